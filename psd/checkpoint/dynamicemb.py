"""Tables as NVIDIA's dynamicemb dumps them, to a folder for each collection of embeddings:

    user_emb_keys.rank_0.world_size_2      ids (n,) int64 of one process, nothing else
    user_emb_values.rank_0.world_size_2    rows (n, dim) float32, in the same order

A file for each process; the dim follows from the sizes. Scores, counters and the optimizer's values lie in other files, which
are not read. Must not know checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
from typing_extensions import override

from psd.checkpoint.opening import open_storage
from psd.checkpoint.plain import PIECE_BYTES, ValueRows, ValueTable
from psd.contract.errors import CheckpointFailed

_KEY_BYTES, _VALUE_BYTES = 8, 4


class DynamicEmbTable(ValueTable):
    """A table in a folder of a dump, by its name there; see ValueTable.

    Raises:
        CheckpointFailed: the folder has no such table, lacks a file of it, or has files whose sizes do not fit each other.
    """

    def __init__(self, folder: str, name: str) -> None:
        self._storage = open_storage(folder)
        self.location = self._storage.location
        sizes = self._storage.files("")
        pattern = re.compile(re.escape(name) + r"_emb_keys\.rank_\d+\.world_size_(\d+)")
        worlds = sorted({int(match[1]) for file in sizes if (match := pattern.fullmatch(file))})
        if len(worlds) != 1:
            several = f"of {' and of '.join(map(str, worlds))} processes, and it must be of one dump" if worlds else "not there"
            raise CheckpointFailed(f"{self.location}: table {name!r}: is {several}; its files are {name}_emb_keys.rank_...")
        self._files: list[tuple[str, str, int]] = []
        dims: set[int] = set()
        for rank in range(worlds[0]):
            keys, values = (f"{name}_emb_{what}.rank_{rank}.world_size_{worlds[0]}" for what in ("keys", "values"))
            for file in (keys, values):
                if file not in sizes:
                    raise CheckpointFailed(f"{self.location}: {file} is missing")
            count, rest = divmod(sizes[keys], _KEY_BYTES)
            width, left = divmod(sizes[values], max(1, count) * _VALUE_BYTES)
            if rest or left or bool(count) != bool(width):
                raise CheckpointFailed(
                    f"{self.location}: {values}: has {sizes[values]} bytes, which are no float32 rows for the {sizes[keys]} "
                    f"bytes of int64 ids in {keys}"
                )
            self._files.append((keys, values, count))
            dims.update({width} if count else ())
        if len(dims) != 1:
            problem = f"has rows of {sorted(dims)} numbers" if dims else "has no rows, and so no dim"
            raise CheckpointFailed(f"{self.location}: table {name!r}: {problem}")
        (self.dim,) = dims
        self.count = sum(count for _, _, count in self._files)

    @override
    def rows(self) -> Iterator[ValueRows]:
        step = max(1, PIECE_BYTES // (_VALUE_BYTES * self.dim))
        for keys, values, count in self._files:
            for first in range(0, count, step):
                n = min(step, count - first)
                ids = np.frombuffer(self._content(keys, first * _KEY_BYTES, n * _KEY_BYTES), "<u8")
                row_bytes = self.dim * _VALUE_BYTES
                rows = np.frombuffer(self._content(values, first * row_bytes, n * row_bytes), "<f4")
                yield ValueRows(ids, rows.reshape(n, self.dim))

    def _content(self, file: str, first: int, nbytes: int) -> bytes:
        data = self._storage.read("", file, first, first + nbytes)
        if len(data) != nbytes:
            raise CheckpointFailed(f"{self.location}: {file}: has become shorter while it was read")
        return data
