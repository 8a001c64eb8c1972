"""A lane that takes the best transport: shared memory with a shard on this machine, else TCP, else gRPC.

What it opens it opens at the first need, and anew after a failure, since a shard may come back elsewhere. Control calls stay
with gRPC, and so does all data where neither works, unless one way is forced. Must not know sessions, clocks or retries.
"""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from psd.contract.config import ConfigError, parse_address
from psd.contract.credentials import Credentials
from psd.contract.errors import InvalidRequest, ShardUnavailable
from psd.contract.layout import Block
from psd.contract.tls import what_is_wrong
from psd.contract.tls_socket import TlsSocket
from psd.contract.wire import Stream, is_of_this_user
from psd.v1 import control_pb2, data_pb2, job_pb2
from psd_client.bulk_connection import HEAD_BYTES_MAX, BulkConnection, NotGreeted
from psd_client.flat import FlatBuffers
from psd_client.grpc_lane import GrpcLane
from psd_client.transport import Call, Cancelled, GradientPart, Share

CONNECT_S = 3.0
TRANSPORT_CHARACTERS_MAX = 120
STALE_NAME_S = 20.0
"""Seconds for which name servers may still give out a shard's earlier address. A connection that worked before is tried again
for this long, and only then given up in favour of gRPC."""

SILENCES_MAX = 2
"""Attempts on a port that did not answer, while the shard answered over gRPC, until this worker stops trying it."""

ResultT = TypeVar("ResultT")


