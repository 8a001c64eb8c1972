"""Commands for tests: started, and ended whatever the test does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import Job, Process


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    """Starts `python -m MODULE ARGS...`."""
    started: list[Process] = []

    def begin(module: str, *args: str, environ: dict[str, str] | None = None) -> Process:
        started.append(Process(module, *args, environ=environ))
        return started[-1]

    yield begin
    for process in started:
        process.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Runs `psd-run OPTIONS script.py ARGS...` with the text of the script; returns when the workers start."""
    started: list[Job] = []

    def begin(script: str, *options: str, args: tuple[str, ...] = (), environ: dict[str, str] | None = None) -> Job:
        path = tmp_path / "script.py"
        path.write_text(script)
        started.append(Job(*options, str(path), *args, environ=environ))
        started[-1].wait_until_ready()
        return started[-1]

    yield begin
    for process in started:
        process.close()
