"""Commands for tests: started, and ended whatever the test does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import Job, Process


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    """Starts `python -m MODULE ARGS...`, with options of Process."""
    started: list[Process] = []

    def begin(module: str, *args: str, **options: Any) -> Process:
        started.append(Process(module, *args, **options))
        return started[-1]

    yield begin
    for process in started:
        process.close()


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """refusal(main, options) -> the one line with which a command refuses its options."""

    def refused(main: Callable[[list[str]], Any], options: list[str]) -> str:
        with pytest.raises(SystemExit) as exit_:
            main(options)
        assert exit_.value.code == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    return refused


@pytest.fixture
def help_of(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """help_of(main, *command) -> the help that it prints."""

    def printed(main: Callable[[list[str]], Any], *command: str) -> str:
        with pytest.raises(SystemExit) as exit_:
            main([*command, "--help"])
        assert exit_.value.code == 0
        return capsys.readouterr().out

    return printed


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
