"""Writes one shard's part of a cut, and the manifest once all parts exist.

A shard's values are streamed, array by array, straight from its pages. The part's document is written when they are durable,
the manifest when all documents are. Must not know other checkpoints, or which shard must write.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence

import psd
from psd.checkpoint import manifest as documents
from psd.checkpoint.blocks import BlockPart, block_chunks
from psd.checkpoint.chunks import Chunk, encode
from psd.checkpoint.cut import MANIFEST, Cut, data_file, part_file
from psd.checkpoint.loading import Incomplete, check_size, load, load_base, read_document
from psd.checkpoint.manifest import BaseEntry, Manifest, ManifestDocument, Part
from psd.checkpoint.sealing import unseal
from psd.checkpoint.storage import FileStore
from psd.checkpoint.tables import TablePart, TableRecord, table_chunks
from psd.checkpoint.vectors import VectorsPart, difference_of, specs_of, vector_chunks
from psd.contract.errors import CheckpointCorrupt, CheckpointFailed
from psd.v1.job_pb2 import LearningRateScale

logger = logging.getLogger(__name__)


def write_part(
    storage: FileStore,
    cut: Cut,
    shard_index: int,
    blocks: Iterable[BlockPart],
    worker_clocks: Mapping[int, int],
    client_states: Mapping[int, bytes],
    learning_rates: Sequence[LearningRateScale],
    tables: Sequence[TablePart],
    base: str,
    vectors: VectorsPart | None = None,
) -> int:
    """Write one shard's part of a cut, as `CheckpointDirectory.write_part` says."""
    files = storage.files(cut.name)
    if is_written(storage, cut, shard_index, files):
        return 0
    if len(tables) != len(cut.spec.tables):
        raise CheckpointFailed(f"{cut.name}: shard {shard_index} has {len(tables)} tables of {len(cut.spec.tables)}")
    base = "" if all(table.is_full for table in tables) else base
    _base_of(storage, cut, base)  # raises before much is written in vain
    chunks: list[Chunk] = []
    new = itertools.chain(block_chunks(cut, shard_index, blocks), table_chunks(tables), vector_chunks(vectors))
    storage.write(cut.name, data_file(shard_index, cut.shard_count), encode(new, shard_index, chunks))
    part = Part(
        shard_index=shard_index,
        psd_version=psd.__version__,
        chunks=tuple(chunks),
        worker_clocks=worker_clocks,
        client_states=client_states,
        learning_rates=tuple(learning_rates),
        tables=tuple(TableRecord(table.step, table.clock, table.count, table.width, table.is_full) for table in tables),
        base=base,
        vectors=specs_of(vectors),
        sessions=vectors.sessions if vectors is not None and vectors.specs else {},
    )
    document = documents.part_document(cut, part)
    storage.write(cut.name, part_file(shard_index, cut.shard_count), [document])
    return part.data_bytes + len(document)


def _base_of(storage: FileStore, cut: Cut, name: str) -> tuple[BaseEntry, Manifest] | None:
    """The checkpoint to build on; None without a name."""
    if not name:
        return None
    try:
        manifest, sha256 = load_base(storage, name)
    except (Incomplete, CheckpointCorrupt) as error:
        raise CheckpointFailed(f"{cut.name}: builds on another checkpoint, which cannot be used: {error}") from None
    return BaseEntry(name, sha256), manifest


def is_written(storage: FileStore, cut: Cut, shard_index: int, files: Mapping[str, int]) -> bool:
    """True if the part exists and is whole: some object stores show an interrupted put."""
    file = part_file(shard_index, cut.shard_count)
    if file not in files:
        return False
    try:
        _read_part(cut, shard_index, read_document(storage, cut.name, file), files)
    except CheckpointCorrupt as error:
        logger.warning("a part of a checkpoint is damaged and is written again: %s", error)
        return False
    return True


def as_written(storage: FileStore, cut: Cut, shard_index: int) -> Cut | None:
    """The cut, with the time in a shard's stored part; None unless that exists and is whole."""
    file, files = part_file(shard_index, cut.shard_count), storage.files(cut.name)
    if file not in files:
        return None
    try:
        facts = unseal(read_document(storage, cut.name, file), f"{cut.name}/{file}")
        found = dataclasses.replace(cut, created_at=float(facts["created_at"]))
    except (CheckpointCorrupt, ArithmeticError, LookupError, TypeError, ValueError):
        return None
    return found if is_written(storage, found, shard_index, files) else None


def _read_part(cut: Cut, shard_index: int, document: bytes, files: Mapping[str, int]) -> Part:
    """Read a part from its document; CheckpointCorrupt unless it belongs to this cut, and its file has the right length."""
    file = f"{cut.name}/{part_file(shard_index, cut.shard_count)}"
    part = documents.parse_part(document, file, documents.identity_of(cut), shard_index)
    check_size(cut.name, files, data_file(shard_index, cut.shard_count), part.data_bytes)
    return part


def complete(storage: FileStore, cut: Cut) -> bool:
    """Write the manifest if all parts exist, as `CheckpointDirectory.complete` says."""
    files = storage.files(cut.name)
    if MANIFEST in files:
        try:
            load(storage, cut.name, files)
        except CheckpointCorrupt as error:
            logger.error("a checkpoint is damaged, trying to write its manifest again: %s", error)  # noqa: TRY400
        else:
            return True
    names = [(part_file(index, cut.shard_count), data_file(index, cut.shard_count)) for index in range(cut.shard_count)]
    if any(file not in files for pair in names for file in pair):
        return False
    texts = [read_document(storage, cut.name, file) for file, _ in names]
    if any(
        unseal(text, f"{cut.name}/{file}").get("run_id") != cut.run_id for text, (file, _) in zip(texts, names, strict=True)
    ):
        return False  # left by an earlier run, which was to end at this step, too; that shard will write its own
    parts = [_read_part(cut, index, text, files) for index, text in enumerate(texts)]
    if difference := difference_of([(part.vectors, part.sessions) for part in parts]):
        raise CheckpointFailed(f"{cut.name}: batches on vectors were under way at the cut: {difference}")
    if difference := _difference_of_positions(cut, parts):
        raise CheckpointFailed(f"{cut.name}: its parts are no cut: {difference}", parts="differ")
    entry, base = _base_of(storage, cut, next((part.base for part in parts if part.base), "")) or (None, None)
    manifest = documents.manifest_document(cut, parts, texts, entry)
    ManifestDocument(manifest, cut.name).with_parts(parts, base)  # raises unless readers will accept it
    storage.sync(cut.name)  # make the other shards' files durable before the manifest
    storage.write(cut.name, MANIFEST, [manifest])
    return True


def _difference_of_positions(cut: Cut, parts: Sequence[Part]) -> str:
    """The first worker whose pushes the parts count differently, in a job without rounds; empty if there is none. Workers may
    have come and gone while positions were collected."""
    if cut.spec.consistency.has_rounds:
        return ""
    layout = cut.layout
    trained = [p for p in parts if cut.spec.tables or any(block.trained for block in layout.blocks_of(p.shard_index))]
    for first, part in itertools.pairwise(trained):
        for rank in sorted(first.worker_clocks.keys() | part.worker_clocks.keys()):
            ours, theirs = first.worker_clocks.get(rank), part.worker_clocks.get(rank)
            if ours != theirs:
                return f"worker {rank} is at step {ours} on shard {first.shard_index}, at {theirs} on shard {part.shard_index}"
    return ""
