"""Armed steps without a shard: blocks of an arena, ranks, connections of psd_core, and in short what Python does beside them.

Joins and revocations are made under one lock, as a shard makes them under its own. It knows no psd.
"""

from __future__ import annotations

import queue
import socket
import threading
from array import array
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from psd_core import arena as stores
from psd_core.arena import Arena, BlockShape, Terms
from psd_core.steps import SERVED_AGAIN, SERVED_TICKETS, RankPlace, Ranks, StepConnection, Steps
from psd_core.worker_steps import TAKEN, WorkerSteps

SIZES = (5, 700)
SCALARS = (1.0, 0.0, 0.0, 0.0)
COUNTED, DUPLICATE, LATE, EARLY = range(4)
LIVE = 2 << 4
"""In the record of a rank; see ShardCore._save_worker."""


class Host:
    """A job's part of float32 blocks: SGD with lr = 1, and the sum of gradients, which are rank + 1 everywhere.

    Attributes:
        lent: the blocks. places: clocks by rank. present: by rank, of each session the first round, or step, and the first one
            without it.
    """

    def __init__(self, path: Path, world: int, *, has_rounds: bool) -> None:
        shapes = [BlockShape("float32", size, 0, 1) for size in SIZES]
        self.arena = Arena.create(path, meta=b"", shapes=shapes, workers=world)
        self.has_rounds, self.world = has_rounds, world
        self.ranks, self.lock = Ranks(world), threading.Lock()
        self.places = [RankPlace() for _ in range(world)]
        self.sessions = [1] * world
        self.has_failed = threading.Event()
        self.present: list[list[list[float]]] = [[[0, np.inf]] for _ in range(world)]
        for rank, place in enumerate(self.places):
            place.lie_in(self.ranks, rank)
            self.arena.set_member(rank, 1, 0, LIVE)
        self.lent = []
        for block, size in enumerate(SIZES):
            ends = np.array([size], np.uint32)
            terms = Terms("sgd", (), ends, ages_rate=False, has_rounds=has_rounds, is_mean=False, quorum=world)
            lent = self.arena.lend(block, terms)
            page = self.arena.spare(block)
            for values in (page.parameter, page.steps, page.sessions, page.clocks):
                values[:] = 0
            self.arena.publish(block, page, 0)
            lent.core.open(0)
            lent.core.attend(self.ranks, block == 0)
            self.lent.append(lent)
        blocks = [(lent.core, "f", 4 * block) for block, lent in enumerate(self.lent)]
        low, high = [0.0] * 4 * len(SIZES), [10.0, 0.0, 0.0, 0.0] * len(SIZES)
        self.steps = Steps(self.ranks, blocks, low, high, has_rounds, None, self.arena.member_word(0)[0])

    def pause(self) -> None:
        """Let others go on, unless one of them has failed."""
        assert not self.has_failed.wait(0.001), "another worker has failed"

    def waited_in(self, number: float) -> int:
        """Mask of the ranks that a round waits for."""
        return sum(1 << rank for rank, spans in enumerate(self.present) if spans[-1][0] <= number < spans[-1][1])

    def push(self, rank: int, clock: int, values: list[np.ndarray]) -> bool:
        """Make a push as a call; False if it is too early for a block."""
        is_whole = True
        for lent, gradient in zip(self.lent, values, strict=True):
            core = lent.core
            with core.lock():
                arguments = (rank, self.sessions[rank], clock, 1.0, gradient, None, SCALARS, 0, None, 1.0, True, False)
                while (outcome := core.contribute(*arguments, self.waited_in(core.version))) == stores.NEEDS_PAGE:
                    lent.extend()
                self._settle(lent)
            assert outcome in (COUNTED, DUPLICATE, EARLY)
            is_whole &= outcome != EARLY
        if is_whole:
            with self.lock:
                self.places[rank].clock = max(self.places[rank].clock, clock + 1)
        return is_whole

    def reached(self, number: int) -> bool:
        """True if all blocks have more than so many updates of rounds."""
        return all(lent.core.version > number for lent in self.lent)

    def arm(self, rank: int) -> int:
        """The epoch of a rank; 0: not before those that have joined are waited for."""
        with self.lock:
            version = min(lent.core.version for lent in self.lent)
            if self.has_rounds and any(version < spans[-1][0] for spans in self.present):
                return 0
            self.ranks.revoke_one(rank)
            at = self.arena.member_word(rank)[1]
            floor = int(self.present[rank][-1][0])
            return self.steps.arm(rank, self.sessions[rank], floor, at, self.waited_in(version), None) or 0

    def leave(self, rank: int, *, returns: bool) -> None:
        """End a session, and if it returns begin another one, in a later round; close the rounds that wait for nobody else."""
        with self.lock, ExitStack() as stack:
            self.ranks.revoke()
            for lent in self.lent:
                stack.enter_context(lent.core.lock())
            place, spans = self.places[rank], self.present[rank]
            spans[-1][1] = place.clock
            if returns:
                self.sessions[rank] += 1
                if self.has_rounds:
                    place.clock = max([place.clock, *(lent.core.version + 1 for lent in self.lent)])
                self.arena.set_member(rank, self.sessions[rank], place.clock, LIVE)
                spans.append([place.clock, np.inf])
            for lent in self.lent:
                self._settle(lent)

    def _settle(self, lent: Any) -> None:
        """Close the rounds that have all that they wait for, and those that wait for nobody while a later one does."""
        core = lent.core
        while self.has_rounds:
            waited = self.waited_in(core.version)
            if not core.is_complete(waited, not waited and any(spans[-1][0] > core.version for spans in self.present)):
                break
            while core.close_round() == stores.NEEDS_PAGE:
                lent.extend()

    def check(self, block: int) -> int:
        """The version of the current page, which must have what it says that it has."""
        page = self.arena.pin(block)
        try:
            version, found = page.version, set(page.parameter.tolist())
            if self.has_rounds:
                counts = [sum(max(0, min(end, version) - begin) for begin, end in spans) for spans in self.present]
            else:
                counts = page.clocks.tolist()
                assert version == sum(counts)
            assert found == {-float(sum((rank + 1) * count for rank, count in enumerate(counts)))}
            return version
        finally:
            self.arena.unpin(page)


