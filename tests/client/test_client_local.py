"""Local clusters: functions of a notebook in several workers, with what they print, return and raise."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import psd_client
from psd.contract.job_records import running_jobs
from psd_client import ConfigError, LocalCluster, RunFailed

NOTEBOOK = """
import beside_the_notebook
import numpy as np
import psd_client

FACTOR = 3

class Answer:
    def __init__(self, parameters):
        self.parameters = parameters

def train(steps, start=0.0):
    with psd_client.connect() as ps:
        params = ps.declare({"w": np.full(2, start)}, psd_client.SGD(lr=1))
        for _ in range(steps):
            params = ps.push_pull({"w": np.full(2, FACTOR * (beside_the_notebook.ONE + ps.rank))})
        print("trained", ps.world_size)
        return ps.rank, Answer(params["w"].tolist())

def fail():
    with psd_client.connect() as ps:
        ps.declare({"other": np.zeros(3)}, psd_client.Adam())  # each run is a job of its own
        if ps.rank == 1:
            raise ValueError("of this worker")
        ps.barrier("nobody else comes")

def wait():
    print("waiting", flush=True)
    input_that_never_comes = __import__("threading").Event()
    input_that_never_comes.wait()
"""


@pytest.fixture(scope="module")
def patched() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def notebook(patched: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[..., Any]]:
    """Functions of a module that no other process can import, as those of a notebook or a REPL are; beside it lies one that can
    be, from there."""
    path = tmp_path_factory.mktemp("notebook")
    (path / "beside_the_notebook.py").write_text("ONE = 1.0\n")
    patched.syspath_prepend(str(path))
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(NOTEBOOK, "<cell 1>", "exec"), names)
    return names


@pytest.fixture(scope="module")
def cluster(patched: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """The only job of this machine."""
    patched.setenv("PSD_JOBS_DIR", str(tmp_path_factory.mktemp("local") / "jobs"))
    with psd_client.local(shards=2, workers=2) as cluster:
        yield cluster


def assert_is_listed(cluster: LocalCluster) -> None:
    """With the shards of its latest run."""
    (job,) = running_jobs()
    assert (",".join(job.servers), job.workers) == (cluster.servers, 2)


class Interrupting(io.StringIO):
    """A terminal on which somebody presses Ctrl-C as soon as a worker waits."""

    def write(self, text: str) -> int:
        if "waiting" in text:
            raise KeyboardInterrupt
        return super().write(text)


@pytest.mark.process
def test_run_when_functions_are_a_notebooks_then_they_train_together(
    cluster: LocalCluster, notebook: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Arguments go there, objects come back in the order of the ranks, output is shown. Python has the notebook's directory in
    its path, and a worker needs that path before it reads the function."""
    results = cluster.run(notebook["train"], 2, start=1.0)

    assert [(rank, answer.parameters) for rank, answer in results] == [(rank, [1 - 2 * 4.5] * 2) for rank in (0, 1)]
    assert sorted(capsys.readouterr().out.splitlines()) == ["[worker 0] trained 2", "[worker 1] trained 2"]
    with psd_client.connect(cluster.servers, role="reader") as reader:
        assert reader.pull()["w"].tolist() == [1 - 2 * 4.5] * 2
    assert_is_listed(cluster)


@pytest.mark.process
def test_run_when_a_worker_raises_then_the_caller_gets_its_traceback_and_the_others_end(
    cluster: LocalCluster, notebook: Any
) -> None:
    with pytest.raises(
        RunFailed, match=r'(?s)^worker 1 raised an error:\nTrace.*"<cell 1>", line \d+, in fail.*of this'
    ) as caught:
        cluster.run(notebook["fail"])

    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, ValueError)
    assert_is_listed(cluster)
    with pytest.raises(TypeError, match=r"^fn: it, or what it uses, cannot be sent to a worker: .*lock"):
        cluster.run(print, threading.Lock())


@pytest.mark.process
def test_run_when_ctrl_c_is_pressed_then_everything_ends(
    cluster: LocalCluster, notebook: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that do not look, and the shards."""
    monkeypatch.setattr(sys, "stdout", Interrupting())
    with pytest.raises(KeyboardInterrupt):
        cluster.run(notebook["wait"])

    assert running_jobs() == []
    with pytest.raises(RuntimeError, match="this local cluster is closed"):
        cluster.run(notebook["wait"])
    with pytest.raises(psd_client.ShardUnavailable):
        psd_client.connect(cluster.servers, 0, 1, retry_timeout=0)


@pytest.mark.parametrize(
    ("arguments", "match"), [({"shards": 0}, "shards: expected at least 1"), ({"workers": "4"}, "workers: ex")]
)
def test_local_when_a_number_is_wrong_then_names_it(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        psd_client.local(**arguments)
