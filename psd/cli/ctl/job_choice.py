"""Finds the job that a command of psdctl is about, where no addresses are given: among those that run on this machine.

Must not know what commands do with it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from psd.cli.words.terminal import show
from psd.contract.config import ConfigError
from psd.contract.job_records import JobRecord, running_jobs
from psd.contract.printable import printable
from psd.watch.words import aligned, duration

NAMED_MAX = 20
"""Jobs that an error names at most."""

COMMAND_LETTERS = 60


def chosen(program: str, name: str | None, otherwise: str) -> JobRecord:
    """The job of this name, or the only one. If there are several, asks on a terminal.

    Args:
        program: who asks. name: the name of the job, or its beginning; None: none was given.
        otherwise: the setting that would do instead, in an error.

    Raises:
        ConfigError: there is no such job, or there are several and no terminal; names them.
    """
    try:
        jobs = running_jobs()
    except OSError as error:
        raise ConfigError(f"{otherwise}; your jobs on this machine cannot be found: {error.strerror or error}") from error
    if name is not None:
        return _named(jobs, name)
    if not jobs:
        raise ConfigError(f"{otherwise}; you have no job that runs on this machine")
    if len(jobs) == 1:
        show(f"{program}: job {jobs[0].name}", is_error=True)
        return jobs[0]
    if sys.stdin.isatty() and sys.stderr.isatty():
        return _asked(jobs)
    raise ConfigError(f"job: {len(jobs)} jobs of yours run on this machine; name one: {_names(jobs)}")


def command_text(job: JobRecord) -> str:
    """The words of a job's program, on one line, and not too many."""
    text = printable(" ".join(job.command))
    return text if len(text) <= COMMAND_LETTERS else f"{text[: COMMAND_LETTERS - 3]}..."


def _named(jobs: Sequence[JobRecord], name: str) -> JobRecord:
    found = [job for job in jobs if job.name == name] or [job for job in jobs if name and job.name.startswith(name)]
    if not found:
        there = f"there are {_names(jobs)}" if jobs else "you have none that runs on this machine"
        raise ConfigError(f"job: there is no job {name!r}; {there}")
    if len(found) > 1:
        raise ConfigError(f"job: {name!r} begins the names of {_names(found)}; give more of it")
    return found[0]


def _names(jobs: Sequence[JobRecord]) -> str:
    more = f" and {len(jobs) - NAMED_MAX} more" if len(jobs) > NAMED_MAX else ""
    return ", ".join(job.name for job in jobs[:NAMED_MAX]) + more


def _asked(jobs: Sequence[JobRecord]) -> JobRecord:
    """The job of which the user types the number."""
    now = time.time()
    rows = [
        (f"{number}", printable(job.name), duration(max(0.0, now - job.started_at)), command_text(job))
        for number, job in enumerate(jobs, 1)
    ]
    show("\n".join(aligned([("", "JOB", "AGE", "COMMAND"), *rows], [False, True, False, True])), is_error=True)
    while True:
        print(f"which one? (1 to {len(jobs)}) ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            print(file=sys.stderr)
            raise ConfigError("job: none was chosen")
        if line.strip() in (numbers := [row[0] for row in rows]):
            return jobs[numbers.index(line.strip())]
