"""A user's own rule in real processes: killed shards, failures, checkpoints that need it, every consistency."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chaos import assert_same_bits, final_state, run_disturbed, steps_for
from commands import completed
from numpy.typing import NDArray
from shard_processes import ShardProcess, servers_of

import psd_client
from psd.checkpoint import CheckpointDirectory
from psd.contract.layout import Layout

HERE = str(Path(__file__).parent)
DRIFTING, FAILING = "sample_rules:Drifting", "sample_rules:Failing"
LISTED = ("--rule", DRIFTING, "--rule", FAILING, "--rule-dir", HERE)
SHAPES = {"weight": (300, 170), "bias": (170,), "scale": ()}
KILLS = 2


def train(servers: str, rank: int, on_step: Callable[[], object], *, steps: int, transport: str) -> dict[str, NDArray[Any]]:
    """Two groups with rules of different numbers; gradients depend on the parameters."""
    rng = np.random.default_rng(1)
    initial = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    groups = [{"params": ["weight"]}, {"params": ["bias", "scale"], "lr": 0.01, "friction": 0.5}]
    with psd_client.connect(servers, rank, 2, transport=transport, retry_timeout=60, wait_timeout=100) as ps:
        table = psd_client.Table("rows", 5, psd_client.CustomRule(DRIFTING, lr=0.05), init=psd_client.Normal(0.1))
        rule = psd_client.CustomRule(DRIFTING)
        params = ps.declare(initial, rule, groups=groups, consistency="sync", aggregation="exact", tables=[table])
        while ps.clock < steps:
            grads = {name: (np.sin(value + rank + ps.clock) + value) / 7 for name, value in params.items()}
            ids = np.arange(40) * (rank + 1) + ps.clock % 7
            rows = np.sin(ps.tables["rows"].pull(ids) + rank)
            params = ps.push_pull(grads, weight=1 + (rank + ps.clock) % 3, tables={"rows": (ids, rows)})
            on_step()
        return params | {"rows": ps.tables["rows"].pull(np.arange(100))}


@pytest.mark.process
def test_a_job_whose_shards_are_killed_ends_in_the_same_bits(
    shard_processes: Callable[..., list[ShardProcess]], tmp_path: Path
) -> None:
    """Parameters, slots and steps of a user's own rule are in the arena and in checkpoints."""
    ends = []
    for name, kills in {"undisturbed": 0, "disturbed": KILLS}.items():
        url = str(tmp_path / name)
        shards = shard_processes(2, "--checkpoint-dir", url, "--lease", "60", *LISTED)
        work = functools.partial(train, steps=steps_for(KILLS, 0))
        pulled = run_disturbed(shards, 2, work, transport="shm", seed=5, kills=kills, faults=0)
        ends.append((pulled, final_state(shards, url)))

    (undisturbed_pulls, undisturbed), (disturbed_pulls, disturbed) = ends
    assert_same_bits(undisturbed, disturbed)
    for one, other in zip(undisturbed_pulls, disturbed_pulls, strict=True):
        assert_same_bits(one, other)


@pytest.mark.process
def test_a_rule_that_fails_ends_the_job_with_its_name_and_without_a_wait(
    shard_processes: Callable[..., list[ShardProcess]],
) -> None:
    """Each worker gets the error, long before any timeout; the parameters are those of the last good version."""
    servers = servers_of(shard_processes(2, *LISTED))

    def work(rank: int) -> tuple[psd_client.RuleFailed, Any]:
        with psd_client.connect(servers, rank, 2, wait_timeout=600) as ps:
            ps.declare({"w": np.zeros(5000, np.float32)}, psd_client.CustomRule(FAILING), consistency="sync")
            last = [ps.push_pull({"w": np.ones(5000, np.float32)})["w"] for _ in range(2)][-1]
            with pytest.raises(psd_client.RuleFailed) as raised:
                ps.push_pull({"w": np.ones(5000, np.float32)})
            ps.barrier("failed")
            return raised.value, last

    begun = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(work, range(2)))

    assert time.monotonic() - begun < 250
    for error, _ in results:
        assert f"rule '{FAILING}' failed in tensor 'w' at version 2" in str(error)
        assert "ArithmeticError: enough" in str(error)
        assert "sample_rules.py:" in str(error)
        assert error.detail.items() >= {"rule": FAILING, "tensor": "w", "version": 2}.items()


@pytest.mark.parametrize("consistency", ["async", "ssp:1"])
def test_without_rounds_each_push_is_an_update(cluster: Callable[..., Any], consistency: str) -> None:
    """Two workers, two shards: as many updates as pushes, and a worker that fails can read what holds."""
    running = cluster(2, rules=(DRIFTING, FAILING))

    def work(rank: int) -> int:
        with psd_client.connect(running.servers, rank, 2, wait_timeout=60) as ps:
            ps.declare({"w": np.zeros(5000, np.float32)}, psd_client.CustomRule(DRIFTING), consistency=consistency)
            ps.barrier("declared")  # whoever joins later begins at a later step
            for _ in range(10):
                ps.push_pull({"w": np.ones(5000, np.float32)})
            ps.barrier("pushed")
            return int(np.unique(ps.pull()["w"]).size)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [1, 1]
    for shard in running.shards:
        job = shard.shard._core.declared()
        assert (job.version_min, job.version_max) == (20, 20)
        assert sum(job.ages) == 20 * job.trained_count


def test_a_checkpoint_is_read_without_the_code_and_restored_only_with_it(cluster: Callable[..., Any], tmp_path: Path) -> None:
    """Slots are stored by the names that the job has declared; a shard that may not run the rule does not start."""
    url = str(tmp_path / "checkpoints")
    first = cluster(2, rules=(DRIFTING,), checkpoint_dir=url)
    with psd_client.connect(first.servers, 0, 1) as ps:
        ps.declare({"w": np.zeros(5000, np.float32)}, psd_client.CustomRule(DRIFTING))
        ps.push_pull({"w": np.ones(5000, np.float32)})
    first.finish()

    directory = CheckpointDirectory(url)
    manifest = directory.newest()
    assert manifest is not None
    (block, *_) = directory.read_blocks(manifest, Layout(manifest.spec, 3), 0)
    assert np.unique(block.slots["velocity"]).tolist() == [np.float32(1) / np.sqrt(np.float32(0.5625))]
    assert np.unique(block.slots["mean_square"]).tolist() == [0.5625]
    ended = completed("psd.cli.server", "--shard", "0/1", "--listen", "127.0.0.1:0", "--checkpoint-dir", url)
    assert ended.returncode == 1
    assert f"'{DRIFTING}' is not listed on this shard" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_treatment_of_old_gradients_may_change_at_a_restore(cluster: Callable[..., Any], tmp_path: Path) -> None:
    """It needs no slot, and so does not matter to a checkpoint."""
    found = []
    for shard_count, options in ((2, {"consistency": "async"}), (3, {"consistency": "ssp:2", "staleness": "lr"})):
        running = cluster(shard_count, checkpoint_dir=str(tmp_path / "checkpoints"))
        with psd_client.connect(running.servers, 0, 1) as ps:
            ps.declare({"w": np.zeros(5000)}, psd_client.SGD(lr=0.5), **options)
            found.append(np.unique(ps.push_pull({"w": np.ones(5000)})["w"]).tolist())
        running.finish()

    assert found == [[-0.5], [-1.0]]