class BulkLane(GrpcLane):
    """The lane to one shard over the best transport that works.

    Args:
        transport: "auto"; or "shm" or "tcp", which raise ConfigError where they do not work.
    """

    def __init__(self, shard: int, address: str, transport: str, credentials: Credentials | None = None) -> None:
        super().__init__(shard, address, credentials)
        self.transport = ""
        self._wanted = transport
        self._bulk: BulkConnection | None = None
        self._grpc_at: int | None = None  # the shard's incarnation at which nothing but gRPC worked
        self._shared: tuple[FlatBuffers, FlatBuffers] | None = None
        self._had_tcp = False
        self._missed_since: float | None = None  # since when TCP connections fail
        self._silences = 0  # TCP connections that were taken and not answered, one after the other

    @property
    def is_interruptible(self) -> bool:  # type: ignore[override]  # a plain attribute elsewhere
        """See Lane. Only while nothing has to be asked over gRPC."""
        return self._bulk is not None and self._bulk.is_open

    def prepare(self, caller: job_pb2.Caller, call: Call) -> Share | None:
        """See Lane."""
        bulk = self._opened(caller, call)
        return self._share if bulk is not None and bulk.is_local else None

    def _share(self, gradients: FlatBuffers, parameters: FlatBuffers) -> None:
        self._shared = gradients, parameters

    def push(self, part: GradientPart, call: Call) -> data_pb2.PushReply:
        """See Lane."""
        bulk = self._connection(part.header.caller, call)
        if bulk is None:
            return super().push(part, call)
        return self._counted(bulk, lambda: bulk.push(part, call))

    def pull(self, request: data_pb2.PullRequest, blocks: Sequence[Block], parameters: FlatBuffers, call: Call) -> None:
        """See Lane."""
        bulk = self._connection(request.caller, call)
        if bulk is None:
            super().pull(request, blocks, parameters, call)
        else:
            self._counted(bulk, lambda: bulk.pull(request, blocks, parameters, call))

    def push_pull(self, part: GradientPart, parameters: FlatBuffers, call: Call) -> data_pb2.PushReply:
        """See Lane."""
        bulk = self._connection(part.header.caller, call)
        if bulk is None:
            return super().push_pull(part, parameters, call)
        return self._counted(bulk, lambda: bulk.push_pull(part, parameters, call))

    def close(self) -> None:
        """See Lane."""
        super().close()
        if self._bulk is not None:
            self._bulk.close()

    def _counted(self, bulk: BulkConnection, exchange: Callable[[], ResultT]) -> ResultT:
        sent, received = bulk.sent_bytes, bulk.received_bytes
        try:
            return exchange()
        except ShardUnavailable:
            if self._closed:
                raise Cancelled from None
            raise
        finally:
            self.sent_bytes += bulk.sent_bytes - sent
            self.received_bytes += bulk.received_bytes - received

    # -- choosing ------------------------------------------------------------------------------------------------------

    def _connection(self, caller: job_pb2.Caller, call: Call) -> BulkConnection | None:
        """The connection, ready for bulk calls; None to use gRPC."""
        bulk = self._opened(caller, call)
        if bulk is not None and bulk.is_local and self._shared is not None:
            gradients, parameters = self._shared
            if gradients.segment is not None and not gradients.segment.is_given_up:
                bulk.attach(gradients, parameters, call)
        return bulk

    def _opened(self, caller: job_pb2.Caller, call: Call) -> BulkConnection | None:
        if (self._bulk is None or not self._bulk.is_open) and self._grpc_at != caller.incarnation:
            self._bulk = self._choose(caller, call)
            self._grpc_at = caller.incarnation if self._bulk is None else None
        return self._bulk if self._bulk is not None and self._bulk.is_open else None

    def _choose(self, caller: job_pb2.Caller, call: Call) -> BulkConnection | None:
        refusals: list[str] = []
        ways: tuple[tuple[str, Callable[[control_pb2.OpenBulkReply], socket.socket | TlsSocket]], ...]
        ways = ("shm", self._connect_local), ("tcp", self._connect_tcp)
        for name, connect in ways:
            if self._wanted not in ("auto", name):
                continue
            reply = self.open_bulk(control_pb2.OpenBulkRequest(caller=caller), call)
            try:
                stream = Stream(connect(reply), HEAD_BYTES_MAX)
                bulk = BulkConnection(stream, self.shard, self.address, reply.ticket, call)
            except _NotHere as error:
                refusals.append(f"{name}: {error}")
                continue
            except NotGreeted:
                refusals.append(f"{name}: {self._silent(name, reply.tcp_port)}")
                continue
            except InvalidRequest as error:
                self._missed(f"another shard is there: {error}")
                raise
            self._silences = 0
            if name == "tcp":
                self._had_tcp, self._missed_since = True, None
            self._note(name, refusals)
            return bulk
        if self._wanted != "auto":
            self.open_bulk(control_pb2.OpenBulkRequest(caller=caller), call)  # raises if the shard has only just died
            raise ConfigError(f"transport: shard {self.shard} at {self.address} cannot be reached by {refusals[0]}")
        self._note("grpc", refusals)
        return None

    def _missed(self, why: str) -> None:
        """Handle a failed connection: raise ShardUnavailable, to be tried again, while the name may be to blame."""
        now = time.monotonic()
        if self._missed_since is None:
            self._missed_since = now
        if self._had_tcp and now - self._missed_since < STALE_NAME_S:
            raise self._unavailable(why)

    def _silent(self, name: str, port: int) -> str:
        """Handle a connection that was accepted but never answered: return the reason against this transport. Raises
        ShardUnavailable while it may be that the shard was only suspended for a while; each attempt begins with a call that it
        must answer."""
        if name == "shm":
            raise self._unavailable("accepts connections on this machine but does not answer")
        why = f"port {port}: accepts connections but does not answer"
        self._missed(why)
        self._silences += 1
        if self._silences < SILENCES_MAX:
            raise self._unavailable(why)
        return why

    def _unavailable(self, why: str) -> ShardUnavailable:
        where = {"shard": self.shard, "address": self.address}
        return ShardUnavailable(f"shard {self.shard} at {self.address}: {why}", **where)

    def _note(self, name: str, refusals: Sequence[str]) -> None:
        self.transport = f"{name} (not {'; not '.join(refusals)})" if refusals else name
        self.transport = self.transport[:TRANSPORT_CHARACTERS_MAX]

    def _connect_local(self, reply: control_pb2.OpenBulkReply) -> socket.socket:
        if not hasattr(os, "memfd_create"):
            raise _NotHere("this system has no memory files")
        if not reply.local_name:
            raise _NotHere("the shard's system has no memory files")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(f"\0{reply.local_name}")
        except OSError:
            sock.close()
            raise _NotHere("the shard is on another machine") from None
        if not is_of_this_user(sock):
            sock.close()
            raise _NotHere("the shard is another user's")
        return sock

    def _connect_tcp(self, reply: control_pb2.OpenBulkReply) -> socket.socket | TlsSocket:
        if not reply.tcp_port:
            raise _NotHere("the shard was started with --bulk-port off")
        host, _ = parse_address(self.address, "servers")
        try:
            sock = socket.create_connection((host.strip("[]"), reply.tcp_port), CONNECT_S)
        except OSError as error:
            self._missed(f"port {reply.tcp_port}: {error.strerror or error}")
            raise _NotHere(f"port {reply.tcp_port}: {error.strerror or error}") from None
        sock.settimeout(None)
        context = self._credentials.context()
        return sock if context is None else _secured(sock, context, host.strip("[]"))


def _secured(sock: socket.socket, context: ssl.SSLContext, host: str) -> TlsSocket:
    port = sock.getpeername()[1]
    secured = TlsSocket(sock, context, host)
    try:
        secured.handshake(CONNECT_S)
    except TimeoutError:
        secured.close()
        raise NotGreeted from None
    except OSError as error:
        secured.close()
        raise _NotHere(f"port {port}: {what_is_wrong(error, host) or error}") from None
    except BaseException:
        secured.close()
        raise
    return secured


class _NotHere(Exception):
    """The reason why a transport does not work with this shard."""
