"""A program that runs without psd-run and without servers: it trains alone, on a private shard, which ends with it."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psd_client
from psd.contract.environment import memory_directory
from psd.contract.job_records import running_jobs
from psd_client import SGD, Adam, ConfigError, connect

W = {"w": np.ones(3)}


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("PSD_") or name == "WORLD_SIZE"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PSD_JOBS_DIR", str(tmp_path / "jobs"))


@pytest.mark.process
@pytest.mark.usefixtures("_alone")
def test_connect_when_nothing_is_given_then_trains_on_a_private_shard(caplog: pytest.LogCaptureFixture) -> None:
    """As with one worker under psd-run. A second connection is another job; a reader reads from the latest one."""
    with connect() as ps, connect(run_id="second") as other:
        ps.declare(W, SGD(lr=1))
        other.declare({"v": np.zeros(2)}, Adam(lr=1))  # a cell of a notebook that was run again, changed
        assert ps.push_pull(W, weight=3)["w"].tolist() == [0, 0, 0]
        with connect(role="reader") as reader:
            assert list(reader.pull()) == ["v"]
        assert (ps.rank, ps.world_size, ps.clock) == (0, 1, 1)
        # As where an estimator keeps it that is then saved: pickle named a lambda of ours.
        for copied in (copy.deepcopy, copy.copy, pickle.dumps):
            with pytest.raises(TypeError, match="a connection cannot be copied or pickled"):
                copied(ps if copied is copy.copy else [ps])

    assert [record.getMessage().startswith("psd: training alone") for record in caplog.records] == [True, True]
    with pytest.raises(ConfigError, match="no private shard to read from"):
        connect(role="reader")


@pytest.mark.process
@pytest.mark.usefixtures("_alone")
def test_publish_when_nothing_is_given_then_the_store_is_on_a_private_shard() -> None:
    """Which a reader of this process finds; it ends with the store."""
    with psd_client.publish() as store:
        assert store.put({"w": np.arange(3)}, {"step": 5}) == 1
        with connect(role="reader") as reader:
            weights = reader.pull()
    assert (weights.version, weights.meta, weights["w"].tolist()) == (1, {"step": 5}, [0, 1, 2])
    with pytest.raises(ConfigError, match="no private shard to read from"):
        connect(role="reader")


@pytest.mark.process
@pytest.mark.usefixtures("_alone")
def test_connect_when_alone_then_psdctl_finds_the_shard_until_the_connection_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each connection is a job. Its name is the program's, and where Python has none, that of a job."""
    monkeypatch.setattr(sys, "argv", ["/there/train.py", "--lr", "1"])
    with connect() as ps:
        (job,) = running_jobs()
        assert (job.command, job.workers, job.pid) == (("/there/train.py", "--lr", "1"), 1, os.getpid())
        assert job.name.startswith("train-")
        with connect(job.servers, role="reader") as reader:
            ps.declare(W, SGD(lr=1))
            assert list(reader.pull()) == ["w"]
        monkeypatch.setattr(sys, "argv", ["-c"])
        with connect():
            assert [each.name.partition("-")[0] for each in running_jobs()] == ["train", "job"]
        assert running_jobs() == [job]
    assert running_jobs() == []


@pytest.mark.process
@pytest.mark.usefixtures("_alone")
def test_connect_when_the_job_cannot_be_recorded_then_trains_all_the_same(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs").chmod(0o755)

    with connect() as ps:
        ps.declare(W, SGD(lr=1))
        assert ps.push_pull(W)["w"].tolist() == [0, 0, 0]

    assert "psd: psdctl jobs will not list this job: " in caplog.text


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize(
    ("environ", "arguments", "match"),
    [
        ({"PSD_STANDALONE": "0"}, {}, "servers: not given.*because PSD_STANDALONE is 0"),
        ({"PSD_RANK": "1"}, {}, "servers: not given.*because PSD_RANK is set"),
        ({"JOB_COMPLETION_INDEX": "1"}, {}, "because JOB_COMPLETION_INDEX is set"),
        ({"WORLD_SIZE": "4"}, {}, "because WORLD_SIZE is 4"),
        ({"PSD_STANDALONE": "no"}, {}, "PSD_STANDALONE: expected 0 or 1, got 'no'"),
        ({}, {"rank": 0, "world_size": 2}, "servers: not given. Pass servers="),
        ({}, {"servers": "h:1"}, "rank: not given"),
    ],
)
def test_connect_when_it_may_be_one_of_several_then_does_not_train_alone(
    environ: dict[str, str], arguments: dict[str, Any], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that has lost a part of its settings must not train on its own, unnoticed."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=match):
        connect(**arguments)


OWNER = """
import os, signal, sys
import numpy as np
import psd_client

ps = psd_client.connect()
ps.declare({"w": np.zeros(3)}, psd_client.SGD(lr=1))
child = os.fork()
if child == 0:  # a data loader that nobody ends
    os.close(1)
    os.close(2)
    signal.pause()
print(child, psd_client.standalone.PrivateShard.newest().process.pid, flush=True)
signal.pause()
"""


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[str]]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PSD_") or name == "PSD_JOBS_DIR"}
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def arenas_of(pid: int) -> list[Path]:
    """Directories in memory of that process."""
    locks = memory_directory().glob(f"psd-{os.getuid()}-*/lock")
    return [path for path in locks if path.read_bytes()[:16].strip() == b"%d" % pid]


@pytest.mark.process
def test_private_shard_when_its_owner_is_killed_then_ends_and_leaves_nothing(owner: subprocess.Popen[str]) -> None:
    """Although a forked child of the owner lives on. Standard error ends when owner and shard, who have it, are gone."""
    assert owner.stdout is not None
    assert owner.stderr is not None
    child, shard = map(int, owner.stdout.readline().split())
    assert len(arenas_of(shard)) == 1
    assert owner.pid in [job.pid for job in running_jobs()]

    owner.kill()
    text = owner.stderr.read()

    os.kill(child, signal.SIGKILL)
    assert text.count("\n") == 1
    assert "training alone" in text
    assert arenas_of(shard) == []
    assert owner.pid not in [job.pid for job in running_jobs()]


def test_package_says_what_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psd_client.standalone.python_command", lambda module: ["false", module])

    with pytest.raises(psd_client.ShardUnavailable, match="a private shard of this process could not be started: it ended"):
        psd_client.standalone.PrivateShard().wait_ready()


FORKING = """
import os, threading
import numpy as np
import psd_client

def push():
    while not is_over.is_set():
        ps.push_pull({"w": np.ones(300_000, np.float32)})

is_over = threading.Event()
with psd_client.connect(transport="grpc") as ps:
    ps.declare({"w": np.zeros(300_000, np.float32)}, psd_client.SGD(lr=0.1))
    pushing = threading.Thread(target=push)
    pushing.start()
    for _ in range(30):
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
    is_over.set()
    pushing.join()
"""
"""What a notebook does that runs shell commands beside its training."""


@pytest.mark.process
@pytest.mark.usefixtures("_alone")
def test_program_when_it_forks_while_it_trains_then_grpc_prints_nothing_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)

    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING], capture_output=True, text=True, timeout=100, check=True
    )

    assert [line for line in ended.stderr.splitlines() if not line.startswith("psd: ")] == []
