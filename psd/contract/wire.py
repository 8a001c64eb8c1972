"""Messages of the bulk lane on a stream socket: sent with one system call, received straight into the caller's memory.

A message is a 16-byte prefix (kind, bytes of head, bytes of payload), a small protobuf head, and a payload; bulk.proto has the
kinds. `Stream` reads ahead a little, so that prefix, head and a small payload cost one system call together; the rest of a
large payload is read directly into the caller's memory. Both sides use it. Must not know what heads mean, sessions or blocks.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import math
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from psd.contract import strands
from psd.contract.errors import InvalidRequest
from psd.contract.strands import BUFFERS_MAX, beyond
from psd.contract.tls_socket import TlsSocket

PREFIX = struct.Struct("<IIQ")

READ_AHEAD_BYTES = 16 << 10
"""Bytes read ahead. Heads have a few dozen bytes, a push's some hundred; further bytes would only be copied twice."""

BUFFER_BYTES = 1 << 20
"""Buffer of each socket and direction; Linux doubles it. It limits the bytes sent to a side that does not read. Neither a
larger one nor the kernel's choice made steps shorter."""

KEPT_BACK_BYTES_MAX = 16 << 10
"""Bytes that are cheaper to copy than to send by a system call of their own."""

KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 2}
"""Options by which the system reports within 20 seconds, as gRPC does, that a peer vanished while the connection was idle. They
do not help while bytes are unacknowledged; and TCP_USER_TIMEOUT would also end a connection to a side that does not read for
long, such as a shard that lets a push wait. See ALIVE in bulk.proto."""

_TCP_PROGRESS = struct.Struct("@120xQQ")
"""Fields of Linux's struct tcp_info: bytes that the peer has acknowledged, and bytes received from it."""


class Kind(enum.IntEnum):
    """The kind of a message on a bulk connection; bulk.proto says what each is for."""

    HELLO = 1
    WELCOME = 2
    ATTACH = 3
    SEND = 4
    READY = 5
    CALL = 6
    FRAME = 7
    ANSWER = 8
    REPLY = 9
    ERROR = 10
    ALIVE = 11
    STEP = 12
    DONE = 13
    AGAIN = 14


_KINDS = {kind.value: kind for kind in Kind}  # calling Kind takes ten times as long


class Disconnected(Exception):
    """Raised if the peer has closed the connection, or it broke."""


