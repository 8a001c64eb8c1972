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
from free_ports import free_port
from name_server import HOST, NameServer

import psd_client
from psd.contract.config import ServerConfig
from psd.rim.server import ShardServer
from psd_client.lanes import grpc_channel

NAME = "psd-0.psd"
ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
STEPS_EACH = 3


class AskedServer(NameServer):
    """Also counts the channels that are opened; on_open(how many by now) is called before each of them asks for its name.

    Attributes:
        stale: addresses that Python's resolver gives before those in `names`, each once.
    """

    opened = 0
    stale: list[str] = []
    on_open: Callable[[int], object] = staticmethod(lambda count: None)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[AskedServer]:
    """A name server that this process asks: gRPC's own resolver as well as Python's."""
    server = AskedServer()
    open_channel, getaddrinfo = grpc_channel.open_channel, socket.getaddrinfo

    def opened(address: str, *args: Any) -> Any:
        server.opened += 1
        server.on_open(server.opened)
        return open_channel(f"dns://{HOST}:{server.port}/{address}", *args)

    def lookup(host: str, *args: Any, **kwargs: Any) -> Any:
        is_stale = server.stale and host in server.names
        return getaddrinfo(server.stale.pop() if is_stale else server.names.get(host, host), *args, **kwargs)

    monkeypatch.setattr(grpc_channel, "open_channel", opened)
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    yield server
    server.close()


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Callable[..., ShardServer]]:
    """Starts a shard, or starts it again at another address, at the same port, once it has been stopped."""
    lives: list[ShardServer] = []
    port = free_port()

    def start(host: str, index: int = 0, count: int = 1) -> ShardServer:
        state_dir = str(tmp_path / f"arena-{index}")
        lives.append(ShardServer(ServerConfig(index, count, listen=f"{host}:{port}", state_dir=state_dir)))
        lives[-1].start()
        return lives[-1]

    yield start
    for server in lives:
        server.stop()


@pytest.mark.parametrize("transport", ["grpc", "tcp"])
def test_a_shard_that_returns_at_another_address_is_found_there_and_has_lost_nothing(names, life, transport):
    """The name is asked for anew after a failure, soon, and every push has counted once."""
    shard = life(ADDRESSES[0])
    names.names[NAME] = ADDRESSES[0]
    may_go_on = threading.Semaphore(0)
    last = STEPS_EACH * len(ADDRESSES)

    def work() -> np.ndarray:
        servers = f"{NAME}:{shard.address.rpartition(':')[2]}"
        with psd_client.connect(servers, 0, 1, transport=transport, retry_timeout=60) as ps:
            params = ps.declare({"w": np.zeros(8, np.float32)}, psd_client.SGD(lr=1.0))
            for _ in range(last):
                assert may_go_on.acquire(timeout=100)
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

        assert total.result(200).tolist() == [-last] * 8


def test_a_channel_that_does_not_reach_its_shard_is_replaced(names, life, monkeypatch):
    """The resolver of a new channel asks at once; that of the old one had learnt to be patient."""
    monkeypatch.setattr(grpc_channel, "UNREACHED_S", 0.2)
    shard = life(ADDRESSES[0])
    names.on_open = lambda count: count == 2 and names.names.update({NAME: ADDRESSES[0]})

    with psd_client.connect(f"{NAME}:{shard.address.rpartition(':')[2]}", 0, 1, retry_timeout=60):
        assert names.opened >= 2


def test_an_address_that_only_python_still_has_from_before_does_not_end_the_tcp_lane(names, life):
    """Each resolver has its own memory: gRPC may know already where the shard is now. TCP is tried again until it is right."""
    shard = life(ADDRESSES[0])
    names.names[NAME] = ADDRESSES[0]
    with psd_client.connect(f"{NAME}:{shard.address.rpartition(':')[2]}", 0, 1, transport="tcp", retry_timeout=60) as ps:
        ps.declare({"w": np.zeros(8, np.float32)}, psd_client.SGD(lr=1.0))
        ps.push_pull({"w": np.ones(8, np.float32)})
        shard.stop()
        life(ADDRESSES[1])
        names.names[NAME] = ADDRESSES[1]
        names.stale = [ADDRESSES[0]] * 3

        params = ps.push_pull({"w": np.ones(8, np.float32)})

        assert params["w"].tolist() == [-2.0] * 8
        assert names.stale == []
        assert ps.transports == ["tcp"]


@pytest.mark.parametrize("transport", ["grpc", "tcp"])
def test_shards_that_have_exchanged_their_addresses_are_told_apart(names, life, transport):
    """Addresses are given out again. A shard that says that it is another one is not where the name will soon lead."""
    lives = [life(ADDRESSES[index], index, 2) for index in range(2)]
    port = lives[0].address.rpartition(":")[2]
    servers = [f"psd-{index}.psd" for index in range(2)]
    names.names.update(zip(servers, ADDRESSES, strict=False))
    with psd_client.connect(",".join(f"{s}:{port}" for s in servers), 0, 1, transport=transport, retry_timeout=60) as ps:
        ps.declare({"w": np.zeros(1000, np.float32)}, psd_client.SGD(lr=1.0))
        ps.push_pull({"w": np.ones(1000, np.float32)})
        for shard in lives:
            shard.stop()
        for index in range(2):
            life(ADDRESSES[1 - index], index, 2)
        learning = threading.Timer(0.5, lambda: names.names.update(zip(servers, ADDRESSES[1::-1], strict=True)))
        learning.start()

        params = ps.push_pull({"w": np.ones(1000, np.float32)})

        assert np.unique(params["w"]).tolist() == [-2.0]
    learning.join()
