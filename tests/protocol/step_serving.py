"""How a shard's process takes armed steps: what psd/rim/steps.py and psd_core's loop do, without sockets, piece by piece, so
that others have their turn between two pieces of one step; the pieces, and what they do to blocks, are the real C.

Whoever revokes waits until no step is inside: here that step goes on to its end at once, before anything is revoked. C tells
the time by a clock of its own; here it stands still, so what C has noted of it is set to the shard's.

Numbers travel in messages here, also those that would lie in memory which a worker and a shard of one machine share: for what
is explored that is the same. A worker writes to that memory while no step of it is under way, and one that gives a step up
waits until the shard has let go of it, or has memory of its own from then on (psd_client/lanes/bulk_connection.py): so what a
shard finds there when it counts is what the message would have had, and none comes late. What a shard writes there is looked
at when DONE has come. Pages that are lent belong to pulls, and a worker that borrows them makes no steps
(ArmedSteps.are_wanted). Rows that are asked for ahead are read in the piece that pins; these workers ask for none.
Must not know more of workers.
"""

from __future__ import annotations

import importlib
import struct
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, ClassVar

import green
import numpy as np
from green import Fiber
from published import History, WatchedCore
from wire import Outcome, Request

from psd.contract.wire import Kind
from psd.state.aggregation.small_block import SmallBlock
from psd.state.desks.steps import Armed
from psd.state.shard import Shard
from psd.state.workers.membership import WorkerState
from psd.v1 import bulk_pb2, data_pb2
from psd_core.arena import BlockCore
from psd_core.steps import AGAIN_LONG_WAIT, AGAIN_REVOKED, PlayedStep, Ranks

LANE = "grpc"
_PREFIX = struct.Struct("<IIQ")
_DONE = struct.Struct("<QII")
_AGAIN = struct.Struct("<II")
_SESSION, _SESSION_AT = struct.Struct("<Q"), _PREFIX.size + 8


class StepWait:
    """What a step is parked for whose round is open."""

    def __init__(self, step: PlayedStep) -> None:
        self._step = step

    @property
    def is_ready(self) -> bool:
        """True if it may go on."""
        return self._step.is_reached or self._step.is_revoked


class WatchedRanks(Ranks):
    """Ranks for whose revocation the steps that are inside go on first. door: returns where these are; None: nowhere."""

    door: ClassVar[Callable[[], StepDoor | None]]

    def revoke(self) -> None:
        if (door := type(self).door()) is not None:
            door.leave_all(None)
        super().revoke()

    def revoke_one(self, rank: int) -> None:
        if (door := type(self).door()) is not None:
            door.leave_all(rank)
        super().revoke_one(rank)


def stand_ins(door: Callable[[], StepDoor | None], first_epoch: Callable[[], int]) -> list[tuple[Any, str, Any]]:
    """What `green.green` is to put into psd.state and psd_core.

    Args:
        door: of the shard that runs. first_epoch: returns the number that the epochs of a job's ranks begin with.
    """
    WatchedRanks.door = staticmethod(door)
    of_steps = SmallBlock.of_steps

    def of_real_core(block: SmallBlock, first_scalar: int) -> tuple[BlockCore, str, int]:
        core, letter, first = of_steps(block, first_scalar)
        return (core.watched if isinstance(core, WatchedCore) else core), letter, first

    numbers = types.SimpleNamespace(urandom=lambda count: first_epoch().to_bytes(count, "little"))
    return [
        (importlib.import_module("psd.state.workers.membership"), "Ranks", WatchedRanks),
        (importlib.import_module("psd_core._ranks"), "os", numbers),
        (SmallBlock, "of_steps", of_real_core),
    ]


