"""What a block writes to a spare page besides an update: first values, stored ones, and all that an update leaves as it was.

The page is nobody else's until it is published. Must not know versions, rounds or locks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd.checkpoint import RestoredBlock
from psd_core.arena import Page


def write_initial(page: Page, values: NDArray[Any], slot_starts: Sequence[float]) -> None:
    """Parameters from `values`; slots begin as their rule says, steps and the dedup window as zero."""
    np.copyto(page.parameter, values)
    for slot, start in zip(page.slots, slot_starts, strict=True):
        slot.fill(start)
    page.steps.fill(0)
    page.sessions.fill(0)
    page.clocks.fill(0)


def write_stored(page: Page, stored: RestoredBlock) -> None:
    """Everything from a checkpoint; without a dedup window, where the job has other workers."""
    np.copyto(page.parameter, stored.parameter)
    for slot, values in zip(page.slots, stored.slots.values(), strict=True):
        np.copyto(slot, values)
    np.copyto(page.steps, stored.steps)
    np.copyto(page.sessions, 0 if stored.sessions is None else stored.sessions)
    np.copyto(page.clocks, 0 if stored.clocks is None else stored.clocks)


def write_unchanged(before: Page, after: Page) -> None:
    """Parameters, slots and steps as they were."""
    np.copyto(after.parameter, before.parameter)
    for old, new in zip(before.slots, after.slots, strict=True):
        np.copyto(new, old)
    np.copyto(after.steps, before.steps)


def write_window(before: Page, after: Page, counted: Mapping[int, int], clock: int) -> None:
    """The dedup window: `counted`, by rank the session whose push of `clock` is in the update; the others as they were."""
    np.copyto(after.sessions, before.sessions)
    np.copyto(after.clocks, before.clocks)
    for rank, session in counted.items():
        after.sessions[rank] = session
        after.clocks[rank] = clock + 1
