"""The examples of docs/migrating.md and the benchmark, started as their docstrings say, in a short form."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.process


def run(*command: str, backend: str = "tensorflow", **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PSD_")}
    environ |= {"KERAS_BACKEND": backend, **variables}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=280, env=environ, check=False)


def psd_run(*arguments: str, backend: str = "tensorflow") -> str:
    """Standard output of a run, which must succeed."""
    finished = run("-m", "psd.cli.run", *arguments, backend=backend)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def test_linear_regression_goes_on_where_its_checkpoint_is(tmp_path):
    """Synchronously with TensorFlow, with checkpoints by time; then asynchronously with torch, on another number of shards."""
    script = str(ROOT / "examples/keras_linear_regression.py")
    options = ("--workers", "2", "--checkpoint-dir", str(tmp_path / "run"), "--checkpoint-secs", "1")

    first = psd_run(*options, script, "--mode", "sync", "--steps", "90", "--lr", "0.2")
    second = psd_run(*options, "--shards", "2", script, "--mode", "async", "--steps", "130", "--lr", "0.2", backend="torch")

    line = r"step +(\d+)  weight +(\S+)  bias +(\S+)  loss +(\S+)"
    assert [int(step) for step, *_ in re.findall(line, first)] == [20, 40, 60, 80, 90]
    begun = [int(step) for step in re.findall(r"continues at step (\d+)", second)]
    assert (len(begun), min(begun)) == (2, 90)  # whoever joins later begins where the other one is
    assert int(re.findall(line, second)[-1][0]) == 130
    for output in (first, second):
        _, weight, bias, loss = map(float, re.findall(line, output)[-1])
        assert (weight, bias) == (pytest.approx(2, abs=0.2), pytest.approx(10, abs=0.1))
        assert loss < 0.5


def test_text_with_adadelta_is_restored(tmp_path):
    """The loss falls, and begins in the second run, of fewer workers, where it was."""
    options = ("--shards", "2", "--checkpoint-dir", str(tmp_path / "run"))
    script = (str(ROOT / "examples/keras_text_adadelta.py"), "--length", "12", "--units", "24")

    outputs = [
        psd_run("--workers", workers, *options, *script, "--steps", steps) for workers, steps in (("2", "60"), ("1", "80"))
    ]

    first, second = (json.loads(output.partition("result ")[2].splitlines()[0]) for output in outputs)
    losses = [float(loss) for loss in re.findall(r"loss +(\S+)", outputs[0])]
    assert losses[-1] < losses[0] - 0.5
    assert (first["begun"], first["steps"]) == (0, 60)
    assert (second["begun"], second["steps"]) == (60, 80)
    assert second["loss"] < first["loss"] + 0.2


@pytest.mark.parametrize("script", ["keras_linear_regression.py", "keras_text_adadelta.py"])
def test_example_that_may_not_train_alone_says_how_to_start_it(script):
    finished = run(str(ROOT / "examples" / script), backend="torch", PSD_STANDALONE="0")

    assert finished.returncode == 1
    assert "For example: psd-run" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_the_page_names_what_there_is():
    """Every option of psd's command lines and of the examples, and every file, that docs/migrating.md names."""
    page = (ROOT / "docs/migrating.md").read_text()
    of_others = {
        "--ps_hosts",
        "--worker_hosts",
        "--job_name",
        "--task_index",
        "--issync",
        "--nproc-per-node",
    }  # the last: torchrun's
    known = "".join(run("-m", f"psd.cli.{name}", "--help").stdout for name in ("run", "server"))
    known += "".join(run(str(path), "--help", backend="torch").stdout for path in (ROOT / "examples").glob("keras_*.py"))

    options = set(re.findall(r"--[a-z][a-z_-]+", page)) - of_others
    files = re.findall(r"\]\(([^)#h][^)#]*)\)", page)

    assert len(options) > 10
    assert [option for option in options if option not in known] == []
    assert len(files) > 3
    assert [name for name in files if not (ROOT / "docs" / name).exists()] == []


def test_the_benchmark_verifies_what_it_measures(tmp_path):
    """It holds to the bit, with gradients of several blocks; its figures mean nothing here."""
    figures = tmp_path / "figures"

    done = run(str(ROOT / "benchmarks/keras_step.py"), "--model", "mlp", "--steps", "3", "--json", str(figures))

    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(json.loads(figures.read_text())["median_s"]) == ["keras, eager", "keras, graph", "torch client"]
