"""How a shard's process serves one request: what psd/rim's carriers do, without frames and sockets; and what it waits for.

The desks are the real ones: ControlService and DataPlane, with the real Waiter on futures that hand over to the checker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any

import green
from green import Fiber
from published import History
from step_serving import LANE, StepDoor, StepWait
from wire import Outcome, Request

from psd.rim.calls import Waiter
from psd.rim.control_service import ControlService
from psd.rim.data_plane import DataPlane, PulledBlock, PushedBlock
from psd.state.shard import Shard
from psd.state.tickets import Ticket
from psd.v1 import control_pb2, data_pb2

DEADLINE_S = 600.0


class Broken(Exception):
    """The connection of the call that runs."""


class TicketFuture(green.Future):
    """What a call waits for. That it may go on is an event of its own, which the checker chooses the moment of."""

    def await_done(self, timeout: float | None) -> None:
        if not self.is_done and timeout != 0 and green.park(self) == "time out":
            raise FutureTimeoutError


@dataclass(eq=False)
class GreenTicket(Ticket):
    """A ticket whose future does not block. No wait ends as time passes: the end of a grace is an event of the shard."""

    future: Any = field(default_factory=TicketFuture)

    def _set_due_in(self, _: Any) -> None:
        """Leave it to that event."""

    due_in = property(lambda _: lambda: None, _set_due_in)  # type: ignore[assignment]


class Paused:
    """What a call is parked for that waits for nothing: another thread of the shard has its turn."""


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
    """A call that runs in the shard.

    Attributes:
        locks_left: before which of its locks it is to pause, counted from now; 0: at none.
        is_hung_up: nobody waits for its answer any more: its caller may have made another call meanwhile.
    """

    request: int
    context: Context
    is_hung_up: bool = False
    fiber: Fiber | None = None
    locks_taken: int = 0
    locks_left: int = 0

    def hang_up(self) -> None:
        """Tell the call that its caller is gone."""
        self.is_hung_up = True
        for callback in self.context.callbacks:
            callback()

    @property
    def is_ready(self) -> bool:
        """True if it may go on."""
        awaits = None if self.fiber is None else self.fiber.awaits
        if isinstance(awaits, StepWait):
            return awaits.is_ready
        return isinstance(awaits, Paused) or (isinstance(awaits, TicketFuture) and awaits.is_done)


class Desks:
    """What one life of a shard serves requests with."""

    def __init__(
        self,
        shard: Shard,
        history: History,
        ranks: Sequence[int],
        watching_rows: Callable[[Callable[[], int]], int],
    ) -> None:
        self._shard = shard
        self._history = history
        self.door = StepDoor(shard, history, dict(enumerate(ranks)), watching_rows)
        self._plane = DataPlane(shard, LANE)
        self._control = ControlService(
            shard,
            None,  # type: ignore[arg-type]  # errors are not made statuses here
            address=lambda: "",
            on_leave=lambda: None,
            open_bulk=lambda *_: control_pb2.OpenBulkReply(),
            open_reads=lambda *_: control_pb2.OpenBulkReply(),
        )
        control = self._control
        self._unary = {
            "join": (control.join, control_pb2.JoinRequest),
            "declare": (control.declare, control_pb2.DeclareRequest),
            "leave": (control.leave, control_pb2.LeaveRequest),
            "commit": (control.commit, control_pb2.CommitRequest),
            "measure": (control.measure, control_pb2.MeasureRequest),
            "barrier": (control.barrier, control_pb2.BarrierRequest),
            "stop": (control.stop, control_pb2.StopRequest),
            "rollback": (control.rollback, control_pb2.RollbackRequest),
        }

    def serve(self, request: Request, context: Any, blocks_max: int | None, *, is_late: bool) -> Outcome:
        """The outcome of a request, of whose blocks only so many come; raises what it is refused with.

        is_late: the connection by which it has come is an earlier one of its worker's.
        """
        if not is_late:
            self.door.on_call(request)
        if request.kind in self._unary:
            method, message = self._unary[request.kind]
            return Outcome(_bytes(method(message.FromString(request.body), context)))
        match request.kind:
            case "heartbeat":
                beat = control_pb2.HeartbeatRequest.FromString(request.body)
                self._shard.admission.heartbeat(beat)
                self._shard.learn(beat.caller, beat.cuts)
                return Outcome(_bytes(control_pb2.HeartbeatReply(cuts=self._shard.cuts.latest())))
            case "initialize":
                return self._initialize(request, blocks_max)
            case "push":
                header = data_pb2.PushHeader.FromString(request.body)
                (reply,) = self._plane.push(header, _pushed(request, blocks_max), Waiter(self._shard, context))
                return Outcome(_bytes(reply))
            case "push_pull":
                header = data_pb2.PushHeader.FromString(request.body)
                answers = self._plane.push_pull(header, _pushed(request, blocks_max), Waiter(self._shard, context))
                outcome = self._answer(answers, header.clock + 1)
                if is_late:
                    return outcome
                reply = data_pb2.PushReply.FromString(outcome.body)
                return outcome._replace(offer=self.door.offer(request, header, reply))
            case "pull":
                pull = data_pb2.PullRequest.FromString(request.body)
                return self._answer(self._plane.pull(pull, Waiter(self._shard, context)), pull.clock)
            case kind:
                raise AssertionError(kind)

    def take_step(self, request: Request, on_piece: Callable[[], None], is_hung_up: Callable[[], bool]) -> Outcome:
        """The outcome of an armed step."""
        if request.process not in self.door.armed:
            raise Broken("there is no such connection")
        outcome = self.door.take(request, on_piece, is_hung_up)
        if outcome is None:
            self.door.end(request)
            raise Broken("the worker has gone")
        return outcome

    def _answer(self, answers: Iterator[PulledBlock | data_pb2.PushReply], clock: int) -> Outcome:
        body, versions = b"", []
        for answer in answers:
            if isinstance(answer, PulledBlock):
                self._history.on_read(answer.block, answer.version, answer.values, clock)
                versions.append((answer.block, answer.version))
                answer.release()
            else:
                body = _bytes(answer)
        return Outcome(body, tuple(sorted(versions)))

    def _initialize(self, request: Request, blocks_max: int | None) -> Outcome:
        first = data_pb2.InitializeFrame.FromString(request.body)
        admission = self._shard.admission
        init = admission.begin_initialize(first.caller, first.layout_digest, first.choice)
        for index, _, payload in request.blocks[:blocks_max]:
            admission.initialize_block(init, index, memoryview(payload))
        if blocks_max is not None:
            raise Broken("the connection broke")
        return Outcome(_bytes(data_pb2.InitializeReply(accepted=admission.end_initialize(init))))


def _bytes(message: Any) -> bytes:
    found: bytes = message.SerializeToString(deterministic=True)
    return found


def _pushed(request: Request, blocks_max: int | None) -> Iterator[PushedBlock]:
    for index, head, payload in request.blocks[:blocks_max]:
        frame = data_pb2.PushFrame.FromString(head)
        yield PushedBlock(index, frame.present, memoryview(payload), rows=frame.rows, more=frame.more)
    if blocks_max is not None:
        raise Broken("the connection broke")
