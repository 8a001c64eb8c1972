"""The gRPC channel to one shard: opens and replaces it, makes calls of each kind, and turns their failures into psd's errors.

It opens at the first call. After a failure it is replaced if certificates have changed or the shard stays away: the shard may
come back at another address, and gRPC's resolver asks ever more rarely for a name that it did not find. Where there are
several addresses, each failure turns to the next one. gRPC does not survive a fork, so a channel refuses to be used in a child
process. Must not know what psd's calls are, retries or other shards.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc.experimental import ChannelOptions

from psd.contract import frames
from psd.contract.config import alternatives
from psd.contract.credentials import Credentials
from psd.contract.errors import (
    Draining,
    InternalError,
    NotDeclared,
    Overloaded,
    PsdError,
    ShardUnavailable,
    TlsFailed,
    Unauthenticated,
    WaitTimeout,
    WrongShard,
)
from psd.contract.tls import Pem
from psd_client.lanes.grpc_errors import may_be_tls, psd_error
from psd_client.lanes.transport import Call, Cancelled, MessageT, Scope

MESSAGE_BYTES_MAX = 32 << 20
"""Largest message, as psd-server's default: a declaration of 100,000 tensors needs about 6 MiB, a frame 4 MiB."""

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    *frames.WINDOW_OPTIONS,
    *frames.KEEPALIVE_OPTIONS,
    ("grpc.http2.max_pings_without_data", 0),
    # A shard that is back within a second must be found at once: gRPC's default back-off grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # despite its name, the time that one attempt to connect may take
    # On Kubernetes a restarted shard has another address. gRPC by default pauses 30 s between two look-ups of it.
    ("grpc.dns_min_time_between_resolutions_ms", 500),
    ("grpc.enable_retries", 0),  # shards.py retries
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # two clients in one process do not share a connection
    # Calls of one message then use no thread of gRPC's: waiting for one makes small calls take half as long again, and an
    # interpreter that exits may not be able to start one.
    (ChannelOptions.SingleThreadedUnaryStream, 1),
)

UNREACHED_S = 2.0
"""Age in seconds at which a channel that cannot reach the shard is replaced."""


ELSEWHERE = (ShardUnavailable, Draining, Overloaded, NotDeclared, WaitTimeout)
"""Errors after which the same call may succeed at another address. Nothing newer has come to a relay that is cut off, too."""


def open_channel(address: str, pem: Pem | None, options: Any) -> grpc.Channel:
    """A channel with TLS; without if `pem` is None."""
    if pem is None:
        return grpc.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(pem.ca, pem.key or None, pem.cert or None)
    return grpc.secure_channel(address, credentials, options=options)


