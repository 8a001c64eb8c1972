"""The gate that batches on vectors pass, and the way of the shards to one common cut of the vectors.

A batch goes to every shard. So the shards' vectors are of one moment when each shard has run the same batches of every worker.
A shard that hears of a cut leaves a note among the checkpoints, and goes on. When all have, each holds new batches back, and
notes which ones it has run; batches that another shard has run are let through. Batches never wait for long, and only once
every shard has left its first note. Must not know what a batch does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from psd.checkpoint import CheckpointDirectory, Cut
from psd.contract.errors import CheckpointFailed
from psd.state.desks.vectors import VectorDesk, VectorsCut

HELD_S_MAX = 5.0
"""Most seconds for which batches are held back while none is running."""
COME_S_MAX = 20.0
"""Most seconds, added to a lease, until all shards have come to a cut; no batch is held back meanwhile."""
LEFT_S = 1.0
"""Seconds of these after which a shard checks whether another one takes no part."""
POLL_S = 0.02

_COME, _HELD, _LEFT = "come", "held", "left"


class GivenUp(Exception):
    """Raised if other shards have given a cut up, or it comes too late; not reported as a failure."""


class VectorGate:
    """Lets batches pass, unless they are held back. Thread-safe."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._inside = 0
        self._let_through: Mapping[int, int] | None = None

    @contextmanager
    def passing(self, session: int, sequence: int) -> Iterator[None]:
        """A context in which this batch runs; waits while it is held back."""
        with self._condition:
            self._condition.wait_for(lambda: self._may_pass(session, sequence))
            self._inside += 1
        try:
            yield
        finally:
            with self._condition:
                self._inside -= 1
                self._condition.notify_all()

    def hold(self, let_through: Mapping[int, int]) -> None:
        """Hold batches back from now on, except those up to a number for each session."""
        with self._condition:
            self._let_through = let_through
            self._condition.notify_all()

    def is_empty(self, within_s: float) -> bool:
        """True if no batch runs, now or at some moment within so many seconds."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._inside, within_s)

    def open(self) -> None:
        """Let all batches pass again."""
        with self._condition:
            self._let_through = None
            self._condition.notify_all()

    def _may_pass(self, session: int, sequence: int) -> bool:
        return self._let_through is None or sequence <= self._let_through.get(session, 0)


class VectorCuts:
    """The cuts of one shard's vectors: `come`, then, when `have_all_come`, `take`; or `leave`.

    Args:
        lease_s: time in which each worker has carried a cut to all shards.
        is_ending: returns True if the shard ends, so that it waits for no others. pause: waits for some seconds, or less.
    """

    def __init__(
        self,
        gate: VectorGate,
        desk: VectorDesk,
        directory: CheckpointDirectory,
        shard_index: int,
        *,
        lease_s: float,
        is_ending: Callable[[], bool],
        pause: Callable[[float], object],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gate = gate
        self._desk = desk
        self._directory = directory
        self._shard_index = shard_index
        self._come_s_max = COME_S_MAX + lease_s
        self._is_ending = is_ending
        self._pause = pause
        self._now = now

    def is_shared(self, cut: Cut) -> bool:
        """True if the shards must come to a common cut of vectors."""
        return self._desk.has_vectors and cut.shard_count > 1

    def come(self, cut: Cut) -> None:
        """Note for the other shards that this one has heard of a cut."""
        self._note(cut, _COME, {})

    def leave(self, cut: Cut) -> None:
        """Note that this shard takes no part in a cut, so that the others need not wait for it."""
        self._note(cut, _LEFT, {})

    def have_all_come(self, cut: Cut, for_s: float, *, is_fresh: bool) -> bool:
        """True if all shards have heard of a cut.

        Args:
            for_s: how long this shard has waited for the others. is_fresh: True if no earlier process of it knew the cut.

        Raises:
            CheckpointFailed: they have not come in time. GivenUp: there is no reason to wait any more.
        """
        self._check_not_ending(cut)
        come = self._count_come(cut)
        if come == cut.shard_count:
            return True
        if not come or (for_s > LEFT_S and self._has_one_left(cut)):
            raise GivenUp(f"{cut.name}: another shard takes no part in it")
        # A cut that an earlier process knew has notes of other shards, unless they gave it up long ago.
        if for_s > HELD_S_MAX and not is_fresh and come <= 1:
            raise GivenUp(f"{cut.name}: the other shards have given it up")
        if for_s > self._come_s_max:
            raise CheckpointFailed(f"{cut.name}: not all shards have come to the cut of the vectors in {self._come_s_max:g} s")
        return False

    @contextmanager
    def take(self, cut: Cut) -> Iterator[VectorsCut | None]:
        """The vectors of this shard, of the same moment as those of all others; None if all were dropped.

        Raises:
            CheckpointFailed: not all shards have held batches back in time, or a worker's batch has not come to all of them.
            GivenUp: the shard ends, or another one has given the cut up.
        """
        gate, desk = self._gate, self._desk
        try:
            gate.hold({})
            while not gate.is_empty(POLL_S):  # a running batch keeps others out by itself, however long it takes
                self._check_goes_on(cut)
            deadline = self._now() + HELD_S_MAX
            farthest: dict[int, int] = {}
            for note in self._held(cut, deadline):
                for session, number in note.items():
                    farthest[session] = max(number, farthest.get(session, 0))
            if farthest:
                gate.hold(farthest)
            while lacking := [s for s, number in desk.latest_of(farthest).items() if number < farthest[s]]:
                if self._now() > deadline:
                    batch = f"batch {farthest[lacking[0]]} of session {lacking[0]}"
                    raise CheckpointFailed(f"{cut.name}: {batch}, which another shard has run, has not come")
                self._check_goes_on(cut)
                self._pause(POLL_S)
            with desk.snapshot(farthest) as vectors:
                gate.open()
                yield vectors
        finally:
            gate.open()

    def _held(self, cut: Cut, deadline: float) -> list[dict[int, int]]:
        """The batches that each shard had run when it began to hold others back."""
        self._note(cut, _HELD, {str(session): number for session, number in self._desk.latest().items()})
        while len(notes := self._directory.notes.read(cut.name, _HELD, cut.shard_count)) < cut.shard_count:
            if self._now() > deadline:
                raise CheckpointFailed(f"{cut.name}: not all shards have held batches back within {HELD_S_MAX:g} s")
            self._check_goes_on(cut)
            self._pause(POLL_S)
        return [{int(session): number for session, number in latest.items()} for latest in notes.values()]

    def _note(self, cut: Cut, stage: str, latest: Mapping[str, int]) -> None:
        """Note that this shard has come to a stage of a cut, and the number of each session's latest batch there."""
        self._directory.notes.write(cut.name, stage, self._shard_index, cut.shard_count, latest)

    def _count_come(self, cut: Cut) -> int:
        return len(self._directory.notes.shards(cut.name, _COME, cut.shard_count))

    def _has_one_left(self, cut: Cut) -> bool:
        """True if some shard takes no part in a cut; the cut's step may differ there."""
        return any(self._directory.notes.shards(name, _LEFT, cut.shard_count) for name in self._directory.named(cut.cut_id))

    def _check_goes_on(self, cut: Cut) -> None:
        self._check_not_ending(cut)
        if self._count_come(cut) < cut.shard_count:
            raise GivenUp(f"{cut.name}: another shard has given it up")

    def _check_not_ending(self, cut: Cut) -> None:
        if self._is_ending():
            raise GivenUp(f"{cut.name}: the shard ends")
