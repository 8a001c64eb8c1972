"""The common parts of every RPC: turns bytes into messages, errors into statuses, tickets into waits.

Parsers never raise: a request that cannot be parsed becomes an error value that the method raises, so that the caller gets
INVALID_ARGUMENT with the field's name instead of gRPC's anonymous INTERNAL.
"""

from __future__ import annotations

import json
import logging
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from typing_extensions import override

from psd.contract import frames
from psd.contract.bounds import PARTS_MAX, check_parts
from psd.contract.errors import (
    DETAIL_KEY,
    REASON_KEY,
    BarrierTimeout,
    CutMissed,
    InternalError,
    InvalidRequest,
    PsdError,
    WaitTimeout,
)
from psd.contract.wording import describe_wait
from psd.rim import views
from psd.rim.pace import Caller, Pace
from psd.state.shard import Shard
from psd.state.tickets import Ticket, WaitKind

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)

WAIT_S_MAX = 3600.0
"""Longest wait of a call without a deadline; psd's own clients always send one."""

DUE_S_MIN = 0.001
"""Least time for which a call waits for what is due."""

MESSAGE_BYTES_MAX = 1500
"""Longest status message, in UTF-8. It is sent in HTTP/2 headers, where a byte that is not ASCII takes three; with the detail
it must fit into 8 KiB, gRPC's default limit for headers."""


UNPACED = (WaitTimeout, CutMissed)
"""Errors that are sent without a delay: outcomes of waits, after which workers and readers ask again."""


class Frame(NamedTuple):
    """A parsed frame: the message without its payload, and the payload; `is_own`: True if that stays until the call ends."""

    head: Any
    payload: memoryview
    is_own: bool = True


def message_parser(kind: type[M], parts_max: int = PARTS_MAX) -> Callable[[bytes], M | PsdError]:
    """A deserializer for unary requests with at most `parts_max` parts."""

    def parse(data: bytes) -> M | PsdError:
        try:
            check_parts(data, kind.DESCRIPTOR, parts_max)
            return kind.FromString(data)
        except PsdError as error:
            return error
        except DecodeError as error:
            return InvalidRequest(f"{kind.DESCRIPTOR.name}: not a valid message: {error}")

    return parse


def frame_parser(kind: type[M]) -> Callable[[bytes | memoryview], Frame | PsdError]:
    """A deserializer for frames; the payload is a view into the received bytes."""
    name = kind.DESCRIPTOR.name

    def parse(data: bytes | memoryview) -> Frame | PsdError:
        try:
            head, payload = frames.split(data, name)
            check_parts(head, kind.DESCRIPTOR)
            return Frame(kind.FromString(head), payload)
        except PsdError as error:
            return error
        except DecodeError as error:
            return InvalidRequest(f"{name}: not a valid message: {error}")

    return parse


def checked(item: Any) -> Any:
    """The parsed request; raises the error if parsing failed."""
    if isinstance(item, PsdError):
        raise item
    return item


def abort(context: grpc.ServicerContext, error: PsdError) -> NoReturn:
    """End the call with the status of an error, its reason and detail in the trailing metadata."""
    detail = json.dumps(error.detail).encode()
    context.set_trailing_metadata(((REASON_KEY, error.reason), (DETAIL_KEY, detail)))
    message = str(error).encode("utf-8", "replace")[:MESSAGE_BYTES_MAX].decode("utf-8", "ignore")
    context.abort(grpc.StatusCode[error.code], message)