class ServedStep:
    """One step on its way through the shard.

    Attributes:
        rank, session: whose it is. done: pieces that are over: begin, each block, end. reason: for AGAIN; 0: none.
        counted: blocks that have counted it. has_left: it is not inside any more.
    """

    def __init__(
        self,
        shard: Shard,
        armed: Armed,
        rank: int,
        message: bytes,
        history: History,
        watching_rows: Callable[[Callable[[], int]], int],
    ) -> None:
        self._shard = shard
        self._watching_rows = watching_rows
        self.armed, self.rank, self._history = armed, rank, history
        (self.session,) = _SESSION.unpack_from(message, _SESSION_AT)
        self.played = PlayedStep(armed.steps, rank, message)
        self._blocks = [block for block in armed.job.blocks.values() if isinstance(block, SmallBlock)]
        self._tables = armed.job.tables
        self.done = self.reason = 0
        self.counted: list[int] = []
        self.has_left = self._is_awaited = False

    @property
    def is_inside(self) -> bool:
        """True while whoever revokes waits for it."""
        return self.played.is_inside

    def advance(self) -> None:
        """Take one piece."""
        played, piece = self.played, self.done
        self.done += 1
        if piece == 0:
            self.reason = played.begin()
        elif piece <= played.blocks:
            self._count(piece - 1)
        else:
            played.end()
        self.has_left = bool(self.reason) or piece > played.blocks

    def _count(self, place: int) -> None:
        if place == len(self._blocks):
            self._count_rows(place)
            return
        block = self._blocks[place]
        core = block._core
        assert isinstance(core, WatchedCore)
        before = core.version, core.contributors
        self.reason = core.watching(lambda: self.played.count(place))
        if (core.version, core.contributors) != before:
            self._has_counted(block.index, before[0])

    def _count_rows(self, place: int) -> None:
        tables = self._tables
        assert tables is not None
        before = tables.version
        self.reason = self._watching_rows(lambda: self.played.count(place))
        if tables.version != before:
            self._has_counted(tables.index, before)

    def _has_counted(self, block: int, version: int) -> None:
        self.counted.append(block)
        if not self._is_awaited and (changed := self._changed(version)):
            self._history.wrong.append(f"block {block} counts a step of worker {self.rank}, though {changed}")

    def _changed(self, round_: int) -> str:
        """A fact that steps rely on, and that has changed since it was armed; "": none."""
        core = self._shard._core
        members = core.membership
        if core.job is not self.armed.job or members is None:
            return "the job is another one"
        worker = members.workers[self.rank]
        if worker.state is not WorkerState.LIVE or worker.session != self.session:
            return "its session has ended"
        if core.job.policy.has_rounds and members.waited_in(round_) != self.armed.steps.known(0)[0]:
            return "the round waits for others"
        cuts = [snapshot.cut for snapshot in self._shard.cuts._open]
        if core.job.policy.has_rounds:
            cuts = [cut for cut in cuts if cut.step <= self.played.clock + 1]
        return "a cut is open" if cuts else ""

    def leave(self) -> None:
        """Go on until it is not inside: somebody waits for that, and what steps rely on may be about to change."""
        self._is_awaited = True
        while self.is_inside:
            self.advance()

    def let_go(self) -> None:
        """End it anyhow, with its process."""
        if self.is_inside:
            with suppress(BaseException):
                self.played.end()

    @property
    def known(self) -> tuple[Any, ...]:
        """All that decides what becomes of it."""
        return self.done, self.reason, self.counted, self.has_left, self.played.is_revoked


