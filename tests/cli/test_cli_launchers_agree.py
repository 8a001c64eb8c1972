"""One command line of psd-run, given to all launchers: the settings that shards and workers end with are the same everywhere.

Ray is played (played_ray.py), and processes are noted instead of started; Kubernetes' manifests are read as its kubelet does.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from played_ray import PlayedRay

from psd.cli import run
from psd.cli.hosts import slurm
from psd.cli.job.plan import HostPlan
from psd.cli.kubernetes import manifests
from psd.cli.ray import job as ray_job
from psd.cli.ray import shards as ray_shards
from psd.cli.server import parse as parse_shard
from psd.cli.words.arguments import EXIT_CHECKPOINT, LAST_CHECKPOINT_SIGNAL
from psd.cli.words.logs import Settings
from psd.contract.config import SECURITY, Limits, ServerConfig
from psd.contract.environment import VARIABLES
from psd.contract.job_records import JobRecord, running_jobs
from psd.contract.launching import HAS_STORED
from psd.contract.settings import settings_of

SERVERS = ["127.0.0.1:7000", "127.0.0.1:7001"]

JOB = (
    *("--shards", "2", "--workers", "2000", "--consistency", "sync", "--quorum", "1999", "--reduce", "sum"),
    *("--aggregation", "exact", "--transport", "tcp", "--streams", "4", "--env", "MINE=1", "--env", "PSD_REDUCE=mean"),
    *("--rule", "mine_of_psd:First", "--rule", "mine_of_psd:Second", "--lease", "12345.678", "--grace", "3210.5"),
    *("--on-worker-failure", "continue", "--log-level", "debug"),
    *("--checkpoint-dir", "memory://run", "--checkpoint-secs", "1234567.5", "--checkpoint-steps", "12345678"),
    *("--checkpoint-keep", "1000000", "--from-checkpoint", "memory://b/m.safetensors", "--parameters-only"),
)

SHARED = [name for name, each in settings_of(ServerConfig).items() if each.is_shared and each.group != SECURITY]
"""Settings that all shards of a job have alike; what may reach them is their place's, which `--insecure` stands for here."""

WHO = frozenset({"PSD_SERVERS", "PSD_RANK", "PSD_LOCAL_RANK", "PSD_RUN_ID", "PSD_NODE", "PSD_RETRY_TIMEOUT"})
"""Variables of a worker that say which it is, and for how long a place may keep a shard away."""

RULES = """
class First:
    slots, hyper = {}, {"lr": 1.0}

    def apply(self, param, grad, slots, hyper):
        param -= grad


class Second(First):
    pass
"""


class Found(NamedTuple):
    """What a launcher has made of a command line: the last shard's words, the files in its --rule-dir, its environment, and a
    worker's."""

    shard: list[str]
    modules: set[str]
    shard_environ: Mapping[str, str]
    worker_environ: Mapping[str, str]

    @property
    def settings(self) -> tuple[ServerConfig, Settings]:
        return parse_shard(self.shard)


def rule_dir(words: Sequence[str]) -> Path:
    return Path(parse_shard(words)[0].rule_dir)


def files(folder: Path) -> set[str]:
    """Files that a shard finds in a folder, wherever its own working directory is."""
    return {path.name for path in folder.iterdir()} if folder.is_absolute() else set()


@pytest.fixture(autouse=True)
def _beside_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "mine_of_psd.py").write_text(RULES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PSD_JOBS_DIR", str(tmp_path / "jobs"))


def here(words: list[str], environ: Mapping[str, str] = {}) -> Found:
    plan = run.parse(words, environ)
    assert isinstance(plan, HostPlan)
    if plan.meeting is not None:  # as the psd-run of the second node does
        plan = run.parse(words, environ, "run-7", 1)
        assert isinstance(plan, HostPlan)
    command = plan.shard_command(1, SERVERS[1], Path("/state/shard-1"))
    shard = list(command[command.index("psd.cli.server") + 1 :])
    return Found(shard, files(rule_dir(shard)), plan.shard_environ, plan.worker_environ(1, SERVERS))


def on_slurm(words: list[str], monkeypatch: pytest.MonkeyPatch) -> Found:
    task = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "node[1-2]"}
    monkeypatch.setattr(slurm, "_ask", lambda *question: "node1\nnode2" if "hostnames" in question else "NodeAddr=10.0.0.1")
    return here(["--on", "slurm", "--insecure", *words], task)


