"""`psdctl top`: live in a terminal, or once as text. psd/watch/top decides what is shown."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from typing import Any

from psd.cli.ctl.job_arguments import USAGE, add_where, check
from psd.cli.words import arguments
from psd.cli.words.arguments import EXIT_FAILURE, EXIT_OK, Commands, seconds
from psd.cli.words.terminal import show
from psd.contract import scalars
from psd.watch.asking import Asker
from psd.watch.sampler import Sampler
from psd.watch.snapshot import CurvePoint, as_json
from psd.watch.top.columns import SORTS
from psd.watch.top.lines import as_text

_DESCRIPTION = """\
Look at a job live: whether it trains, how fast, what limits it; its shards, its workers, who waits for whom,
and what has happened. ? explains keys and columns. The job hardly notices: it is asked every two seconds."""

_EPILOG = """\
examples:
  psdctl top --job train-3f
  psdctl top --servers 127.0.0.1:7000,127.0.0.1:7001
  psdctl top --sort awaited
  psdctl top --once > picture.txt

Where the output is no terminal, one picture is printed as plain text, measured over a second, as with --once.
--json prints it as one object: that of psdctl status, and "curves", by the name of each scalar that workers
have logged its last point; "events", the oldest first.

Events are what has happened since the first look, and of before: who is gone, shards that were started
again, the last checkpoint.

exit status:
  0     ended by q or Ctrl-C; or printed
  1     printed once, and a shard did not answer
  2     the options are wrong, or Textual is not installed"""


def add_command(commands: Commands) -> None:
    """Add `top` to psdctl."""
    parser = arguments.add_command(commands, "top", USAGE, _DESCRIPTION, _EPILOG)
    add_where(parser, 2.0, "how long to wait for each shard")
    how = parser.add_argument_group("output")
    how.add_argument(
        "--interval", type=seconds, default=2.0, metavar="SECONDS", help="time between looks (default: %(default)g)"
    )
    how.add_argument("--sort", choices=SORTS, default="rank", help="order of the workers (default: %(default)s)")
    how.add_argument("--once", action="store_true", help="print one picture as plain text, and end")
    how.add_argument("--json", action="store_true", help="print one picture as a JSON object, on one line, and end")
    parser.finish(_run)


def _run(args: argparse.Namespace) -> int:
    check(args)
    if not 0.1 <= args.interval <= 3600:
        args.parser.error(f"--interval: expected 0.1 to 3600 seconds, got {args.interval:g}")
    with Asker(args.servers, args.credentials) as asker:
        sampler = Sampler(asker, answer_s=args.timeout)
        if args.once or args.json or not (sys.stdout.isatty() and sys.stdin.isatty()):
            return _print_once(sampler, args)
        try:
            from psd.watch.top.app import TopApp
        except ImportError:
            args.parser.error("it needs Textual, which is not installed: pip install 'psd[ui]', or use --once")
        TopApp(sampler, args.interval, args.sort).run()
    return EXIT_OK


def _last(point: CurvePoint) -> dict[str, Any]:
    return {**as_json(point), **scalars.as_json({"value": point.value})}


def _print_once(sampler: Sampler, args: argparse.Namespace) -> int:
    now = sampler.measure()
    if args.json:
        curves = {name: _last(points[-1]) for name, points in sampler.history.curves.items()}
        print(json.dumps({**as_json(now), "curves": curves, "events": as_json([*sampler.history.events])}), flush=True)
    else:
        show(as_text(now, sampler.history, args.sort, shutil.get_terminal_size((100, 24)).columns))
    return EXIT_FAILURE if now.problems else EXIT_OK
