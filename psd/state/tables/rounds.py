"""Rows of pushes on their way to the stores: checks them as they come in frames, puts the rows of one push together from
several frames, and sums those of a round by id.

A round is as for blocks; if a worker has no gradient for a row, that counts as zero. It is used under the lock of the tables'
block. Must not know versions, workers' leases or stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

import psd_core
from psd.contract.config import Limits
from psd.contract.errors import BlockOutOfRange, InvalidRequest, NonFiniteGradient
from psd.contract.frames import present_mask
from psd.contract.jobspec import JobSpec
from psd.contract.rows import TableRows, rows_in
from psd.state.aggregation.exact_rounds import ExactRound, MeasuredRound
from psd.state.aggregation.rules import Gradient
from psd.v1 import data_pb2
from psd_core.distinct import first_elsewhere, shard_of
from psd_core.table import PUSH_MAX, RowSums

Gradients: TypeAlias = dict[int, TableRows]
"""The gradients of one push for the rows of one shard, by table. A table with no rows here may have some on other shards; a
table that is missing has no gradient at all."""


@dataclass(slots=True)
class StagedRows:
    """The rows of a push whose last frame has not come. `ids`: their number; `nbytes`: their bytes, with the gradients."""

    rows: list[TableRows] = field(default_factory=list)
    ids: int = 0
    nbytes: int = 0

    def clear(self) -> None:
        """Forget the rows."""
        self.rows, self.ids, self.nbytes = [], 0, 0


class RowChecks:
    """Checks the rows, and the ids, that are sent to a shard.

    Attributes:
        ids_max: the most ids in one push, or one pull. step_ids_max: in one step. shard, shards: index and count.
    """

    def __init__(self, spec: JobSpec, shard_index: int, shard_count: int, limits: Limits) -> None:
        self._names = [table.name for table in spec.tables]
        self._dims = [table.dim for table in spec.tables]
        self._no_rows = [
            TableRows(number, np.empty(0, np.uint64), np.empty((0, dim), np.float32)) for number, dim in enumerate(self._dims)
        ]
        self.shard = shard_index
        self.shards = shard_count
        self.ids_max = limits.push_ids_max
        self._bytes_max = limits.push_bytes_max
        # The sum of a round is pushed to a store as one push.
        self._table_ids_max = PUSH_MAX // spec.world_size if spec.consistency.has_rounds else PUSH_MAX
        self.step_ids_max = min(self.ids_max, self._table_ids_max)

    def rows(
        self,
        parts: Sequence[data_pb2.RowsPart],
        payload: memoryview,
        before: int,
        *,
        has_values: bool,
        memory: Sequence[memoryview] = (),
    ) -> list[TableRows]:
        """The rows of a frame; see rows_in.

        Args:
            before: number of ids that the same call has brought in earlier frames.

        Raises:
            InvalidRequest, InvalidTensor: the frame is wrong, or has too many. BlockOutOfRange: an id is another shard's.
        """
        count = before + sum([part.rows for part in parts])
        if count > self.ids_max:
            raise InvalidRequest(f"rows: {count} ids are above the shard's --max-push-ids {self.ids_max}")
        rows = rows_in(parts, payload, self._dims, has_values=has_values, memory=memory)
        if self.shards > 1 and (found := first_elsewhere([part.ids for part in rows], self.shards, self.shard)) is not None:
            table, ids, _ = rows[found[0]]
            one = ids[found[1] :][:1]
            owner = shard_of(one, self.shards)[0]
            raise BlockOutOfRange(
                f"rows: id {one[0]} of table {self._names[table]!r} is not on shard {self.shard}; shard {owner} owns it"
            )
        return rows

    def stage(
        self,
        staged: StagedRows,
        parts: Sequence[data_pb2.RowsPart],
        payload: memoryview,
        memory: Sequence[memoryview] = (),
    ) -> None:
        """Copy the rows of a frame that is not the last of its push."""
        rows = self.rows(parts, payload, staged.ids, has_values=True, memory=memory)
        count = sum(len(part.ids) for part in rows)
        if not count:
            raise InvalidRequest("more: stands on a frame without rows")
        staged.rows += [TableRows(table, ids.copy(), values.copy()) for table, ids, values in rows]
        staged.ids += count
        staged.nbytes += sum(part.nbytes for part in rows)
        if staged.nbytes > self._bytes_max:
            raise InvalidRequest(f"rows: {staged.nbytes} bytes are above the shard's --max-push-bytes {self._bytes_max}")

    def gradients(
        self,
        staged: StagedRows,
        parts: Sequence[data_pb2.RowsPart],
        payload: memoryview,
        present: bytes = b"",
        memory: Sequence[memoryview] = (),
    ) -> Gradients:
        """The staged rows of a push together with those of its last frame, which are not copied. present: as in PushFrame."""
        mask = present_mask(present, len(self._dims))
        pieces = [*staged.rows, *self.rows(parts, payload, staged.ids, has_values=True, memory=memory)]
        found = {rows.table: rows for rows in pieces}
        if len(found) < len(pieces):
            by_table: dict[int, list[TableRows]] = {table: [] for table in found}
            for rows in pieces:
                by_table[rows.table].append(rows)
            found = {table: _joined(rows) for table, rows in by_table.items()}
        for table, ids, _ in found.values():
            if len(ids) > self._table_ids_max:
                raise InvalidRequest(
                    f"rows: {len(ids)} ids of table {self._names[table]!r} are above {self._table_ids_max}: the workers of a "
                    f"round may have {PUSH_MAX} together"
                )
        if mask is None:
            return (
                found if len(found) == len(self._dims) else {rows.table: found.get(rows.table, rows) for rows in self._no_rows}
            )
        for table in found:
            if not mask[table]:
                raise InvalidRequest(f"present: says that table {self._names[table]!r} has no gradient, but there are rows")
        return {rows.table: found.get(rows.table, rows) for rows in self._no_rows if mask[rows.table]}

    def check_finite(self, gradients: Gradients, rank: int, clock: int) -> None:
        """Raise NonFiniteGradient, which names worker, table and id, if some number is not finite."""
        for table, ids, values in gradients.values():
            element = psd_core.first_nonfinite(values.reshape(-1))
            if element >= 0:
                name, number = self._names[table], psd_core.widened(values.reshape(-1))[element]
                raise NonFiniteGradient(
                    f"payload: the gradient of worker {rank} at step {clock} has {number} in table {name!r} "
                    f"(id {ids[element // self._dims[table]]})",
                    rank=rank,
                    tensor=name,
                    clock=clock,
                )


def _joined(pieces: Sequence[TableRows]) -> TableRows:
    if len(pieces) == 1:
        return pieces[0]
    values: list[NDArray[Any]] = [piece.values for piece in pieces]
    if len({part.dtype for part in values}) > 1:
        values = [psd_core.widened(part.reshape(-1)).reshape(part.shape) for part in values]
    return TableRows(pieces[0].table, np.concatenate([piece.ids for piece in pieces]), np.concatenate(values))


class TableSums:
    """Sums of gradients by table and id."""

    def __init__(self, dims: Sequence[int]) -> None:
        self.tables = [RowSums(dim) for dim in dims]

    def add(self, gradients: Gradients, weight: float) -> None:
        """Add weighted gradients for all tables; if there is no memory, for none."""
        for table, ids, values in gradients.values():
            self.tables[table].prepare(ids, values)
        for table in gradients:
            self.tables[table].add_prepared(weight)

    def multiply(self, factor: float) -> None:
        """Multiply all sums."""
        for sums in self.tables:
            values = sums.values.reshape(-1)
            psd_core.scaled_copy(values, values, factor)

    def squares(self) -> int | None:
        """The sum of the squares of all sums (see psd_core.square_sum). It does not depend on the order of the rows."""
        return psd_core.total_squares(psd_core.square_sum_of_rows(sums.values) for sums in self.tables)

    def clear(self) -> None:
        """Forget all sums, but keep the memory."""
        for sums in self.tables:
            sums.clear()


class SumsPool:
    """Lends the memory in which a round's gradients are summed, and keeps it for the next round."""

    def __init__(self, dims: Sequence[int]) -> None:
        self._dims = dims
        self._free: list[TableSums] = []

    def lend(self) -> TableSums:
        """Lend empty sums."""
        return self._free.pop() if self._free else TableSums(self._dims)

    def give_back(self, lent: TableSums) -> None:
        """Take lent sums back."""
        lent.clear()
        self._free.append(lent)