def wait_s(context: Caller) -> float:
    """Seconds that a call may wait, so that the answer can still name the missing workers before the caller's deadline."""
    remaining = context.time_remaining()
    # For a call without a deadline gRPC reports a very long time.
    return WAIT_S_MAX if remaining is None else min(WAIT_S_MAX, max(0.0, remaining - min(1.0, remaining / 10)))


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error and of its causes, and the objects in their frames.

    A frame that holds its error is a cycle, which keeps the call until Python collects it, in an idle shard perhaps never: a
    dead worker's memory would stay mapped, and gRPC would count the call against --max-streams.
    """
    before: BaseException | None = error
    while before is not None:
        traceback.clear_frames(before.__traceback__)
        before.__traceback__ = None
        before = before.__cause__ or before.__context__


class Guarded(Protocol):
    """The state behind a service: a shard's, or a relay's.

    Attributes:
        name: "shard 3". is_draining: True once it takes no new work.
    """

    is_draining: bool

    @property
    def name(self) -> str: ...  # noqa: D102 - above

    def check_draining(self) -> None:
        """Raise Draining if it takes no new work."""
        ...

    def count_error(self, error: PsdError) -> None:
        """Note that a call has ended in an error."""
        ...


class CallGuard:
    """Wraps the methods of a service: refuses while draining, translates errors, counts refusals.

    Args:
        pace: the pace of refusals, and of methods that are `paced`.
    """

    def __init__(self, guarded: Guarded, pace: Pace) -> None:
        self._guarded = guarded
        self._pace = pace

    def _before(self, request: Any, *, while_draining: bool) -> Any:
        if not while_draining:
            self._guarded.check_draining()
        return checked(request)

    def as_error(self, error: Exception) -> PsdError:
        """The error for the caller. Counts the exception, logs it if it is a defect, and drops its traceback."""
        told = error
        if not isinstance(told, PsdError):
            logger.error("a request failed because of a defect in the server", exc_info=error)
            told = InternalError(f"{self._guarded.name} failed; its log has the traceback")
        forget_frames(error)
        self._guarded.count_error(told)
        return told

    def _refuse(self, context: grpc.ServicerContext, error: Exception) -> NoReturn:
        found = self.as_error(error)
        if not (isinstance(found, UNPACED) or self._guarded.is_draining):
            self._pace.wait(context)
        abort(context, found)

    def unary(
        self, method: Callable[[Any, grpc.ServicerContext], Any], *, while_draining: bool = False, paced: bool = False
    ) -> Callable[[Any, grpc.ServicerContext], Any]:
        """Wrap a method that returns one reply."""

        def call(request: Any, context: grpc.ServicerContext) -> Any:
            try:
                checked = self._before(request, while_draining=while_draining)
                if paced:
                    self._pace.wait(context)
                return method(checked, context)
            except grpc.RpcError:  # the caller hung up: nobody waits for an answer
                raise
            except Exception as error:  # noqa: BLE001 - the rim is where every error becomes a status
                self._refuse(context, error)

        return call

    def stream(
        self, method: Callable[[Any, grpc.ServicerContext], Iterator[bytes]]
    ) -> Callable[[Any, grpc.ServicerContext], Iterator[bytes]]:
        """Wrap a method that answers with a stream."""

        def call(request: Any, context: grpc.ServicerContext) -> Iterator[bytes]:
            try:
                yield from method(self._before(request, while_draining=False), context)
            except grpc.RpcError:
                return
            except Exception as error:  # noqa: BLE001 - the rim is where every error becomes a status
                self._refuse(context, error)

        return call


class Unknown(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # only its stub is generic
    """Refuses unknown methods with gRPC's own message, but at a pace. Must be the last handler of a server."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        # For calls of any kind: a handler of this kind waits for no message.
        self._handler = grpc.stream_stream_rpc_method_handler(self._refuse)

    @override
    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        del handler_call_details
        return self._handler

    def _refuse(self, requests: Iterator[Any], context: grpc.ServicerContext) -> NoReturn:
        del requests
        self._pace.wait(context)
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


class Waiter:
    """Blocks one call on tickets, until its deadline; ends the wait when the caller hangs up."""

    def __init__(self, shard: Shard, context: Caller) -> None:
        self._shard = shard
        self._context = context
        self._ticket: Ticket | None = None
        self._is_told = False  # whether gRPC was asked to report the caller's end
        self._has_hung_up = False

    def _on_end(self) -> None:
        self._has_hung_up = True
        ticket = self._ticket
        if ticket is not None:
            ticket.fail(_HungUp("the caller hung up"))

    def wait(self, ticket: Ticket) -> Any:
        """The ticket's result.

        Raises:
            WaitTimeout, BarrierTimeout: the call's deadline is near; names the missing workers.
        """
        timeout = wait_s(self._context)
        self._ticket = ticket
        if not self._is_told:
            self._is_told = True
            self._has_hung_up = not self._context.add_callback(self._on_end)
        if self._has_hung_up:
            ticket.fail(_HungUp("the caller hung up"))
        try:
            return self._result(ticket, timeout)
        except FutureTimeoutError:
            wait = views.wait_status(self._shard, ticket)
            kind = BarrierTimeout if ticket.kind is WaitKind.BARRIER else WaitTimeout
            error = kind(
                f"{describe_wait(wait)}; gave up after {timeout:.1f} s",
                missing=[worker.rank for worker in wait.missing],
            )
            ticket.fail(error)
            # The wait may have ended just when it was given up.
            if ticket.future.exception() is None:
                return ticket.future.result()
            raise error from None
        finally:
            self._ticket = None
            if ticket.kind is WaitKind.BARRIER and not (ticket.future.done() and ticket.future.exception() is None):
                self._shard.withdraw(ticket)

    def _result(self, ticket: Ticket, timeout: float) -> Any:
        """The ticket's result; FutureTimeoutError after `timeout` seconds. Ends the wait itself where that is due."""
        deadline = time.monotonic() + timeout
        while (due_in := ticket.due_in()) is not None and due_in < (left := deadline - time.monotonic()):
            try:
                return ticket.future.result(min(left, max(due_in, DUE_S_MIN)))
            except FutureTimeoutError:
                self._shard.settlement.decide_due()
        return ticket.future.result(deadline - time.monotonic())


class _HungUp(PsdError):
    """Raised if the caller has hung up; never sent."""

    code = "CANCELLED"