class GrpcChannel:
    """The gRPC channel of one shard.

    Args:
        address: HOST:PORT, or several of relays, A|B, of which one is used at a time.

    Attributes:
        is_leaving: True once the worker leaves the job: then nobody asks why it cannot connect.
    """

    def __init__(self, shard: int, address: str, credentials: Credentials) -> None:
        self.is_leaving = False
        self._shard = shard
        self._addresses = alternatives(address)
        self._address = self._addresses[0]
        self._credentials = credentials
        self._pem: Pem | None = None  # the channel's certificates
        self._was_reached = False
        self._opened_at = 0.0
        self._shown: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # call -> metadata, if there is a token
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._closed = False

    # -- calls ---------------------------------------------------------------------------------------------------------
    # is_wait: True if the call waits for other workers: then if its deadline passes, they are late and not the shard.

    def unary(self, method: str, request: Message, reply: type[MessageT], call: Call, *, is_wait: bool) -> MessageT:
        """Send one message; return the reply."""
        return self.begin_unary(method, request, reply, call, is_wait=is_wait)()

    def begin_unary(
        self, method: str, request: Message, reply: type[MessageT], call: Call, *, is_wait: bool = False
    ) -> Callable[[], MessageT]:
        """Send one message; return a function that waits for the reply."""
        rpc = self._begin("unary_stream", method, request, call.timeout_s, reply)
        return lambda: self._only(rpc, call, is_wait=is_wait)

    def frame(self, method: str, frame: bytes, call: Call) -> bytes:
        """Send bytes; return the bytes of the answer. The call may wait for other workers."""
        answer: bytes = self._only(self._begin("unary_stream", method, frame, call.timeout_s), call, is_wait=True)
        return answer

    def stream_out(
        self, method: str, messages: Iterator[bytes], reply: type[MessageT], call: Call, *, is_wait: bool
    ) -> MessageT:
        """Send a stream of messages; return the reply."""
        rpc = self._begin("stream_unary", method, messages, call.timeout_s, reply)
        with call.scope.entered(rpc.cancel):
            try:
                found: MessageT = rpc.result()
            except (grpc.RpcError, grpc.FutureCancelledError):
                raise self._failure(rpc, call.scope, is_wait=is_wait) from None
        self._was_reached = True
        return found

    def stream_in(self, method: str, request: Message | Iterator[bytes], call: Call) -> Iterator[bytes]:
        """Send one message, or a stream; yield the messages of the answer. The call may wait for other workers."""
        kind = "unary_stream" if isinstance(request, Message) else "stream_stream"
        return self._answers(self._begin(kind, method, request, call.timeout_s), call, is_wait=True)

    def _answers(self, rpc: Any, call: Call, *, is_wait: bool) -> Iterator[Any]:
        with call.scope.entered(rpc.cancel):
            try:
                for message in rpc:  # noqa: UP028 - gRPC's object is no generator, and must not be closed like one
                    yield message
            except (grpc.RpcError, grpc.FutureCancelledError):
                raise self._failure(rpc, call.scope, is_wait=is_wait) from None
            self._was_reached = True

    def _only(self, rpc: Any, call: Call, *, is_wait: bool) -> Any:
        answers = list(self._answers(rpc, call, is_wait=is_wait))
        if len(answers) != 1:
            raise InternalError(f"shard {self._shard} at {self._address}: has sent {len(answers)} answers, expected one")
        return answers[0]

    def _begin(
        self,
        kind: str,
        method: str,
        request: Message | Iterator[bytes] | bytes,
        timeout_s: float,
        reply: type[Message] | None = None,
    ) -> Any:
        """Begin a call on the channel, which is opened if needed; Cancelled if `close` was called meanwhile.

        Args:
            kind: gRPC's name for it. On the wire a stream of one message is the same as the message, so calls with one answer
                are "unary_stream", too: gRPC completes these in the waiting thread. reply: None: the answer is bytes.
        """
        serialize = type(request).SerializeToString if isinstance(request, Message) else None
        while True:
            channel, metadata = self._open(), self._credentials.metadata()
            start = getattr(channel, kind)(method, serialize, None if reply is None else reply.FromString)
            if kind == "stream_unary":
                start = start.future
            try:
                begun = start(request, timeout=timeout_s, metadata=metadata)
            except ValueError:  # gRPC raises this for a closed channel
                if self._closed:
                    raise Cancelled from None
                if channel is self._channel:
                    raise
                continue
            if metadata is not None and isinstance(begun, grpc.Call):
                self._shown[begun] = metadata
            return begun

    # -- the channel ---------------------------------------------------------------------------------------------------

    def _open(self) -> grpc.Channel:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"psd: connected in process {self._pid} and used in process {os.getpid()}: a connection does not survive "
                "a fork; call psd_client.connect() in the process that uses it"
            )
        with self._lock:
            if self._closed:
                raise Cancelled
            if self._channel is None:
                self._pem = self._credentials.pem()
                self._channel = open_channel(self._address, self._pem, CHANNEL_OPTIONS)
                self._opened_at = time.monotonic()
            return self._channel

    def _failure(self, rpc: Any, scope: Scope | None, *, is_wait: bool) -> PsdError | Cancelled:
        """The error of a failed call; prepares another attempt if that may succeed."""
        if self._closed or (scope is not None and scope.is_cancelled):
            return Cancelled()
        address = self._address
        error = psd_error(rpc, self._shard, address, is_wait=is_wait)
        if len(self._addresses) > 1 and isinstance(error, ELSEWHERE):
            self._turn()
        where = {"shard": self._shard, "address": address}
        shown = self._shown.get(rpc)
        if isinstance(error, Unauthenticated) and shown is not None and self._credentials.has_other_token(shown):
            return ShardUnavailable(f"shard {self._shard} at {address}: the token has changed meanwhile", **where)
        if isinstance(error, WrongShard) and self._was_reached:
            # Addresses are used again: the shard has moved, and another one now has its old address.
            self._renew(is_lost=True)
            return ShardUnavailable(f"shard {self._shard} at {address}: {error}", **where)
        if not isinstance(error, ShardUnavailable):
            self._was_reached = True
            return error
        is_unreached = rpc.code() is grpc.StatusCode.UNAVAILABLE
        self._renew(is_lost=is_unreached and time.monotonic() - self._opened_at > UNREACHED_S)
        if may_be_tls(error) and not self.is_leaving and (why := self._credentials.why_not(address)) is not None:
            # During a job both sides may be getting new certificates: try again. Before the first contact they are wrong.
            kind = ShardUnavailable if self._was_reached else TlsFailed
            error = kind(f"shard {self._shard} at {address}: {why}", **where)
        return error

    def _renew(self, *, is_lost: bool = False) -> None:
        """Let the next call open another channel if certificates have changed, or if this one has lost the shard."""
        pem = self._credentials.pem()
        with self._lock:
            if self._channel is None or (pem == self._pem and not is_lost):
                return
            channel, self._channel = self._channel, None
        channel.close()

    def _turn(self) -> None:
        """Let the next call go to the next address."""
        self._address = self._addresses[(self._addresses.index(self._address) + 1) % len(self._addresses)]
        self._renew(is_lost=True)

    def close(self) -> None:
        """Close the channel; calls in progress end."""
        with self._lock:
            self._closed = True
            channel, self._channel = self._channel, None
        if channel is not None and os.getpid() == self._pid:
            channel.close()
