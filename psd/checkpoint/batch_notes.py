"""Notes of the shards about a cut of server-side vectors, where the checkpoints are: shards never talk to each other.

A note says that a shard has come to a *stage* of a cut, and which batches it has run: the number of the latest of each session.
Must not know what a stage means, nor how long anybody waits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from psd.checkpoint.cut import Cut
from psd.checkpoint.sealing import FORMAT, FORMAT_VERSION, seal, unseal
from psd.checkpoint.storage import FileStore
from psd.contract.errors import CheckpointCorrupt

_NOTE = re.compile(r"shard-\d+-of-\d+\.(\w+)\.batches")


def write_batches(storage: FileStore, cut: Cut, stage: str, shard_index: int, latest: Mapping[int, int]) -> None:
    """Store a shard's note."""
    head = {"format": FORMAT, "format_version": FORMAT_VERSION}
    storage.write(cut.name, _file(cut, stage, shard_index), [seal({**head, "latest": [*latest.items()]})])


def count_batches(storage: FileStore, cut: Cut, stage: str) -> int:
    """Number of the shards that have come to a stage."""
    files = storage.files(cut.name)
    return sum(_file(cut, stage, index) in files for index in range(cut.shard_count))


def has_batches(storage: FileStore, name: str, stage: str) -> bool:
    """True if some shard has come to a stage of the cut of that name."""
    found = map(_NOTE.fullmatch, storage.files(name))
    return any(note[1] == stage for note in found if note)


def read_batches(storage: FileStore, cut: Cut, stage: str) -> list[dict[int, int]] | None:
    """The notes of all shards about a stage, in their order; None while some are missing."""
    names = [_file(cut, stage, index) for index in range(cut.shard_count)]
    if not set(names) <= storage.files(cut.name).keys():
        return None
    found = []
    for name in names:
        try:
            document = unseal(storage.read(cut.name, name), name)
            found.append({int(session): int(number) for session, number in document["latest"]})
        except (CheckpointCorrupt, FileNotFoundError, KeyError, TypeError, ValueError):
            return None  # some object stores show the remains of an interrupted put
    return found


def remove_batches(storage: FileStore, cut: Cut) -> None:
    """Remove all notes about a cut."""
    for name in storage.files(cut.name):
        if _NOTE.fullmatch(name):
            storage.remove(cut.name, name)


def _file(cut: Cut, stage: str, shard_index: int) -> str:
    return f"shard-{shard_index:05}-of-{cut.shard_count:05}.{stage}.batches"
