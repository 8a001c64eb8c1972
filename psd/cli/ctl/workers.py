"""`psdctl workers`: who trains, how fast, and who waits for whom. psd/watch decides what is shown."""

from __future__ import annotations

import argparse
import json
import shutil

from psd.cli.ctl.job_arguments import USAGE, add_where, check
from psd.cli.words import arguments
from psd.cli.words.arguments import EXIT_FAILURE, EXIT_OK, Commands
from psd.cli.words.terminal import show
from psd.watch.asking import Asker
from psd.watch.sampler import Sampler
from psd.watch.snapshot import as_json
from psd.watch.top.columns import SORTS, WORKER_COLUMNS, grid, sorted_workers

_DESCRIPTION = """\
List the workers of a job: how far each is (CLOCK, its steps), how fast, how many steps behind the foremost one,
what part of the time others have AWAITED it, where it is; below it who waits for whom. Takes a second, to measure."""

_EPILOG = """\
examples:
  psdctl workers --servers 127.0.0.1:7000,127.0.0.1:7001
  psdctl workers --sort awaited
  psdctl workers --json | jq '.workers[] | select(.state != "live") | .rank'

--json prints one object: "workers", "waits" and "problems", as in psdctl status.

exit status:
  0     all shards answered, and belong to one job
  1     a shard did not answer, or the addresses are not those of one job's shards in their order
  2     the options are wrong"""


def add_command(commands: Commands) -> None:
    """Add `workers` to psdctl."""
    parser = arguments.add_command(commands, "workers", USAGE, _DESCRIPTION, _EPILOG)
    add_where(parser, 5.0, "how long to wait for each shard")
    how = parser.add_argument_group("output")
    how.add_argument("--sort", choices=SORTS, default="rank", help="order of the workers (default: %(default)s)")
    how.add_argument("--json", action="store_true", help="one JSON object, on one line, instead of a table")
    parser.finish(_run)


def _run(args: argparse.Namespace) -> int:
    check(args)
    with Asker(args.servers, args.credentials) as asker:
        now = Sampler(asker, answer_s=args.timeout).measure()
    workers = sorted_workers(now.workers, args.sort)
    if args.json:
        found = {
            name: as_json(value) for name, value in (("workers", workers), ("waits", now.waits), ("problems", now.problems))
        }
        print(json.dumps(found), flush=True)
    else:
        width = shutil.get_terminal_size((200, 24)).columns
        is_seen = any(shard.state != "no answer" for shard in now.shards)
        nobody = "no worker has joined yet" if is_seen else "no shard answered"
        lines = grid(WORKER_COLUMNS, workers, width).lines() if workers else [nobody]
        show("\n".join([*lines, *now.waiting, *(f"problem: {problem}" for problem in now.problems)]))
    return EXIT_FAILURE if now.problems else EXIT_OK
