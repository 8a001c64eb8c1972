"""Streams whose peer is slow, silent, or gone: who waits is asked now and then, and each end has its own error."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from psd.contract.wire import PREFIX, Disconnected, Kind, Stream

HEAD_BYTES_MAX = 1 << 20
MUCH = 8 << 20
"""More than the buffers of both sides hold."""
PAUSE_S = 0.02


@pytest.fixture
def streams() -> Iterator[tuple[Stream, Stream]]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    ends = Stream(here, HEAD_BYTES_MAX), Stream(there, HEAD_BYTES_MAX)
    yield ends
    for end in ends:
        end.close()


class GivenUp(Exception):
    """Raised by whoever is asked."""


def after(count: int, action: Callable[[], None]) -> Callable[[], None]:
    """A function for set_patience: waits so many pauses, then acts."""
    left = [count]

    def on_pause() -> None:
        left[0] -= 1
        if left[0] == 0:
            action()

    return on_pause


def give_up() -> None:
    raise GivenUp


@pytest.mark.parametrize("wait", ["receive", "send"])
def test_whoever_waits_is_asked_after_each_pause(streams: tuple[Stream, Stream], wait: str) -> None:
    """To wait on is to return; anything else is raised where the wait is."""
    here, _ = streams
    here.set_patience(PAUSE_S, after(3, give_up))

    with pytest.raises(GivenUp):
        if wait == "send":
            here.send(Kind.FRAME, b"", bytes(MUCH))
        else:
            here.receive()


def test_a_message_that_was_interrupted_by_pauses_arrives_whole(streams: tuple[Stream, Stream]) -> None:
    """The peer begins to read late, and the sender continues where it was."""
    here, there = streams
    payload = memoryview(bytes(range(256)) * (MUCH // 256))
    may_read = threading.Event()
    here.set_patience(PAUSE_S, after(3, may_read.set))
    received: list[Any] = []

    def read() -> None:
        assert may_read.wait(100)
        received.append(there.receive())
        target = memoryview(bytearray(MUCH))
        there.read_into(target)
        received.append(target == payload)

    reader = threading.Thread(target=read)
    reader.start()
    here.send(Kind.FRAME, b"head", payload)
    reader.join(100)

    assert received == [(Kind.FRAME, b"head", MUCH), True]


class Dead:
    """A socket whose peer TCP has found to be gone."""

    family = getattr(socket, "AF_UNIX", None)

    def setsockopt(self, *_: Any) -> None:
        pass

    def recv_into(self, *_: Any) -> int:
        raise OSError(errno.ETIMEDOUT, "Connection timed out")  # which Python makes a TimeoutError

    def sendmsg(self, _: Any) -> int:
        raise OSError(errno.ETIMEDOUT, "Connection timed out")


def test_a_peer_that_tcp_has_found_to_be_gone_is_disconnected() -> None:
    """It is not a wait that has reached its limit, for which Python has the same class of error."""
    dead: Any = Dead()
    stream = Stream(dead, HEAD_BYTES_MAX)

    with pytest.raises(Disconnected, match="timed out"):
        stream.receive()
    with pytest.raises(Disconnected, match="timed out"):
        stream.send(Kind.CALL)


def test_progress_is_what_has_come_and_what_has_arrived(streams: tuple[Stream, Stream]) -> None:
    """It counts whether the peer's program reads or not; nothing moves while nothing is said."""
    here, there = streams
    before, again = here.progress(), here.progress()
    assert before is not None
    assert before == again

    there.send(Kind.ALIVE)
    here.receive()
    heard = here.progress()
    assert heard is not None
    assert heard[1] - before[1] == PREFIX.size

    local, other = socket.socketpair()
    with other:
        stream = Stream(local, HEAD_BYTES_MAX)
        assert stream.progress() is None
        stream.close()


def test_a_word_in_between_never_waits_and_never_cuts_into_a_message(streams: tuple[Stream, Stream]) -> None:
    """Nothing is said to a peer that does not read, nor while another thread is in the middle of a message."""
    here, there = streams
    here.send_if_idle(Kind.ALIVE)
    assert there.receive()[0] is Kind.ALIVE

    sending = threading.Thread(target=here.send, args=(Kind.FRAME, b"", bytes(MUCH)))
    sending.start()
    there.receive()  # its first bytes have come, and the rest does not fit into the buffers
    for _ in range(3):
        here.send_if_idle(Kind.ALIVE)
    there.skip(MUCH)
    sending.join(100)
    here.send(Kind.REPLY)
    assert there.receive()[0] is Kind.REPLY


def test_a_word_to_a_connection_that_was_closed_meanwhile_is_none(streams: tuple[Stream, Stream]) -> None:
    """Whoever says it to all connections goes on with the next one."""
    streams[0].close()

    streams[0].send_if_idle(Kind.ALIVE)


def test_a_connection_asks_whether_an_idle_peer_is_there(streams: tuple[Stream, Stream]) -> None:
    """At both ends: twenty seconds of silence, at most."""
    for stream in streams:
        assert stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, interval, count = (
            stream.socket.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
        )
        assert idle + interval * count <= 20