class Stream:
    """One connected stream socket, or several as one (`join`). One thread may send while another receives; any thread may call
    `send_if_idle`.

    Args:
        sock: blocking, or with TLS; this object closes it.
        head_bytes_max: a longer head is refused before it is read.

    Attributes:
        is_tcp: False for a local socket. head_bytes_max: as given; may be changed.
    """

    def __init__(self, sock: socket.socket | TlsSocket, head_bytes_max: int) -> None:
        self.socket = sock
        self.head_bytes_max = head_bytes_max
        self._ahead = memoryview(bytearray(READ_AHEAD_BYTES))
        self._start = self._end = 0
        self._kept_back = b""
        self._sending = threading.Lock()
        self._timeout_s: float = 0
        self._deadline = math.inf
        self._on_pause: Callable[[], None] | None = None
        self._joined: Sequence[Stream] = ()
        self._cut_bytes = 0  # of the payload that is to be read next, if it comes in parts
        self.is_tcp = sock.family != getattr(socket, "AF_UNIX", None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        if self.is_tcp:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _keep_alive(sock)

    @property
    def local(self) -> socket.socket | None:
        """The socket, if it is local, for sending descriptors; else None."""
        return None if self.is_tcp or isinstance(self.socket, TlsSocket) else self.socket

    def send_descriptor(self, descriptor: int) -> None:
        """Send a descriptor over a local socket, with one byte. Raises Disconnected."""
        local = self.local
        assert local is not None
        try:
            socket.send_fds(local, [b"\0"], [descriptor])
        except OSError as error:
            raise Disconnected(str(error)) from None

    def receive_descriptors(self) -> list[int]:
        """The descriptors that come with the next byte, for the caller to close; none if the socket is not local. Raises
        Disconnected."""
        local = self.local
        if local is None:
            return []
        try:
            return list(socket.recv_fds(local, 1, 1)[1])
        except OSError as error:
            raise Disconnected(str(error)) from None

    def send(self, kind: Kind, head: bytes = b"", *payload: Any, more: bool = False) -> None:
        """Send one message; `payload` is any number of C-contiguous buffers, which are sent one after the other.

        Args:
            more: True if another message follows at once; a small one is then held back, and sent together with it.

        Raises:
            Disconnected: the peer cannot be reached any more. TimeoutError: see `set_timeout`.
        """
        views = [memoryview(piece).cast("B") for piece in payload if len(piece)] if payload else []
        nbytes = sum([view.nbytes for view in views]) if views else 0
        with self._sending:
            front = b"".join((self._kept_back, PREFIX.pack(kind, len(head), nbytes), head))
            if more and len(front) + nbytes <= KEPT_BACK_BYTES_MAX:
                self._kept_back = b"".join((front, *views))
                return
            self._kept_back = b""
            if self._joined and nbytes >= strands.CUT_BYTES_MIN:
                parts = strands.cut(views, nbytes, 1 + len(self._joined))
                parts[0].insert(0, memoryview(front))
                self._move(parts, strands.send_now, select.POLLOUT)
                return
            unsent, left = [memoryview(front), *views], len(front) + nbytes
            while left:
                try:
                    sent = self.socket.sendmsg(unsent[:BUFFERS_MAX])
                except OSError as error:
                    self._pause_after(error)
                    continue
                left -= sent
                if left:
                    unsent = beyond(unsent, sent)

    def join(self, others: Sequence[Stream]) -> None:
        """Let the sockets of other streams carry parts of large payloads from now on; this one closes them. The other side does
        the same, with its ends in the same order."""
        self._joined = others

    def _move(self, parts: list[list[memoryview]], step: strands.Step, event: int) -> None:
        """Move the parts of a payload."""
        try:
            strands.move([each.socket for each in (self, *self._joined)], parts, step, event, self._wait)
        except EOFError:
            raise Disconnected("the peer has closed the connection") from None
        except OSError as error:
            if not isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
                raise Disconnected(error.strerror or str(error)) from None
            raise

    def _wait(self, poll: select.poll) -> None:
        while not poll.poll(self._timeout_s * 1000 or None):
            if self._on_pause is None:
                raise TimeoutError
            self._on_pause()

    def send_if_idle(self, kind: Kind) -> None:
        """Send a message of 16 bytes, unless another one is being sent or the peer does not read; never waits."""
        if not self._sending.acquire(blocking=False):
            return
        try:
            if _is_writable(self.socket):
                self.socket.sendmsg((PREFIX.pack(kind, 0, 0),))
        except (OSError, ValueError):  # it has ended, or is closed: the next call on it raises
            return
        finally:
            self._sending.release()

    def receive(self) -> tuple[Kind, bytes, int]:
        """The kind and head of the next message, and the size of its payload, which must be read or skipped next.

        Raises:
            InvalidRequest: the next bytes are no message. Disconnected, TimeoutError: as in `send`.
        """
        if self._end - self._start < PREFIX.size:
            self._read_ahead(PREFIX.size)
        kind, head_bytes, payload_bytes = PREFIX.unpack_from(self._ahead, self._start)
        self._start += PREFIX.size
        known = _KINDS.get(kind)
        if known is None:
            raise InvalidRequest(f"kind: {kind} is not one of the bulk lane's messages")
        if head_bytes > self.head_bytes_max:
            raise InvalidRequest(f"head: has {head_bytes} bytes, the limit is {self.head_bytes_max}")
        head = bytes(self._take(head_bytes))
        if self._joined and payload_bytes >= strands.CUT_BYTES_MIN:
            self._cut_bytes = payload_bytes
        return known, head, payload_bytes

    def read_into(self, *targets: memoryview) -> None:
        """Fill the targets (bytes, C-contiguous), one after the other, with the next bytes: of a payload, with all of it."""
        parts: list[list[memoryview]] | None = None
        if self._cut_bytes:
            parts = strands.cut(targets, self._cut_bytes, 1 + len(self._joined))
            self._cut_bytes = 0
            targets = tuple(parts[0])
        unfilled: list[memoryview] = []
        for target in targets:
            ready = min(self._end - self._start, target.nbytes)
            target[:ready] = self._ahead[self._start : self._start + ready]
            self._start += ready
            if ready < target.nbytes:
                unfilled.append(target[ready:])
        if parts is not None:
            parts[0] = unfilled
            self._move(parts, strands.receive_now, select.POLLIN)
            return
        while unfilled:
            unfilled = beyond(unfilled, self._receive_into(unfilled, socket.MSG_WAITALL))

    @property
    def has_read_ahead(self) -> bool:
        """True if there are bytes that were received, and not read."""
        return self._start != self._end

    def skip(self, count: int) -> None:
        """Skip the next bytes: of a payload, all of it."""
        if self._cut_bytes:
            self._skip_parts()
            return
        while count > 0:
            if self._start == self._end:
                self._start, self._end = 0, self._receive_into([self._ahead], 0)
            step = min(count, self._end - self._start)
            self._start += step
            count -= step

    def _skip_parts(self) -> None:
        scratch = memoryview(bytearray(strands.CUT_BYTES_MIN))
        left = strands.part_sizes(self._cut_bytes, 1 + len(self._joined))
        self._cut_bytes = 0
        ready = min(self._end - self._start, left[0])
        self._start += ready
        left[0] -= ready
        while any(left):
            parts = [[scratch[:size]] if size else [] for size in left]
            left = [max(0, size - scratch.nbytes) for size in left]
            self._move(parts, strands.receive_now, select.POLLIN)

    def _take(self, count: int) -> memoryview:
        """The next bytes; valid until the next call."""
        if count > READ_AHEAD_BYTES:
            whole = bytearray()
            while len(whole) < count:  # a head that is announced but never sent takes no memory
                step = memoryview(bytearray(min(count - len(whole), max(READ_AHEAD_BYTES, len(whole)))))
                self.read_into(step)
                whole += step
            return memoryview(whole)
        if self._end - self._start < count:
            self._read_ahead(count)
        taken = self._ahead[self._start : self._start + count]
        self._start += count
        return taken

    def _read_ahead(self, count: int) -> None:
        """Read ahead until so many bytes are available."""
        if self._start + count > READ_AHEAD_BYTES:
            held = bytes(self._ahead[self._start : self._end])
            self._ahead[: len(held)] = held
            self._start, self._end = 0, len(held)
        while self._end - self._start < count:
            if self._start == self._end:
                self._start = self._end = 0
            self._end += self._receive_into([self._ahead[self._end :]], 0)

    def _receive_into(self, targets: list[memoryview], flags: int) -> int:
        while True:
            if self._deadline < math.inf and time.monotonic() > self._deadline:
                raise TimeoutError
            try:
                if len(targets) == 1 or isinstance(self.socket, TlsSocket):
                    count = self.socket.recv_into(targets[0], 0, flags)
                else:
                    count = self.socket.recvmsg_into(targets[:BUFFERS_MAX], 0, flags)[0]
            except OSError as error:
                self._pause_after(error)
                continue
            if count == 0:
                raise Disconnected("the peer has closed the connection")
            return count

    def _pause_after(self, error: OSError) -> None:
        """Call `on_pause` after a system call that has timed out; returns if the call may be repeated."""
        # Python also raises TimeoutError when TCP has found that the peer is gone.
        if not isinstance(error, (BlockingIOError, TimeoutError)) or error.errno == errno.ETIMEDOUT:
            raise Disconnected(error.strerror or str(error)) from None
        if self._on_pause is None:
            raise TimeoutError from None
        self._on_pause()

    def set_timeout(self, seconds: float) -> None:
        """Set how long one system call may take from now on; 0: for ever. Then TimeoutError is raised, unless `set_patience`
        was called."""
        if seconds == self._timeout_s:
            return
        self._timeout_s = seconds
        if isinstance(self.socket, TlsSocket):
            self.socket.set_timeout(seconds)
            return
        whole, part = divmod(round(seconds * 1_000_000), 1_000_000)
        limit = struct.pack("@ll", whole, part)  # because socket.settimeout polls before each call
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def set_patience(self, seconds: float, on_pause: Callable[[], None]) -> None:
        """Set `on_pause`, which the waiting thread calls when nothing has moved for that long. It raises an error to end the
        wait; if it returns, the wait continues."""
        self._on_pause = on_pause
        self.set_timeout(seconds)
        if isinstance(self.socket, TlsSocket):
            self.socket.on_pause = on_pause

    def set_deadline(self, seconds: float | None) -> None:
        """Set how long all receives from now on may take together; None: for ever."""
        self._deadline = math.inf if seconds is None else time.monotonic() + seconds
        self.set_timeout(seconds or 0)

    def progress(self) -> tuple[int, int] | None:
        """The bytes that the peer has acknowledged, and those received from it, as TCP counts them; None if unknown."""
        if not self.is_tcp or not hasattr(socket, "TCP_INFO"):
            return None
        try:
            info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_PROGRESS.size)
        except OSError:
            return None
        if len(info) != _TCP_PROGRESS.size:
            return None
        sent, received = _TCP_PROGRESS.unpack(info)
        for other in self._joined:
            further = other.progress()
            if further is not None:
                sent, received = sent + further[0], received + further[1]
        return sent, received

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[bytes]:
        """Leave the socket to somebody else for a while, with the bytes that were received already. Nothing is sent meanwhile;
        what is left of them then is given back by `give_back`."""
        with self._sending:
            ahead = bytes(self._ahead[self._start : self._end])
            self._start = self._end = 0
            yield ahead

    def give_back(self, received: bytes) -> None:
        """Have these bytes received next; at most READ_AHEAD_BYTES."""
        self._ahead[: len(received)] = received
        self._start, self._end = 0, len(received)

    def fileno(self) -> int:
        """The descriptor, of the first socket."""
        return self.socket.fileno()

    @property
    def is_single(self) -> bool:
        """True if this is one socket, without TLS."""
        return not (self._joined or isinstance(self.socket, TlsSocket))

    def shut_down(self, how: int) -> None:
        """End one or both directions; wakes threads that wait in them."""
        for other in self._joined:
            other.shut_down(how)
        with contextlib.suppress(OSError):
            self.socket.shutdown(how)

    def close(self) -> None:
        """Close the descriptor. No other thread may be using it."""
        for other in self._joined:
            other.close()
        self.socket.close()


def _keep_alive(sock: socket.socket | TlsSocket) -> None:
    """Let the system check from time to time whether a silent peer still exists."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEP_ALIVE.items():
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _is_writable(sock: socket.socket | TlsSocket) -> bool:
    """True if there is room for some KiB: Linux says so when a third of the buffer is free."""
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLOUT)
    return any(event & select.POLLOUT for _, event in poll.poll(0))


def is_of_this_user(sock: socket.socket) -> bool:
    """True if the other end of a connected local socket (Linux) belongs to the user of this process."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)  # pid, uid, gid
    return int.from_bytes(credentials[4:8], "little") == os.getuid()
