"""The services of a relay: Describe, Read and Status of a shard's; everything else is refused, with the words where to go.

Must not know how versions come.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any, NoReturn

import grpc
from typing_extensions import override

import psd
from psd.contract import facts
from psd.contract.errors import InvalidRequest, WrongShard
from psd.relay.following import Following
from psd.relay.holding import Holding, check_run
from psd.relay.views import relay_numbers, shard_numbers
from psd.rim.calls import CallGuard, abort, message_parser, wait_s
from psd.rim.pace import Pace
from psd.rim.views import reader_status
from psd.v1 import control_pb2, data_pb2, vectors_pb2

_SERVICES = (
    control_pb2.DESCRIPTOR.services_by_name["ControlService"],
    data_pb2.DESCRIPTOR.services_by_name["DataService"],
    vectors_pb2.DESCRIPTOR.services_by_name["VectorService"],
)
SERVICES = tuple(service.full_name for service in _SERVICES)
"""Full names of the services whose methods a relay knows."""

_METHODS = frozenset(f"/{service.full_name}/{method.name}" for service in _SERVICES for method in service.methods)

_ROWS = "rows of tables"
_VECTORS = "server-side vectors"
_NOT_HERE = {"ReadRows": _ROWS, "PullRows": _ROWS, "List": _VECTORS, "Fetch": _VECTORS}


class RelayService:
    """Answers readers with what a `Holding` has.

    Args:
        servers: those that the relay follows, in words. address: returns the relay's own.

    Attributes:
        started: when it was made, by the clock of the holding.
    """

    def __init__(
        self, holding: Holding, following: Following, guard: CallGuard, pace: Pace, servers: str, address: Callable[[], str]
    ) -> None:
        self._holding = holding
        self._following = following
        self._guard = guard
        self._pace = pace
        self._servers = servers
        self._address = address
        self._incarnation = secrets.randbits(63)
        self.started = holding.now()

    def handlers(self) -> tuple[grpc.GenericRpcHandler[Any, Any], ...]:
        """Handlers for all methods of a shard."""
        guard = self._guard
        control, data, _ = SERVICES
        of_control = {
            "Describe": grpc.unary_unary_rpc_method_handler(
                guard.unary(self.describe),
                message_parser(control_pb2.DescribeRequest),
                control_pb2.DescribeReply.SerializeToString,
            ),
            "Status": grpc.unary_unary_rpc_method_handler(
                guard.unary(self.status, while_draining=True, paced=True),
                message_parser(control_pb2.StatusRequest),
                control_pb2.StatusReply.SerializeToString,
            ),
        }
        of_data = {
            "Read": grpc.unary_stream_rpc_method_handler(guard.stream(self.read), message_parser(data_pb2.ReadRequest)),
        }
        return (
            grpc.method_handlers_generic_handler(control, of_control),
            grpc.method_handlers_generic_handler(data, of_data),
            _Refused(self._refusal, guard, self._pace),
        )

    def describe(self, request: control_pb2.DescribeRequest, context: grpc.ServicerContext) -> control_pb2.DescribeReply:
        """The job, and the version that the relay has."""
        del context
        if (request.shard_index, request.shard_count) != (0, 1):
            raise WrongShard(
                f"{self._holding.name} has all of the job, but was asked as one of {request.shard_count} shards: give the "
                'address of one relay, or those of several as alternatives, "A|B"'
            )
        held = self._holding.some()
        check_run(request.run_id, held)
        return held.described

    def read(self, request: data_pb2.ReadRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
        """The frames of a version."""
        readers, counts = self._holding.readers, self._holding.counters.lanes["grpc"]
        with (
            readers.asked_by(request, "grpc") as reader,
            self._holding.reading(request, wait_s(context), context.add_callback) as held,
        ):
            readers.begin_sending(reader)
            for index, has in zip_longest(request.blocks or held.blocks, request.held):
                frame = held.frame(index, request.codec, has)
                readers.sent(reader, len(frame))
                counts.count_bytes(sent=len(frame), saved=max(0, held.blocks[index].nbytes - len(frame)))
                yield frame
            readers.has(reader, held.version)

    def status(self, request: control_pb2.StatusRequest, context: grpc.ServicerContext) -> control_pb2.StatusReply:
        """Say what the relay follows, and how well."""
        del request, context
        holding, following, held = self._holding, self._following, self._holding.held
        reply = control_pb2.StatusReply(
            shard_count=1,
            state=control_pb2.SHARD_STATE_EMPTY if held is None else control_pb2.SHARD_STATE_SERVING,
            incarnation=self._incarnation,
            address=self._address(),
            version=psd.__version__,
            relay=control_pb2.RelayStatus(
                of=self._servers,
                newest=following.newest,
                problem=following.problem,
            ),
            readers=[reader_status(reader, holding.age_s) for reader in holding.readers.all()],
        )
        if holding.is_draining:
            reply.state = control_pb2.SHARD_STATE_DRAINING
        if held is not None:
            reply.run_id = held.described.run_id
        said = relay_numbers(holding, following)
        del said["behind"]  # which follows from `newest`
        facts.write(reply.relay, said)
        facts.write(reply, shard_numbers(holding, self.started))
        return reply

    def _refusal(self, method: str) -> InvalidRequest:
        what = _NOT_HERE.get(method)
        why = f"does not have {what}" if what else "serves readers alone"
        return InvalidRequest(f"{method}: {self._holding.name} {why}; connect to the shards of the job")


class _Refused(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # only its stub is generic
    """Refuses the methods of a shard that a relay has not."""

    def __init__(self, refusal: Callable[[str], InvalidRequest], guard: CallGuard, pace: Pace) -> None:
        self._refusal = refusal
        self._guard = guard
        self._pace = pace

    @override
    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        if handler_call_details.method not in _METHODS:
            return None
        method = handler_call_details.method.rpartition("/")[2]

        def refuse(requests: Iterator[Any], context: grpc.ServicerContext) -> NoReturn:
            del requests
            error = self._guard.as_error(self._refusal(method))
            self._pace.wait(context)
            abort(context, error)

        # For calls of any kind: a handler of this kind waits for no message.
        return grpc.stream_stream_rpc_method_handler(refuse)
