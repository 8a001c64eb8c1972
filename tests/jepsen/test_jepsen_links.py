"""Each fault of a link, on real sockets: whom it strikes, when, and that it heals."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
from links import Link, Network
from plan import Fault

SOON_S = 0.3
"""What must not come has not come by then."""


class Echo:
    """A shard that says what it hears."""

    def __init__(self) -> None:
        self.listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        self.ports = [int(listener.getsockname()[1]) for listener in self.listeners]
        self.ended = threading.Semaphore(0)
        for listener in self.listeners:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                sock, _ = listener.accept()
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, suppress(OSError):
            while data := sock.recv(1 << 16):
                sock.sendall(data)
        self.ended.release()

    def close(self) -> None:
        for listener in self.listeners:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    echo = Echo()
    yield echo
    echo.close()


@pytest.fixture
def link(echo: Echo) -> Iterator[Link]:
    network = Network()
    yield network.link(("127.0.0.1", echo.ports[0]), echo.ports[1])
    network.close()


class Worker:
    """A connection to a link's port for control."""

    def __init__(self, link: Link) -> None:
        host, _, port = link.address.rpartition(":")
        self.sock = socket.create_connection((host, int(port)), 10)

    def __enter__(self) -> Worker:
        assert self.asks(b"hello") == b"hello"
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def asks(self, words: bytes) -> bytes:
        """What the shard says, as far as it says so much."""
        self.sock.sendall(words)
        return self.hears(len(words))

    def hears(self, size: int, within_s: float = 10) -> bytes:
        self.sock.settimeout(within_s)
        heard = b""
        while len(heard) < size and (piece := self.sock.recv(size - len(heard))):
            heard += piece
        return heard


def test_a_link_when_nothing_is_wrong_then_it_passes_data_and_farewells(link: Link) -> None:
    """A closed sending side is how a worker gives a call up."""
    with Worker(link) as worker:
        data = bytes(range(256)) * 4096
        threading.Thread(target=worker.sock.sendall, args=(data,), daemon=True).start()
        assert worker.hears(len(data)) == data
        worker.sock.shutdown(socket.SHUT_WR)
        assert worker.hears(1) == b""


def test_refuse_then_connections_are_reset_and_new_ones_refused_until_it_ends(link: Link) -> None:
    fault = Fault("link-refuse", 0, 1, way="control")
    with Worker(link) as worker:
        assert link.begin(fault) == 1
        with pytest.raises(ConnectionResetError):
            worker.hears(1)
        with pytest.raises(ConnectionRefusedError):
            Worker(link)
        link.end(fault)
        with Worker(link):
            pass


def test_reset_when_it_strikes_the_other_way_then_this_one_goes_on(link: Link) -> None:
    with Worker(link) as worker:
        assert link.begin(Fault("link-reset", 0, 0, way="bulk")) == 0
        assert worker.asks(b"?") == b"?"
        assert link.begin(Fault("link-reset", 0, 0, way="control")) == 1
        with pytest.raises(ConnectionResetError):
            worker.hears(1)


def test_truncate_then_a_part_passes_before_the_reset(link: Link) -> None:
    with Worker(link) as worker:
        link.begin(Fault("link-truncate", 0, 1, way="control", direction="down", part=0.5))
        worker.sock.sendall(b"12345678")
        assert worker.hears(4) == b"1234"
        with pytest.raises(ConnectionResetError):
            worker.hears(4)


def test_delay_then_pieces_are_late_and_whole(link: Link) -> None:
    fault = Fault("link-delay", 0, 1, way="control", direction="down", part=2 * SOON_S)
    with Worker(link) as worker:
        link.begin(fault)
        worker.sock.sendall(b"late")
        with pytest.raises(TimeoutError):
            worker.hears(4, SOON_S)
        assert worker.hears(4) == b"late"


def test_black_hole_then_nothing_passes_and_all_of_it_afterwards(link: Link) -> None:
    fault = Fault("link-black-hole", 0, 1, way="control")
    with Worker(link) as worker:
        link.begin(fault)
        worker.sock.sendall(b"patience")
        with pytest.raises(TimeoutError):
            worker.hears(8, SOON_S)
        link.end(fault)
        assert worker.hears(8) == b"patience"


@pytest.mark.parametrize("side", ["worker", "shard"])
def test_half_open_then_one_side_hears_at_once_and_the_other_by_its_keep_alive(link: Link, echo: Echo, side: str) -> None:
    """What it sends is not acknowledged. New connections work."""
    with Worker(link) as worker:
        for option, value in {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 1}.items():
            worker.sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        worker.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        link.begin(Fault("link-half-open", 0, 0, way="control", side=side))
        if side == "worker":
            assert echo.ended.acquire(timeout=10)
            with pytest.raises(OSError, match="timed out"):
                worker.hears(1, 30)
        else:
            with pytest.raises(ConnectionResetError):
                worker.hears(1)
            assert not echo.ended.acquire(timeout=SOON_S)
        with Worker(link):
            pass
