"""The manifests, played: processes with their very commands and environment, deleted one after another while a job trains."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import signal
import statistics
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kustomized import DEPLOY, kustomized
from player import Cluster
from pods import SHARED

from psd.cli import run
from psd.cli.kubernetes import credentials, manifests
from psd.cli.kubernetes.kubectl import Kubectl

SCRIPT = str(Path(__file__).with_name("summing_worker.py"))
STEPS_BETWEEN = 5


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    played = Cluster(tmp_path)
    yield played
    played.close()


@pytest.fixture
def deploy(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """psd-run --on kubernetes, with the played cluster in kubectl's place."""
    monkeypatch.chdir(Path(SCRIPT).parent)

    def psd_run(*options: str) -> None:
        plan = run.parse(["--on", "kubernetes", "--image", "psd", *options, Path(SCRIPT).name], {})
        assert isinstance(plan, run.Deployment)
        assert plan.run(Kubectl("", run=cluster.kubectl)) == 0

    return psd_run


class Job:
    """A played job, with its workers' output."""

    def __init__(self, cluster: Cluster, workers: int) -> None:
        self._cluster = cluster
        self._workers = workers

    def log(self, rank: int) -> str:
        """Logs of all pods that have had this name."""
        return self._cluster.pods[f"psd-worker-{rank}"].log.read_text()

    def times(self, rank: int = 0) -> list[float]:
        return [float(text) for text in re.findall(r"^step \d+ at (\S+)", self.log(rank), re.MULTILINE)]

    def clock(self) -> int:
        last = self.log(0).rpartition("begins at")[2]
        return max([0, *(int(text) for text in re.findall(r"^step (\d+) at", last, re.MULTILINE))])

    def wait_steps(self, count: int) -> None:
        until, waited = self.clock() + count, 0
        while self.clock() < until:
            is_alive = (waited := waited + 1) < 10_000 and not self._cluster.has_ended("psd-worker")
            assert is_alive, f"the job does not go on\n{self.log(0)[-2000:]}"
            threading.Event().wait(0.02)

    def end(self, shards: int) -> None:
        """Let all workers end after the same step, and check that each push of each of them has counted once."""
        (self._cluster.pods["psd-worker-0"].home / "stop").touch()
        assert self._cluster.wait_job("psd-worker") == "Complete"
        last = self.clock()
        total = float(last * sum(range(1, self._workers + 1)))
        for rank in range(self._workers):
            assert f"steps {last} sums [{total}] lanes {['tcp'] * shards}" in self.log(rank), self.log(rank)[-2000:]


def stall_s(times: list[float]) -> float:
    """Seconds that steps took beyond twice the usual."""
    steps = [later - earlier for earlier, later in itertools.pairwise(times)]
    usual = statistics.median(steps)
    return sum(step - usual for step in steps if step > 2 * usual + 0.1)


def roll(cluster: Cluster, job: Job, rounds: int) -> None:
    """Restart all shards one after another, as kubectl rollout restart does, again and again."""
    before = len(job.times())
    names = sorted((name for name in cluster.pods if re.fullmatch(r"psd-\d+", name)), reverse=True)
    addresses = {cluster.pods[name].address for name in names}
    ended_s = []
    for name in names * rounds:
        job.wait_steps(STEPS_BETWEEN)
        ended_s.append(cluster.delete_shard(name))
        addresses.add(cluster.pods[name].address)
    job.wait_steps(STEPS_BETWEEN)

    restarts = len(names) * rounds
    assert len(addresses) == len(names) + restarts
    stall = stall_s(job.times()[before:])
    print(  # noqa: T201 - the figure of the criterion
        f"{restarts} shards restarted one after another: training stood still for {stall:.1f} s in all, "
        f"{stall / restarts:.2f} s each; of that the old pods took {statistics.mean(ended_s):.2f} s each to end"
    )


@pytest.mark.process
def test_all_shards_restarted_one_after_another_under_load(cluster, deploy):
    """With certificates and tokens: no push is lost or counted twice, a worker that fails is started again, and when the job is
    done each shard is a blank one, ready for the next job."""
    deploy("--shards", "2", "--workers", "2")
    cluster.pods["psd-worker-1"].signal(signal.SIGKILL)  # before it has come far: the Job starts it again
    job = Job(cluster, workers=2)

    roll(cluster, job, rounds=1)
    with urllib.request.urlopen(cluster.pods["psd-0"].metrics_url, timeout=10) as page:
        assert b"psd_" in page.read()
    job.end(shards=2)

    assert cluster.failures == {"psd-worker-1": 1}
    for index in range(2):
        shard = cluster.pods[f"psd-{index}"]
        while not shard.statuses:
            assert not shard.ended.wait(0.05)
        assert shard.statuses == [0]
        shard.wait_for("livenessProbe")
        assert not shard.probe("readinessProbe")
    shown = json.loads(cluster.pods["psd-0"].execute(["psdctl", "status", "--json"]).stdout)
    assert [shard["state"] for shard in shown["shards"]] == ["empty"] * 2


@pytest.mark.process
def test_another_number_of_shards_by_way_of_a_checkpoint(cluster, deploy):
    """psd-run --rescale: the sums go on from the checkpoint, on other shards. So they do when the job is deleted, all pods at
    once, and deployed again."""
    checkpoints = ["--checkpoint-dir", f"file://{SHARED}/checkpoints", "--insecure"]
    deploy("--shards", "1", *checkpoints)
    job = Job(cluster, workers=1)
    job.wait_steps(STEPS_BETWEEN)

    deploy("--shards", "2", "--rescale", *checkpoints)
    job.wait_steps(STEPS_BETWEEN)
    at_deletion = job.clock()
    cluster.delete_all()
    shutil.rmtree(cluster.claims)
    deploy("--shards", "2", *checkpoints)
    job.wait_steps(STEPS_BETWEEN)
    job.end(shards=2)

    begun = [int(text) for text in re.findall(r"^begins at (\d+)", job.log(0), re.MULTILINE)]
    assert begun[0] == 0
    assert begun[1] >= STEPS_BETWEEN
    assert begun[2] >= at_deletion


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_all_shards_restarted_again_and_again(cluster, deploy):
    """Three shards, ten rounds of restarts; then the next job on the same shards, started anew, which begins with nothing."""
    deploy("--shards", "3", "--workers", "2")
    job = Job(cluster, workers=2)

    roll(cluster, job, rounds=10)
    job.end(shards=3)
    deploy("--shards", "3", "--workers", "2")
    job.wait_steps(STEPS_BETWEEN)
    job.end(shards=3)

    assert re.findall(r"^begins at (\d+)", job.log(0), re.MULTILINE) == ["0", "0"]


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_the_example_of_the_overlay_trains(cluster):
    """deploy/overlays/mnist as it is, with the Secrets that psdctl makes."""
    cluster.apply(manifests.as_yaml([*credentials.secrets_of("psd"), *kustomized(DEPLOY / "overlays/mnist")]))

    assert cluster.wait_job("psd-worker", 240) == "Complete"
    (result,) = re.findall(r"^result (.*)$", Job(cluster, workers=2).log(0), re.MULTILINE)
    assert json.loads(result)["accuracy"] > 0.8