def on_kubernetes(words: list[str]) -> Found:
    plan = run.parse(["--on", "kubernetes", "--image", "psd", "--insecure", *words], {})
    assert isinstance(plan, run.Deployment)
    rendered = plan.render()
    config = next(each for each in rendered if each["kind"] == "ConfigMap" and "SHARDS" in each["data"])["data"]
    pods = [manifests.container(manifests.the(kind, rendered)) for kind in ("StatefulSet", "Job")]

    def environ(pod: manifests.Manifest) -> dict[str, str]:
        found = dict(config)
        for variable in pod["env"]:
            found[variable["name"]] = expanded(variable["value"], found) if "value" in variable else "1"
        return found

    def expanded(text: str, known: Mapping[str, str]) -> str:
        return re.sub(r"\$\((\w+)\)", lambda match: known[match[1]], text)

    shard, worker = map(environ, pods)
    words = [expanded(word, shard) for word in pods[0]["args"]]
    mounted = {mount["mountPath"] for mount in pods[0]["volumeMounts"]}
    sent = {name for each in rendered if each["kind"] == "ConfigMap" for name in each["data"] if name.endswith(".py")}
    return Found(words, sent if str(rule_dir(words)) in mounted else set(), shard, worker)


class Played(NamedTuple):
    """A job on Ray that has been played.

    Attributes:
        shards: by index, what each psd-server was started with: words, modules, environment; and its standard input.
        workers: by rank, the environment of each of its lives. events: signals that were sent, and shards that began.
        listed: the jobs of this machine, as worker 0 trained. status: of psd-run.
    """

    shards: dict[int, tuple[list[str], set[str], Mapping[str, str], io.StringIO]]
    workers: dict[int, list[Mapping[str, str]]]
    events: list[tuple[str, int]]
    listed: list[JobRecord]
    status: int


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Played]]:
    """play(words, statuses): runs a job on Ray whose shards are ready at once, and end in order.

    statuses: of worker 1's lives, before the one that finishes; None: it trains on, and somebody presses Ctrl-C.
    shard_statuses: of the lives of each shard; the last is that of all that follow.
    """
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}

    def job(words: list[str], statuses: Sequence[int | None] = (), shard_statuses: Sequence[int] = (0,)) -> Played:
        played = Played({}, {}, [], [], 0)

        finished: set[int] = set()
        all_have = threading.Event()

        class Heard(io.StringIO):
            def close(self) -> None:
                """Stay readable for the test."""

        class Shard:
            def __init__(self, command: list[str], *, env: Mapping[str, str], **_: Any) -> None:
                words = command[command.index("psd.cli.server") + 1 :]
                self._which = words[words.index("--shard") + 1]
                self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
                life = [which for which, signum in played.events if signum == 0].count(self._which)
                self._status = shard_statuses[min(life, len(shard_statuses) - 1)]
                played.events.append((self._which, 0))
                self.stdin, self.stdout = Heard(), self._lines()
                played.shards[int(self._which[0])] = words, files(rule_dir(words)), env, self.stdin

            def _lines(self) -> Iterator[str]:
                yield f"psd-server: shard {self._which} ready at {SERVERS[int(self._which[0])]}\n"
                while not all_have.wait(0.01):
                    with contextlib.suppress(queue.Empty):
                        if self._signals.get_nowait() != LAST_CHECKPOINT_SIGNAL:
                            return
                        yield f"psd-server: shard {self._which} {HAS_STORED}: memory://run/last\n"
                yield f"psd-server: shard {self._which} done: all workers have left\n"

            def wait(self, _timeout: float | None = None) -> int:
                return self._status

            def kill(self) -> None:
                self._signals.put(signal.SIGKILL)

            def send_signal(self, signum: int) -> None:
                played.events.append((f"shard {self._which}", signum))
                self._signals.put(signum)

        class Worker:
            def __init__(self, rank: int) -> None:
                self._rank, self._is_stopped = rank, threading.Event()

            def ready(self) -> None:
                """It is."""

            def run(self, life: int, _command: Any, _script: Any, environ: Mapping[str, str], _ready: None) -> int:
                played.workers.setdefault(self._rank, []).append(environ)
                played.listed.extend(running_jobs() if self._rank == 0 else ())
                status = statuses[life - 1] if self._rank == 1 and life <= len(statuses) else 0
                if status is None:
                    os.kill(os.getpid(), signal.SIGINT)
                    assert self._is_stopped.wait(100)
                    return -signal.SIGTERM
                finished.update([self._rank] if status == 0 else [])
                if len(finished) == int(environ["PSD_WORLD_SIZE"]):
                    all_have.set()
                return status

            def stop(self, _life: int, _grace_s: float) -> None:
                played.events.append((f"worker {self._rank}", signal.SIGTERM))
                self._is_stopped.set()

        monkeypatch.setitem(sys.modules, "ray", PlayedRay())
        monkeypatch.setattr(ray_shards.subprocess, "Popen", Shard)
        monkeypatch.setattr(ray_job, "WorkerProcess", Worker)
        monkeypatch.setattr(ray_shards, "private_path", lambda name: tmp_path / name)
        plan = run.parse(["--on", "ray", "--insecure", *words], {})
        assert isinstance(plan, ray_job.RayPlan)
        return played._replace(status=plan.run())

    yield job
    for signum, handler in before.items():
        signal.signal(signum, handler)


