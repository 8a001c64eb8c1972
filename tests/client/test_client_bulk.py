"""The lanes that a worker chooses: which, why not a better one, and that all of them do the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from client_faults import Thread, until
from scripted_shard import ToldLane

import psd_client
from psd.contract.config import ConfigError
from psd.contract.errors import NonFiniteGradient, ShardUnavailable, WaitTimeout
from psd.rim.server import ShardServer
from psd.state.tickets import WaitKind
from psd.v1 import data_pb2, job_pb2
from psd.v1.data_pb2 import PushHeader
from psd_client.lanes.transport import Call, Scope

TRANSPORTS = ("shm", "tcp", "grpc")
ELEMENTS = 700_000  # three blocks
SMALL = {"w": np.zeros(ELEMENTS, np.float32), "b": np.ones(5, np.float64), "empty": np.zeros((0, 3), np.float32)}


def gradients(rank: int, step: int) -> dict[str, Any]:
    random = np.random.default_rng([rank, step])
    made = {"w": random.standard_normal(ELEMENTS).astype(np.float32), "b": random.standard_normal(5)}
    return made if step % 2 else {"b": made["b"]}  # a tensor without a gradient


def train(servers: str, rank: int, world_size: int, transport: str, steps: int = 4) -> dict[str, Any]:
    with psd_client.connect(servers, rank, world_size, transport=transport, wait_timeout=60) as ps:
        ps.declare(SMALL, psd_client.SGD(lr=0.1, momentum=0.9), aggregation="exact")
        for step in range(steps):
            ps.push_pull(gradients(rank, step), weight=1 + rank)
        ps.push(gradients(rank, steps))
        assert [lane.split()[0] for lane in ps.transports] == [transport] * len(servers.split(","))
        return ps.pull()


def connection_of(server: ShardServer, rank: int = 0) -> Any:
    """The shard's end of a worker's bulk connection."""
    return server._bulk._by_rank[rank]


def test_train_when_the_transport_differs_then_the_bits_do_not(cluster: Callable[..., Any]) -> None:
    results = []
    for transport in TRANSPORTS:
        servers = cluster(2).servers
        workers = [Thread(lambda rank=rank, s=servers, t=transport: train(s, rank, 2, t)) for rank in range(2)]
        results.append([worker.result() for worker in workers])

    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            assert {name: value.tobytes() for name, value in mine.items()} == {n: v.tobytes() for n, v in theirs.items()}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_train_when_the_workers_transports_differ_then_they_train_together(cluster: Callable[..., Any], transport: str) -> None:
    servers = cluster(2).servers
    workers = [Thread(lambda r=rank, t=t: train(servers, r, 2, t)) for rank, t in enumerate(("shm", transport))]

    first, second = (worker.result() for worker in workers)

    assert first["w"].tobytes() == second["w"].tobytes()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_status_when_a_worker_trains_then_shows_its_transport(cluster: Callable[..., Any], transport: str) -> None:
    running = cluster(1, lease_s=2.0)
    with psd_client.connect(running.servers, 0, 1, transport=transport) as ps:
        ps.declare(SMALL, psd_client.SGD(lr=1.0))
        until(lambda: running.shards[0].shard._core.members.worker(0).transport == transport)


def test_connect_when_the_shard_is_not_on_this_machine_then_takes_tcp_and_says_why(cluster: Callable[..., Any]) -> None:
    running = cluster(1)
    running.shards[0]._bulk.local_name = "psd-of-another-machine"

    with psd_client.connect(running.servers, 0, 1) as ps:
        ps.declare(SMALL, psd_client.SGD(lr=1.0))

        assert ps.transports == ["tcp (not shm: the shard is on another machine)"]


def test_connect_when_the_bulk_port_cannot_be_reached_then_takes_grpc_and_says_why(cluster: Callable[..., Any]) -> None:
    running = cluster(1)
    running.shards[0]._bulk.local_name = ""
    running.shards[0]._bulk.tcp_port = 1

    with psd_client.connect(running.servers, 0, 1) as ps:
        ps.declare(SMALL, psd_client.SGD(lr=1.0))
        ps.push_pull(gradients(0, 1))

        (transport,) = ps.transports
        assert transport.startswith("grpc (not shm: the shard's system has no memory files; not tcp: port 1: ")


def test_connect_when_the_bulk_port_is_off_then_only_a_forced_tcp_fails(cluster: Callable[..., Any]) -> None:
    servers = cluster(1, bulk_port=None).servers

    with psd_client.connect(servers, 0, 1, transport="tcp") as ps, pytest.raises(ConfigError, match="--bulk-port off"):
        ps.declare(SMALL, psd_client.SGD(lr=1.0))
    with psd_client.connect(servers, 0, 1) as ps:
        ps.declare(SMALL, psd_client.SGD(lr=1.0))
        assert ps.transports == ["shm"]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_push_pull_when_the_connection_broke_then_opens_another_and_counts_once(
    cluster: Callable[..., Any], transport: str
) -> None:
    running = cluster(2)
    with psd_client.connect(running.servers, 0, 1, transport=transport) as ps:
        ps.declare({"w": np.zeros(ELEMENTS)}, psd_client.SGD(lr=1.0))
        for step in range(1, 4):
            connection_of(running.shards[step % 2]).hang_up()
            assert ps.push_pull({"w": np.full(ELEMENTS, -1.0)})["w"].tolist() == [float(step)] * ELEMENTS


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_declare_when_a_transport_is_chosen_then_the_initial_values_go_by_it(
    cluster: Callable[..., Any], transport: str
) -> None:
    running = cluster(2)
    with psd_client.connect(running.servers, 0, 1, transport=transport) as ps:
        ps.declare({"w": np.arange(ELEMENTS, dtype=np.float32)}, psd_client.SGD(lr=1.0))

        received = [shard.shard.lane_counts(lane).received_bytes for lane in TRANSPORTS for shard in running.shards]
        assert sum(received[2 * TRANSPORTS.index(transport) :][:2]) == sum(received) == ELEMENTS * 4
        assert ps.pull()["w"].tolist() == list(range(ELEMENTS))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_declare_when_the_connection_breaks_amid_the_initial_values_then_offers_them_again(
    cluster: Callable[..., Any], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first offer had written is given back, and the second one is whole."""
    running = cluster(1)
    server = running.shards[0]
    admission, taken = server.shard.admission, []

    def initialize_block(init: Any, index: int, payload: memoryview) -> None:
        taken.append((init, index))
        if len(taken) == 2:
            connection_of(server).cut()
            raise OSError("the connection broke")
        take(init, index, payload)

    take = admission.initialize_block
    monkeypatch.setattr(admission, "initialize_block", initialize_block)
    with psd_client.connect(running.servers, 0, 1, transport=transport) as ps:
        ps.declare({"w": np.arange(ELEMENTS, dtype=np.float32)}, psd_client.SGD(lr=1.0))
        assert ps.pull()["w"].tolist() == list(range(ELEMENTS))

    assert [index for _, index in taken] == [0, 1, *range(len(server.shard._core.declared().blocks))]
    assert taken[0][0].pages == {}
    assert server.shard._core.declared().arena.held_bytes == 0


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_pull_when_the_connection_breaks_while_it_waits_then_goes_on(cluster: Callable[..., Any], transport: str) -> None:
    running = cluster(1)

    def work(rank: int) -> Any:
        with psd_client.connect(running.servers, rank, 2, transport=transport, wait_timeout=60) as ps:
            ps.declare({"w": np.zeros(ELEMENTS)}, psd_client.SGD(lr=1.0), reduce="sum")
            if rank == 1:
                assert may_push.wait(100)
            return ps.push_pull({"w": np.full(ELEMENTS, -1.0)})["w"]

    may_push = threading.Event()
    workers = [Thread(lambda rank=rank: work(rank)) for rank in range(2)]
    core = running.shards[0].shard._core
    for _ in range(3):
        until(lambda: [wait.kind for wait in core.waiting.open(0)] == [WaitKind.ROUND])
        (waiting,) = core.waiting.open(0)
        connection_of(running.shards[0]).hang_up()
        until(lambda before=waiting: before not in core.waiting.open(0))
    may_push.set()

    for worker in workers:
        assert set(worker.result().tolist()) == {2.0}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_push_pull_when_nobody_else_comes_then_times_out_and_may_be_called_again(
    cluster: Callable[..., Any], transport: str, impatient: Any
) -> None:
    running = cluster(1)
    pair = [Thread(lambda rank=rank: _declared(running.servers, rank, transport, reduce="sum")) for rank in range(2)]
    with pair[0].result() as ps, pair[1].result() as other:
        with impatient(), pytest.raises(WaitTimeout, match="worker 1"):
            ps.push_pull({"w": np.full(ELEMENTS, -1.0)})
        late = Thread(lambda: other.push_pull({"w": np.full(ELEMENTS, -1.0)}))

        assert set(ps.push_pull({"w": np.full(ELEMENTS, -1.0)})["w"].tolist()) == {2.0}
        late.result()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_push_pull_when_it_has_failed_then_the_gradient_that_counts_is_the_one_that_was_pushed(
    cluster: Callable[..., Any], transport: str, impatient: Any
) -> None:
    """Also if the worker's own memory, from which a shard on the same machine reads, changes before the round closes."""
    running = cluster(1)
    pair = [Thread(lambda rank=rank: _declared(running.servers, rank, transport)) for rank in range(2)]
    ps, other = (thread.result() for thread in pair)
    with ps, other:
        with impatient(), pytest.raises(WaitTimeout, match="worker 1"):
            ps.push_pull({"w": np.full(ELEMENTS, -1.0)})
        for space in ps._worker.gradients.spaces:
            space[...] = 77

        assert set(other.push_pull({"w": np.full(ELEMENTS, -3.0)})["w"].tolist()) == {2.0}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_close_when_another_thread_waits_then_ends_its_call(cluster: Callable[..., Any], transport: str) -> None:
    running = cluster(1)
    pair = [Thread(lambda rank=rank: _declared(running.servers, rank, transport)) for rank in range(2)]
    ps, other = (thread.result() for thread in pair)
    waiting = Thread(lambda: ps.push_pull({"w": np.zeros(ELEMENTS)}))
    until(lambda: running.shards[0].shard._core.waiting.open(0) != [])

    ps.close()

    with pytest.raises(RuntimeError, match="closed by another thread"):
        waiting.result()
    other.close()


