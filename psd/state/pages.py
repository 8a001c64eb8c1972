"""Writes the next page of a block, before it becomes current: values, slots, steps and the dedup window. Also lends the memory
in which a round's gradients are summed.

Where workers pull differences, a page has one extra array: the parameters as workers have them (outgoing.py).

Must not know rounds, rules or locks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from psd.checkpoint import RestoredBlock
from psd_core.arena import Arena, Page

Counted: TypeAlias = tuple[int, int]
"""The last push of a rank that counts, as the dedup window of a page has it: its session, and its clock + 1."""


class SetMark(NamedTuple):
    """Name of one load, which sets parameters or slots: the session, and the number of the load in that session."""

    session: int
    seq: int


def initialize(page: Page, values: NDArray[Any], slot_starts: Sequence[float]) -> None:
    """Write initial parameters; slots begin as their rule says, steps and the dedup window as zero."""
    np.copyto(page.parameter, values)
    show(page)
    for slot, start in zip(page.slots, slot_starts, strict=True):
        slot.fill(start)
    page.steps.fill(0)
    page.sessions.fill(0)
    page.clocks.fill(0)


def restore(page: Page, stored: RestoredBlock) -> None:
    """Write everything from a checkpoint."""
    np.copyto(page.parameter, stored.parameter)
    show(page)
    for slot, values in zip(page.slots, stored.slots.values(), strict=True):
        np.copyto(slot, values)
    np.copyto(page.steps, stored.steps)
    np.copyto(page.sessions, 0 if stored.sessions is None else stored.sessions)
    np.copyto(page.clocks, 0 if stored.clocks is None else stored.clocks)


def show(page: Page) -> None:
    """Let workers have the parameters as they are."""
    for shown in page.extra:
        np.copyto(shown, page.parameter)


def carry_over(before: Page, after: Page) -> None:
    """Copy values, slots and steps unchanged."""
    for old, new in zip(before.arrays, after.arrays, strict=True):
        np.copyto(new, old)
    np.copyto(after.steps, before.steps)


class Change(NamedTuple):
    """Parts of a block that a load sets; all else stays as it is.

    Attributes:
        values: new parameters. slots: new values of slots and steps of the segments, by the slot's number, from 1.
        resets: True if all other slots begin anew.
    """

    values: NDArray[Any] | None = None
    slots: Mapping[int, tuple[NDArray[Any], Sequence[int]]] = MappingProxyType({})
    resets: bool = False

    def and_also(self, slot: int, values: NDArray[Any], steps: Sequence[int]) -> Change:
        """This change, extended by a slot, or by the parameters if `slot` is 0. Parts that it has already stay."""
        if not slot:
            return self if self.values is not None else self._replace(values=values)
        return self._replace(slots={slot: (values, steps), **self.slots}, resets=True)

    def without(self, done: Collection[int]) -> Change:
        """This change without the parts that earlier changes of the same load have set. done: their `what`."""
        slots = {slot: values for slot, values in self.slots.items() if slot not in done}
        return Change(None if PARAMETERS in done else self.values, slots, self.resets and RESET not in done)

    @property
    def what(self) -> frozenset[int]:
        """The parts that this changes: numbers of slots, PARAMETERS if it has values, RESET if slots begin anew."""
        others = [PARAMETERS] * (self.values is not None) + [RESET] * self.resets
        return frozenset([*self.slots, *others])


PARAMETERS, RESET = 0, -1


def set_anew(before: Page, after: Page, change: Change, slot_starts: Sequence[float]) -> None:
    """Write what a load sets, and all else as it was. slot_starts: the values of slots that begin anew."""
    carry_over(before, after)
    if change.values is not None:
        np.copyto(after.parameter, change.values)
        show(after)
    if change.resets:
        for slot, start in zip(after.slots, slot_starts, strict=True):
            slot.fill(start)
        after.steps.fill(0)
    for number, (values, steps) in change.slots.items():
        np.copyto(after.slots[number - 1], values)
        after.steps[:] = steps
    count(before, after, {}, 0)


def count(before: Page, after: Page, sessions: Mapping[int, int], clock: int) -> None:
    """Write the dedup window, in which the pushes of `clock` by these sessions count now. sessions: by rank."""
    after.sessions[:] = before.sessions
    after.clocks[:] = before.clocks
    for rank, session in sessions.items():
        after.sessions[rank] = session
        after.clocks[rank] = clock + 1


def counted(pages: Sequence[Page]) -> list[Counted]:
    """The latest push of each rank that is counted in any of these pages."""
    sessions = np.max([page.sessions for page in pages], axis=0)
    clocks = np.max([np.where(page.sessions == sessions, page.clocks, 0) for page in pages], axis=0)
    return list(zip(sessions.tolist(), clocks.tolist(), strict=True))


class Lender(Protocol):
    """Lends buffers in which a round's gradients are summed; they are given back when the round closes."""

    def lend(self) -> Any:
        """Lend a buffer, with undefined contents."""
        ...

    def give_back(self, lent: Any, /) -> None:
        """Take a lent buffer back."""
        ...


class BlockAccumulators:
    """Lends memory of the arena in which the gradients of one block are summed."""

    def __init__(self, arena: Arena, slot: int) -> None:
        self._arena = arena
        self._slot = slot

    def lend(self) -> NDArray[Any]:
        """Lend an array, with undefined contents."""
        return self._arena.lend_accumulator(self._slot)

    def give_back(self, array: NDArray[Any]) -> None:
        """Take a lent array back."""
        self._arena.return_accumulator(array)
