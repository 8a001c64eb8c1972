"""Notes that shards leave for each other among the checkpoints, because they never talk to each other.

    <url>/timeline-.../shard-00000-of-00002.come.note    progress of a shard with a cut of vectors, in the cut's directory
    <url>/ends/shard-00000-of-00002.life.note            when a shard began (ends.py)
    <url>/ends/shard-00000-of-00002.end.note             what it holds at its end

Must not know what a note means, or how long anybody waits for one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import psd
from psd.checkpoint.sealing import FORMAT, FORMAT_VERSION, seal, unseal
from psd.checkpoint.storage import FileStore
from psd.contract.errors import CheckpointCorrupt

_NAME = re.compile(r"shard-(\d+)-of-(\d+)\.(\w+)\.note")


class ShardNotes:
    """The shards' notes in a storage."""

    def __init__(self, storage: FileStore) -> None:
        self._storage = storage

    def write(self, directory: str, topic: str, shard_index: int, shard_count: int, facts: Mapping[str, Any]) -> None:
        """Store a shard's note on a topic; replaces an earlier one."""
        head = {"format": FORMAT, "format_version": FORMAT_VERSION, "psd_version": psd.__version__}
        self._storage.write(directory, _name(topic, shard_index, shard_count), [seal({**head, "facts": dict(facts)})])

    def shards(self, directory: str, topic: str, shard_count: int) -> set[int]:
        """The shards that have left a note on a topic."""
        found = map(_NAME.fullmatch, self._storage.files(directory))
        return {int(name[1]) for name in found if name and (int(name[2]), name[3]) == (shard_count, topic)}

    def read(self, directory: str, topic: str, shard_count: int) -> dict[int, Any]:
        """The facts in the notes on a topic, by shard; without notes that are missing or not whole."""
        notes = {}
        for index in sorted(self.shards(directory, topic, shard_count)):
            file = _name(topic, index, shard_count)
            try:
                notes[index] = unseal(self._storage.read(directory, file), f"{directory}/{file}")["facts"]
            except (FileNotFoundError, CheckpointCorrupt, KeyError):
                continue  # removed, or being written in a store that shows that: as if it did not exist
        return notes

    def remove(self, directory: str, shard_index: int | None = None) -> None:
        """Remove all notes in a directory, or one shard's, and then the directory if it is empty."""
        files = self._storage.files(directory)
        for file in files:
            name = _NAME.fullmatch(file)
            if name and shard_index in (None, int(name[1])):
                self._storage.remove(directory, file)
        if files:
            self._storage.remove_directory(directory)


def _name(topic: str, shard_index: int, shard_count: int) -> str:
    return f"shard-{shard_index:05}-of-{shard_count:05}.{topic}.note"