def _declared(servers: str, rank: int, transport: str, **options: Any) -> psd_client.ParameterServer:
    ps = psd_client.connect(servers, rank, 2, transport=transport)
    ps.declare({"w": np.zeros(ELEMENTS)}, psd_client.SGD(lr=1.0), **options)
    return ps


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_push_when_a_gradient_is_refused_by_the_shard_then_the_next_is_taken(
    cluster: Callable[..., Any], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with psd_client.connect(cluster(1).servers, 0, 1, transport=transport) as ps:
        ps.declare({"w": np.zeros(ELEMENTS)}, psd_client.SGD(lr=1.0))
        # A client that does not look, and does not say that it has.
        monkeypatch.setattr(type(ps._worker.gradients), "first_nonfinite", lambda *_: None)
        monkeypatch.setattr(data_pb2, "PushHeader", lambda is_finite=False, **fields: PushHeader(**fields))
        with pytest.raises(NonFiniteGradient, match="'w'"):
            ps.push_pull({"w": np.full(ELEMENTS, np.nan)})

        assert set(ps.push_pull({"w": np.full(ELEMENTS, -1.0)})["w"].tolist()) == {1.0}


def test_prepare_when_the_shard_has_died_since_it_named_its_port_then_may_be_called_again() -> None:
    """Nothing listens there; but only of a shard that lives is that an error of the configuration."""
    with pytest.raises(ConfigError, match="port 1: "):
        ToldLane(1, answers=2).prepare(job_pb2.Caller(), Call(10, Scope()))
    with pytest.raises(ShardUnavailable, match="gone"):
        ToldLane(1, answers=1).prepare(job_pb2.Caller(), Call(10, Scope()))
