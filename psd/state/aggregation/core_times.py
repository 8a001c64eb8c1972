"""The times of rounds that are in a core in C, which measures them itself.

Must not know blocks, rows or workers' leases.
"""

from __future__ import annotations

from collections.abc import Callable

from typing_extensions import override

from psd.state.counts import Histogram, RoundTimes
from psd_core.arena import BlockCore
from psd_core.steps import TablesCore


class CoreTimes(RoundTimes):
    """The times of a core's rounds. Attributes: as of RoundTimes.

    Args:
        now: returns monotonic seconds.
    """

    def __init__(self, core: BlockCore | TablesCore, now: Callable[[], float]) -> None:
        self._core = core
        self._now = now

    @property
    def closed(self) -> Histogram:  # type: ignore[override]
        """Seconds from a round's first gradient to its update."""
        found = Histogram()
        _, _, found.counts, found.total = self._core.times
        return found

    @property
    def closed_at(self) -> float | None:  # type: ignore[override]
        """The time when the last one closed; None: none has."""
        return self._core.times[1]

    @property
    @override
    def is_open(self) -> bool:
        return self._core.times[0]

    @override
    def on_gradient(self, rank: int, waited: Callable[[], int]) -> None:
        self._core.on_gradient(rank, self._now(), waited())

    @override
    def on_close(self, waited: int) -> None:
        self._core.on_close(self._now(), waited)
