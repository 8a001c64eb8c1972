"""Workers made from the protocol alone, in Python and JavaScript (examples/other_languages), under shards that are killed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from generated_stubs import generate_stubs
from shard_processes import ShardProcess, servers_of
from source_tree import ROOT

pytestmark = pytest.mark.process

HERE = ROOT / "examples" / "other_languages"
STEPS = 80

WITHOUT_PSD = """
import runpy, sys, time
pause = time.sleep
time.sleep = lambda seconds: pause(min(seconds, 0.02))
_, stubs, program, *arguments = sys.argv
sys.path.insert(0, stubs)
sys.argv = [program, *arguments]
runpy.run_path(program, run_name="__main__")
of_psd = sorted(name for name in sys.modules if name.split(".")[0] in ("psd", "psd_client", "psd_core"))
assert [name for name in of_psd if not name.startswith("psd.v1.")] == ["psd", "psd.v1"], of_psd
assert sys.modules["psd"].__file__.startswith(stubs), sys.modules["psd"]
"""
"""A program that runs another one, which finds the stubs, and none of psd's code.

Its heartbeats come often, so that one is under way whenever something else happens.
"""

OFTEN = """
const later = setTimeout;
globalThis.setTimeout = (call, ms, ...rest) => later(call, [2000, 12000].includes(ms) ? 20 : ms, ...rest);
"""
"""A module that makes worker.js' heartbeats come as often: their pauses are a fifth of the lease, 10 s at first, then 60 s."""


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with freshly generated stubs, as a stranger would make them."""
    return generate_stubs(tmp_path_factory.mktemp("stubs"))


def why_no_javascript() -> str:
    """The reason why worker.js cannot run here; empty if it can."""
    if shutil.which("node") is None:
        return "node is not installed"
    look = "require('@grpc/grpc-js'); require('@grpc/proto-loader')"
    found = subprocess.run(["node", "-e", look], cwd=HERE, capture_output=True, timeout=100, check=False)
    return "its packages are not installed: npm ci --prefix examples/other_languages" if found.returncode else ""


@pytest.fixture
def job(stubs: Path, tmp_path: Path) -> Iterator[Callable[..., list[subprocess.Popen[str]]]]:
    """job(shards, languages) -> a worker in each language, which makes STEPS steps."""
    started: list[subprocess.Popen[str]] = []

    def start(shards: list[ShardProcess], languages: tuple[str, ...]) -> list[subprocess.Popen[str]]:
        if "javascript" in languages and (why := why_no_javascript()):
            pytest.skip(why)
        often = tmp_path / "often.js"
        often.write_text(OFTEN)
        commands = {
            "python": [sys.executable, "-I", "-c", WITHOUT_PSD, str(stubs), str(HERE / "worker.py"), str(STEPS)],
            "javascript": ["node", "--require", str(often), str(HERE / "worker.js"), str(STEPS)],
        }
        for rank, language in enumerate(languages):
            environ = os.environ | {
                "PSD_SERVERS": servers_of(shards),
                "PSD_RANK": str(rank),
                "PSD_WORLD_SIZE": str(len(languages)),
            }
            started.append(subprocess.Popen(commands[language], stdout=subprocess.PIPE, text=True, env=environ))
        return started

    yield start
    for process in started:
        process.kill()
        process.wait(100)
        assert process.stdout is not None
        process.stdout.close()


def steps_of(worker: subprocess.Popen[str]) -> Iterator[int]:
    """The steps that a worker says it has made, as it makes them."""
    assert worker.stdout is not None
    for line in worker.stdout:
        word, _, rest = line.partition(" ")
        if word == "values":
            assert rest.strip() == f"[-{3 * STEPS:.1f}]"
            return
        yield int(rest)
    raise AssertionError(f"the worker has ended with status {worker.wait(100)}")


def check_ends(workers: list[subprocess.Popen[str]]) -> None:
    """Wait for all workers, which have found that every gradient of each has counted once."""
    for worker in workers:
        for _ in steps_of(worker):
            pass
        assert worker.wait(100) == 0


LANGUAGES = [("python", "python"), ("javascript", "python")]


@pytest.mark.parametrize("languages", LANGUAGES, ids="-".join)
def test_every_gradient_counts_once_when_shards_are_killed_and_one_has_lost_its_memory(
    shard_processes: Callable[..., list[ShardProcess]],
    job: Callable[..., list[subprocess.Popen[str]]],
    languages: tuple[str, ...],
    tmp_path: Path,
) -> None:
    """The sum of all gradients, in each element, is what both workers find in the end.

    They carry the checkpoint from shard to shard, and bring both back to it: a worker that finds one shard gone back, and the
    other one not, begins another timeline, so the last one is 1 or above.
    """
    shards = shard_processes(2, "--lease", "60", "--checkpoint-dir", str(tmp_path / "checkpoints"))
    workers = job(shards, languages)

    due = [(5, shards[1]), (20, shards[1]), (35, shards[0])]
    for step in steps_of(workers[0]):
        if due and step >= due[0][0]:
            (at, shard), *due = due
            if at == 20:
                shards[0].checkpoint()
            assert not shard.has_ended
            shard.kill()
            if at == 20:
                shard.lose_state()
            shard.start()
        if step == STEPS:
            break

    check_ends(workers)
    assert not due
    assert [shard.wait() for shard in shards] == [0, 0]
    names = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert any(re.fullmatch(rf"timeline-0*[1-9][0-9]*-step-0*{STEPS}-final", name) for name in names), names
