"""The gRPC lane: the protocol of record, which always works.

Bulk frames are built and taken apart on raw bytes (grpc_frames.py), so gRPC's generated stubs are not used here. A
push_pull is full duplex: gRPC's thread takes frames from the sending generator while the calling thread writes the answers
into the parameters.

The channel opens at the first call, and anew, after it has failed, if certificates have changed or the shard stays away: it may
come back at another address, and gRPC's resolver asks for a name that it did not find ever more rarely. gRPC does not survive a
fork, so a lane refuses to be used in a child process. Must not know sessions, clocks, retries or other shards.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from grpc.experimental import ChannelOptions

from psd.contract import frames
from psd.contract.credentials import Credentials
from psd.contract.errors import InternalError, PsdError, ShardUnavailable, TlsFailed, Unauthenticated, WrongShard
from psd.contract.layout import Block
from psd.contract.tls import Pem
from psd.v1 import control_pb2, data_pb2
from psd_client.crew import can_start_threads
from psd_client.feed import Aborted
from psd_client.flat import FlatBuffers
from psd_client.grpc_errors import may_be_tls, psd_error
from psd_client.grpc_frames import Answer, initial_frames, push_messages
from psd_client.transport import Call, Cancelled, GradientPart, Lane

MESSAGE_BYTES_MAX = 32 << 20
"""The default of psd-server: a declaration of 100,000 tensors needs about 6 MiB, a frame 4 MiB."""

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    *frames.WINDOW_OPTIONS,
    # A peer that vanishes without a word is noticed within keepalive time + timeout = 20 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A shard that is back within a second is to be found again at once: gRPC's own back-off would grow to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # despite its name, the time that one attempt to connect may take
    # On Kubernetes a shard that is back has another address. gRPC's own pause between two questions for it is 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 500),
    ("grpc.enable_retries", 0),  # retry.py retries
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # two clients in one process do not share a connection
)

UNREACHED_S = 2.0
"""Age in seconds at which a channel that cannot reach the shard is replaced."""

AT_ONCE_BYTES_MAX = MESSAGE_BYTES_MAX - (1 << 20)
"""Limit of gradients or parameters in one message."""

WITHOUT_THREADS = ((ChannelOptions.SingleThreadedUnaryStream, 1),)
"""Further options once no threads can be started any more: gRPC then makes blocking calls, and receives streams, without
any."""

_CONTROL = "/psd.v1.ControlService/"
_DATA = "/psd.v1.DataService/"

MessageT = TypeVar("MessageT", bound=Message)
ResultT = TypeVar("ResultT")


def open_channel(address: str, pem: Pem | None, options: Any) -> grpc.Channel:
    """A channel with TLS, or, if `pem` is None, without."""
    if pem is None:
        return grpc.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(pem.ca, pem.key or None, pem.cert or None)
    return grpc.secure_channel(address, credentials, options=options)


class GrpcLane(Lane):
    """One shard over one gRPC channel. Without `credentials`: no TLS, no token."""

    transport = "grpc"

    def __init__(self, shard: int, address: str, credentials: Credentials | None = None) -> None:
        super().__init__(shard, address)
        self._credentials = credentials if credentials is not None else Credentials()
        self._pem: Pem | None = None  # of the channel
        self._was_reached = False
        self._opened_at = 0.0
        self._shown: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # call -> metadata, if there is a token
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._closed = False
        self._has_threads = True
        self._retired: grpc.Channel | None = None
        self._is_leaving = False

    def _begin(self, start: Callable[[grpc.Channel, dict[str, Any]], ResultT], timeout_s: float) -> ResultT:
        """A call that `start` begins on the channel, which is opened if need be; Cancelled if the lane was closed meanwhile."""
        while True:
            channel, metadata = self._open(), self._credentials.metadata()
            try:
                begun = start(channel, {"timeout": timeout_s, "metadata": metadata})
            except ValueError:  # gRPC's word for a closed channel
                if self._closed:
                    raise Cancelled from None
                if channel is self._channel:
                    raise
                continue
            if metadata is not None and isinstance(begun, grpc.Call):
                self._shown[begun] = metadata
            return begun

    def _open(self) -> grpc.Channel:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"psd: connected in process {self._pid} and used in process {os.getpid()}: a connection does not survive "
                "a fork; call psd_client.connect() in the process that uses it"
            )
        with self._lock:
            if self._closed:
                raise Cancelled
            if self._channel is not None and self._has_threads and not can_start_threads():
                self._retired, self._channel, self._has_threads = self._channel, None, False  # with what is under way on it
            if self._channel is None:
                self._pem = self._credentials.pem()
                options = CHANNEL_OPTIONS if self._has_threads else (*CHANNEL_OPTIONS, *WITHOUT_THREADS)
                self._channel = open_channel(self.address, self._pem, options)
                self._opened_at = time.monotonic()
            return self._channel

    def _failed(self, rpc: Any, *, is_wait: bool) -> PsdError:
        """The error of a failed call, and, if another attempt may succeed, a function that prepares it."""
        error = psd_error(rpc, self.shard, self.address, is_wait=is_wait)
        where = {"shard": self.shard, "address": self.address}
        shown = self._shown.get(rpc)
        if isinstance(error, Unauthenticated) and shown is not None and self._credentials.has_other_token(shown):
            return ShardUnavailable(f"shard {self.shard} at {self.address}: the token has changed meanwhile", **where)
        if isinstance(error, WrongShard) and self._was_reached:
            # Addresses are given out again: the shard has moved, and another one is now where it was.
            self._renew(is_lost=True)
            return ShardUnavailable(f"shard {self.shard} at {self.address}: {error}", **where)
        if not isinstance(error, ShardUnavailable):
            self._was_reached = True
            return error
        is_unreached = rpc.code() is grpc.StatusCode.UNAVAILABLE
        self._renew(is_lost=is_unreached and time.monotonic() - self._opened_at > UNREACHED_S)
        if may_be_tls(error) and not self._is_leaving and (why := self._credentials.why_not(self.address)) is not None:
            # Amid a job certificates may be on their way to both sides: worth another attempt. At its beginning they are wrong.
            kind = ShardUnavailable if self._was_reached else TlsFailed
            error = kind(f"shard {self.shard} at {self.address}: {why}", **where)
        return error

    def _renew(self, *, is_lost: bool = False) -> None:
        """Let the next call open another channel, if certificates have changed, or this one has lost the shard."""
        pem = self._credentials.pem()
        with self._lock:
            if self._channel is None or (pem == self._pem and not is_lost):
                return
            channel, self._channel = self._channel, None
        channel.close()

    def close(self) -> None:
        """Close the channel; calls in progress end."""
        with self._lock:
            self._closed = True
            channels = self._channel, self._retired
            self._channel = self._retired = None
        for channel in channels:
            if channel is not None and os.getpid() == self._pid:
                channel.close()

    # Control plane.

    def join(self, request: control_pb2.JoinRequest, call: Call) -> control_pb2.JoinReply:
        """Enter the worker."""
        return self._unary("Join", request, control_pb2.JoinReply, call, is_wait=False)

    def declare(self, request: control_pb2.DeclareRequest, call: Call) -> control_pb2.DeclareReply:
        """Agree on the job."""
        return self._unary("Declare", request, control_pb2.DeclareReply, call, is_wait=True)

    def rollback(self, request: control_pb2.RollbackRequest, call: Call) -> control_pb2.RollbackReply:
        """Make the shard go back to a checkpoint."""
        return self._unary("Rollback", request, control_pb2.RollbackReply, call, is_wait=True)

    def describe(self, request: control_pb2.DescribeRequest, call: Call) -> control_pb2.DescribeReply:
        """Fetch the job and its progress."""
        return self._unary("Describe", request, control_pb2.DescribeReply, call, is_wait=False)

    def commit(self, request: control_pb2.CommitRequest, call: Call) -> control_pb2.CommitReply:
        """Report that all shards have a push."""
        return self._unary("Commit", request, control_pb2.CommitReply, call, is_wait=True)

    def measure(self, request: control_pb2.MeasureRequest, call: Call) -> control_pb2.MeasureReply:
        """Fetch the measure of the shard's part of a round."""
        return self._unary("Measure", request, control_pb2.MeasureReply, call, is_wait=False)

    def barrier(self, request: control_pb2.BarrierRequest, call: Call) -> control_pb2.BarrierReply:
        """Wait until everybody has arrived."""
        return self._unary("Barrier", request, control_pb2.BarrierReply, call, is_wait=True)

    def open_bulk(self, request: control_pb2.OpenBulkRequest, call: Call) -> control_pb2.OpenBulkReply:
        """Ask for a ticket to a bulk lane."""
        return self._unary("OpenBulk", request, control_pb2.OpenBulkReply, call, is_wait=False)

    def begin_heartbeat(
        self, request: control_pb2.HeartbeatRequest, timeout_s: float
    ) -> Callable[[], control_pb2.HeartbeatReply]:
        """Send a heartbeat; return a function that waits for the reply."""
        serialize, parse = control_pb2.HeartbeatRequest.SerializeToString, control_pb2.HeartbeatReply.FromString
        if not can_start_threads():
            return lambda: self._blocking("Heartbeat", request, control_pb2.HeartbeatReply, timeout_s, is_wait=False)
        rpc = self._begin(
            lambda channel, how: channel.unary_unary(f"{_CONTROL}Heartbeat", serialize, parse).future(request, **how), timeout_s
        )

        def reply() -> control_pb2.HeartbeatReply:
            result: control_pb2.HeartbeatReply = self._result(rpc, rpc.result, is_wait=False)
            return result

        return reply

    def leave(self, request: control_pb2.LeaveRequest, timeout_s: float) -> None:
        """Report that the worker has finished."""
        self._is_leaving = True  # and does not care why it cannot connect
        self._blocking("Leave", request, control_pb2.LeaveReply, timeout_s, is_wait=False)

    def _blocking(
        self, name: str, request: Message, reply: type[MessageT], timeout_s: float, *, is_wait: bool, service: str = _CONTROL
    ) -> MessageT:
        """Make a call for which gRPC starts no thread; only its deadline and `close` end it."""
        serialize, parse = type(request).SerializeToString, reply.FromString
        try:
            result: MessageT = self._begin(
                lambda channel, how: channel.unary_unary(service + name, serialize, parse)(request, **how), timeout_s
            )
        except grpc.RpcError as error:
            if self._closed:
                raise Cancelled from None
            failed: Any = error  # which is a grpc.Call, too
            raise self._failed(failed, is_wait=is_wait) from None
        return result

    def _unary(
        self, name: str, request: Message, reply: type[MessageT], call: Call, *, is_wait: bool, service: str = _CONTROL
    ) -> MessageT:
        if not can_start_threads():
            return self._blocking(name, request, reply, call.timeout_s, is_wait=is_wait, service=service)
        serialize, parse = type(request).SerializeToString, reply.FromString
        rpc = self._begin(
            lambda channel, how: channel.unary_unary(service + name, serialize, parse).future(request, **how), call.timeout_s
        )
        with call.scope.entered(rpc.cancel):
            result: MessageT = self._result(rpc, rpc.result, call, is_wait=is_wait)
            return result

    def _result(self, rpc: Any, result: Callable[[], ResultT], call: Call | None = None, *, is_wait: bool) -> ResultT:
        """The result of `result`, which is a step of the call `rpc`; its failure as a typed error."""
        try:
            found = result()
        except (grpc.RpcError, grpc.FutureCancelledError):
            if self._closed or (call is not None and call.scope.is_cancelled):
                raise Cancelled from None
            raise self._failed(rpc, is_wait=is_wait) from None
        self._was_reached = True
        return found

    # Data plane.

    def initialize(self, first: data_pb2.InitializeFrame, blocks: Sequence[Block], values: FlatBuffers, call: Call) -> bool:
        """Provide the initial values."""
        frames_out = initial_frames(first, blocks, values)
        reply = self._send("Initialize", frames_out, data_pb2.InitializeReply, call, is_wait=False)
        self.sent_bytes += sum(block.nbytes for block in blocks)
        return reply.accepted

    def push(self, part: GradientPart, call: Call) -> data_pb2.PushReply:
        """Send a gradient."""
        if not can_start_threads():
            if sum(block.nbytes for block in part.blocks) > AT_ONCE_BYTES_MAX:  # the shard refuses it with exact aggregation
                raise RuntimeError(
                    "gRPC cannot send this much at the end of the program with this Python; call close() earlier"
                )
            return self._push_pull_small(part, None, call)  # whoever ends waits for the round, too
        return self._send("Push", self._push_frames(part), data_pb2.PushReply, call, is_wait=True)

    def pull(self, request: data_pb2.PullRequest, blocks: Sequence[Block], parameters: FlatBuffers, call: Call) -> None:
        """Fetch parameters."""
        serialize = data_pb2.PullRequest.SerializeToString
        rpc = self._begin(
            lambda channel, how: channel.unary_stream(f"{_DATA}Pull", serialize, None)(request, **how), call.timeout_s
        )
        self._receive(rpc, blocks, None if request.versions_only else parameters, call)

    def read(self, request: data_pb2.ReadRequest, blocks: Sequence[Block], parameters: FlatBuffers, call: Call) -> None:
        """Fetch parameters as of a cut."""
        serialize = data_pb2.ReadRequest.SerializeToString
        rpc = self._begin(
            lambda channel, how: channel.unary_stream(f"{_DATA}Read", serialize, None)(request, **how), call.timeout_s
        )
        self._receive(rpc, blocks, parameters, call)

    def push_pull(self, part: GradientPart, parameters: FlatBuffers, call: Call) -> data_pb2.PushReply:
        """Push and fetch, full duplex; small ones in one message each way."""
        if part.is_small:  # two copies more, but without what it costs to keep up a stream
            return self._push_pull_small(part, parameters, call)
        messages = self._push_frames(part)
        rpc = self._begin(
            lambda channel, how: channel.stream_stream(f"{_DATA}PushPull", None, None)(messages, **how), call.timeout_s
        )
        return self._with_reply(self._receive(rpc, part.blocks, parameters, call))

    def _push_pull_small(self, part: GradientPart, parameters: FlatBuffers | None, call: Call) -> data_pb2.PushReply:
        message = data_pb2.SmallPush()
        for frame, payload in push_messages(part):
            if payload is not None:
                frame.payload = payload.tobytes()
            message.frames.append(frame)
        self.sent_bytes += sum(len(frame.payload) for frame in message.frames)
        reply = self._unary("PushPullSmall", message, data_pb2.SmallAnswer, call, is_wait=True, service=_DATA)
        answer = Answer(f"shard {self.shard} at {self.address}", part.blocks, parameters)
        for answered in reply.frames:
            answer.take(answered, memoryview(answered.payload))
        self.received_bytes += answer.received_bytes
        return self._with_reply(answer.complete())

    def _with_reply(self, reply: data_pb2.PushReply | None) -> data_pb2.PushReply:
        if reply is None:
            raise InternalError(f"shard {self.shard} at {self.address}: the answer to a push_pull has no push reply")
        return reply

    def _send(self, name: str, messages: Iterator[bytes], reply: type[MessageT], call: Call, *, is_wait: bool) -> MessageT:
        parse = reply.FromString
        rpc = self._begin(
            lambda channel, how: channel.stream_unary(_DATA + name, None, parse).future(messages, **how), call.timeout_s
        )
        with call.scope.entered(rpc.cancel):
            result: MessageT = self._result(rpc, rpc.result, call, is_wait=is_wait)
            return result

    def _receive(
        self, rpc: Any, blocks: Sequence[Block], parameters: FlatBuffers | None, call: Call
    ) -> data_pb2.PushReply | None:
        """Write the blocks of an answer into the parameters, if any; return the push reply, if there is one."""
        answer = Answer(f"shard {self.shard} at {self.address}", blocks, parameters)
        try:
            with call.scope.entered(rpc.cancel):
                while (frame := self._result(rpc, lambda: next(rpc, None), call, is_wait=True)) is not None:
                    answer.take_frame(frame)
        finally:
            self.received_bytes += answer.received_bytes
        return answer.complete()

    def _push_frames(self, part: GradientPart) -> Iterator[bytes]:
        """The frames of one push. Runs in gRPC's thread while the call lives; must not raise."""
        try:
            for message, payload in push_messages(part):
                self.sent_bytes += 0 if payload is None else payload.nbytes
                yield frames.join(message.SerializeToString(), payload)
        except Aborted:  # the shard refuses what ends without a last frame, and the call fails by that
            return