class ExactRowsRound(ExactRound):
    """An exact round whose gradients are rows."""

    def _copied(self, values: Gradients) -> Gradients:
        return {rows.table: TableRows(rows.table, rows.ids.copy(), rows.values.copy()) for rows in values.values()}

    def _give_back(self, kept: Gradients) -> None:
        kept.clear()

    def _summed(self, summands: list[tuple[Any, float]]) -> tuple[Any, Any, float]:
        if len(summands) < 2:
            return super()._summed(summands)
        if self._sum is None:
            self._sum = self._setting.accumulators.lend()
        self._sum.clear()
        for gradients, weight in summands:
            self._sum.add(gradients, weight)
        return self._sum, None, 0.0


class MeasuredRowsRound(MeasuredRound, ExactRowsRound):
    """A measured round whose gradients are rows."""

    def _reduced_to_one(self, found: Gradient) -> TableSums | None:
        """The round's sums, multiplied by the scale of the reduction; None if nobody has a gradient."""
        sums: TableSums | None = found.accumulator
        if sums is None and found.last is not None:
            sums = self._sum = self._setting.accumulators.lend()
            sums.add(found.last, found.weight)
        if sums is not None:
            sums.multiply(found.scale)
        return sums

    def _squares_of(self, values: TableSums) -> int | None:
        return values.squares()