def on_ray(words: list[str], play: Callable[..., Played]) -> Found:
    played = play(words)
    assert played.status == 0
    return Found(*played.shards[1][:3], *played.workers[1])


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, play: Callable[..., Played]) -> Callable[[str], Found]:
    """launched(WHERE): what that launcher makes of JOB and a script."""
    words = [*JOB, "train.py"]
    without_workers = [*JOB[:2], *JOB[4:], "train.py"]
    launchers = {
        "this machine": lambda: here(words),
        "--nnodes": lambda: here(["--nnodes", "2", "--rendezvous", "127.0.0.1:1", "--insecure", *words]),
        "--hosts": lambda: here(["--hosts", "a:1,b:1999", "--insecure", *without_workers]),
        "--on slurm": lambda: on_slurm(words, monkeypatch),
        "--on kubernetes": lambda: on_kubernetes(words),
        "--on ray": lambda: on_ray(words, play),
    }
    return lambda where: launchers[where]()


elsewhere = pytest.mark.parametrize("where", ["--nnodes", "--hosts", "--on slurm", "--on kubernetes", "--on ray"])


@elsewhere
def test_shards_have_the_same_settings(launched: Callable[[str], Found], where: str) -> None:
    """Where nothing starts workers again, nothing tells shards of it."""
    (usual, usual_log), (config, log) = launched("this machine").settings, launched(where).settings

    default = ServerConfig(0, 1)
    for name in SHARED:
        assert getattr(usual, name) != getattr(default, name), f"JOB does not show whether {name} arrives"
        is_told = name != "heeds_launcher" or where != "--on kubernetes"
        assert getattr(config, name) == getattr(usual if is_told else default, name), name
    assert config.limits == usual.limits == Limits(workers_max=2000)
    assert log.level == usual_log.level == "debug"


@elsewhere
def test_workers_have_the_same_variables(launched: Callable[[str], Found], where: str) -> None:
    """What an option says wins over --env. malloc's thresholds are psd-run's."""
    usual, environ = launched("this machine").worker_environ, launched(where).worker_environ

    assert (usual["PSD_REDUCE"], usual["PSD_QUORUM"], usual["MINE"], usual["PSD_RANK"]) == ("sum", "1999", "1", "1")
    for name in (*VARIABLES, "MINE", "MALLOC_MMAP_THRESHOLD_"):
        assert environ.get(name) == usual.get(name) or name in WHO, name


@elsewhere
def test_shards_have_the_variables_of_env(launched: Callable[[str], Found], where: str) -> None:
    """As the help says: all shards and workers."""
    assert launched(where).shard_environ["MINE"] == "1"


