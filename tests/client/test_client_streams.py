"""Large pushes and pulls over several TCP connections: the same numbers, counted once, whatever becomes of one of them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from certificates import Authority
from client_faults import in_threads, until

import psd_client
from psd.contract.config import ConfigError
from psd.contract.environment import client_config

SIZE = 3_000_001
"""Twelve blocks, of which the last is small."""
STREAMS = 4


def values(seed: int) -> Any:
    return np.random.default_rng(seed).normal(size=SIZE).astype(np.float32)


def trained(servers: str, rank: int, workers: int, job: dict[str, Any], **link: Any) -> tuple[bytes, list[str]]:
    """The parameters after three steps, and the transports."""
    with psd_client.connect(servers, rank, workers, **link) as ps:
        ps.declare({"w": values(0), "small": np.zeros(3, np.float32)}, psd_client.SGD(lr=0.1, momentum=0.9), **job)
        for step in range(3):
            ps.push_pull({"w": values(10 * step + rank), "small": np.ones(3, np.float32)})
        pulled = ps.pull()
        bits = pulled["w"].tobytes() + pulled["small"].tobytes()
        return bits, ps.transports


def test_any_number_of_streams_brings_the_same_bits(cluster: Callable[..., Any]) -> None:
    """Of two workers that use different numbers of them, too, on two shards; also of what is compressed."""
    found, job = [], {"aggregation": "exact", "compress": "int8", "pull": "bf16"}
    for first, second in ((1, 1), (STREAMS, 2)):
        servers = cluster(2).servers
        found.append(
            in_threads(
                lambda: trained(servers, 0, 2, job, transport="tcp", streams=first),  # noqa: B023 - they end here
                lambda: trained(servers, 1, 2, job, transport="tcp", streams=second),  # noqa: B023
            )
        )
    (alone, _), (first_of_many, second_of_many) = found
    assert alone[0] == first_of_many[0] == second_of_many[0]
    assert alone[1] == ["tcp", "tcp"]
    assert first_of_many[1] == [f"tcp ({STREAMS} streams)"] * 2


def test_streams_have_tls_where_the_shard_has(cluster: Callable[..., Any], tmp_path: Path) -> None:
    authority = Authority("ours")
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    shard = authority.issue("127.0.0.1").write(tmp_path, "shard")
    job = {"aggregation": "exact"}

    secured = trained(cluster(1, **shard).servers, 0, 1, job, transport="tcp", streams=STREAMS, tls_ca=str(tmp_path / "ca.pem"))

    assert secured[0] == trained(cluster(1).servers, 0, 1, job, transport="tcp")[0]


def test_rows_of_tables_travel_over_streams(cluster: Callable[..., Any]) -> None:
    """Rows have pieces of ids and values, in frames of their own."""
    found = []
    ids = np.arange(20_000, dtype=np.uint64) * 977
    for streams in (1, STREAMS):
        with psd_client.connect(cluster(1).servers, 0, 1, transport="tcp", streams=streams) as ps:
            tables = [psd_client.Table("t", 16, psd_client.SGD(lr=0.5), init=psd_client.Normal(1.0))]
            ps.declare({"w": values(0)}, psd_client.SGD(lr=1.0), tables=tables)
            before = ps.tables["t"].pull(ids).tobytes()
            ps.push_pull({"w": values(1)}, tables={"t": (ids, np.ones((len(ids), 16), np.float32))})
            found.append((before, ps.tables["t"].pull(ids).tobytes()))
            assert found[-1][0] != found[-1][1]
    assert found[0] == found[1]


def test_a_shard_that_returns_is_reached_over_streams_again(job: Any) -> None:
    """The connection opens anew with all of them."""
    with psd_client.connect(job.servers, 0, 1, transport="tcp", streams=STREAMS) as ps:
        ps.declare({"w": np.zeros(SIZE, np.float32)}, psd_client.SGD(lr=1.0))
        one = np.ones(SIZE, np.float32)
        ps.push_pull({"w": one})
        job.restart(0)
        pulled = ps.push_pull({"w": one})["w"]
        assert set(pulled.tolist()) == {-2.0}
        assert ps.transports[0] == f"tcp ({STREAMS} streams)"


def test_a_stream_that_broke_while_nothing_travelled_is_noticed_at_the_next_step(cluster: Callable[..., Any]) -> None:
    running = cluster(1)
    with psd_client.connect(running.servers, 0, 1, transport="tcp", streams=STREAMS) as ps:
        ps.declare({"w": np.zeros(SIZE, np.float32)}, psd_client.SGD(lr=1.0))
        one = np.ones(SIZE, np.float32)
        ps.push_pull({"w": one})
        (connection,) = running.shards[0]._bulk._by_rank.values()
        connection._stream._joined[1].socket.shutdown(socket.SHUT_RDWR)
        assert set(ps.push_pull({"w": one})["w"].tolist()) == {-2.0}
        assert ps.stats()["pushes"] == 2


def test_nothing_of_a_connection_of_several_streams_is_left_when_its_worker_has_left(cluster: Callable[..., Any]) -> None:
    running = cluster(1)
    with psd_client.connect(running.servers, 0, 1, transport="tcp", streams=STREAMS) as ps:
        ps.declare({"w": np.zeros(SIZE, np.float32)}, psd_client.SGD(lr=1.0))
        ps.push_pull({"w": np.ones(SIZE, np.float32)})
        bulk = running.shards[0]._bulk
        until(lambda: bulk.connections()["tcp"].open == 1)
        (connection,) = bulk._by_rank.values()
        sockets = [connection._stream.socket, *(each.socket for each in connection._stream._joined)]
        assert len(sockets) == STREAMS
        assert bulk.connections()["tcp"].refused == 0
    until(lambda: bulk.connections()["tcp"].open == 0)
    until(lambda: all(sock.fileno() == -1 for sock in sockets))
    assert bulk._bundles == {}
    assert not [each for each in threading.enumerate() if each.name == "psd-bulk"]


def test_readers_read_over_streams(cluster: Callable[..., Any]) -> None:
    """Two at a time, which have no rank: each one's further sockets find its own first one."""
    servers = cluster(2).servers
    with psd_client.connect(servers, 0, 1, transport="tcp") as ps:
        ps.declare({"w": values(0)}, psd_client.SGD(lr=1.0))
        link = {"role": "reader", "transport": "tcp", "streams": STREAMS}
        with psd_client.connect(servers, **link) as first, psd_client.connect(servers, **link) as second:
            for reader in (first, second):
                assert reader.pull()["w"].tobytes() == values(0).tobytes()
                assert reader.transports == [f"tcp ({STREAMS} streams)"] * 2


