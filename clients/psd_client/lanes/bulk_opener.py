"""Opens a bulk connection by the best transport: shared memory with a shard on this machine, else TCP; if neither works, none.

It opens one when one is first needed, and again after a failure: a restarted shard may be elsewhere. Must not know calls,
sessions, clocks or retries, nor whether a worker or a reader asks.
"""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

from psd.contract.config import ConfigError, parse_address
from psd.contract.credentials import Credentials
from psd.contract.errors import InvalidRequest, ShardUnavailable
from psd.contract.loopback import connect_tcp
from psd.contract.tls import what_is_wrong
from psd.contract.tls_socket import TlsSocket
from psd.contract.wire import Stream, is_of_this_user
from psd.v1 import control_pb2
from psd_client.lanes.bulk_connection import HEAD_BYTES_MAX, BulkClient, NotGreeted
from psd_client.lanes.further_streams import greeting
from psd_client.lanes.transport import Call, Traffic

CONNECT_S = 3.0
TRANSPORT_CHARACTERS_MAX = 120
STALE_NAME_S = 20.0
"""Seconds for which name servers may still answer with a shard's earlier address. A connection that worked before is tried
again for this long, before gRPC is used instead."""

Connect = Callable[[control_pb2.OpenBulkReply], "socket.socket | TlsSocket"]

SILENCES_MAX = 2
"""Attempts on a port that does not answer, while the shard answers over gRPC, before this worker stops trying the port."""


class Asking(Protocol):
    """Whoever asks for a connection. incarnation: of the shard, which it last answered."""

    @property
    def incarnation(self) -> int: ...  # noqa: D102 - above


AskingT = TypeVar("AskingT", bound=Asking)
ClientT = TypeVar("ClientT", bound=BulkClient)


class BulkOpener(Generic[AskingT, ClientT]):
    """The bulk connection of one shard, opened when needed.

    Args:
        wanted: "auto"; or "shm" or "tcp", which raise ConfigError if they do not work, ShardUnavailable if they did before.
        ask: asks over gRPC for a ticket, and the address at which the shard listens. traffic: as in BulkClient.
        kind: the connection's class.
        streams: connections over TCP that carry large payloads together.

    Attributes:
        transport: how bulk data travels, and why not by a better transport; empty before the first connection.
    """

    def __init__(
        self,
        shard: int,
        address: str,
        wanted: str,
        credentials: Credentials,
        ask: Callable[[AskingT, Call], control_pb2.OpenBulkReply],
        traffic: Traffic,
        kind: type[ClientT],
        streams: int = 1,
    ) -> None:
        self.transport = ""
        self._shard = shard
        self._address = address
        self._wanted = wanted
        self._credentials = credentials
        self._ask = ask
        self._traffic = traffic
        self._streams = streams
        self._kind = kind
        self._open: ClientT | None = None
        self._grpc_at: int | None = None  # the shard's incarnation for which only gRPC worked
        self._had_tcp = False
        self._missed_since: float | None = None  # when the TCP connections began to fail
        self._silences = 0  # TCP connections in a row that were accepted and not answered

    @property
    def is_open(self) -> bool:
        """True if there is a connection."""
        return self._open is not None and self._open.is_open

    def connection(self, caller: AskingT, call: Call) -> ClientT | None:
        """The connection, which is opened if needed; None if only gRPC works."""
        if self._open is not None and self._open.is_open:
            return self._open
        if self._grpc_at != caller.incarnation:
            self._open = self._choose(caller, call)
            self._grpc_at = caller.incarnation if self._open is None else None
        return self._open

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._open is not None:
            self._open.close()

    def _choose(self, caller: AskingT, call: Call) -> ClientT | None:
        refusals: list[str] = []
        ways: tuple[tuple[str, Connect], ...]
        ways = ("shm", self._connect_local), ("tcp", self._connect_tcp)
        for name, connect in ways:
            if self._wanted not in ("auto", name):
                continue
            reply = self._ask(caller, call)
            streams = self._streams if name == "tcp" else 1
            further = [partial(_further, connect, reply, strand) for strand in range(1, streams)]
            try:
                stream = Stream(connect(reply), HEAD_BYTES_MAX)
                bulk = self._kind(stream, self._shard, self._address, reply.ticket, call, self._traffic, further)
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
            self._note(name, refusals, streams)
            return bulk
        if self._wanted != "auto":
            self._ask(caller, call)  # raises if the shard has only just died
            if self.transport:  # it worked before, so the program's choice is no error
                raise self._unavailable(f"cannot be reached any more by {refusals[0]}")
            raise ConfigError(f"transport: shard {self._shard} at {self._address} cannot be reached by {refusals[0]}")
        self._note("grpc", refusals)
        return None

    def _missed(self, why: str) -> None:
        """Handle a failed connection: raise ShardUnavailable, which is retried, while the cause may be a stale name."""
        now = time.monotonic()
        if self._missed_since is None:
            self._missed_since = now
        if self._had_tcp and now - self._missed_since < STALE_NAME_S:
            raise self._unavailable(why)

    def _silent(self, name: str, port: int) -> str:
        """Handle a connection that was accepted but never answered: return the reason against this transport. While the shard
        may only have been suspended, raises ShardUnavailable: the next attempt begins with a call that it must answer."""
        if name == "shm":
            raise self._unavailable("accepts connections on this machine but does not answer")
        why = f"port {port}: accepts connections but does not answer"
        self._missed(why)
        self._silences += 1
        if self._silences < SILENCES_MAX:
            raise self._unavailable(why)
        return why

    def _unavailable(self, why: str) -> ShardUnavailable:
        where = {"shard": self._shard, "address": self._address}
        return ShardUnavailable(f"shard {self._shard} at {self._address}: {why}", **where)

    def _note(self, name: str, refusals: Sequence[str], streams: int = 1) -> None:
        remarks = [f"{streams} streams"] * (streams > 1) + [f"not {refusal}" for refusal in refusals]
        self.transport = f"{name} ({'; '.join(remarks)})" if remarks else name
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
        host, _ = parse_address(self._address, "servers")
        try:
            sock = connect_tcp(host.strip("[]"), reply.tcp_port, CONNECT_S)
        except OSError as error:
            self._missed(f"port {reply.tcp_port}: {error.strerror or error}")
            raise _NotHere(f"port {reply.tcp_port}: {error.strerror or error}") from None
        context = self._credentials.context()
        return sock if context is None else _secured(sock, context, host.strip("[]"))


def _further(connect: Connect, reply: control_pb2.OpenBulkReply, strand: int) -> Stream:
    return greeting(Stream(connect(reply), HEAD_BYTES_MAX), reply.ticket, strand)


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
    """Raised with the reason why a transport does not work with this shard."""
