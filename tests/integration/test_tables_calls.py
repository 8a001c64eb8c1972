"""The calls on tables, through real shards: which ids there are, what a step without rows does, and what travels how often."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import psd_client
from psd.state.counts import DATA_CALLS
from psd_client import SGD, Adagrad, Normal, SpecMismatch, Table
from psd_client.client import worker_of

EXTREME = np.array([2**63, 2**64 - 1, 0, 1, 2**63 - 1], np.uint64)


@pytest.mark.parametrize(
    ("consistency", "aggregation", "transport"), [("sync", "fast", "shm"), ("sync", "exact", "tcp"), ("async", "fast", "grpc")]
)
def test_ids_of_all_64_bits_in_any_shape_have_rows(
    run_workers: Callable[..., Any], consistency: str, aggregation: str, transport: str
) -> None:
    """Signed or not, and repeated. One worker's pushes have no rows, in each of the ways in which one can say so."""

    def worker(ps: psd_client.ParameterServer) -> None:
        tables = [Table("a", 3, SGD(lr=1.0), init=Normal(1.0)), Table("b", 1, Adagrad(lr=1.0))]
        ps.declare({}, tables=tables, consistency=consistency, aggregation=aggregation, reduce="sum")
        a = ps.tables["a"]
        start = a.pull(EXTREME)
        for ids, places in [
            (EXTREME.view(np.int64), slice(None)),
            (EXTREME[1], 1),
            (-1, 1),
            ([2**64 - 1, 0], [1, 2]),
            (EXTREME[[0, 3, 1, 0]].reshape(2, 1, 2), np.array([0, 3, 1, 0]).reshape(2, 1, 2)),
            (EXTREME.astype(">u8")[::-1], slice(None, None, -1)),
        ]:
            np.testing.assert_array_equal(a.pull(ids), start[places])
        for ids, shape in [([], (0, 3)), (np.zeros((2, 0, 4), np.int64), (2, 0, 4, 3))]:
            assert a.pull(ids).shape == shape
        ps.barrier("all have pulled")
        if ps.rank == 0:
            ps.push_pull({}, tables={"a": (EXTREME.view(np.int64), np.ones((5, 3), np.float32))})
            a.push([-1, 2**64 - 1], np.ones((2, 3), np.float32))
            a.push(1, [0.0, 4.0, 0.0])
            ps.push_pull({})
        else:
            ps.push_pull({}, tables={"a": ([], []), "b": (np.zeros((0, 2), np.uint64), np.zeros((0, 2, 1), np.float32))})
            a.push([], np.zeros((0, 3), np.float32))
            ps.push({}, tables={})
            ps.push_pull({})
        ps.barrier("all have pushed")
        moved = np.ones((5, 3), np.float32)
        moved[1] += 2
        moved[3, 1] += 4
        np.testing.assert_allclose(a.pull(EXTREME), start - moved, rtol=1e-6)
        assert a.pull([2**62, -(2**62)]).any(axis=1).all()  # other ids have their initial values

    run_workers(2, 3, worker, transport=transport)


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_a_step_of_tensors_and_tables_is_one_call_to_each_shard(cluster: Callable[..., Any], transport: str) -> None:
    """The rows of the next step come with it; without that, those of all tables come in one call more."""
    shards = cluster(3)
    ids = np.arange(300)

    def calls() -> list[dict[str, int]]:
        lanes = [shard.shard.status().counters.lanes[transport].calls for shard in shards.shards]
        return [{call: sum(lane[call].counts) for call in DATA_CALLS} for lane in lanes]

    with psd_client.connect(shards.servers, 0, 1, transport=transport) as ps:
        tables = [Table(name, dim, Adagrad(lr=0.1)) for name, dim in (("a", 4), ("b", 1), ("c", 9))]
        ps.declare({"w": np.zeros(3000), "v": np.zeros(7, np.float32)}, SGD(lr=1.0), tables=tables)
        rows = {table.name: (ids, np.ones((300, table.dim), np.float32)) for table in tables}
        before = calls()
        for _ in range(4):
            for table in ps.tables.values():
                table.prefetch(ids)
            ps.push_pull({"w": np.ones(3000), "v": np.ones(7, np.float32)}, tables=rows)
            for table in ps.tables.values():
                table.pull(ids)
        worker_of(ps).pull_rows(dict.fromkeys(range(3), ids))
        after = calls()

    made = [{call: later[call] - earlier[call] for call in later} for earlier, later in zip(before, after, strict=True)]
    assert made == [{"push": 0, "push_pull": 4, "pull": 1, "batch": 0}] * 3


def test_a_table_that_two_workers_declare_otherwise_is_refused_by_name(cluster: Callable[..., Any]) -> None:
    """What decides what rows are: their rule, too. The first declaration stands."""
    servers = cluster(2).servers
    options: dict[str, Any] = {"name": "user", "dim": 3, "optimizer": Adagrad(lr=0.1), "init": Normal(1.0), "seed": 7}
    with psd_client.connect(servers, 0, 2) as first:
        first.declare({}, tables=[Table(**options)])
        for changed, difference in [
            ({"dim": 4}, "dim of table 'user'"),
            ({"seed": 8}, "seed of table 'user'"),
            ({"init": Normal(2.0)}, "init of table 'user'"),
            ({"updates": "catch_up"}, "updates of table 'user'"),
            ({"max_rows": 9}, "max_rows of table 'user'"),
            ({"optimizer": SGD(lr=0.1)}, "optimizer of table 'user': adagrad in the job, sgd"),
            ({"name": "item"}, "table 'user': is in the job, is not in this worker's declaration"),
        ]:
            with psd_client.connect(servers, 1, 2) as second, pytest.raises(SpecMismatch, match=difference):
                second.declare({}, tables=[Table(**(options | changed))])
        with psd_client.connect(servers, 1, 2) as second:
            second.declare({}, tables=[Table(**options)])
            np.testing.assert_array_equal(first.tables["user"].pull([1, 2]), second.tables["user"].pull([1, 2]))
