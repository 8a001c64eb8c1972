"""psd-run --on ray, and psd.ray, on a Ray cluster of several nodes on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from commands import Process, processes
from conftest import TIMEOUT_S, parent, servers_of, wait_until, worker_of
from source_tree import ROOT

from psd.contract.config import ConfigError

ray = pytest.importorskip("ray")

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


HALVES = """
import os

assert os.environ["SEEN_BY_SHARDS"] == "yes"


class Halves:
    slots, hyper = {}, {"lr": 0.5}

    def apply(self, param, grad, slots, hyper):
        param -= hyper["lr"] * grad
"""

TRAINING_BY_HALVES = """
import numpy as np
import psd_client

with psd_client.connect() as ps:
    ps.declare({"w": np.zeros(5, np.float32)}, optimizer=psd_client.CustomRule("halves_of_psd:Halves"))
    while ps.clock < 4:
        params = ps.push_pull({"w": np.ones(5, np.float32)})
print("trained to", params["w"][0])
"""


@pytest.fixture
def begin(run, nodes):
    """Starts a job of two shards and two workers. No lease runs out while a busy machine starts a worker again."""

    def begin(*words) -> Process:
        where = ["--on", "ray", "--address", nodes.address, "--shards", 2, "--workers", 2, "--grace", 5, "--lease", 90]
        started = run(*where, *words)
        started.run_id = started.line(r"\[psd-run\] run (\S+);", TIMEOUT_S)[1]
        return started

    return begin


@pytest.fixture
def job(begin, script):
    """A job that trains for so many steps; once it trains."""

    def begin_training(*options, steps) -> Process:
        started = begin(*options, script, steps, 0.02, script.parent / "trains-")
        # Not by the output, which Ray brings later.
        wait_until(lambda: len(list(script.parent.glob("trains-*"))) == 2, "both workers train")
        return started

    return begin_training


def test_job_when_processes_are_killed_one_by_one_then_nothing_is_lost(job):
    """A worker's program, a worker's actor, a psd-server, and a shard's actor. Each step adds 1.5: the end tells whether each
    counted once. The worker's actor is one restart, too, however long Ray takes to start it again."""
    started = job("--max-restarts", 2, steps=1500)

    os.kill(worker_of(started.run_id, 1), signal.SIGKILL)
    started.line(r"worker 1 was killed by SIGKILL .*; starting it again")
    os.kill(parent(worker_of(started.run_id, 0)), signal.SIGKILL)
    started.line("worker 0 was lost with its actor or node", TIMEOUT_S)
    for shard, victim in (("0/2", lambda pid: pid), ("1/2", parent)):
        pid = servers_of(started.run_id)[shard]
        os.kill(victim(pid), signal.SIGKILL)
        wait_until(lambda: servers_of(started.run_id).get(shard, pid) != pid, "the shard is started again")  # noqa: B023

    assert started.end(TIMEOUT_S) == 0, started.output
    assert started.output.count("the shard continues where its earlier process ended") == 2
    assert started.output.count("trained to -2250.0 -2250.0") == 2
    assert "shards have moved" not in started.output, "they have their ports again"
    assert "2 restarts of workers, 2 restarts of shards" in started.output
    assert processes(started.run_id) == {}
    assert servers_of(started.run_id) == {}
    assert not list(Path("/dev/shm").glob(f"psd-run-{started.run_id}*"))


def test_job_when_the_node_of_a_shard_dies_then_it_goes_on_elsewhere_from_the_newest_checkpoint(run, nodes, script, tmp_path):
    """All workers are run again, as their shards have other addresses; so no step counts twice. The cluster is full before, so
    that there is room again only with another node."""
    where = ["--on", "ray", "--address", nodes.address, "--shards", 2, "--workers", 4, "--grace", 5, "--lease", 90]
    options = ["--checkpoint-dir", tmp_path / "checkpoints", "--checkpoint-steps", 20, "--max-restarts", 4]
    started = run(*where, *options, script, 400, 0.02)
    run_id = started.line(r"\[psd-run\] run (\S+);", TIMEOUT_S)[1]
    wait_until(lambda: list((tmp_path / "checkpoints").glob("timeline*")), "there is a checkpoint")

    nodes.lose(parent(servers_of(run_id)["1/2"]), is_replaced=False)
    started.line("waiting for room on the Ray cluster: CPU: 6 wanted, [0-9] free of 4", TIMEOUT_S)
    nodes.replace()

    started.line("shards have moved; running all workers again", TIMEOUT_S)
    assert started.end(TIMEOUT_S) == 0, started.output
    again = [int(step) for step in re.findall(r"begins at step (\d+)", started.output)][-4:]
    assert len(set(again)) == 1
    assert again[0] >= 20
    assert started.output.count("trained to -1000.0 -1000.0") == 4
    assert processes(run_id) == {}


def test_job_when_it_names_a_rule_beside_the_script_then_shards_on_other_nodes_have_it(begin, tmp_path, monkeypatch):
    """The module is sent to them as the script is to workers, and --env holds for them, too."""
    (tmp_path / "halves_of_psd.py").write_text(HALVES)
    (tmp_path / "train.py").write_text(TRAINING_BY_HALVES)
    monkeypatch.chdir(tmp_path)

    started = begin("--rule", "halves_of_psd:Halves", "--env", "SEEN_BY_SHARDS=yes", "train.py")

    assert started.end(TIMEOUT_S) == 0, started.output
    assert started.output.count("trained to -2.0") == 2


