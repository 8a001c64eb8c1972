"""psd-run --on ray, and psd.ray, on a Ray cluster of several nodes on this machine."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import Process, processes
from conftest import TIMEOUT_S, wait_until

# Ray's name for "use the loopback address"; read when it is imported.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

ray = pytest.importorskip("ray")

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Three nodes with two CPUs each, beside the head, which has none."""
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(3):
        found.add_node(num_cpus=2, object_store_memory=100 << 20)
    yield found
    ray.shutdown()
    found.shutdown()


@pytest.fixture
def job(run, cluster, script):
    """A job of two shards and two workers, that trains for so many steps; once it trains."""

    def begin(*options, steps) -> Process:
        where = ["--on", "ray", "--address", cluster.address, "--shards", 2, "--workers", 2, "--grace", 5]
        started = run(*where, *options, script, steps, 0.02, script.parent / "trains-")
        started.run_id = started.line(r"\[psd-run\] run (\S+);", TIMEOUT_S)[1]
        # Not by the output, which Ray brings later.
        wait_until(lambda: len(list(script.parent.glob("trains-*"))) == 2, "both workers train")
        return started

    return begin


def servers_of(run_id: str) -> dict[str, int]:
    """Pids of the job's psd-servers, by which of how many."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            words = _read(entry / "cmdline").split("\0")
            if run_id in words and "--shard" in words:
                found[words[words.index("--shard") + 1]] = int(entry.name)
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def parent(pid: int) -> int:
    """The process that has started another."""
    return int(re.search(r"PPid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


def worker_of(run_id: str, rank: int) -> int:
    """Pid of a worker's program."""
    (pid,) = (pid for pid in processes(run_id) if f"PSD_RANK={rank}" in _read(Path(f"/proc/{pid}/environ")).split("\0"))
    return pid


def test_job_when_processes_are_killed_one_by_one_then_nothing_is_lost(job, tmp_path):
    """A worker's program, a psd-server, and a shard's actor. Each step adds 1.5: the end tells whether each counted once."""
    started = job("--max-restarts", 1, steps=1000)

    os.kill(worker_of(started.run_id, 1), signal.SIGKILL)
    started.line("worker 1 was killed by signal 9; running it again")
    for shard, victim in (("0/2", lambda pid: pid), ("1/2", parent)):
        pid = servers_of(started.run_id)[shard]
        os.kill(victim(pid), signal.SIGKILL)
        wait_until(lambda: servers_of(started.run_id).get(shard, pid) != pid, "the shard is started again")  # noqa: B023

    assert started.end(TIMEOUT_S) == 0, started.output
    assert started.output.count("the shard continues where its earlier process ended") == 2
    assert started.output.count("trained to -1500.0 -1500.0") == 2
    assert "shards have moved" not in started.output, "they have their ports again"
    assert processes(started.run_id) == {}
    assert servers_of(started.run_id) == {}
    assert not list(Path("/dev/shm").glob(f"psd-run-{started.run_id}*"))


def test_job_when_the_node_of_a_shard_dies_then_it_goes_on_elsewhere_from_the_newest_checkpoint(job, cluster, tmp_path):
    """All workers are run again, as their shards have other addresses; so no step counts twice."""
    started = job("--checkpoint-dir", tmp_path / "checkpoints", "--checkpoint-steps", 20, "--max-restarts", 4, steps=800)
    wait_until(lambda: list((tmp_path / "checkpoints").glob("timeline*")), "there is a checkpoint")
    raylets = {node.all_processes["raylet"][0].process.pid: node for node in cluster.worker_nodes}
    victim = raylets[parent(parent(servers_of(started.run_id)["1/2"]))]

    cluster.remove_node(victim, allow_graceful=False)

    started.line("shards have moved; running all workers again", TIMEOUT_S)
    assert started.end(TIMEOUT_S) == 0, started.output
    again = [int(step) for step in re.findall(r"begins at step (\d+)", started.output)][-2:]
    assert again[0] == again[1]
    assert again[0] >= 20
    assert started.output.count("trained to -1200.0 -1200.0") == 2
    assert processes(started.run_id) == {}


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_job_when_psd_run_ends_then_nothing_is_left_on_any_node(job, signum):
    """Whether psd-run can still say so, or Ray alone notices."""
    started = job(steps=10**6)

    started.signal(signum)

    assert started.end(TIMEOUT_S) == (130 if signum == signal.SIGINT else -signum)
    wait_until(lambda: processes(started.run_id) == {}, "the workers' programs end")
    wait_until(lambda: servers_of(started.run_id) == {}, "the shards end")


def test_start_when_a_program_is_rays_own_then_its_tasks_train_with_the_shards(cluster):
    """The handle can be sent to tasks, which connect by it."""
    import numpy as np

    import psd.ray

    ray.init(address=cluster.address, log_to_driver=False)

    @ray.remote(num_cpus=1)
    def train(shards: psd.ray.RayShards, rank: int) -> list[float]:
        import psd_client

        with psd_client.connect(servers=shards.servers, run_id=shards.run_id, rank=rank, world_size=2) as ps:
            ps.declare({"w": np.zeros(3, np.float32)}, psd_client.SGD(lr=1))
            return ps.push_pull({"w": np.full(3, rank + 1, np.float32)})["w"].tolist()

    shards = psd.ray.start(shards=2, lease=5)
    assert set(shards.environment(0, 2)) == {"PSD_SERVERS", "PSD_RUN_ID", "PSD_RANK", "PSD_WORLD_SIZE"}
    assert ray.get([train.remote(shards, rank) for rank in range(2)]) == [[-1.5] * 3] * 2
    shards.stop()
    assert servers_of(shards.run_id) == {}


def test_start_when_an_option_is_wrong_then_says_so(cluster):
    """psd-server is the one that knows its options."""
    import psd.ray
    from psd.contract.config import ConfigError

    ray.init(address=cluster.address, log_to_driver=False)
    with pytest.raises(ConfigError, match=r"shard \d ended \d+ times at its start; see its log"):
        psd.ray.start(shards=1, lease=-1)
