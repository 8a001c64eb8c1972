"""Gradients that can be told apart in the parameters: each has a digit of its own, in every block.

A gradient has a number. It is `RADIX ** digit` at every CELLS-th element of each tensor that it has, and 0 elsewhere; so the
parameters of a job with SGD(lr=1) and reduce="sum" are, negated, integers whose digits say how often each gradient has counted,
block by block, without any rounding. Knows nothing of workers and faults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from lossy_cells import LOSSY, PERIOD, LossyCells, length_of
from numpy.typing import NDArray
from row_cells import TABLES, RowCells, tables

from psd.contract.compression import Compression
from psd.contract.jobspec import GroupSpec, JobSpec
from psd.contract.layout import Layout
from psd_client import SGD
from psd_client.param_groups import ParamGroups
from psd_client.tensors import tensor_specs

CELLS = 512
RADIX = 16
DIGITS = 12
"""RADIX ** DIGITS is below 2 ** 53: float64 has all of these integers."""

NUMBERS = CELLS * DIGITS
"""How many gradients a job can tell apart."""

GROUPS = (("a", "b"), ("c",))
TENSORS = ("a", "b", "c")


PER_LIFE = NUMBERS // 28
"""Of a worker's process."""


def names(*, with_tables: bool, is_compressed: bool = False) -> tuple[str, ...]:
    """Of what a gradient may have."""
    return TENSORS + (LOSSY,) * is_compressed + TABLES * with_tables


_ELEMENTS_OF_C = {"small": 1100, "medium": 160_000, "large": 1_000_000}
SIZES = tuple(_ELEMENTS_OF_C)
"""small: a block of each group on each shard, in one message; medium: several blocks; large: more than sockets hold."""


def initial(size: str, shards: int, codec: str = "") -> dict[str, NDArray[Any]]:
    """The parameters of a job: zeros, at least 2 * CELLS of them in each block, so that every block has every cell."""
    lengths = {"a": 700 * shards, "b": 700 * shards, "c": _ELEMENTS_OF_C[size] * shards}
    lossy = {LOSSY: np.zeros(length_of(size, shards, codec), np.float32)} if codec else {}
    return {name: np.zeros(length) for name, length in lengths.items()} | lossy


def param_groups(codec: str = "") -> list[dict[str, Any]]:
    """As declare() takes them."""
    return [{"params": list(names)} for names in (*GROUPS, *([(LOSSY,)] if codec else []))]


class Gradients:
    """The arrays of a job's gradients, made once and used again for each."""

    def __init__(self, size: str, shards: int, codec: str = "") -> None:
        self._arrays = initial(size, shards, codec)
        self._lossy = LossyCells(codec, NUMBERS, PER_LIFE) if codec else None

    def write(self, number: int, tensors: Sequence[str], value: float | None = None) -> dict[str, NDArray[Any]]:
        """The gradient of that number; to be wiped before the next one is written."""
        cell, digit = divmod(number, DIGITS)
        dense = [name for name in tensors if name in self._arrays]
        for name in (name for name in dense if name in TENSORS):
            self._arrays[name][cell::CELLS] = float(RADIX**digit) if value is None else value
        if LOSSY in dense and self._lossy is not None:
            self._lossy.write(self._arrays[LOSSY], number)
        return {name: self._arrays[name] for name in dense}

    def wipe(self, number: int, tensors: Sequence[str]) -> None:
        """Zeros again."""
        self.write(number, tensors, 0.0)


