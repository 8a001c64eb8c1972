"""A connection between two psd-runs of one job: messages as lines of JSON, over a socket, with or without TLS, or over the two
pipes of an ssh process.

Nothing here waits. Messages that cannot be written at once are kept until the selector says that there is room; a sender of
many messages checks `is_crowded` first. Both sides send something every `BEAT_S` seconds, so that the loss of the other end is
noticed within `SILENCE_S`, on every kind of connection.

Knows lines and time, but not what the messages mean.
"""

from __future__ import annotations

import json
import os
import select
import ssl
import threading
import time
from collections import deque
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]

BEAT_S = 5.0
"""Seconds between two signs of life."""

SILENCE_S = 30.0
"""Seconds of silence after which the other side counts as lost: long enough for a machine that swaps."""

FLUSH_S = 0.05
"""Seconds until a connection that had no room is tried again."""

MESSAGE_BYTES_MAX = 1 << 20
"""Limit of a line that is received; the largest are pieces of output."""

PREAMBLE_LINES = 3

CROWDED_BYTES = 1 << 20

_READ_BYTES = 1 << 16


def _parsed(line: bytes | bytearray) -> Message | None:
    """The message in a line; None if it is not a message."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):  # brackets in brackets in brackets
        return None
    return found if isinstance(found, dict) else None


class NodeLink:
    """One end of a connection.

    Args:
        reader, writer: descriptors; the same one for a socket. They are made non-blocking; the caller closes them.
        tls: the TLS socket; None without TLS.
        has_preamble: other lines, such as those of a login shell, may come before the first message.

    Attributes:
        message_bytes_max: limit of a received line. silence_s: seconds of silence after which the other side counts as lost.
        preamble: the last of the lines before the first message.
    """

    def __init__(self, reader: int, writer: int, tls: ssl.SSLSocket | None = None, *, has_preamble: bool = False) -> None:
        self.preamble: deque[str] = deque(maxlen=PREAMBLE_LINES)
        self._is_in_preamble = has_preamble
        self.reader, self.writer = reader, writer
        self.message_bytes_max = MESSAGE_BYTES_MAX
        self.silence_s = SILENCE_S
        self._tls = tls
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        if tls is not None:
            tls.setblocking(False)  # a timeout that it was dialled with would hold
        self._received = bytearray()
        self._unsent = bytearray()
        self._is_broken = False
        self._lock = threading.Lock()  # of the connection, and of what is unsent: signs of life come from a thread of their own
        self._heard_at = self._said_at = time.monotonic()

    @property
    def has_unsent(self) -> bool:
        """True if messages wait to be sent by `flush`, when there is room."""
        return bool(self._unsent)

    @property
    def is_crowded(self) -> bool:
        """True if many bytes wait, because the other side does not read."""
        return len(self._unsent) > CROWDED_BYTES

    def send(self, message: Message) -> None:
        """Send a message, now or by a later `flush`. On a broken connection it is lost."""
        with self._lock:
            self._unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send as much of the waiting messages as there is room for."""
        with self._lock:
            if self._is_broken:
                self._unsent.clear()
            try:
                while self._unsent:
                    del self._unsent[: self._write()]
                    self._said_at = time.monotonic()
            except BlockingIOError:
                return
            except OSError:
                self._is_broken = True
                self._unsent.clear()

    def end(self) -> None:
        """Send nothing from now on: the descriptors are about to be closed, and their numbers may then be reused."""
        with self._lock:
            self._is_broken = True

    def receive(self) -> list[Message] | None:
        """Receive the messages that have come; None if the connection has ended, is broken, or has brought something else."""
        try:
            with self._lock:
                data = self._read()
        except BlockingIOError:
            return None if self._is_broken else []
        except OSError:
            return None
        self._heard_at = time.monotonic()
        self._received += data
        *lines, rest = self._received.split(b"\n")
        self._received = bytearray(rest)
        if not data or any(len(line) > self.message_bytes_max for line in (*lines, rest)):
            return None
        found = []
        for line in lines:
            message = _parsed(line)
            if message is not None:
                self._is_in_preamble = False
                found.append(message)
            elif not self._is_in_preamble:
                return None
            elif words := line.decode(errors="replace").strip():
                self.preamble.append(words)
        return found

    def _read(self) -> bytes:
        """Read the available bytes, at most one TLS record. Raises BlockingIOError if there are none."""
        if self._tls is None:
            return os.read(self.reader, _READ_BYTES)
        try:
            return self._tls.recv(_READ_BYTES)  # makes the handshake first
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def _write(self) -> int:
        """Write some of the unsent bytes. Raises BlockingIOError if there is no room."""
        if self._tls is None:
            return os.write(self.writer, self._unsent)
        try:
            return self._tls.send(self._unsent)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def wait(self) -> list[Message]:
        """Wait for the first messages, at most `SILENCE_S`; return them, or an empty list."""
        give_up_at = time.monotonic() + SILENCE_S
        while (left_s := give_up_at - time.monotonic()) > 0:
            select.select([self.reader], [], [], left_s)
            messages = self.receive()
            if messages is None:
                return []
            if messages:
                return messages
        return []

    def beat_at(self) -> float:
        """The time at which to call `beat`."""
        return min(self._said_at + BEAT_S, self._heard_at + self.silence_s)

    def beat(self, now: float) -> bool:
        """Send a sign of life if it is time; return False if the other side has been silent for too long.

        It is not silent if bytes have come that were not received yet because this side was held up.
        """
        if now >= self._said_at + BEAT_S:
            self._said_at = now  # one that waits for room needs no company
            if not self._unsent:
                self.send({})
        if now < self._heard_at + self.silence_s:
            return True
        incoming = select.poll()
        incoming.register(self.reader, select.POLLIN)
        return bool(incoming.poll(0))
