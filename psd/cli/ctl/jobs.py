"""`psdctl jobs`: lists the jobs of this user that run on this machine, and asks their shards how far they are.

Knows the records that jobs leave (psd/contract/job_records.py), but not who writes them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from psd.cli.ctl.job_arguments import add_timeout, check_seconds, files_of
from psd.cli.ctl.job_choice import command_text
from psd.cli.words import arguments
from psd.cli.words.arguments import EXIT_OK, CommandFailed, Commands
from psd.cli.words.terminal import show
from psd.contract.config import ConfigError
from psd.contract.credentials import Credentials
from psd.contract.job_records import JobRecord, running_jobs
from psd.contract.printable import printable
from psd.watch.asking import Asker
from psd.watch.sampler import Sampler
from psd.watch.top.columns import Column, grid
from psd.watch.words import duration

_AT_ONCE = 16
"""Jobs that are asked at the same time."""

_DESCRIPTION = """\
List your jobs on this machine: those of psd-run, and programs and notebooks that train on shards of their own.
Each is asked how far it is. A job of psd-run --on ray is listed on the machine where psd-run runs; one on Kubernetes
is not, as psd-run ends once it is there: kubectl get jobs. Nor are those of other users and on other machines."""

_EPILOG = """\
examples:
  psdctl jobs
  psdctl status --job train-3f                     one of them, by the beginning of its name
  psdctl jobs --json | jq -r '.jobs[] | select(.step == null) | .name'

The other commands, such as psdctl status, need no addresses for these: without --servers and PSD_SERVERS they
take the only job, or ask which one. A job of several hosts is listed on each that has workers; from a machine
that is not in the network of a Ray cluster, its shards may not be reached.

STEP is that of its slowest live worker; of WORKERS the first number are live. "-": not known; if shards did not
answer, lines below say why.

Each job has a record in a directory that only you can open: PSD_JOBS_DIR, or one in memory. It has no tokens and
no keys. It is removed at the end of the job or, after kill -9, by whoever looks next.

--json prints one object, "jobs", a list with for each
  name, command, directory, pid   what it is, and the process that runs it
  started_at, age_s               when it began, in seconds since 1970; how many seconds that is ago
  step, live, workers             how far, how many live, of how many; null: not known
  servers                         the shards' addresses, in their order
  dashboard, log_dir              an address, a directory; empty: none
  tls_ca, tls_cert, tls_key,
  token_file                      paths of the files for its shards; empty: none
  problems                        what is wrong, in words; empty if all is well

exit status:
  0     listed; there may be none, and a job's shards may not answer
  1     the records cannot be read, or are not private to you
  2     the options are wrong"""


@dataclass(frozen=True)
class ListedJob:
    """A job, and what its shards say of it.

    Attributes:
        step: of its slowest live worker; None: nothing has been declared, or no shard has answered.
        live: number of live workers; None: no shard has answered.
        problems: reasons why the shards have not said more, a sentence each.
    """

    record: JobRecord
    age_s: float
    step: int | None
    live: int | None
    problems: tuple[str, ...]


_COLUMNS: tuple[Column[ListedJob], ...] = (
    Column("NAME", lambda job: printable(job.record.name), 100, is_left=True),
    Column("AGE", lambda job: duration(job.age_s), 90),
    Column("STEP", lambda job: "-" if job.step is None else f"{job.step}", 95),
    Column("WORKERS", lambda job: f"{'-' if job.live is None else job.live}/{job.record.workers}", 60),
    Column("SHARDS", lambda job: f"{len(job.record.servers)}", 50),
    Column("DASHBOARD", lambda job: printable(job.record.dashboard) or "-", 80, is_left=True),
    Column("SERVERS", lambda job: ",".join(job.record.servers), 40, is_left=True),
    Column("COMMAND", lambda job: command_text(job.record), 70, is_left=True),
)


def add_command(commands: Commands) -> None:
    """Add `jobs` to psdctl."""
    parser = arguments.add_command(commands, "jobs", "[options]", _DESCRIPTION, _EPILOG)
    how = parser.add_argument_group("output")
    how.add_argument("--json", action="store_true", help="one JSON object, on one line, instead of a table")
    add_timeout(how, 2.0, "how long to wait for the shards")
    parser.finish(_run)


def _run(args: argparse.Namespace) -> int:
    check_seconds(args.parser, "timeout", args.timeout)
    try:
        records = running_jobs()
    except OSError as error:
        raise CommandFailed(f"the records of jobs cannot be read: {error.strerror or error}") from error
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        jobs = list(threads.map(lambda record: _asked(record, args.timeout), records))
    if args.json:
        print(json.dumps({"jobs": [_as_json(job) for job in jobs]}), flush=True)
    else:
        show(_as_text(jobs))
    return EXIT_OK


def _asked(record: JobRecord, timeout_s: float) -> ListedJob:
    """Ask the shards of a job."""
    try:
        with Asker(record.servers, Credentials(**files_of(record))) as asker:
            now = Sampler(asker, answer_s=timeout_s, has_curves=False).look()
    except ConfigError as error:  # a certificate or a token has gone
        return ListedJob(record, _age_s(record), None, None, (printable(str(error)),))
    is_known = any(shard.state != "no answer" for shard in now.shards)
    live = sum(worker.state == "live" for worker in now.workers) if is_known else None
    return ListedJob(record, _age_s(record), now.clock if now.consistency else None, live, now.problems)


def _age_s(record: JobRecord) -> float:
    return max(0.0, time.time() - record.started_at)


def _as_text(jobs: Sequence[ListedJob]) -> str:
    if not jobs:
        return "you have no job that runs on this machine"
    width = shutil.get_terminal_size((200, 24)).columns
    problems = [f"problem: {printable(job.record.name)}: {problem}" for job in jobs for problem in job.problems]
    return "\n".join([*grid(_COLUMNS, jobs, width).lines(), *problems])


def _as_json(job: ListedJob) -> dict[str, Any]:
    seen = {"age_s": job.age_s, "step": job.step, "live": job.live, "problems": job.problems}
    return {**asdict(job.record), **seen}
