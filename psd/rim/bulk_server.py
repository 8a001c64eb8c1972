"""The shard's end of the bulk lane: its sockets, tickets and connections. bulk_connection.py serves one connection.

A worker asks over gRPC (`OpenBulk`) where to connect and gets a ticket for one connection; so this port admits nobody whom gRPC
refuses. TCP uses TLS if gRPC does. Each connection has a thread. A rank has one connection: a new one ends the one before, and
begins once that one has no call in progress, so that two calls never write to one worker's memory. A reader (`OpenReads`) has
no rank, and so no connection of its own that another one would end; all readers together have --max-readers. Must not know
blocks or frames.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from psd.contract.config import ServerConfig, parse_address
from psd.contract.errors import InvalidRequest, Overloaded
from psd.contract.loopback import unpaced
from psd.contract.tls_socket import TlsSocket
from psd.contract.wire import Stream, is_of_this_user
from psd.rim.access import Access, Metadata
from psd.rim.bulk_connection import HELLO_BYTES_MAX, READER, STRANGER, ServedConnection
from psd.rim.bulk_watch import Watch
from psd.rim.bundles import Bundle
from psd.rim.calls import CallGuard
from psd.rim.data_plane import DataPlane
from psd.rim.strangers import Strangers
from psd.rim.tls import ServerTls
from psd.rim.vector_plane import VectorPlane
from psd.state.shard import Shard
from psd.v1 import bulk_pb2, control_pb2

logger = logging.getLogger(__name__)

TICKET_S = 30.0
HELLO_S = 5.0
"""Seconds until a connection that has not shown its ticket is closed."""
PREDECESSOR_S = 4.0
"""Seconds that a new connection waits for its rank's earlier one to end; its worker waits a little longer."""
BLOCK_S = 1.0
"""Seconds that the earlier connection may take to finish its current block before it is cut off."""
STRANGERS_MAX = 64
"""Most connections that have not shown a ticket yet."""
CROWDED_PAUSE_S = 0.1
"""Pause after a connection that displaced another one, if nobody with a ticket is expected: so a flood waits in the kernel, and
costs the shard almost nothing."""


@dataclass(frozen=True)
class _Ticket:
    rank: int  # READER for a reader's
    session: int
    expires: float
    is_welcome: Callable[[str], bool] | None


@dataclass(frozen=True)
class LaneConnections:
    """The number of open connections of one lane, and of those closed before they showed a ticket."""

    open: int
    refused: int


