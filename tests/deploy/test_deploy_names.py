"""Shards that come back under their name at another address, as pods do: workers find them there."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from name_server import HOST, NameServer

import psd_client
from psd.contract.config import ServerConfig
from psd.rim.server import ShardServer
from psd_client import grpc_lane

NAME = "psd-0.psd"
ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
STEPS_EACH = 3


class AskedServer(NameServer):
    """Also counts the channels that are opened; on_open(how many by now) is called before each of them asks for its name."""

    opened = 0
    on_open: Callable[[int], object] = staticmethod(lambda count: None)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[AskedServer]:
    """A name server that this process asks: gRPC's own resolver as well as Python's."""
    server = AskedServer()
    open_channel, getaddrinfo = grpc_lane.open_channel, socket.getaddrinfo

    def opened(address: str, *args: Any) -> Any:
        server.opened += 1
        server.on_open(server.opened)
        return open_channel(f"dns://{HOST}:{server.port}/{address}", *args)

    def lookup(host: str, *args: Any, **kwargs: Any) -> Any:
        return getaddrinfo(server.names.get(host, host), *args, **kwargs)

    monkeypatch.setattr(grpc_lane, "open_channel", opened)
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    yield server
    server.close()


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Callable[[str], ShardServer]]:
    """Starts the same shard at another address, at the same port, once it has been stopped."""
    lives: list[ShardServer] = []
    with socket.create_server((ADDRESSES[0], 0)) as free:
        port = free.getsockname()[1]

    def start(host: str) -> ShardServer:
        lives.append(ShardServer(ServerConfig(0, 1, listen=f"{host}:{port}", state_dir=str(tmp_path / "arena"))))
        lives[-1].start()
        return lives[-1]

    yield start
    lives[-1].stop()


@pytest.mark.parametrize("transport", ["grpc", "tcp"])
def test_a_shard_that_returns_at_another_address_is_found_there_and_has_lost_nothing(names, life, transport):
    """The name is asked for anew after a failure, soon, and every push has counted once."""
    shard = life(ADDRESSES[0])
    names.names[NAME] = ADDRESSES[0]
    may_go_on = threading.Semaphore(0)
    last = STEPS_EACH * len(ADDRESSES)

    def work() -> np.ndarray:
        servers = f"{NAME}:{shard.address.rpartition(':')[2]}"
        with psd_client.connect(servers, 0, 1, transport=transport, retry_timeout=20) as ps:
            params = ps.declare({"w": np.zeros(8, np.float32)}, psd_client.SGD(lr=1.0))
            for _ in range(last):
                assert may_go_on.acquire(timeout=30)
                params = ps.push_pull({"w": np.ones(8, np.float32)})
            assert ps.transports[0].startswith(transport)
        return params["w"]

    with ThreadPoolExecutor(1) as pool:
        total = pool.submit(work)
        for address in ADDRESSES[1:]:
            may_go_on.release(STEPS_EACH)
            shard.stop()
            names.names.pop(NAME)
            shard = life(address)
            names.names[NAME] = address
        may_go_on.release(STEPS_EACH)

        assert total.result(60).tolist() == [-last] * 8


def test_a_channel_that_does_not_reach_its_shard_is_replaced(names, life, monkeypatch):
    """The resolver of a new channel asks at once; that of the old one had learnt to be patient."""
    monkeypatch.setattr(grpc_lane, "UNREACHED_S", 0.2)
    shard = life(ADDRESSES[0])
    names.on_open = lambda count: count == 2 and names.names.update({NAME: ADDRESSES[0]})

    with psd_client.connect(f"{NAME}:{shard.address.rpartition(':')[2]}", 0, 1, retry_timeout=10):
        assert names.opened == 2
