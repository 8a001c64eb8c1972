"""Whoever holds something of a shard's arena while that is replaced or closed, one class for each kind.

Each begins to hold with `__init__`, says with `seen` what it sees now, and lets go with `give_back`, as its owner in the
product does.
"""

from __future__ import annotations

import contextlib
import threading
from queue import SimpleQueue
from typing import Any

import numpy as np
from shard_driver import Driver, Seat, job_spec

from psd.contract.errors import PsdError
from psd.contract.jobspec import JobSpec
from psd.state.cuts.snapshots import Done
from psd.v1 import data_pb2
from psd_core.arena import Page

BLOCKS = 24
"""Several times the spares that an arena keeps, so that what is given back late would be surplus."""

SIZE = 600
WORKERS = 3


def spec_of(mode: str = "sync", **fields: Any) -> JobSpec:
    return job_spec(WORKERS, blocks=BLOCKS, size=SIZE, mode=mode, **fields)


def bytes_of(pages: list[Page]) -> list[tuple[int, bytes]]:
    return [(page.version, page.parameter.tobytes()) for page in pages]


class Holder:
    """Common to all.

    Attributes:
        spec: of the job. is_large: its blocks have the rounds of large ones.
        error: with which its owner's call has ended, if it has.
    """

    spec = spec_of()
    is_large = False
    error: Exception | None = None

    def __init__(self, driver: Driver, seats: list[Seat]) -> None:
        self.driver = driver
        self.seats = seats
        self.job = driver.core.declared()
        self.clock = max(block.version for block in self.job.blocks.values())

    def seen(self) -> Any:
        return None

    def give_back(self) -> None:
        raise NotImplementedError

    def train_on(self) -> None:
        """One more step: what is held is no longer current then, and would be free with the last pin."""
        for seat in self.seats:
            for index in range(BLOCKS):
                self.push_block(seat, index, 1.0)

    def push_block(self, seat: Seat, index: int, value: float) -> Any:
        push = self.driver.begin_push(seat, self.clock)
        self.driver.push_block(push, index, value)
        return push


class PulledPages(Holder):
    """Answers on their way to a worker that reads slowly."""

    def __init__(self, driver: Driver, seats: list[Seat]) -> None:
        super().__init__(driver, seats)
        exchange = driver.shard.exchange
        request = data_pb2.PullRequest(caller=seats[0].caller, clock=self.clock, layout_digest=driver.layout.digest)
        pull, blocks = exchange.begin_pull(request)
        self._held = [(block, exchange.read(block, pull)[1]) for block in blocks]  # type: ignore[index]
        self.train_on()

    def seen(self) -> Any:
        return bytes_of([page for _, page in self._held])

    def give_back(self) -> None:
        for block, page in self._held:
            block.unpin(page)
        self.job.arena.trim()


class SnapshotPages(Holder):
    """A checkpoint that is being written."""

    def __init__(self, driver: Driver, seats: list[Seat]) -> None:
        super().__init__(driver, seats)
        ready = driver.shard.cuts.take_part()
        driver.learn_cuts([data_pb2.Cut(id="held", step=self.clock, created_at=5.0)])
        self._snapshot: Any = ready.get_nowait()
        self.train_on()

    def seen(self) -> Any:
        return bytes_of(list(self._snapshot.pages.values()))

    def give_back(self) -> None:
        self.driver.shard.cuts.release(self._snapshot)


class OpenCutPages(Holder):
    """A reader that waits for the last blocks of its cut."""

    def __init__(self, driver: Driver, seats: list[Seat]) -> None:
        super().__init__(driver, seats)
        request = data_pb2.ReadRequest(
            run_id="mine", layout_digest=driver.layout.digest, cut=data_pb2.Cut(id="open", step=self.clock + 1)
        )
        self._done: Done = SimpleQueue()
        self._snapshot = driver.shard.begin_read(request, self._done)
        for index in range(BLOCKS // 2):
            for seat in seats:
                self.push_block(seat, index, 1.0)
        assert len(self._snapshot.pages) == BLOCKS // 2

    def give_back(self) -> None:
        assert self._done.qsize() == 1
        self.driver.shard.cuts.abandon(self._snapshot)


class UpdateInFlight(Holder):
    """A kernel that writes a spare page. Its push ends with an error that says that the shard has gone back."""

    is_large = True

    def __init__(self, driver: Driver, seats: list[Seat]) -> None:
        super().__init__(driver, seats)
        block = self.job.blocks[0]
        begun, self._goes_on = threading.Event(), threading.Event()
        rule, goes_on = block._rule, self._goes_on

        class Slow:
            def apply(self, before: Page, after: Page, *args: Any) -> None:
                begun.set()
                assert goes_on.wait(100)
                rule.apply(before, after, *args)

        block._rule = Slow()
        for seat in seats[:-1]:
            self.push_block(seat, 0, 1.0)
        push = driver.begin_push(seats[-1], self.clock)

        def run() -> None:
            try:
                driver.push_block(push, 0, 1.0)
            except PsdError as error:
                self.error = error

        self._thread = threading.Thread(target=run)
        self._thread.start()
        assert begun.wait(100)

    def give_back(self) -> None:
        self._goes_on.set()
        self._thread.join()
        assert self.error is not None


class Sums(Holder):
    """An open round that has accumulators; its last gradient comes when it is over."""

    is_large = True

    def __init__(self, driver: Driver, seats: list[Seat]) -> None:
        super().__init__(driver, seats)
        for index in range(BLOCKS):
            for seat in seats[:-1]:
                self.push_block(seat, index, 1.0)
        self._last = driver.begin_push(seats[-1], self.clock)
        self._rounds = [block._round for block in self.job.blocks.values()]

    def seen(self) -> Any:
        return [self._sum(round_).tobytes() for round_ in self._rounds]

    def _sum(self, round_: Any) -> Any:
        return round_._sum._sum

    def give_back(self) -> None:
        for index in range(BLOCKS):
            with contextlib.suppress(PsdError):
                self.driver.push_block(self._last, index, 1.0)
        for round_ in self._rounds:
            round_.end()


class ExactParts(Sums):
    """The same, kept apart."""

    spec = spec_of(aggregation="exact")

    def _sum(self, round_: Any) -> Any:
        return np.concatenate([part.values for part in round_._parts.values()])


class SmallSums(Sums):
    """An open round of blocks whose sums are in C."""

    is_large = False

    def seen(self) -> Any:
        return [block._core.round for block in self._blocks]

    def __init__(self, driver: Driver, seats: list[Seat]) -> None:
        super().__init__(driver, seats)
        self._blocks: list[Any] = list(self.job.blocks.values())


class LentGradients(Holder):
    """Gradients that lie in workers' memory, of rounds that are complete and not applied yet."""

    is_large = True

    def __init__(self, driver: Driver, seats: list[Seat]) -> None:
        super().__init__(driver, seats)
        self._pushes = [driver.begin_push(seat, self.clock) for seat in seats]
        for index in range(BLOCKS):
            for push in self._pushes:
                driver.lend_block(push, index, 1.0)
        assert self.job.blocks[0]._is_due

    def give_back(self) -> None:
        for push in self._pushes:
            push.loan.end()


KINDS = (PulledPages, SnapshotPages, OpenCutPages, UpdateInFlight, Sums, SmallSums, ExactParts, LentGradients)