class BulkServer:
    """The bulk lane of one shard. Made, then `start`ed once, then `stop`ped.

    Args:
        planes: data planes by lane. access: None: everybody may do everything. tls: None: no TLS.

    Attributes:
        tcp_port: 0 if TCP is switched off. local_name: name of the local socket; empty if the system has none.
    """

    def __init__(
        self,
        shard: Shard,
        planes: Mapping[str, DataPlane],
        vectors: VectorPlane,
        guard: CallGuard,
        config: ServerConfig,
        access: Access | None = None,
        tls: ServerTls | None = None,
    ) -> None:
        self._access = access
        self._tls = tls
        self.tcp_port = 0
        self.local_name = ""
        self._shard = shard
        self._planes = planes
        self._vectors = vectors
        self._guard = guard
        self._config = config
        self._lock = threading.Lock()
        self._ticket_given = threading.Condition(self._lock)
        self._tickets: dict[bytes, _Ticket] = {}
        self._by_rank: dict[int, ServedConnection] = {}
        self._bundles: dict[ServedConnection, tuple[bytes, Bundle]] = {}  # a connection's ticket, and its further sockets
        self._admitted: dict[int, int] = {}  # by rank, the latest session that has opened a connection
        self._connections: dict[int, ServedConnection] = {}  # by file descriptor
        self._strangers = Strangers(STRANGERS_MAX)
        self._refused = {"shm": 0, "tcp": 0}
        self._threads: set[threading.Thread] = set()
        self._listeners: list[socket.socket] = []
        self._acceptors: list[threading.Thread] = []
        self._watch = Watch(self._connections, self._is_current)
        self._is_stopping = False
        self._cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def start(self) -> None:
        """Bind and serve.

        Raises:
            OSError: the port cannot be bound.
        """
        if self._config.bulk_port is not None:
            host, _ = parse_address(self._config.listen, "--listen")
            self._listen_tcp(host.strip("[]"), self._config.bulk_port)
        self._listen_local()
        self._watch.start()
        for listener in self._listeners:
            thread = threading.Thread(target=self._accept, args=(listener,), name="psd-bulk-accept", daemon=True)
            thread.start()
            self._acceptors.append(thread)

    def _listen_tcp(self, host: str, port: int) -> None:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            unpaced(listener, address)  # what it accepts takes this over
            listener.listen(self._config.limits.workers_max)
        except OSError as error:
            listener.close()
            raise OSError(f"--bulk-port: cannot bind {host}:{port}: {error.strerror}; is the port in use?") from error
        self.tcp_port = listener.getsockname()[1]
        self._listeners.append(listener)

    def _listen_local(self) -> None:
        """Listen under a name in Linux's abstract namespace, which leaves nothing behind, whichever process dies."""
        if not (hasattr(socket, "SO_PEERCRED") and hasattr(os, "memfd_create")):
            return
        name = f"psd-{os.getuid()}-{secrets.token_hex(8)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(f"\0{name}")
            listener.listen(self._config.limits.workers_max)
        except OSError as error:
            listener.close()
            logger.warning("no shared memory with workers: the local socket cannot be bound: %s", error)
            return
        self.local_name = name
        self._listeners.append(listener)

    def open(self, request: control_pb2.OpenBulkRequest, metadata: Metadata = ()) -> control_pb2.OpenBulkReply:
        """Open a bulk connection. The token in the call's metadata must stay valid while the connection is used."""
        is_welcome = None if self._access is None else self._access.holder(metadata)
        worker = self._shard.check_caller(request.caller)
        return self._new_ticket(worker.rank, worker.session, is_welcome)

    def open_reads(self, request: control_pb2.OpenReadsRequest, metadata: Metadata = ()) -> control_pb2.OpenBulkReply:
        """Open a bulk connection for a reader, likewise."""
        is_welcome = None if self._access is None else self._access.holder(metadata)
        self._shard.readers.check(request)
        readers_max = self._config.limits.readers_max
        with self._lock:
            count = sum(connection.rank == READER for connection in self._connections.values())
        if count >= readers_max:
            raise Overloaded(f"OpenReads: {readers_max} readers have connections already (the shard's --max-readers)")
        return self._new_ticket(READER, 0, is_welcome)

    def _new_ticket(self, rank: int, session: int, is_welcome: Callable[[str], bool] | None) -> control_pb2.OpenBulkReply:
        ticket, now, limits = secrets.token_bytes(32), time.monotonic(), self._config.limits
        count_max = limits.readers_max if rank == READER else limits.workers_max + STRANGERS_MAX
        with self._lock:
            self._forget_old_tickets(now)
            if sum((other.rank == READER) == (rank == READER) for other in self._tickets.values()) >= count_max:
                raise Overloaded(f"{'OpenReads' if rank == READER else 'OpenBulk'}: too many unused tickets")
            self._tickets[ticket] = _Ticket(rank, session, now + TICKET_S, is_welcome)
            self._ticket_given.notify_all()
        return control_pb2.OpenBulkReply(ticket=ticket, tcp_port=self.tcp_port, local_name=self.local_name)

    def _forget_old_tickets(self, now: float) -> None:
        self._tickets = {key: kept for key, kept in self._tickets.items() if kept.expires > now}

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
                is_alone = self._begin(sock)
            except (OSError, RuntimeError):
                if self._is_stopping:
                    return
                # No descriptors or threads are left, or the peer has gone already: neither may end the service.
                logger.warning("the bulk lane could not accept a connection", exc_info=True)
                select.select([], [], [], 0.1)
                continue
            if not is_alone:
                with self._lock:
                    self._forget_old_tickets(time.monotonic())
                    if not (self._tickets or self._is_stopping):
                        self._ticket_given.wait(CROWDED_PAUSE_S)

    def _begin(self, sock: socket.socket) -> bool:
        """Serve a connection, unless there are too many; False if it is refused, or displaced another one."""
        try:
            secured = self._secured(sock)
        except OSError:  # the client has gone; port scanners only connect
            with self._lock:
                self._refused["tcp"] += 1
            return True
        stream, descriptor = Stream(secured, HELLO_BYTES_MAX), secured.fileno()
        lane = "tcp" if stream.is_tcp else "shm"
        connection = ServedConnection(
            stream, self._shard, self._planes[lane], self._vectors, self._guard, lambda: len(self._by_rank) < self._cores
        )
        thread = threading.Thread(
            target=self._serve, args=(connection, secured, descriptor, lane), name="psd-bulk", daemon=True
        )
        with self._lock:
            limits = self._config.limits
            threads_max = limits.workers_max + limits.readers_max + 2 * STRANGERS_MAX  # some are ending
            if len(self._threads) >= threads_max or self._is_stopping or not _is_welcome(stream):
                self._refused[lane] += 1
                stream.close()
                return False
            self._connections[descriptor] = connection
            self._threads.add(thread)
        is_alone = self._strangers.enter(connection, connection.hang_up)
        try:
            thread.start()
        except RuntimeError:
            self._forget(connection, descriptor, lane, thread)
            raise
        return is_alone

    def _secured(self, sock: socket.socket) -> socket.socket | TlsSocket:
        """The socket, with TLS if configured; a local one needs none."""
        if self._tls is None or sock.family == getattr(socket, "AF_UNIX", None):
            return sock
        try:
            sock.getpeername()  # raises if the peer has gone: ssl would leave half a socket behind
            return TlsSocket(sock, self._tls.context())
        except BaseException:
            sock.close()
            raise

    def _serve(self, connection: ServedConnection, sock: socket.socket | TlsSocket, descriptor: int, lane: str) -> None:
        try:
            self._watch.add(descriptor)
            if isinstance(sock, TlsSocket):
                sock.handshake(HELLO_S)
            connection.serve(self._admit, HELLO_S)
        except OSError as error:  # also a time-out
            logger.debug("the bulk lane's port: the TLS handshake with a client failed: %s", error)
        finally:
            self._watch.forget(descriptor)
            self._forget(connection, descriptor, lane, threading.current_thread())

    def _forget(self, connection: ServedConnection, descriptor: int, lane: str, thread: threading.Thread) -> None:
        with self._lock:
            del self._connections[descriptor]
            self._strangers.leave(connection)
            self._bundles.pop(connection, None)
            self._refused[lane] += connection.rank == STRANGER
            if self._by_rank.get(connection.rank) is connection:
                del self._by_rank[connection.rank]
            self._threads.discard(thread)
        connection.close()

    def _admit(self, connection: ServedConnection, hello: bulk_pb2.BulkHello) -> Bundle:
        """The connection that a greeting opens, or to which it adds a socket. InvalidRequest if its ticket is for neither."""
        if hello.strand:
            return self._admit_strand(connection, hello)
        if hello.streams > 1 and not connection.is_tcp:
            raise InvalidRequest(f"streams: expected 1 over a local socket, got {hello.streams}")
        with self._lock:
            ticket = self._tickets.pop(hello.ticket, None)
            if ticket is None or ticket.expires < time.monotonic():
                raise InvalidRequest("ticket: unknown to this shard, already used, or too old")
            self._strangers.leave(connection)
            bundle = Bundle(ticket.rank, max(1, hello.streams) - 1)
            self._bundles[connection] = hello.ticket, bundle
            connection.is_welcome, connection.session = ticket.is_welcome, ticket.session
            if ticket.rank == READER:
                return bundle
            before = self._by_rank.get(ticket.rank)
            self._by_rank[ticket.rank], self._admitted[ticket.rank] = connection, ticket.session
        if before is not None:
            before.hang_up()
            if not before.ended.wait(BLOCK_S):
                before.cut()
                if not before.ended.wait(PREDECESSOR_S - BLOCK_S):
                    raise Overloaded(f"worker {ticket.rank} has an earlier call under way that does not end")
        return bundle

    def _admit_strand(self, connection: ServedConnection, hello: bulk_pb2.BulkHello) -> Bundle:
        with self._lock:
            bundles = self._bundles.values()
            found = next((bundle for key, bundle in bundles if secrets.compare_digest(key, hello.ticket)), None)
            if found is None or not connection.is_tcp:
                raise InvalidRequest("ticket: of no connection at this shard that has several sockets")
            found.check(hello.strand)
            self._strangers.leave(connection)
        return found

    def _is_current(self, connection: ServedConnection) -> bool:
        """False if the connection's worker has left, or has begun a session that has made no call on it; of a reader, if its
        call should have ended long ago."""
        if connection.rank < 0:
            return not connection.is_overdue
        return self._shard.is_current(connection.rank, connection.session)

    def has_lost(self, rank: int, session: int) -> bool:
        """True if a session had a connection, but has none now."""
        with self._lock:
            return self._admitted.get(rank) == session and rank not in self._by_rank

    def connections(self) -> dict[str, LaneConnections]:
        """The connections by lane."""
        with self._lock:
            tcp = sum(connection.is_tcp for connection in self._connections.values())
            is_open = {"tcp": tcp, "shm": len(self._connections) - tcp}
            return {lane: LaneConnections(is_open[lane], refused) for lane, refused in self._refused.items()}

    def check_tokens(self) -> None:
        """Look at the tokens of the workers whose steps are taken without asking for them: each tick."""
        with self._lock:
            connections = list(self._by_rank.values())
        for connection in connections:
            connection.check_token()

    def stop(self, grace_s: float | None) -> None:
        """Refuse connections, and end the open ones, at once or after `grace_s` for calls in progress. Idempotent."""
        if self._is_stopping:
            return
        with self._lock:
            self._is_stopping = True
            self._ticket_given.notify_all()
        for listener in self._listeners:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for thread in self._acceptors:
            thread.join()
        deadline = time.monotonic() + (grace_s or 0)
        with self._lock:
            connections, threads = list(self._connections.values()), list(self._threads)
        for connection in connections:
            connection.end_when_idle()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for connection in connections:
            connection.hang_up()
        deadline = time.monotonic() + BLOCK_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for connection in connections:
            connection.cut()
        for thread in threads:
            thread.join(HELLO_S)
        self._watch.stop()


def _is_welcome(stream: Stream) -> bool:
    """False for a local socket whose other end belongs to another user."""
    return stream.local is None or is_of_this_user(stream.local)