@elsewhere
def test_shards_find_the_modules_of_rules_beside_the_script(launched: Callable[[str], Found], where: str) -> None:
    """Also where the script is sent to other machines."""
    assert "mine_of_psd.py" in launched(where).modules


@pytest.mark.parametrize("where", ["kubernetes", "ray"])
def test_a_directory_of_this_machine_is_not_handed_to_others(where: str, refusal: Callable[..., str]) -> None:
    """The scalars would be written wherever that path leads there; the error says how to name a place of theirs."""
    error = refusal(run.main, ["--on", where, "--tensorboard", "board", "train.py"])

    assert f"--tensorboard: not with --on {where}, where " in error
    assert "use --env PSD_TENSORBOARD=DIR" in error


def test_shards_on_ray_are_told_of_workers_that_are_started_again(play: Callable[..., Played]) -> None:
    """As psd-run's own are: its lease does not run out while Ray starts one elsewhere; and none comes once it has finished."""
    played = play(["--shards", "2", "--workers", "2", "--max-restarts", "2", "train.py"], [3, 3])

    assert played.status == 0
    assert [len(played.workers[rank]) for rank in range(2)] == [1, 3]
    for _, _, _, heard in played.shards.values():
        assert heard.getvalue().endswith("gone 1\n")
        assert set(heard.getvalue().splitlines()) <= {"starting 1", "gone 1"}


@pytest.mark.parametrize("words", [["--on-worker-failure", "continue", "--max-restarts", "2"], ["--on-worker-failure", "end"]])
def test_shards_on_ray_wait_for_nobody_whom_the_others_do_not(play: Callable[..., Played], words: list[str]) -> None:
    """They go on without it, or end with it."""
    played = play(["--workers", "2", *words, "train.py"], [3, 3] if "continue" in words else [3])

    assert played.status == (0 if "continue" in words else 3)
    assert played.shards[0][3].getvalue() == ""


def test_a_job_on_ray_that_is_told_to_end_takes_a_last_checkpoint_first(play: Callable[..., Played]) -> None:
    """While its workers train; then these are stopped, and then the shards: as psd-run's own are."""
    played = play(["--shards", "2", "--workers", "2", "--checkpoint-dir", "memory://run", "train.py"], [None])

    assert played.status == 130
    shards = {"shard 0/2", "shard 1/2"}
    signals = [event for event in played.events if event[1]]
    assert {signals[0], signals[1]} == {(shard, LAST_CHECKPOINT_SIGNAL) for shard in shards}
    assert signals[2] == ("worker 1", signal.SIGTERM)
    assert {event for event in signals if event[1] == signal.SIGTERM} >= {(shard, signal.SIGTERM) for shard in shards}


def test_a_job_on_ray_whose_last_checkpoint_was_not_stored_says_so(play: Callable[..., Played]) -> None:
    """By its status, and by a line."""
    assert play(["--checkpoint-dir", "memory://run", "train.py"], (), [EXIT_CHECKPOINT]).status == EXIT_CHECKPOINT


@pytest.mark.parametrize(
    ("options", "lives"), [(["--checkpoint-dir", "memory://run"], 2), ([], 1)], ids=["checkpoints", "none"]
)
def test_a_shard_on_ray_that_is_killed_while_it_stores_a_finished_job_is_started_again(
    play: Callable[..., Played], options: list[str], lives: int
) -> None:
    """As psd-run's own are. One that has nothing to store is done."""
    played = play([*options, "train.py"], (), [-signal.SIGKILL, 0])

    assert played.status == 0
    assert [event for event in played.events if event[1] == 0] == [("0/1", 0)] * lives


def test_a_job_on_ray_is_listed_while_it_runs(play: Callable[..., Played]) -> None:
    """With the addresses of its shards, for psdctl on this machine."""
    played = play(["--shards", "2", "--workers", "2", "train.py"])

    assert played.status == 0
    (job,) = played.listed
    environ = played.workers[0][0]
    assert (job.name, job.servers, job.workers) == (environ["PSD_RUN_ID"], tuple(SERVERS), 2)
    assert (job.command, job.pid) == (("train.py",), os.getpid())
    assert running_jobs() == []
