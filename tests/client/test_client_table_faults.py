"""Rows in pushes and pulls that fail: calls that are made again, shards that are restarted, gradients that are not finite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_faults import Restartable, Thread, connect_faulty, in_threads, until

from psd.checkpoint import CheckpointDirectory
from psd.contract.config import Limits
from psd.contract.errors import NonFiniteGradient, RolledBack, ShardUnavailable, WaitTimeout
from psd_client import SGD, NotDeclared, ParameterServer, Table, connect

Start = Callable[..., Any]

IDS = np.arange(40)  # of both shards


def declare(ps: ParameterServer, **options: Any) -> None:
    ps.declare({}, reduce="sum", tables=[Table("t", 2, SGD(lr=1.0))], **options)


def rows(value: float) -> tuple[Any, Any]:
    return IDS, np.full((len(IDS), 2), value, np.float32)


def everywhere(ps: ParameterServer) -> set[float]:
    """What all rows hold."""
    return set(ps.tables["t"].pull(IDS).reshape(-1).tolist())


def pair(servers: str, **options: Any) -> tuple[ParameterServer, Any, ParameterServer]:
    """Worker 0, behind faults, and worker 1."""
    ps, faults = connect_faulty(servers, 0, 2, retry_timeout_s=0)
    peer = connect(servers, 1, 2)
    in_threads(lambda: declare(ps, **options), lambda: declare(peer, **options))
    return ps, faults, peer


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("aggregation", ["fast", "exact"])
def test_pull_when_a_shard_was_restarted_after_the_push_then_the_rows_count_once(
    job: Restartable, aggregation: str, index: int
) -> None:
    """The open round died with the shard; the worker sends its rows again, as they were, before it waits for the round."""
    with connect(job.servers, 0, 2) as ps, connect(job.servers, 1, 2) as peer:
        in_threads(lambda: declare(ps, aggregation=aggregation), lambda: declare(peer, aggregation=aggregation))
        ids, grads = rows(2)
        ps.tables["t"].push(ids, grads)
        grads[:] = 1000  # it is the program's again

        job.restart(index)
        pulled = Thread(lambda: everywhere(ps))
        peer.tables["t"].push(*rows(4))

        assert pulled.result() == everywhere(peer) == {-6.0}
        assert [job.version(0), job.version(1)] == [1, 1]
        assert ps.stats()["rejoins"] == 0


@pytest.mark.parametrize("aggregation", ["fast", "exact"])
def test_push_after_a_wait_timeout_when_made_again_then_counts_once(cluster: Start, impatient: Any, aggregation: str) -> None:
    """The same rows are the same push, in whatever arrays; other rows are the next step's, after it."""
    ps, _, peer = pair(cluster(2).servers, aggregation=aggregation)
    with ps, peer:
        ps.tables["t"].push(*rows(1))
        for _ in range(2):
            with impatient(), pytest.raises(WaitTimeout):
                ps.push_pull({}, tables={"t": rows(10)})
        peer.tables["t"].push(*rows(100))
        pushing = Thread(lambda: peer.push_pull({}, tables={"t": rows(1000)}))
        ps.push_pull({}, tables={"t": rows(10)})
        pushing.result()

        assert everywhere(ps) == everywhere(peer) == {-1111}
        assert (ps.clock, peer.clock) == (2, 2)
        stats = ps.stats()
    assert (stats["pushes"], stats["pushes_dropped"], stats["rows_pushed"]) == (2, 0, 80)


def test_push_that_one_shard_has_when_other_rows_follow_then_both_count_once(cluster: Start) -> None:
    """What has failed is completed first, from the worker's own copy."""
    ps, faults = connect_faulty(cluster(2).servers, retry_timeout_s=0)
    with ps:
        declare(ps, consistency="async")
        ids, grads = rows(1)
        faults.fail("push", shard=1, error=ShardUnavailable("cut"))
        with pytest.raises(ShardUnavailable):
            ps.tables["t"].push(ids, grads)
        grads[:] = 10

        ps.tables["t"].push(ids, grads)

        assert everywhere(ps) == {-11.0}
        assert (ps.clock, ps.stats()["pushes_dropped"]) == (2, 0)


def test_pull_when_an_answer_is_lost_then_asks_again(cluster: Start) -> None:
    """Pushes and pulls alike; each push counts once."""
    ps, faults = connect_faulty(cluster(2).servers)
    with ps:
        declare(ps)
        for shard in range(2):
            faults.lose_reply("push_pull", shard=shard)
            faults.lose_reply("pull_rows", shard=shard)
        ps.push_pull({}, tables={"t": rows(3)})
        assert everywhere(ps) == {-3.0}
        assert ps.stats()["blocks_duplicate"] == 2
        faults.assert_all_fired()


@pytest.mark.parametrize("value", [np.nan, 3e38])
def test_push_when_a_row_is_not_finite_then_table_and_id_are_named(cluster: Start, value: float) -> None:
    """Also where finite gradients of one id have no finite sum; nothing was sent."""
    with connect(cluster(2).servers, 0, 1) as ps:
        ps.declare({"w": np.zeros(3)}, SGD(lr=1.0), tables=[Table("a", 1, SGD(lr=1.0)), Table("t", 2, SGD(lr=1.0))])
        ids, grads = np.array([5, 6, 7, 6]), np.zeros((4, 2), np.float32)
        grads[[1, 3], 1] = value
        with pytest.raises(NonFiniteGradient, match="worker 0: the gradient of id 6 of table 't' at step 0 holds") as caught:
            ps.push_pull({"w": np.ones(3)}, tables={"t": (ids, grads)})
        assert caught.value.detail == {"rank": 0, "clock": 0, "table": "t", "id": 6}
        assert (ps.clock, ps.stats()["sent_bytes"]) == (0, 3 * 8)


