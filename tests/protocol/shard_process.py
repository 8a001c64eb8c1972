"""One shard's process, and the disk that it leaves behind: the real psd.state, behind the rim's own desks, event by event.

Events: ("call", key, request, how), ("go", key, how), ("time out", key), ("hang up", key), ("expire", rank), ("suspend",),
("kill",), ("restart",), ("blank",). A key names a call: the process and thread that made it, or a late one's number. `how`:
None; ("crash", n): the
process dies at its nth crash point; ("cut", n): the connection breaks after n blocks. Must not know workers beyond their calls.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import green
from canonical import Walker
from green import Fiber, Fibers
from published import History
from setting import Setting
from wire import Numbers, Outcome, Request

from psd.contract.config import ServerConfig
from psd.contract.errors import PsdError
from psd.rim.calls import Waiter
from psd.rim.control_service import ControlService
from psd.rim.data_plane import Answer, DataPlane, PushedBlock
from psd.state import core as state_core
from psd.state.membership import WorkerState
from psd.state.settlement import KEPT
from psd.state.shard import Shard
from psd.state.tickets import Ticket
from psd.v1 import control_pb2, data_pb2

DEADLINE_S = 600.0
Key = tuple[Any, ...]


class Killed(BaseException):
    """The process dies here."""


class _Broken(PsdError):
    """The connection of the call that runs."""


class TicketFuture(green.Future):
    """What a call waits for. That it may go on is an event of its own, which the checker chooses the moment of."""

    def await_done(self, timeout: float | None) -> None:
        if not self.is_done and timeout != 0 and green.park(self) == "time out":
            raise FutureTimeoutError


@dataclass(eq=False)
class GreenTicket(Ticket):
    """A ticket whose future does not block."""

    future: Any = field(default_factory=TicketFuture)


def stand_ins() -> list[tuple[Any, str, Any]]:
    """What `green.green` is to put into psd.state."""
    return [(state_core, "Ticket", GreenTicket)]


class Context:
    """What gRPC tells of a call."""

    def __init__(self) -> None:
        self.callbacks: list[Any] = []

    def time_remaining(self) -> float:
        return DEADLINE_S

    def add_callback(self, callback: Any) -> bool:
        self.callbacks.append(callback)
        return True


@dataclass
class Handler:
    """A call that runs here."""

    request: int
    context: Context
    fiber: Fiber | None = None

    @property
    def is_ready(self) -> bool:
        awaits = None if self.fiber is None else self.fiber.awaits
        return isinstance(awaits, TicketFuture) and awaits.is_done


class ShardTold(NamedTuple):
    """What an event has led to.

    Attributes:
        replies: keys of calls that have ended, with their outcomes. crash_points: those at which there is something else on the
            disk than before. wrong: broken invariants.
    """

    replies: tuple[tuple[Key, int], ...]
    crash_points: tuple[int, ...]
    wrong: tuple[str, ...]


class ShardView(NamedTuple):
    """What the rest of the world needs to know of a shard.

    Attributes:
        is_up: its process runs. lives: how often it has been started. handlers: keys of waiting calls; True: it may go on.
        live: by rank, the live session, else 0. history: see History.
    """

    is_up: bool
    lives: int
    is_blank: bool
    handlers: tuple[tuple[Key, bool], ...]
    live: tuple[int, ...]
    history: tuple[Any, ...]


class ShardProcess:
    """A live shard."""

    def __init__(self, setting: Setting, index: int, requests: Numbers, outcomes: Numbers, directory: Path) -> None:
        self._setting = setting
        self._index = index
        self._requests = requests
        self._outcomes = outcomes
        self._directory = directory
        self._fibers = Fibers()
        self._abandoned: list[Fibers] = []
        self._handlers: dict[Key, Handler] = {}
        self._replies: list[tuple[Key, int]] = []
        self._now = 1000.0
        self._lives = 0
        self._is_blank = False
        self._fuse = 0
        self._burnt = 0
        self._crash_points: dict[bytes, int] = {}
        self._is_watched = False
        self.history = History(setting)
        self._shard: Shard | None = None
        self._start()

    def _start(self) -> None:
        self._lives += 1
        config = ServerConfig(
            self._index, self._setting.shards, run_id="run", lease_s=self._setting.lease_s, state_dir=str(self._directory)
        )
        self._shard = Shard(
            config,
            now=lambda: self._now,
            wall=lambda: 0.0,
            incarnation=100 * (self._index + 1) + self._lives,
            crash_point=self._crash_point,
        )
        self._plane = DataPlane(self._shard, "grpc")
        self._control = ControlService(
            self._shard,
            None,  # type: ignore[arg-type]  # errors are not made statuses here
            address=lambda: "",
            on_leave=lambda: None,
            open_bulk=lambda *_: control_pb2.OpenBulkReply(),
        )
        self._watch()

    def _watch(self) -> None:
        """Have the arena tell the history what is published."""
        assert self._shard is not None
        arena = self._shard._core.storage.arena
        if arena is not None and "publish" not in vars(arena):
            publish = arena.publish
            blocks = list(range(self._index, self._setting.blocks, self._setting.shards))

            def watched(slot: int, page: Any, version: int) -> None:
                before, entry = arena.current(slot), arena._blocks.table.load(slot)
                try:
                    publish(slot, page, version)
                finally:
                    if arena._blocks.table.load(slot) != entry:  # also if the process dies at once
                        self.history.on_publish(blocks[slot], before, page, version)

            arena.publish = watched  # type: ignore[method-assign]

    def _crash_point(self, _: str) -> None:
        self._burnt += 1
        if self._fuse:
            if self._burnt >= self._fuse:
                raise Killed
        elif self._is_watched:
            self._crash_points.setdefault(self._front(), self._burnt)

    def _front(self) -> bytes:
        """What the disk holds beside the pages' contents, which the block table stands for."""
        arena = self._shard._core.storage.arena if self._shard is not None else None
        return b"" if arena is None else arena._file.read(arena._front.size, 0)

    # -- events --------------------------------------------------------------------------------------------------------

    def apply(self, event: tuple[Any, ...], *, is_known: bool = False) -> ShardTold:
        self._burnt = self._fuse = 0
        self._is_watched = "crash" in self._setting.faults and not is_known and event[0] == "call"
        self._crash_points = {self._front(): 0} if self._is_watched else {}
        try:
            self._apply(event)
        except Killed:
            self._die()
        if self._shard is not None and self._is_watched:
            self._crash_points.setdefault(self._front(), self._burnt + 1)
        replies, self._replies = tuple(self._replies), []
        points = tuple(sorted(point for point in self._crash_points.values() if point))
        return ShardTold(replies, points, self.history.take_wrong())

    def _apply(self, event: tuple[Any, ...]) -> None:
        shard = self._shard
        match event:
            case ("restart",):
                assert shard is None
                self._start()
                return
            case ("blank",):
                assert shard is None
                shutil.rmtree(self._directory, ignore_errors=True)
                self._is_blank = True
                self.history.on_blank()
                self._start()
                return
        assert shard is not None
        match event:
            case ("call", key, request, how):
                self._begin(key, request, how)
            case ("go", key, how):
                self._set_fuse(how)
                handler = self._handlers[key]
                assert handler.fiber is not None
                self._fibers.wake(handler.fiber)
            case ("time out", key):
                handler = self._handlers[key]
                assert handler.fiber is not None
                self._fibers.wake(handler.fiber, "time out")
            case ("hang up", key):
                handler = self._handlers[key]
                for callback in handler.context.callbacks:
                    callback()
                assert handler.fiber is not None
                self._fibers.wake(handler.fiber)
            case ("expire", rank):
                self._expire(rank)
            case ("suspend",):
                self._now += 2 * self._setting.lease_s
                shard.tick()
            case ("kill",):
                raise Killed
            case _:
                raise AssertionError(event)
        self._fibers.run()
        if self._died or self._fuse:  # if it has come through: just before it answers
            raise Killed

    _died = False

    def _set_fuse(self, how: Any) -> None:
        if how is not None and how[0] == "crash":
            self._fuse = how[1]

    def _expire(self, rank: int) -> None:
        """Everybody else has been heard of just now."""
        assert self._shard is not None
        members = self._shard._core.members
        for worker in members.workers:
            worker.last_seen = self._now
        members._last_tick = self._now
        members.workers[rank].last_seen = self._now - 1.5 * self._setting.lease_s
        self._shard.tick()

    def _die(self) -> None:
        """What the kernel does: memory is gone, locks are released, the arena's file stays as it is."""
        assert self._shard is not None
        arena = self._shard._core.storage.arena
        if arena is not None:
            arena._directory.close()
        self._abandoned.append(self._fibers)  # nothing of it runs any more, not even to clear up
        self._fibers, self._handlers, self._shard, self._died = Fibers(), {}, None, False

    def _begin(self, key: Key, number: int, how: Any) -> None:
        assert key not in self._handlers, f"two calls at once from {key}"
        self._set_fuse(how)
        handler = self._handlers[key] = Handler(number, Context())
        request: Request = self._requests[number]
        blocks_max = how[1] if how is not None and how[0] == "cut" else None

        def serve() -> None:
            try:
                outcome = self._serve(request, handler.context, blocks_max)
            except _Broken:
                outcome = Outcome(reason="ShardUnavailable")
            except PsdError as error:
                outcome = Outcome.of_error(error)
            except Killed:
                self._died = True
                return
            except green.GreenletExit:
                raise
            except Exception as error:  # noqa: BLE001 - the finding itself
                self.history.wrong.append(f"a defect of the shard: {type(error).__name__}: {error}")
                outcome = Outcome(reason="InternalError")
            self._replies.append((key, self._outcomes.of(outcome)))
            if self._handlers.get(key) is handler:
                del self._handlers[key]

        handler.fiber = self._fibers.spawn(serve, "call")

    def _serve(self, request: Request, context: Any, blocks_max: int | None) -> Outcome:
        shard, control = self._shard, self._control
        assert shard is not None
        match request.kind:
            case "join":
                return Outcome(_bytes(control.join(control_pb2.JoinRequest.FromString(request.body), context)))
            case "declare":
                reply = control.declare(control_pb2.DeclareRequest.FromString(request.body), context)
                self._watch()
                return Outcome(_bytes(reply))
            case "heartbeat":
                shard.admission.heartbeat(control_pb2.HeartbeatRequest.FromString(request.body))
                return Outcome()
            case "leave":
                return Outcome(_bytes(control.leave(control_pb2.LeaveRequest.FromString(request.body), context)))
            case "commit":
                return Outcome(_bytes(control.commit(control_pb2.CommitRequest.FromString(request.body), context)))
            case "measure":
                return Outcome(_bytes(control.measure(control_pb2.MeasureRequest.FromString(request.body), context)))
            case "barrier":
                return Outcome(_bytes(control.barrier(control_pb2.BarrierRequest.FromString(request.body), context)))
            case "rollback":
                return Outcome(_bytes(control.rollback(control_pb2.RollbackRequest.FromString(request.body), context)))
            case "initialize":
                return self._initialize(request, blocks_max)
            case "push":
                header = data_pb2.PushHeader.FromString(request.body)
                (pushed,) = self._plane.push(header, _pushed(request, blocks_max), Waiter(shard, context))
                return Outcome(_bytes(pushed))
            case "push_pull":
                header = data_pb2.PushHeader.FromString(request.body)
                answers = self._plane.push_pull(header, _pushed(request, blocks_max), Waiter(shard, context))
                return self._answer(answers, header.clock + 1)
            case "pull":
                pull = data_pb2.PullRequest.FromString(request.body)
                return self._answer(self._plane.pull(pull, Waiter(shard, context)), pull.clock)
            case kind:
                raise AssertionError(kind)

    def _answer(self, answers: Iterator[Answer | data_pb2.PushReply], clock: int) -> Outcome:
        body, versions = b"", []
        for answer in answers:
            if isinstance(answer, Answer):
                self.history.on_read(answer.block, answer.version, answer.values, clock)
                versions.append((answer.block, answer.version))
                answer.release()
            else:
                body = _bytes(answer)
        return Outcome(body, tuple(sorted(versions)))

    def _initialize(self, request: Request, blocks_max: int | None) -> Outcome:
        assert self._shard is not None
        first = data_pb2.InitializeFrame.FromString(request.body)
        admission = self._shard.admission
        init = admission.begin_initialize(first.caller, first.layout_digest, first.choice)
        for index, _, payload in request.blocks[:blocks_max]:
            admission.initialize_block(init, index, memoryview(payload))
        if blocks_max is not None:
            raise _Broken("the connection broke")
        return Outcome(_bytes(data_pb2.InitializeReply(accepted=admission.end_initialize(init))))

    # -- state ---------------------------------------------------------------------------------------------------------

    def view(self) -> ShardView:
        members = self._shard._core.membership if self._shard is not None else None
        workers = members.workers if members is not None else []
        return ShardView(
            is_up=self._shard is not None,
            lives=self._lives,
            is_blank=self._is_blank,
            handlers=tuple(sorted((key, handler.is_ready) for key, handler in self._handlers.items())),
            live=tuple(w.session if w.state is WorkerState.LIVE else 0 for w in workers) or (0,) * len(self._setting.programs),
            history=self.history.summary(),
        )

    def key(self, view: ShardView) -> bytes:
        return repr(view).encode() + self.walked().key()

    def walked(self) -> Walker:
        walker = Walker(lambda file: "/psd/" in file)
        if self._shard is None:
            self._walk_disk(walker)
            return walker
        core = self._shard._core
        if core.storage.arena is not None:
            self._walk_arena(walker, core.storage.arena)
        walker.walk([core, self._shard.admission._last_session])
        for key, handler in sorted(self._handlers.items()):
            walker.walk((key, handler.request))
            assert handler.fiber is not None
            walker.fiber(handler.fiber)
        return walker

    def _walk_arena(self, walker: Walker, arena: Any) -> None:
        walker.walk([arena.word(name) for name in ("initialized", "timeline", "decided", "tentative")])
        walker.walk([arena.member(rank) for rank in range(len(self._setting.programs))])
        decided = arena.word("decided")
        walker.walk([arena.decision(round_) for round_ in range(max(0, decided - KEPT), decided + 1)])
        for slot in range(len(arena.shapes)):
            walker.page(arena.current(slot))

    def _walk_disk(self, walker: Walker) -> None:
        """By opening it as the next process will."""
        storage = state_core.Storage(
            ServerConfig(self._index, self._setting.shards, run_id="run", state_dir=str(self._directory)), lambda _: None
        )
        found = storage.recover()
        if found is not None:
            self._walk_arena(walker, found[1])
            walker.walk([storage.load_barriers(), storage.load_verdict()])
            found[1].close(remove=False)

    def end(self) -> None:
        """Let go of everything."""
        for fibers in (self._fibers, *self._abandoned):
            fibers.end()
        if self._shard is not None:
            self._shard.close(keep=False)
        shutil.rmtree(self._directory, ignore_errors=True)


def _bytes(message: Any) -> bytes:
    return message.SerializeToString(deterministic=True)


def _pushed(request: Request, blocks_max: int | None) -> Iterator[PushedBlock]:
    for index, present, payload in request.blocks[:blocks_max]:
        yield PushedBlock(index, present, memoryview(payload))
    if blocks_max is not None:
        raise _Broken("the connection broke")
