"""The next page of a block, before it becomes current: values, slots, steps and the dedup window; and the memory where a
round's gradients are summed.

Must not know rounds, rules or locks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from psd.checkpoint import RestoredBlock
from psd_core.arena import Arena, Page

Counted: TypeAlias = tuple[int, int]
"""A rank's last push that counts, as the dedup window of a page has it: its session, and the clock after it."""


def initialize(page: Page, values: NDArray[Any], slot_starts: Sequence[float]) -> None:
    """Initial parameters; slots begin as their rule says, steps and the dedup window as zero."""
    np.copyto(page.parameter, values)
    for slot, start in zip(page.slots, slot_starts, strict=True):
        slot.fill(start)
    page.steps.fill(0)
    page.sessions.fill(0)
    page.clocks.fill(0)


def restore(page: Page, stored: RestoredBlock) -> None:
    """Write everything from a checkpoint."""
    np.copyto(page.parameter, stored.parameter)
    for slot, values in zip(page.slots, stored.slots.values(), strict=True):
        np.copyto(slot, values)
    np.copyto(page.steps, stored.steps)
    np.copyto(page.sessions, 0 if stored.sessions is None else stored.sessions)
    np.copyto(page.clocks, 0 if stored.clocks is None else stored.clocks)


def carry_over(before: Page, after: Page) -> None:
    """Copy values, slots and steps unchanged: an update of nothing."""
    np.copyto(after.parameter, before.parameter)
    for old, new in zip(before.slots, after.slots, strict=True):
        np.copyto(new, old)
    np.copyto(after.steps, before.steps)


def set_parameters(before: Page, after: Page, values: NDArray[Any]) -> None:
    """Write other parameters, and all else as it was."""
    carry_over(before, after)
    np.copyto(after.parameter, values)
    count(before, after, {}, 0)


def count(before: Page, after: Page, sessions: Mapping[int, int], clock: int) -> None:
    """Write the dedup window, with the pushes of `clock` of these sessions, by rank, now counted."""
    after.sessions[:] = before.sessions
    after.clocks[:] = before.clocks
    for rank, session in sessions.items():
        after.sessions[rank] = session
        after.clocks[rank] = clock + 1


def counted(pages: Sequence[Page]) -> list[Counted]:
    """The last push of each rank that any of these pages counts."""
    sessions = np.max([page.sessions for page in pages], axis=0)
    clocks = np.max([np.where(page.sessions == sessions, page.clocks, 0) for page in pages], axis=0)
    return list(zip(sessions.tolist(), clocks.tolist(), strict=True))


class Lender(Protocol):
    """Memory to sum the gradients of a round in."""

    def lend(self) -> Any:
        """An accumulator with undefined contents."""
        ...

    def give_back(self, lent: Any, /) -> None:
        """Give it back."""
        ...


class BlockAccumulators:
    """Memory of the arena to sum the gradients of one block in."""

    def __init__(self, arena: Arena, slot: int) -> None:
        self._arena = arena
        self._slot = slot

    def lend(self) -> NDArray[Any]:
        """An array with undefined contents."""
        return self._arena.lend_accumulator(self._slot)

    def give_back(self, array: NDArray[Any]) -> None:
        """Give back a lent array."""
        self._arena.return_accumulator(array)
