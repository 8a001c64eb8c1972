"""Rows that a push_pull brings for the pull after it: the same as without, in one round trip less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from client_faults import connect_faulty, in_threads

from psd.contract.errors import InvalidTensor
from psd_client import SGD, ParameterServer, Table, connect
from psd_client.client import worker_of
from psd_client.lanes.grpc_channel import GrpcChannel
from psd_client.lanes.shard_lane import ShardLane

Start = Callable[..., Any]
IDS = np.arange(40) % 30  # of both shards


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The shards whose rows were asked for in a call of their own, in order."""
    found: list[int] = []
    ask = ShardLane.pull_rows

    def pull_rows(lane: ShardLane, *args: Any, **options: Any) -> int:
        found.append(lane.shard)
        return ask(lane, *args, **options)

    monkeypatch.setattr(ShardLane, "pull_rows", pull_rows)
    return found


def declare(ps: ParameterServer, **options: Any) -> None:
    tables = [Table("a", 3, SGD(lr=1.0)), Table("b", 2, SGD(lr=1.0), dtype="bfloat16")]
    ps.declare({"w": np.zeros(5, np.float32)}, SGD(lr=1.0), reduce="sum", tables=tables, **options)


def ones() -> dict[str, Any]:
    return {"a": (IDS[:30], np.ones((30, 3), np.float32))}


@pytest.mark.parametrize(("transport", "mode"), [("shm", "sync"), ("tcp", "sync"), ("grpc", "sync"), ("shm", "async")])
def test_prefetched_rows_are_those_of_the_step_and_take_no_round_trip(
    cluster: Start, asked: list[int], transport: str, mode: str
) -> None:
    """Of several tables, with all workers' gradients; they are given out once, for these ids, and not after another push."""
    servers = cluster(2).servers
    world = 2 if mode == "sync" else 1

    def worker(rank: int) -> None:
        with connect(servers, rank, world, transport=transport) as ps:
            declare(ps, consistency=mode)
            a, b = ps.tables.values()
            for step in range(1, 4):
                a.prefetch(IDS)
                b.prefetch(ids := IDS[:7].copy())
                ids[:] = 99  # it is the program's
                before = ps.stats()["rows_pulled"]
                assert ps.push_pull({"w": np.ones(5, np.float32)}, tables=ones())["w"].tolist() == [-world * step] * 5
                assert ps.stats()["rows_pulled"] == before + 37
                assert set(a.pull(IDS).reshape(-1).tolist()) == {-world * step}
                assert b.pull(IDS[:7]).shape == (7, 2)
                ps.barrier(f"step {step}")
            assert asked == []

            a.prefetch(IDS)
            ps.push_pull({"w": np.ones(5, np.float32)}, tables=ones())
            ps.push({"w": np.ones(5, np.float32)}, tables=ones())
            assert set(a.pull(IDS).reshape(-1).tolist()) == {-5 * world}
            ps.barrier("asked")
            assert asked != []

    in_threads(*(lambda rank=rank: worker(rank) for rank in range(world)))


def test_a_step_of_much_over_grpc_is_one_message_each_way(cluster: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks, rows and the rows fetched ahead, far more than a socket's buffer holds; and what one message cannot hold."""
    methods: list[str] = []
    begin = GrpcChannel._begin

    def begun(channel: GrpcChannel, kind: str, method: str, *args: Any) -> Any:
        methods.append(method.rpartition("/")[2])
        return begin(channel, kind, method, *args)

    monkeypatch.setattr(GrpcChannel, "_begin", begun)
    size, ids = 100_000, np.arange(3000)
    with connect(cluster(1).servers, 0, 1, transport="grpc") as ps:
        table = Table("a", 64, SGD(lr=1.0))
        ps.declare({"w": np.zeros(size, np.float32)}, SGD(lr=1.0), tables=[table])

        for step, wanted in ((1, ids), (2, np.arange(20_000))):
            ps.tables["a"].prefetch(wanted)
            methods.clear()
            grads = {"a": (wanted, np.ones((len(wanted), 64), np.float32))}
            assert set(ps.push_pull({"w": np.ones(size, np.float32)}, tables=grads)["w"].tolist()) == {-float(step)}
            assert set(ps.tables["a"].pull(ids).reshape(-1).tolist()) == {-float(step)}
            data = [method for method in methods if method != "Heartbeat"]
            assert data == (["PushPullSmall"] if wanted is ids else ["PushPull", "PullRows"])


def test_prefetch_that_does_not_fit_or_is_of_exact_rounds_is_pulled_later(cluster: Start, asked: list[int]) -> None:
    for options in ({"aggregation": "exact"}, {}):
        with connect(cluster(1).servers, 0, 1, transport="tcp") as ps:
            declare(ps, **options)
            table, ids = ps.tables["a"], IDS if options else np.arange(70_000)
            table.prefetch(ids)
            ps.push_pull({"w": np.ones(5, np.float32)}, tables=ones())
            assert asked == []
            assert table.pull(ids)[:30].tolist() == [[-1.0] * 3] * 30
            assert asked != []
            asked.clear()
            assert worker_of(ps).declared.rows.pull_ahead([0]) is None  # the next push_pull does not ask for it again
            with pytest.raises(InvalidTensor, match="ids: dtype must be int64"):
                table.prefetch(["x"])


def test_prefetch_when_the_answer_is_lost_then_comes_with_the_second_attempt(cluster: Start, asked: list[int]) -> None:
    ps, faults = connect_faulty(cluster(2).servers, 0, 1)
    with ps:
        declare(ps)
        ps.tables["a"].prefetch(IDS)
        faults.lose_reply("push_pull", shard=1)
        ps.push_pull({"w": np.ones(5, np.float32)}, tables=ones())

        assert set(ps.tables["a"].pull(IDS).reshape(-1).tolist()) == {-1.0}
        assert ps.stats()["blocks_duplicate"] > 0
        assert asked == []
