"""Reads the vectors of a checkpoint: for the shards of any number, for other programs, and to check every byte.

Must not know where the elements go.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from psd.checkpoint.cut import vectors_file
from psd.checkpoint.manifest import Manifest, Part
from psd.checkpoint.reading import Advance, problems_of, read_ahead, read_checked
from psd.checkpoint.storage import FileStore
from psd.checkpoint.vector_records import VectorRun, decode_run
from psd_core.vector import Piece
from psd_core.vector_operations import extent


def restored_vectors(storage: FileStore, manifest: Manifest, shard_index: int = 0, shard_count: int = 1) -> Iterator[Piece]:
    """Elements of the vectors for one shard, as `CheckpointDirectory.read_vectors` says."""
    for part in manifest.parts:
        wanted = []
        for run in part.vector_runs:
            begin, end = extent(part.vectors[run.vector].size, shard_index, shard_count)
            if run.first < end and run.first + run.elements > begin:
                wanted.append(run)

        def read(run: VectorRun, part: Part = part) -> Piece:
            return decode_run(part.vectors[run.vector], run, _read(storage, manifest, part, run))

        with closing(read_ahead(read, wanted)) as pieces:
            for spec, start, values in pieces:
                begin, end = extent(spec.size, shard_index, shard_count)
                low, high = max(begin, start), min(end, start + len(values))
                yield Piece(spec, low, values[low - start : high - start])


def verify_vectors(storage: FileStore, manifest: Manifest, part: Part, advance: Advance) -> Iterator[str]:
    """Read every byte of a part's vectors; return the problems in words."""
    return problems_of(part.vector_runs, lambda run: _read(storage, manifest, part, run), advance)


def _read(storage: FileStore, manifest: Manifest, part: Part, run: VectorRun) -> bytes:
    file = vectors_file(part.shard_index, manifest.shard_count)
    return read_checked(storage, manifest.name, file, run, f"vector {part.vectors[run.vector].name!r}")