def test_memory_on_the_same_machine_needs_no_streams(cluster: Callable[..., Any]) -> None:
    with psd_client.connect(cluster(1).servers, 0, 1, streams=STREAMS) as ps:
        ps.declare({"w": np.zeros(3, np.float32)}, psd_client.SGD(lr=1.0))
        assert set(ps.push_pull({"w": np.ones(3, np.float32)})["w"].tolist()) == {-1.0}
        assert ps.transports == ["shm"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"streams": 0}, "streams: expected 1 to 32, got 0"),
        ({"streams": 33}, "streams: expected 1 to 32, got 33"),
        ({"streams": 1.5}, "streams: expected a whole number"),
        ({"streams": 2, "transport": "grpc"}, "streams: are of the tcp lane; expected 1 with transport='grpc', got 2"),
        ({"streams": 2, "transport": "shm"}, "streams: are of the tcp lane; expected 1 with transport='shm', got 2"),
    ],
)
def test_connect_when_streams_are_wrong_then_it_says_so(given: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, TypeError), match=message.replace("(", r"\(")):
        psd_client.connect("127.0.0.1:1", 0, 1, **given)


def test_the_environment_says_how_many_streams_unless_the_script_does() -> None:
    environ = {"PSD_STREAMS": "3"}
    given = {"servers": "h:1", "rank": 0, "world_size": 1}
    assert client_config(environ=environ, **given).streams == 3
    assert client_config(environ=environ, **given, streams=2).streams == 2
    with pytest.raises(ConfigError, match="PSD_STREAMS: expected a whole number, got 'x'"):
        client_config(environ={"PSD_STREAMS": "x"}, **given)