@dataclass
class StepDoor:
    """Where steps arrive in one life of a shard.

    Attributes:
        watching_rows: returns the outcome of a call of C that may publish rows; the shard may die in there.
        armed: by process, what its connection takes steps of; None: nothing; not there: it has no connection.
        under_way: by fiber, the steps that are being taken.
    """

    shard: Shard
    history: History
    ranks: Mapping[int, int]
    watching_rows: Callable[[Callable[[], int]], int]
    armed: dict[int, Armed | None] = field(default_factory=dict)
    under_way: dict[Fiber, ServedStep] = field(default_factory=dict)

    def on_call(self, request: Request) -> None:
        """Note that a call comes over a connection: it takes no more steps until another one is offered."""
        if request.process >= 0:
            self.armed[request.process] = None

    def offer(self, request: Request, header: data_pb2.PushHeader, reply: data_pb2.PushReply) -> bytes:
        """Arm the worker of a push that is answered so; what to tell it."""
        if not request.wants_steps or (armed := self.shard.steps.arm(header, reply, LANE)) is None:
            return b""
        self.armed[request.process] = armed
        tables = armed.job.tables
        offer = bulk_pb2.StepOffer(
            epoch=armed.epoch,
            blocks=_blocks_of(armed),
            tables=0 if tables is None else len(tables.partitions),
            scalars=sum(len(group.values) for group in header.scalars),
            head_bytes=armed.steps.head_bytes,
            gradient_bytes=armed.steps.gradient_bytes,
            parameter_bytes=armed.steps.parameter_bytes,
        )
        return offer.SerializeToString(deterministic=True)

    @property
    def are_inside(self) -> bool:
        """True while steps are inside."""
        return any(step.is_inside for step in self.under_way.values())

    def leave_all(self, rank: int | None) -> None:
        """Let the steps that are inside, or those of one rank, go on until they are not."""
        for step in list(self.under_way.values()):
            if rank is None or step.rank == rank:
                step.leave()

    def end(self, request: Request) -> None:
        """Note that a connection has ended."""
        if (armed := self.armed.pop(request.process, None)) is not None:
            self.shard.steps.end(armed.job, self.ranks[request.process])

    def take(self, request: Request, on_piece: Callable[[], None], is_hung_up: Callable[[], bool]) -> Outcome | None:
        """What a step is answered; None: its connection has ended.

        Args:
            on_piece: called before each piece, may let others have their turn.
        """
        if (armed := self.armed[request.process]) is None:
            return _again(AGAIN_REVOKED)
        rank = self.ranks[request.process]
        step = ServedStep(self.shard, armed, rank, request.body, self.history, self.watching_rows)
        fiber = green.current()
        self.under_way[fiber] = step
        try:
            return self._take(step, request, on_piece, is_hung_up)
        except BaseException:
            step.let_go()
            raise
        finally:
            del self.under_way[fiber]

    def _take(
        self, step: ServedStep, request: Request, on_piece: Callable[[], None], is_hung_up: Callable[[], bool]
    ) -> Outcome | None:
        played = step.played
        while not step.has_left:
            on_piece()
            if not step.has_left:  # somebody may have revoked meanwhile
                step.advance()
        self._tell_time(step)
        if not step.reason and played.hands_back:
            self.shard.steps.end_waits(step.armed.job, step.rank)
        while not step.reason and not played.is_reached:
            if is_hung_up():
                played.abandon()
                return None
            if played.is_revoked:
                step.reason = played.again(AGAIN_REVOKED)
            elif green.park(StepWait(played)) == "time out":
                step.reason = played.again(AGAIN_LONG_WAIT)
        versions: list[int] = []
        counted, values, rows = 0, list[bytes](), b""
        if not step.reason:
            on_piece()
            step.reason, versions, counted, values, rows = played.pin()
        if step.reason:
            self.armed[request.process] = None
            self.shard.steps.end_waits(step.armed.job, step.rank)
            return _again(step.reason)
        blocks = _blocks_of(step.armed)
        for block, version, numbers in zip_longest(blocks, versions, values):
            self.history.on_read(block, version, None if numbers is None else np.frombuffer(numbers), played.clock + 1)
        head = _DONE.pack(played.clock + 1, counted, len(blocks) - counted) + struct.pack(f"<{len(blocks)}Q", *versions)
        payload = b"".join(values) + rows  # each of a multiple of 8 bytes
        body = _PREFIX.pack(Kind.DONE, len(head), len(payload)) + head + payload
        return Outcome(body, tuple(sorted(zip(blocks, versions, strict=True))))

    def _tell_time(self, step: ServedStep) -> None:
        core = self.shard._core
        if core.membership is not None:
            core.membership.workers[step.rank].last_seen = core.now()

    @property
    def armed_ranks(self) -> tuple[int, ...]:
        """The ranks whose steps are taken."""
        members = self.shard._core.membership
        ranks = range(len(members.workers)) if members is not None else ()
        return tuple(rank for rank in ranks if members is not None and members.ranks.known(rank)[1] is not None)

    def known(self, fibers: Sequence[Fiber]) -> list[Any]:
        """All that decides what becomes of steps. fibers: of the calls that are under way."""
        core = self.shard._core
        found: list[Any] = [sorted((process, armed is not None) for process, armed in self.armed.items())]
        found.append([self.under_way[fiber].known if fiber in self.under_way else None for fiber in fibers])
        if core.membership is not None:
            ranks = core.membership.ranks
            found.append([ranks.known(rank) for rank in range(len(core.membership.workers))])
        if core.job is not None and core.job.steps is not None:
            found.append(core.job.steps.known(max(0, core.job.version_min - 1)))
        return found


def _blocks_of(armed: Armed) -> list[int]:
    """The blocks of a step; those of all tables are the last one."""
    tables = armed.job.tables
    return [index for index, block in armed.job.blocks.items() if block.is_trained] + ([] if tables is None else [tables.index])


def _again(reason: int) -> Outcome:
    return Outcome(_PREFIX.pack(Kind.AGAIN, _AGAIN.size, 0) + _AGAIN.pack(reason, 0))
