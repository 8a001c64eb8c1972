"""The time that a learner spends in optimizer.step() other than in its own optimizer, and where it goes.

By the kernel's own account of its thread, so that the figures hold on a busy machine, too: it has computed (it copies, and
begins exchanges), was ready to run while others had the processors, or has waited: that is idle. Knows nothing of learners.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import astuple, dataclass
from typing import Any

import torch


@dataclass
class Spent:
    """Seconds, or shares of a time.

    Attributes:
        idle: the thread has waited: for others, or for another thread of its process. computing: it had a processor.
        queued: it could have run, and others had the processors; 0 where the kernel does not say.
    """

    idle: float = 0.0
    computing: float = 0.0
    queued: float = 0.0

    def add(self, other: Spent, sign: float = 1.0) -> None:
        """Add another one."""
        self.idle, self.computing, self.queued = (
            own + sign * its for own, its in zip(astuple(self), astuple(other), strict=True)
        )


class Meter:
    """Measures a learner's thread, which makes it.

    Args:
        inner: the optimizer whose steps are not measured.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._schedstat = -1
        with contextlib.suppress(OSError):
            self._schedstat = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        self._began, self._spent = time.perf_counter(), Spent()
        inner.register_step_pre_hook(lambda *_: self._spent.add(self._now()))
        inner.register_step_post_hook(lambda *_: self._spent.add(self._now(), -1.0))

    def _now(self) -> Spent:
        """The thread's times until now; only differences mean anything."""
        while True:
            before, computing, wall = self._queued(), time.thread_time(), time.perf_counter()
            if (queued := self._queued()) == before:  # else it has lost the processor between these
                return Spent(wall - computing - queued, computing, queued)

    def _queued(self) -> float:
        return int(os.pread(self._schedstat, 100, 0).split()[1]) / 1e9 if self._schedstat >= 0 else 0.0

    def step(self, optimizer: Any) -> None:
        """Make a step, and measure it."""
        self._spent.add(self._now(), -1.0)
        optimizer.step()
        self._spent.add(self._now())

    @property
    def shares(self) -> Spent:
        """Shares of the time since this was made."""
        whole, found = time.perf_counter() - self._began, Spent()
        found.add(self._spent, 1.0 / whole)
        return found
