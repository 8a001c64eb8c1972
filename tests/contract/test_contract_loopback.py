"""Connections within a machine do not pace; others are as the system would have them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from psd.contract.loopback import UNPACED, connect_tcp, unpaced
from psd.contract.wire import Stream
from psd_client import SGD, connect

pytestmark = pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="this system does not say")


def control_of(sock: Any) -> bytes:
    """The congestion control of a socket."""
    return bytes(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)).rstrip(b"\0")


@pytest.fixture
def paced() -> bytes:
    """The name of another congestion control, which every socket has at first."""
    with socket.socket() as sock:
        default = control_of(sock)
    if default == UNPACED:
        pytest.skip(f"the system's own choice is {UNPACED.decode()}")
    return default


@pytest.mark.parametrize("host", ["127.0.0.1", "127.5.0.1", "::1"])
def test_unpaced_when_the_address_is_of_loopback_then_does_not_pace(host: str) -> None:
    """What goes within the machine needs none."""
    with socket.socket() as sock:
        unpaced(sock, (host, 1))

        assert control_of(sock) == UNPACED


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "2001:db8::1"])
def test_unpaced_when_the_address_is_another_then_leaves_it_alone(paced: bytes, host: str) -> None:
    """The way to another machine is the system's business."""
    with socket.socket() as sock:
        unpaced(sock, (host, 1))

        assert control_of(sock) == paced


def test_connect_tcp_when_somebody_listens_then_blocks_and_does_not_pace() -> None:
    """It has chosen before it connected, and waits for ever afterwards."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        connect_tcp("localhost", listener.getsockname()[1], 100) as sock,
    ):
        assert sock.gettimeout() is None
        assert control_of(sock) == UNPACED


def test_connect_tcp_when_nobody_listens_then_raises_why() -> None:
    """The error is that of the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    with pytest.raises(ConnectionRefusedError):
        connect_tcp("127.0.0.1", port, 100)


def test_push_pull_when_the_shard_is_on_this_machine_then_neither_end_paces(
    cluster: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shard's sockets take over what its listener has."""
    ends, made = [], Stream.__init__

    def noted(stream: Stream, sock: Any, head_bytes_max: int) -> None:
        made(stream, sock, head_bytes_max)
        if stream.is_tcp:
            ends.append((threading.current_thread().name, control_of(sock)))

    monkeypatch.setattr(Stream, "__init__", noted)
    with connect(cluster(1).servers, 0, 1, transport="tcp") as ps:
        ps.declare({"w": [0.0]}, SGD(lr=1.0))
        ps.push_pull({"w": [1.0]})

    assert len(ends) >= 2
    assert {control for _, control in ends} == {UNPACED}