def test_mnist_when_a_worker_a_shard_and_a_node_are_killed_then_it_learns_and_nothing_is_lost(begin, nodes, tmp_path):
    """The example as the README has it, which imports a file beside it. After the loss of the node each shard has counted both
    workers' pushes of all steps since the checkpoint: none is missing, none counts twice."""
    steps = 1200
    options = ["--checkpoint-dir", tmp_path / "checkpoints", "--checkpoint-steps", 50, "--max-restarts", 5]
    script = os.path.relpath(ROOT / "examples/mnist.py")
    started = begin(*options, script, "--steps", steps, "--lr", 0.03, "--data", "digits")
    run_id = started.run_id

    def wait_for_progress() -> None:
        at = max([int(step) for step in re.findall(r"step +(\d+) of", started.output)] or [0])
        while int(started.line(r"step +(\d+) of", TIMEOUT_S)[1]) < at + 30:
            pass

    wait_for_progress()
    os.kill(worker_of(run_id, 1), signal.SIGKILL)
    started.line(r"worker 1 was killed by SIGKILL .*; starting it again", TIMEOUT_S)
    wait_for_progress()
    os.kill(servers_of(run_id)["0/2"], signal.SIGKILL)
    started.line("the shard continues where its earlier process ended", TIMEOUT_S)
    wait_for_progress()
    nodes.lose(parent(servers_of(run_id)["1/2"]))
    started.line("shards have moved; running all workers again", TIMEOUT_S)

    assert started.end(2 * TIMEOUT_S) == 0, started.output
    result = json.loads(re.search(r"result (\{.*\})", started.output)[1])
    assert result["steps"] == steps
    assert result["accuracy"] >= 0.85
    counted = re.search(r"shard 1/2 has counted (\d+) pushes, 0 late, up to step (\d+) from (\d+)", started.output)
    pushes, last, first = map(int, counted.groups())
    assert (pushes, last) == (2 * (steps - first), steps)
    assert first >= 50
    assert re.search(rf"step {steps}; \d+ pushes accepted, 0 late since the shards were last started", started.output)
    assert re.search(r"restarts of workers, \d+ restarts of shards", started.output)
    assert processes(run_id) == {}


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_job_when_psd_run_ends_then_nothing_is_left_on_any_node(job, signum):
    """Whether psd-run can still say so, or Ray alone notices."""
    started = job(steps=10**6)

    started.signal(signum)

    assert started.end(TIMEOUT_S) == (130 if signum == signal.SIGINT else -signum)
    wait_until(lambda: processes(started.run_id) == {}, "the workers' programs end")
    wait_until(lambda: servers_of(started.run_id) == {}, "the shards end")


def test_job_when_the_cluster_is_too_small_then_says_what_is_missing_and_ends_at_ctrl_c(run, nodes, script):
    """At once, as nothing has begun."""
    started = run("--on", "ray", "--address", nodes.address, "--workers", 2, "--worker-resources", "CPU=1,GPU=1", script, 10)
    started.line(r"waiting for room on the Ray cluster: GPU: 2 wanted, 0 free of 0", TIMEOUT_S)

    started.signal(signal.SIGINT)

    assert started.end(15.0) == 130
    ray.init(address=nodes.address, log_to_driver=False)
    wait_until(lambda: ray.available_resources().get("CPU") == 6, "the resources are free again")


def test_start_when_a_job_of_that_name_runs_then_is_refused_until_it_has_ended(nodes):
    """Two jobs with one name would write the same checkpoints."""
    import psd.ray

    ray.init(address=nodes.address, log_to_driver=False)
    shards = psd.ray.start(shards=1, run_id="run-7")
    with pytest.raises(ConfigError, match="run_id: a job with the name run-7 runs on this Ray cluster"):
        psd.ray.start(shards=2, run_id="run-7")
    assert shards.servers, "the first goes on"

    shards.stop()

    with pytest.raises(ConfigError, match="the shards of run-7 have ended"):
        _ = shards.servers
    psd.ray.start(shards=2, run_id="run-7").stop()


def test_start_when_a_program_is_rays_own_then_its_tasks_train_with_the_shards(nodes):
    """The handle can be sent to tasks, which connect by it."""
    import numpy as np

    import psd.ray

    ray.init(address=nodes.address, log_to_driver=False)

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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lease": -1}, r"shard 0 cannot be started: psd-server: error: --lease: expected 0.1 to 86400 seconds, got -1"),
        ({"chekpoint_dir": "c"}, r"shard 0 cannot be started: psd-server: error: unrecognized arguments: --chekpoint-dir=c"),
        ({"resources": {"CPU": 0}}, r"resources: Ray refuses them: Bundles cannot be"),
        ({"shards": 0}, r"shards: expected 1 or more, got 0"),
    ],
)
def test_start_when_an_option_is_wrong_then_says_so_at_once(nodes, options, message):
    """psd-server is the one that knows its options; what it says is the error's text."""
    import psd.ray

    ray.init(address=nodes.address, log_to_driver=False)
    with pytest.raises(ConfigError, match=message):
        psd.ray.start(**options)
