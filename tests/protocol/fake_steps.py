"""A worker's end of armed steps: the real C of it, whose bytes go to the checker instead of a socket, and wait for what that
makes of them.

`GreenSteps` is psd_core's WorkerSteps over a pair of sockets that nobody else reads: a step is read there at once, and its
answer is written there when it has come. Must not know when steps may be made, or what shards do with them.
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Sequence
from typing import Any, ClassVar

import green
import numpy as np
from numpy.typing import NDArray
from wire import UNREACHED, Outcome

from psd.contract.rows import TableRows
from psd.v1 import bulk_pb2
from psd_client.lanes.flat import FlatBuffers
from psd_client.lanes.transport import Call, Cancelled
from psd_core.worker_steps import BROKEN, TAKEN, WorkerSteps

BYTES_MAX = 1 << 16


def stand_ins() -> list[tuple[Any, str, Any]]:
    """What `green.green` is to put into the client's lanes."""
    return [(importlib.import_module("psd_client.lanes.steps"), "WorkerSteps", green_steps)]


class PendingStep:
    """A step under way at one shard.

    Attributes:
        outcome: how it has ended; None: it has not. is_cancelled: nobody waits for that any more.
    """

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self.is_cancelled = False
        self._waiters = green.Waiters()

    def take(self, outcome: Outcome) -> None:
        """Note its answer."""
        self.outcome = outcome
        self._waiters.wake()

    def cancel(self) -> None:
        """End the wait for it."""
        self.is_cancelled = True
        self._waiters.wake()

    def wait(self) -> Outcome:
        """The outcome. Raises Cancelled."""
        while self.outcome is None and not self.is_cancelled:
            self._waiters.wait()
        if self.outcome is None:
            raise Cancelled
        return self.outcome


class Wires:
    """The pairs of sockets, one for each place among a worker's shards. Nothing is left in them between two events."""

    pairs: ClassVar[list[tuple[socket.socket, socket.socket]]] = []

    @classmethod
    def of(cls, place: int) -> tuple[socket.socket, socket.socket]:
        """The C core's end, and the checker's."""
        while len(cls.pairs) <= place:
            pair = socket.socketpair()
            for end in pair:
                end.setblocking(False)
            cls.pairs.append(pair)
        return cls.pairs[place]

    @classmethod
    def close(cls) -> None:
        """End all."""
        for pair in cls.pairs:
            for end in pair:
                end.close()
        cls.pairs.clear()


class GreenSteps(WorkerSteps):
    """The steps of one worker; a call waits as its fiber does. Made by `green_steps`.

    Attributes:
        read: the versions that were read last, in place of the worker's. Ages are not looked at here: steps state none, as
            pushes do. pending: by place. broken: places whose connections have ended. shards: by place. epochs: likewise.
    """

    read: NDArray[np.uint64]
    shard_count: int

    def begun(self, shards: int, read: NDArray[np.uint64]) -> GreenSteps:
        """This one, with nothing under way."""
        self.read, self.shard_count = read, shards
        self.pending: dict[int, PendingStep] = {}
        self.settled: set[int] = set()
        self.broken: set[int] = set()
        self.shards: dict[int, int] = {}
        self.epochs: dict[int, int] = {}
        return self

    def arm(self, shard: int, fd: int, epoch: int) -> None:
        self.shards[shard], self.epochs[shard] = fd, epoch  # a FakeStepping's descriptor is its shard
        super().arm(shard, Wires.of(shard)[0].fileno(), epoch)

    def run(
        self, session: int, clock: int, since: int, weight: float, scalars: Any, present: list[bytes] | None
    ) -> bool | None:
        self.read[:] = 0
        self.pending.clear()
        self.settled.clear()
        self.broken.clear()
        if super().run(session, clock, since, weight, scalars, present) is None:
            return None
        process = green.current().fibers.owner
        for place in range(self.shard_count):
            message = Wires.of(place)[1].recv(BYTES_MAX)
            self.pending[place] = process.send_step(self.shards[place], message)
        for place in range(self.shard_count):
            self.settle(place)
            if self.state(place) != TAKEN:
                return False
        return all(self.done(place)[0] == clock + 1 and not self.done(place)[2] for place in range(self.shard_count))

    def settle(self, place: int) -> None:
        """Wait for the answer of a shard, and receive it. Raises Cancelled."""
        if place in self.settled:
            return
        outcome = self.pending[place].wait()
        self.settled.add(place)
        if outcome.reason:
            self.broken.add(place)
            return
        Wires.of(place)[1].send(outcome.body)
        assert super().advance(place)
        if self.state(place) == TAKEN:
            green.current().fibers.owner.received(outcome.versions)

    def state(self, shard: int) -> int:
        return BROKEN if shard in self.broken else super().state(shard)


def green_steps(shards: int, *, versions: NDArray[np.uint64], **how: Any) -> GreenSteps:
    """In place of WorkerSteps."""
    read = np.zeros_like(versions)
    return GreenSteps(shards, versions=read, **how).begun(shards, read)


class FakeStepping:
    """A connection that carries steps (psd_client.lanes.transport.Stepping).

    Attributes:
        offer: that the last reply has made; None: none.
    """

    def __init__(self, shard: int, process: Any) -> None:
        self.shard = shard
        self.offer: bulk_pb2.StepOffer | None = None
        self._process = process

    @property
    def fileno(self) -> int:
        return self.shard

    def begin_call(self) -> None:
        """Note that something else than a step is sent."""
        self.offer = None

    def take_offer(self, offer: bytes) -> None:
        """Note what a reply has offered."""
        self.offer = bulk_pb2.StepOffer.FromString(offer) if offer else None

    def offered(self, gradients: FlatBuffers, parameters: FlatBuffers) -> bulk_pb2.StepOffer | None:
        del gradients, parameters
        return self.offer

    def places(self, rows: Sequence[TableRows]) -> list[int]:
        """Rows travel."""
        return []

    def hold(self, offer: bulk_pb2.StepOffer) -> bool:
        return self.offer is offer

    def let_go(self) -> None:
        pass

    def finish(self, steps: Any, place: int, call: Call) -> bool:
        pending = steps.pending[place]
        try:
            with call.scope.entered(pending.cancel):
                steps.settle(place)
        except BaseException:
            self.abandon_step()
            raise
        state = steps.state(place)
        if state == TAKEN:
            return True
        self.offer = None
        if state == BROKEN:
            green.current().last_shard = self.shard
            error = UNREACHED.error(self.shard)
            assert error is not None
            raise error
        return False

    def cancel_step(self) -> None:
        """Leave it to `abandon_step`, which follows."""

    def abandon_step(self) -> None:
        self.offer = None
        self._process.abandon_step(self.shard)
