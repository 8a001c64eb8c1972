"""Lent gradients: they are not copied, but read where they lie, in memory that shard and worker share or in a message.

A call that waits for its round lends its gradients (`Loan`). A round reads two of them in place (`RoundSum`): the first one,
instead of beginning a sum with a copy of it, and the one that completes the round, in the pass that applies the update. Any of
the round's calls may run that pass. Before a call ends, it ends its loan, and blocks that still read its memory copy what they
need.

1. When `Loan.end` has returned, nothing reads the memory.
2. A lent gradient counts like a copied one: once, and in the same place of the sum.
3. If there is no memory for a copy, the sum stays as it was, and still reads the gradient where it lies.

An encoded gradient (psd_core.codecs.Encoded) is never lent: it is decoded as it is added, in one pass.

`RoundSum` is used under its block's lock. Must not know rounds, blocks or workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import psd_core
from psd.state.pages import Lender
from psd_core.codecs import Encoded

HALF_BYTES = 2
"""Element size of 16-bit gradients. A sum is never of 16 bits: such gradients are widened as they are added."""


class Loan:
    """The gradients that one call lends, until it ends. Used by the call's own thread."""

    def __init__(self) -> None:
        self._borrowers: list[tuple[Callable[[Loan, int], None], int]] = []

    def to(self, take_over: Callable[[Loan, int], None], round_: int) -> None:
        """Note that a round may read a gradient of this call. When the loan ends, `take_over` is called with loan and round."""
        self._borrowers.append((take_over, round_))

    def end(self) -> None:
        """Let every borrower copy what it still needs, because the worker's memory is about to change or to be released."""
        while self._borrowers:
            take_over, round_ = self._borrowers.pop()
            take_over(self, round_)


class Lent(NamedTuple):
    """A lent gradient, with its weight in the sum."""

    values: Any
    weight: float
    loan: Loan


class RoundSum:
    """The weighted sum of a block's gradients. Two of them may be lent: the first one, and the last one.

    The first one is read in place if it equals the beginning of the sum: its weight is 1, and it needs no widening.
    """

    def __init__(self, accumulators: Lender) -> None:
        self._accumulators = accumulators
        self._sum: Any = None
        self._first: Lent | None = None  # stands for the sum, as long as there is none
        self._last: Lent | None = None

    @property
    def terms(self) -> tuple[NDArray[Any] | None, NDArray[Any] | None, float]:
        """The sum so far, then the gradient still to be added (or None), and its weight."""
        sum_ = self._sum if self._first is None else self._first.values
        return (sum_, None, 0.0) if self._last is None else (sum_, self._last.values, self._last.weight)

    def add(self, values: NDArray[Any] | Encoded | None, weight: float, loan: Loan | None = None) -> None:
        """Add a gradient; None adds nothing. If this fails, the sum is the same, though the first one may now be a copy."""
        if values is None:
            return
        if self._first is not None:
            self._take_over_first()
        if isinstance(values, Encoded):
            if self._sum is not None:
                values.accumulate(self._sum, weight)
            else:
                self._begin(values, weight)
        elif self._sum is not None:
            psd_core.accumulate(self._sum, values, weight)
        elif loan is not None and weight == 1 and values.itemsize > HALF_BYTES:
            self._first = Lent(values, weight, loan)
        else:
            self._begin(values, weight)

    def complete(self, values: NDArray[Any] | None, weight: float, loan: Loan) -> None:
        """Take the last gradient, which is lent. It is not added: `terms` returns it beside the sum."""
        if values is not None:
            self._last = Lent(values, weight, loan)

    def take_over(self, loan: Loan) -> None:
        """Copy, or add to the sum, the gradients of this loan. If this fails, the sum is the same, and may still read them."""
        if self._first is not None and self._first.loan is loan:
            self._take_over_first()
        if self._last is not None and self._last.loan is loan:
            self.add(self._last.values, self._last.weight)
            self._last = None

    def end(self) -> None:
        """Stop reading lent gradients, and give the sum's memory back."""
        self._first = self._last = None
        if self._sum is not None:
            self._accumulators.give_back(self._sum)
            self._sum = None

    def _take_over_first(self) -> None:
        assert self._first is not None
        self._begin(self._first.values, self._first.weight)
        self._first = None

    def _begin(self, values: NDArray[Any] | Encoded, weight: float) -> None:
        accumulator = self._accumulators.lend()
        copy_of(accumulator, values, weight)
        self._sum = accumulator


def copy_of(target: NDArray[Any], values: NDArray[Any] | Encoded, weight: float = 1.0) -> None:
    """Set `target` to `weight` times a gradient: with the same bits, whether encoded or not. Integers have no weight."""
    if target.dtype.kind != "f":
        assert not isinstance(values, Encoded)
        np.copyto(target, values)
    elif not isinstance(values, Encoded):
        psd_core.scaled_copy(target, values, weight)
    else:
        values.decode(target)
        if weight != 1:
            psd_core.scaled_copy(target, target, weight)