class Connection:
    """A worker, and the thread of its connection at the host.

    Attributes:
        steps, calls: pushes so far, by how they were made.
    """

    def __init__(self, host: Host, rank: int) -> None:
        self._host, self._rank = host, rank
        self._own, self._peer = socket.socketpair()
        self._loops: queue.Queue[StepConnection] = queue.Queue()
        self._is_armed = False
        self.steps = self.calls = 0
        self.values = [np.full(size, rank + 1, np.float32) for size in SIZES]
        self._parameters = [np.zeros(size, np.float32) for size in SIZES]
        self._made = WorkerSteps(
            1,
            versions=array("Q", [0] * len(SIZES)),
            sends_versions=not host.has_rounds,
            scalars=4 * len(SIZES),
            looked_at=self.values,
        )
        self._made.lay_out(0, array("I", range(len(SIZES))), host.steps.head_bytes, 0, self.values, self._parameters)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        status = SERVED_AGAIN
        while status == SERVED_AGAIN:
            loop, status = self._loops.get(), SERVED_TICKETS
            while status == SERVED_TICKETS:
                status, _ = loop.serve(b"")

    def push(self) -> None:
        """As a step if that is armed and taken, else as a call."""
        host, rank = self._host, self._rank
        clock = host.places[rank].clock
        if self._is_armed and self._step(clock):
            self.steps += 1
            return
        with host.lock:
            host.ranks.revoke_one(rank)
        while not host.push(rank, clock, self.values):
            host.pause()
        while host.has_rounds and not host.reached(clock):
            host.pause()
        self.calls += 1
        if not self._is_armed and (epoch := host.arm(rank)):
            self._made.arm(0, self._own.fileno(), epoch)
            self._loops.put(StepConnection(host.steps, rank, self._peer.fileno()))
            self._is_armed = True

    def _step(self, clock: int) -> bool:
        took = self._made.run(self._host.sessions[self._rank], clock, 0, 1.0, [SCALARS] * len(SIZES), None)
        while took is False and not self._made.advance(0):
            pass
        self._is_armed = took is True or self._made.state(0) == TAKEN
        return self._is_armed

    def close(self) -> None:
        """And end the thread."""
        if not self._is_armed:
            self._loops.put(StepConnection(self._host.steps, self._rank, self._peer.fileno()))
        self._own.close()
        self._thread.join(100)
        self._peer.close()