def seen(parameters: Mapping[str, NDArray[np.float64]], number: int, tensors: Sequence[str]) -> tuple[int, int] | None:
    """How often a gradient has counted where it did least, and where it did most; None if nothing of it is there.

    parameters: all tensors, and of tables, if any, the rows of the gradient's ids.
    """
    cell, digit = divmod(number, DIGITS)
    dense = [-parameters[name][cell::CELLS].astype(np.int64) // RADIX**digit % RADIX for name in tensors if name in TENSORS]
    if LOSSY in tensors and LOSSY in parameters:
        dense.append(-parameters[LOSSY][places(number) :: PERIOD].astype(np.int64))
    rows = [-parameters[name][:, digit].astype(np.int64) for name in tensors if name in TABLES and name in parameters]
    if not dense and not rows:
        return None
    counts = np.concatenate([each.reshape(-1) for each in dense + rows])
    return int(counts.min()), int(counts.max())


@dataclass(frozen=True)
class _Piece:
    """The part of a tensor that lies in a block; by digit and cell, the least and the largest count; -1: no such cell."""

    tensor: str
    block: int
    least: NDArray[np.int64]
    most: NDArray[np.int64]


class Counts:
    """How often each gradient has counted in each block.

    Args:
        parameters: of the job's end. shards: how many. codec: of the tensor that travels compressed, if there is one.

    Attributes:
        shard_of: by block. is_whole: False if an element is no negated integer.
        lossy: by block of the tensor that travels compressed, the place of its first element, and its values.
    """

    def __init__(self, parameters: Mapping[str, NDArray[Any]], shards: int, codec: str = "") -> None:
        layout = _layout(parameters, shards, codec)
        self.lossy_cells = LossyCells(codec, NUMBERS, PER_LIFE) if codec else None
        self.lossy: dict[int, tuple[int, NDArray[np.float32]]] = {}
        self.shard_of = {block.index: layout.shard_of(block.index) for block in layout.blocks}
        self.is_whole = all(_is_whole(values) for name, values in parameters.items() if name != LOSSY)
        self._pieces: list[_Piece] = []
        for block in layout.blocks:
            start = 0
            for tensor, end in zip(block.segment_tensors.tolist(), block.segment_ends.tolist(), strict=True):
                space = layout.spaces[block.space]
                offset = block.offset + start - int(space.starts[space.tensors.tolist().index(tensor)])
                name = layout.spec.tensors[tensor].name
                values = parameters[name][offset : offset + end - start]
                start = end
                if name != LOSSY:
                    self._pieces.append(_piece(name, block.index, values, offset))
                    continue
                assert self.lossy_cells is not None
                self.lossy[block.index] = offset, values
                least, most = self.lossy_cells.counts(values, offset)
                self.is_whole = self.is_whole and _is_whole(-least) and _is_whole(-most)
                self._pieces.append(_Piece(name, block.index, _by_digit(least), _by_digit(most)))
        if TABLES[0] in parameters:
            cells = RowCells(CELLS, DIGITS, shards)
            for shard in range(shards):
                block = layout.tables_block(shard)
                assert block is not None
                self.shard_of[block] = shard
                self._pieces += [_Piece(name, block, *cells.least_and_most(parameters[name], shard)) for name in TABLES]

    def of(self, number: int, tensors: Sequence[str]) -> dict[int, tuple[int, int]]:
        """By block, the least and the largest count of a gradient; blocks that have none of its tensors are left out."""
        cell, digit = divmod(number, DIGITS)
        found: dict[int, tuple[int, int]] = {}
        for piece in self._pieces:
            if piece.tensor in tensors and piece.least[digit, cell] >= 0:
                least, most = found.get(piece.block, (RADIX, -1))
                found[piece.block] = min(least, int(piece.least[digit, cell])), max(most, int(piece.most[digit, cell]))
        return found

    def elsewhere(self, number: int, tensors: Sequence[str]) -> list[str]:
        """The tensors in which a gradient has counted without having them."""
        cell, digit = divmod(number, DIGITS)
        return sorted({p.tensor for p in self._pieces if p.tensor not in tensors and p.most[digit, cell] > 0})

    def numbers(self) -> list[int]:
        """Of all gradients that have counted anywhere."""
        any_ = np.zeros((DIGITS, CELLS), bool)
        for piece in self._pieces:
            any_ |= piece.most > 0
        return sorted(int(cell) * DIGITS + int(digit) for digit, cell in zip(*np.nonzero(any_), strict=True))


def places(number: int) -> int:
    """Where the tensor that travels compressed has a gradient's number, for the first time."""
    return int(LossyCells.places(NUMBERS)[number])


def _is_whole(values: NDArray[Any]) -> bool:
    """All are negated integers."""
    return bool(np.all((values <= 0) & (values == np.rint(values))))


def _by_digit(counts: NDArray[np.float32]) -> NDArray[np.int64]:
    """Counts by gradient as `_Piece` has them."""
    return counts.astype(np.int64).reshape(CELLS, DIGITS).T


def _layout(parameters: Mapping[str, NDArray[Any]], shards: int, codec: str) -> Layout:
    dense = {name: parameters[name] for name in TENSORS + (LOSSY,) * bool(codec)}
    groups = ParamGroups(list(dense), SGD(lr=1), param_groups(codec))
    specs = tensor_specs(dense, groups.group_of)
    of_tables = [table.spec(len(groups.specs)) for table in tables(DIGITS, shards)] if TABLES[0] in parameters else []
    all_groups = (*groups.specs, GroupSpec())
    spec = JobSpec(
        world_size=1,
        tensors=tuple(specs),
        groups=all_groups,
        tables=tuple(of_tables),
        compression=Compression(codec),
    )
    return Layout(spec, shards)


def _piece(tensor: str, block: int, values: NDArray[np.float64], offset: int) -> _Piece:
    """values: the part of the tensor that begins at its element `offset`."""
    before = offset % CELLS
    padded = np.full(-(-(before + len(values)) // CELLS) * CELLS, np.nan)
    padded[before : before + len(values)] = -values
    rows = padded.reshape(-1, CELLS)
    is_there = ~np.isnan(rows)
    is_anywhere = is_there.any(axis=0)
    least = np.where(is_anywhere, np.where(is_there, rows, np.inf).min(axis=0), 0)
    most = np.where(is_anywhere, np.where(is_there, rows, -np.inf).max(axis=0), 0)
    if np.array_equal(least, most):
        digits = _digits(least, is_anywhere)
        return _Piece(tensor, block, digits, digits)
    digits = np.stack([_digits(row, there) for row, there in zip(rows, is_there, strict=True)])
    nowhere = digits < 0
    return _Piece(
        tensor, block, np.where(nowhere, RADIX, digits).min(axis=0) - (RADIX + 1) * nowhere.all(axis=0), digits.max(axis=0)
    )


def _digits(values: NDArray[np.float64], is_there: NDArray[np.bool_]) -> NDArray[np.int64]:
    """(DIGITS, CELLS) of a row of values; -1 where there is none."""
    whole = np.where(is_there, values, 0).astype(np.int64)
    found = np.stack([whole // RADIX**digit % RADIX for digit in range(DIGITS)])
    return np.where(is_there, found, -1)