def test_round_when_a_row_is_not_finite_and_the_policy_is_skip_then_changes_nothing(cluster: Start) -> None:
    """Neither rows nor tensors, of no worker."""
    servers = cluster(2).servers

    def worker(rank: int) -> Any:
        with connect(servers, rank, 2) as ps:
            ps.declare({"w": np.zeros(3)}, SGD(lr=1.0), nan_policy="skip", tables=[Table("t", 2, SGD(lr=1.0))])
            skipped = []
            for step in range(3):
                ids, grads = rows(np.inf if (step, rank) == (1, 1) else 1)
                params = ps.push_pull({"w": np.ones(3)}, tables={"t": (ids, grads)})
                skipped.append(ps.is_skipped)
            return skipped, set(params["w"].tolist()), everywhere(ps)

    for found in in_threads(lambda: worker(0), lambda: worker(1)):
        assert found == ([False, True, False], {-2.0}, {-2.0})


def test_push_when_rows_have_changed_since_they_were_read_then_its_rate_is_divided(cluster: Start) -> None:
    """The age of a gradient is counted from the last pull of rows, whatever the worker has pulled else."""
    servers = cluster(2).servers
    with connect(servers, 0, 2) as ps, connect(servers, 1, 2) as peer:
        options: dict[str, Any] = {"consistency": "async", "staleness": "lr"}
        in_threads(lambda: declare(ps, **options), lambda: declare(peer, **options))
        assert everywhere(ps) == {0.0}
        for _ in range(3):
            everywhere(peer)
            peer.tables["t"].push(*rows(1))
        ps.push_pull({}, tables={"t": rows(4)})
        assert everywhere(ps) == {-3.0 - 4.0 / (1 + 3)}
        ps.tables["t"].group["lr"] = 0.5
        ps.tables["t"].push(*rows(4))
        assert everywhere(ps) == {-4.0 - 2.0}


def test_calls_when_arguments_are_wrong_then_nothing_has_happened(cluster: Start) -> None:
    with connect(cluster(1).servers, 0, 1) as ps:
        with pytest.raises(NotDeclared):
            _ = ps.tables
        for arguments, error, match in (
            (([Table("t", 2, SGD(lr=1.0))] * 2,), ValueError, "tables: the name 't' is given twice"),
            (({"t": 2},), ValueError, "tables: expected a list of psd_client.Table"),
            (((),), ValueError, "there must be at least one parameter to train, or a table"),
        ):
            with pytest.raises(error, match=match):
                ps.declare({}, tables=arguments[0])  # type: ignore[arg-type]
        declare(ps)
        with pytest.raises(ValueError, match="tables: no table 'x' was declared; there are t"):
            ps.push_pull({}, tables={"x": rows(1)})
        assert ps.tables["t"].pull([]).shape == (0, 2)
        ps.tables["t"].push([], [])
        assert (ps.clock, ps.stats()["rows_pushed"], ps.stats()["rows_pulled"]) == (1, 0, 0)


def test_push_when_it_has_too_many_ids_then_the_flag_is_named_and_pulls_are_cut(cluster: Start) -> None:
    servers = cluster(2, limits=Limits(push_ids_max=16)).servers
    with connect(servers, 0, 1) as ps, connect(servers, role="reader") as reader:
        declare(ps)
        with pytest.raises(ValueError, match="--max-push-ids"):
            ps.tables["t"].push(*rows(1))
        ps.tables["t"].push(IDS[:16], rows(1)[1][:16])
        assert ps.tables["t"].pull(IDS)[:, 0].tolist() == [-1.0] * 16 + [0.0] * 24
        assert reader.tables["t"].pull(IDS)[:, 0].tolist() == [-1.0] * 16 + [0.0] * 24


def test_reader_reads_rows_and_marks_nothing(cluster: Start) -> None:
    servers = cluster(2).servers
    with connect(servers, 0, 1) as ps, connect(servers, role="reader") as reader:
        declare(ps)
        ps.tables["t"].push(*rows(2))
        table = reader.tables["t"]
        assert (table.name, table.dim) == ("t", 2)
        assert table.pull(np.array([[1, 2], [1, 99]])).tolist() == [[[-2, -2]] * 2, [[-2, -2], [0, 0]]]


def test_push_when_the_job_has_gone_back_then_rows_are_those_of_the_checkpoint(cluster: Start, tmp_path: Path) -> None:
    """All shards go back, as one of them has lost what it held; the push that failed is forgotten."""
    settings: dict[str, Any] = {"checkpoint_dir": str(tmp_path), "checkpoint_steps": 5, "lease_s": 60}
    job = cluster(2, **settings)
    with connect(job.servers, 0, 1) as ps:
        declare(ps)
        for _ in range(8):
            ps.push_pull({}, tables={"t": rows(1)})
        until(lambda: CheckpointDirectory(str(tmp_path)).newest() is not None)
        job.shards[1].stop()
        job.shards[1] = cluster(2, only=1, listen=job.shards[1].address, **settings).shards[0]

        with pytest.raises(RolledBack, match="went back to a checkpoint at step 5"):
            ps.push_pull({}, tables={"t": rows(100)})

        assert everywhere(ps) == {-5.0}
        ps.push_pull({}, tables={"t": rows(1)})
        assert everywhere(ps) == {-6.0}
