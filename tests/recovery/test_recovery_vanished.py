"""Connections whose other end vanishes without a word, so that not even TCP answers: both sides notice, and go on."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from proxy import Proxy
from shard_processes import ShardProcess
from tcp_sockets import connected_sockets
from waiting import wait_until

import psd_client

pytestmark = [pytest.mark.process, pytest.mark.slow]

SIZE = 4_000_000
"""float32: what no buffers of sockets hold."""

NOTICED_IN_S = 120
"""Twenty seconds, a second attempt, and what a busy machine adds; before, it took until TCP gave up, after many minutes."""


class Thread(threading.Thread):
    """A worker's, whose result is waited for."""

    def __init__(self, target: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call, self._value = target, None
        self.start()

    def run(self) -> None:
        self._value = self._call()

    def result(self) -> Any:
        self.join(NOTICED_IN_S)
        assert not self.is_alive(), "it has not noticed"
        return self._value


@pytest.fixture
def shard(shard_processes: Callable[..., list[ShardProcess]]) -> ShardProcess:
    """Its lease is long enough for a worker that has noticed to go on as the same session."""
    return shard_processes(1, "--lease", "60")[0]


@pytest.fixture
def proxy(shard: ShardProcess) -> Iterator[Proxy]:
    made = Proxy(shard.address, shard.bulk_port)
    yield made
    made.close()


def connect(address: str, rank: int = 0, world_size: int = 1, transport: str = "tcp") -> psd_client.ParameterServer:
    ps = psd_client.connect(address, rank, world_size, transport=transport, retry_timeout=60)
    ps.declare({"w": np.zeros(SIZE, np.float32)}, psd_client.SGD(lr=1.0), reduce="sum")
    return ps


def pushed(ps: psd_client.ParameterServer) -> Any:
    return Thread(lambda: set(ps.push_pull({"w": np.full(SIZE, -1, np.float32)})["w"].tolist()))


until = partial(wait_until, timeout_s=NOTICED_IN_S)


@pytest.mark.parametrize("only_bulk", [pytest.param(True, marks=pytest.mark.chaos, id="bulk"), pytest.param(False, id="all")])
def test_worker_when_the_shard_vanishes_while_it_sends_then_goes_on_over_another_connection(
    shard: ShardProcess, proxy: Proxy, only_bulk: bool
) -> None:
    """Blocked in the middle of its gradient; the control plane is of no help where it works."""
    with connect(proxy.address) as ps:
        lane: Any = ps._worker._shards.lanes[0]
        shard.signal(signal.SIGSTOP)
        pushing = pushed(ps)
        until(lane._bulk._open._stream._sending.locked)
        proxy.vanish(shard.bulk_port if only_bulk else None)
        shard.signal(signal.SIGCONT)

        assert pushing.result() == {1.0}


@pytest.mark.parametrize("only_bulk", [pytest.param(True, marks=pytest.mark.chaos, id="bulk"), pytest.param(False, id="all")])
def test_worker_when_the_shard_vanishes_while_it_waits_then_goes_on_over_another_connection(
    shard: ShardProcess, proxy: Proxy, only_bulk: bool
) -> None:
    """Everything has arrived, and it waits for another worker."""
    others = Thread(lambda: connect(shard.address, 1, 2))
    with connect(proxy.address, 0, 2) as ps, others.result() as other:
        lane: Any = ps._worker._shards.lanes[0]
        pulling = pushed(ps)
        until(lambda: len(shard.status().waits) == 1)
        before = lane._bulk._open
        proxy.vanish(shard.bulk_port if only_bulk else None)
        until(lambda: lane._bulk._open is not before)
        pushing = pushed(other)

        assert (pulling.result(), pushing.result()) == ({2.0}, {2.0})


def connections_from(ports: set[int], shard: ShardProcess) -> set[str]:
    """TCP connections that the shard's process has open to one of these ports."""
    own = set()
    for link in Path(f"/proc/{shard.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            own.add(str(link.readlink()))
    return {name for name, port in connected_sockets(shard.pid).items() if port in ports and name in own}


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_shard_when_a_worker_vanishes_while_it_is_sent_to_then_lets_go_of_it_and_a_successor_gets_in(
    shard: ShardProcess, proxy: Proxy, transport: str
) -> None:
    """The successor at once; and the dead one's connections are gone, with the threads that were blocked, soon after."""
    gone = psd_client.connect(proxy.address, 0, 1, transport=transport, retry_timeout=0)
    gone.declare({"w": np.zeros(SIZE, np.float32)}, psd_client.SGD(lr=1.0), reduce="sum")

    def push() -> None:
        with pytest.raises(psd_client.PsdError):
            gone.push_pull({"w": np.full(SIZE, -1, np.float32)})

    stuck = Thread(push)
    proxy.vanish()
    ports = proxy.own_ports()
    assert connections_from(ports, shard)

    with connect(shard.address, transport=transport) as successor:
        pushed(successor).result()
        stuck.result()
        gone.close()

        until(lambda: not connections_from(ports, shard))
