"""The open round of a shard's part of the tables: as for blocks, but its gradients are of rows, and summed by id.

If a worker has no gradient for a row, that counts as zero. Used under the lock of the tables' block. Must not know versions,
workers' leases or stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

import psd_core
from psd.contract.rows import TableRows
from psd.state.aggregation.exact_rounds import ExactRound, MeasuredRound
from psd.state.aggregation.lent_gradients import Lent, Loan, RoundSum
from psd.state.aggregation.rounds import Contribution, FastRound, Taken
from psd.state.aggregation.rules import Gradient
from psd.state.tables.pushes import Gradients
from psd_core.table import RowSums


class TableSums:
    """Sums of gradients by table and id.

    Attributes:
        touched: the tables that have a gradient, even if only for rows on other shards.
    """

    def __init__(self, dims: Sequence[int]) -> None:
        self.tables = [RowSums(dim) for dim in dims]
        self.touched: set[int] = set()

    def add(self, gradients: Gradients, weight: float) -> None:
        """Add weighted gradients for all tables; if there is no memory, for none."""
        for table, ids, values in gradients.values():
            self.tables[table].prepare(ids, values)
        for table in gradients:
            self.tables[table].add_prepared(weight)
        self.touched |= gradients.keys()

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
        self.touched.clear()
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


class _RowsSum(RoundSum):
    """A sum of rows, as TableSums. Lent Gradients are read by the push to the store itself."""

    @override
    def add(self, values: Any, weight: float, loan: Loan | None = None) -> None:
        if values is None:
            return
        if self._first is not None:
            self._take_over_first()
        if self._sum is not None:
            self._sum.add(values, weight)
        elif loan is not None and weight == 1:
            self._first = Lent(values, weight, loan)
        else:
            self._begin(values, weight)

    @override
    def complete(self, values: Any, weight: float, loan: Loan) -> None:
        """Take the last gradient. If it cannot be pushed to the store beside what there is, it is added to the sum."""
        if self._sum is None and (self._first is None or weight == 1):
            super().complete(values, weight, loan)
        else:
            self.add(values, weight)

    def _begin(self, values: Any, weight: float) -> None:
        sums = self._accumulators.lend()
        sums.add(values, weight)
        self._sum = sums


class FastRowsRound(FastRound):
    """A fast round whose gradients are rows."""

    def _new_sum(self) -> RoundSum:
        return _RowsSum(self._setting.accumulators)

    @override
    def take(self, part: Contribution) -> Taken:
        """Take a contribution. The last of several, if it is not lent, is added to the sum, and cannot be taken back from it;
        so it counts at once, even if there is no space for the update."""
        if part.loan is not None or not self._contributors or not self._closes_with(part):
            return super().take(part)
        noted = self._noted(part)
        self._sum.add(self._values(part), self._weight(part))
        self._note(part, *noted)
        return Taken.COMPLETE


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
