"""The last checkpoint with exact aggregation, of shards that have closed different rounds: nobody has brought the decisions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psd_client
from psd.checkpoint import CheckpointDirectory, CheckpointState
from psd.rim.server import ShardServer

SIZE = 3000
TABLE = psd_client.Table("t", 3, psd_client.SGD(lr=1.0))
ROWS = (np.arange(20), np.ones((20, 3), np.float32))
GRADIENT = {"w": np.ones(SIZE, np.float32)}


def push_and_hang(servers: str, *, until: Callable[[], None], clip_norm: float | None = None, has_rows: bool = False) -> None:
    """Two workers that say nothing any more once their second pushes are acknowledged; `until` is called while they hang."""
    have_pushed, ended = threading.Barrier(3), threading.Event()
    declared, rows = ((TABLE,), {"t": ROWS}) if has_rows else ((), {})

    def work(rank: int) -> None:
        with psd_client.connect(servers, rank, 2, wait_timeout=60, retry_timeout=1) as ps:
            initial, rule = {"w": np.zeros(SIZE, np.float32)}, psd_client.SGD(lr=1.0)
            ps.declare(initial, rule, aggregation="exact", clip_norm=clip_norm, tables=declared)
            ps.push_pull(GRADIENT, tables=rows)
            ps.push(GRADIENT, tables=rows)
            have_pushed.wait(100)
            assert ended.wait(100)
            ps._worker.close(RuntimeError("it dies"))

    with ThreadPoolExecutor(2) as pool:
        workers = [pool.submit(work, rank) for rank in range(2)]
        have_pushed.wait(100)
        until()
        ended.set()
        for worker in workers:
            worker.result()


def end(shards: Sequence[ShardServer]) -> None:
    """As if psd-run had asked for a checkpoint before, in vain, and has ended the workers."""
    for shard in shards:
        shard.expect_end()
    with ThreadPoolExecutor(len(shards)) as pool:
        list(pool.map(lambda shard: shard.drain(60), shards))


def versions(shards: Sequence[ShardServer]) -> list[tuple[int, ...]]:
    return [server.shard.declared().trained_versions for server in shards]


def goes_on_from(servers: str, *, has_rows: bool) -> tuple[Any, Any]:
    """The parameters, and the rows, after the third step."""
    declared, rows = ((TABLE,), {"t": ROWS}) if has_rows else ((), {})

    def work(rank: int) -> tuple[Any, Any]:
        with psd_client.connect(servers, rank, 2, wait_timeout=60) as ps:
            initial, rule = {"w": np.zeros(SIZE, np.float32)}, psd_client.SGD(lr=1.0)
            ps.declare(initial, rule, aggregation="exact", tables=declared)
            assert ps.clock == 2
            params = ps.push_pull(GRADIENT, tables=rows)["w"]
            return params, ps.tables["t"].pull(ROWS[0]) if has_rows else params

    with ThreadPoolExecutor(2) as pool:
        return [*pool.map(work, range(2))].pop()


@pytest.mark.parametrize("has_rows", [False, True], ids=["tensors", "rows"])
@pytest.mark.parametrize("heard", [(), (1,), (2,)])
def test_a_round_that_only_some_shards_have_closed_is_in_the_checkpoint_of_the_end(
    cluster: Callable[..., Any], tmp_path: Path, heard: Sequence[int], has_rows: bool
) -> None:
    """Shard 0 has decided what it is made of. All workers fall silent before they bring that to the others, or to all."""
    running = cluster(3, checkpoint_dir=str(tmp_path), lease_s=600)

    def until() -> None:
        jobs = [server.shard.declared() for server in running.shards]
        decided = jobs[0].participant.check(jobs[0].coordinator.latest())
        for index in heard:
            jobs[index].participant.follow(decided)
        assert versions(running.shards) == [(2,) if index in (0, *heard) else (1,) for index in range(3)]
        end(running.shards)

    push_and_hang(running.servers, until=until, has_rows=has_rows)

    directory = CheckpointDirectory(str(tmp_path))
    (stored,) = directory.checkpoints()
    assert (stored.state, stored.step, directory.verify(stored.name)) == (CheckpointState.VALID, 2, [])
    assert not any(shard.has_failed_to_store for shard in running.shards)
    assert [path.name for path in tmp_path.iterdir()] == [stored.name]

    goes_on = cluster(2, checkpoint_dir=str(tmp_path), lease_s=600)
    params, rows = goes_on_from(goes_on.servers, has_rows=has_rows)
    assert (params == -3).all()
    assert (rows == -3).all()


def test_a_shard_that_lacks_a_gradient_of_the_round_leaves_the_job_without_a_checkpoint_of_the_end(
    cluster: Callable[..., Any], tmp_path: Path
) -> None:
    """It was killed since, and has not got the gradient again. All shards find that out at once."""
    running = cluster(3, checkpoint_dir=str(tmp_path), lease_s=600)

    def until() -> None:
        for block in running.shards[2].shard.declared()._trained:
            block._round.end()
        end(running.shards)

    push_and_hang(running.servers, until=until)

    assert CheckpointDirectory(str(tmp_path)).checkpoints() == []
    assert versions(running.shards) == [(2,), (2,), (1,)]
    for shard in running.shards:
        assert "in the middle of a round: they are at version 1, version 2" in shard._checkpointer.progress.error
    assert [*tmp_path.iterdir()] == []


def test_a_round_without_its_verdict_is_left_out_by_all_shards(cluster: Callable[..., Any], tmp_path: Path) -> None:
    """The workers fall silent before they have measured the gradient's norm."""
    running = cluster(3, checkpoint_dir=str(tmp_path), lease_s=600)

    push_and_hang(running.servers, until=lambda: end(running.shards), clip_norm=1.0)

    (stored,) = CheckpointDirectory(str(tmp_path)).checkpoints()
    assert (stored.state, stored.step) == (CheckpointState.VALID, 1)
