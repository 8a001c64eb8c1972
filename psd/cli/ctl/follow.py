"""`psdctl follow`: writes each new version of a running job as a directory, and runs a command for it.

Options, and what is said on the terminal; psd/cli/follow does the work, and is imported only when it is wanted: it is the one
part of the commands that is a client.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from psd.cli.ctl.job_arguments import add_where, check
from psd.cli.words import arguments
from psd.cli.words.arguments import (
    EXIT_FAILURE,
    EXIT_OK,
    CommandFailed,
    Commands,
    exit_status,
    refuse_given,
    signal_name,
    whole_number,
)
from psd.cli.words.terminal import show
from psd.contract.config import ConfigError
from psd.contract.job_records import running_jobs
from psd.contract.printable import printable
from psd.watch.asking import Asker
from psd.watch.sampler import Sampler
from psd.watch.words import size

if TYPE_CHECKING:
    from psd.cli.follow.formats import Format
    from psd.cli.follow.versions import FollowedVersion

REPEATED_S = 60.0
"""Seconds after which the same trouble is told again."""

LOOK_S = 2.0
"""Seconds that shards have to say whether all workers have left."""

_DESCRIPTION = """\
Write each new version of a running job's parameters as a directory, and run COMMAND for it: to serve, evaluate
or export a model while it trains. It is a reader: no worker waits for it, and waiting for the next version costs
the shards nothing."""

_EPILOG = """\
examples:
  psdctl follow --to versions                                 your only job on this machine; until it is over
  psdctl follow --to versions --every 100 --keep 5 -- python evaluate.py
  psdctl follow --to versions --once                          the newest version, now
  psdctl follow --to adapters --format peft --adapter-config adapter_config.json -- sh load.sh

DIR then has
  version-00001200/    model.safetensors and version.json: the job, the version, when, and the files' sizes
  latest               a link to the newest
A directory has its name from the moment that it is whole and on disk; the --keep newest stay. The version is the
number of closed rounds; without rounds, the clock of the slowest worker. Of a job that has gone back to a checkpoint
there are timeline-00001-version-00001000 and so on. A DIR has the versions of one job.

COMMAND has in its environment
  PSD_VERSION          the version, such as 1200
  PSD_DIR              the path of its directory, which stays as long as COMMAND runs
It is not run twice at once: versions that come while it runs are written, and the newest of them is next. If it
fails, that is said, and the next version has its turn. What it leaves in the background counts as COMMAND.

--format peft writes adapter_model.safetensors and adapter_config.json, as PEFT, vLLM and SGLang read them: the
tensors that have the adapter's name in theirs, without it, such as "q_proj.lora_A.default.weight"; all, if none has.

Shards that restart, a full disk, a follower that was killed: it goes on where it was, from what is in DIR. A version
of which COMMAND was not told, because the follower ended, is told first. docs/following.md has recipes.

--json prints one object on a line for each version, "version", "timeline", "directory", "bytes" and "seconds",
and for each end of COMMAND, "version", "timeline" and "status" (below 0: by a signal).

exit status:
  0     the job is over, and what it left is in DIR; with --once: the version is there, and COMMAND went well
  1     the shards refuse, or have not answered for --timeout; DIR cannot be used; with --once: what went wrong
  2     the options are wrong
  130   ended by Ctrl-C, 143 by SIGTERM: nothing is torn, and COMMAND is ended, too"""


def add_command(commands: Commands) -> None:
    """Add `follow` to psdctl."""
    usage = "--to DIR [--job NAME | --servers HOST:PORT,...] [options] [-- COMMAND ...]"
    parser = arguments.add_command(commands, "follow", usage, _DESCRIPTION, _EPILOG)
    what = parser.add_argument_group("what to write, and where")
    what.add_argument("--to", required=True, metavar="DIR", help="the directory; made if needed")
    what.add_argument(
        "--names",
        nargs="+",
        action="extend",
        default=[],
        metavar="PATTERN",
        help='only these tensors: names, or patterns such as "encoder.*" (default: all)',
    )
    what.add_argument(
        "--format", choices=("safetensors", "peft"), default="safetensors", help="the files of a version (default: %(default)s)"
    )
    what.add_argument(
        "--config",
        default="",
        metavar="FILE",
        help="with safetensors: this config.json beside, for transformers' from_pretrained",
    )
    what.add_argument("--adapter-config", default="", metavar="FILE", help="with peft, which needs it: the adapter_config.json")
    what.add_argument("--adapter", metavar="NAME", help="with peft: the adapter's name in the program (default: default)")
    when = parser.add_argument_group("which versions")
    when.add_argument(
        "--every",
        type=whole_number,
        default=1,
        metavar="N",
        help="only multiples of N, or the first one after, and the job's last (default: %(default)s)",
    )
    when.add_argument(
        "--keep", type=whole_number, default=3, metavar="N", help="remove all but the N newest (default: %(default)s)"
    )
    when.add_argument("--once", action="store_true", help="write the newest version and end")
    add_where(parser, 600.0, "how long to go on without an answer from the shards")
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="what to run for each version, and its arguments")
    how = parser.add_argument_group("output")
    how.add_argument("--json", action="store_true", help="JSON objects, one on a line, instead of text")
    parser.finish(_run)


def _run(args: argparse.Namespace) -> int:
    _check_options(args)
    check(args)
    from psd.cli.follow import follower
    from psd.cli.follow.ending import EndListener
    from psd.cli.follow.versions import FollowedDirectory

    form = _format(args)
    name = None if args.record is None else args.record.name
    try:
        with (
            _terminated_in_order(),
            FollowedDirectory(args.to) as directory,
            follower.reader_of(args.servers, name or "", args.files) as reader,
            EndListener(follower.reader_of(args.servers, name or "", args.files, "grpc")) as listener,
            Asker(args.servers, args.credentials) as asker,
            follower.JobFollower(
                reader,
                listener,
                _ending(name, asker),
                directory,
                form,
                args.command,
                _Report(args, directory.directory_of),
                patterns=args.names,
                every=args.every,
                keep=args.keep,
                patience_s=args.timeout,
            ) as following,
        ):
            went_well = following.once() if args.once else following.follow()
    except ConfigError as error:  # of the directory, or what the job has
        raise CommandFailed(str(error)) from error
    return EXIT_OK if went_well else EXIT_FAILURE


def _check_options(args: argparse.Namespace) -> None:
    for name, most in (("every", 1 << 40), ("keep", 1_000_000)):
        if not 1 <= getattr(args, name) <= most:
            raise ConfigError(f"--{name}: expected 1 to {most}, got {getattr(args, name)}")
    if args.format == "peft":
        if not args.adapter_config:
            raise ConfigError("--adapter-config: expected a file, which --format peft writes beside the tensors")
        refuse_given(args, {"config": "not with --format peft, which has --adapter-config"})
    else:
        refuse_given(args, dict.fromkeys(("adapter_config", "adapter"), "only with --format peft"))
    if args.command and shutil.which(args.command[0]) is None:
        raise ConfigError(f"COMMAND: there is no program {args.command[0]!r}")


def _format(args: argparse.Namespace) -> Format:
    from psd.cli.follow.formats import ADAPTER, PeftFormat, SafetensorsFormat

    if args.format == "peft":
        return PeftFormat(args.adapter_config, args.adapter or ADAPTER)
    return SafetensorsFormat(args.config)


def _ending(name: str | None, asker: Asker) -> Callable[[], bool]:
    """A function that returns whether the job is over: a job of this machine that runs no more, or whose workers have left."""
    sampler = Sampler(asker, answer_s=LOOK_S, has_curves=False)

    def is_over() -> bool:
        if name is not None and name not in [record.name for record in running_jobs()]:
            return True
        return sampler.look().state == "finished"

    return is_over


@contextlib.contextmanager
def _terminated_in_order() -> Iterator[None]:
    """Within: SIGTERM ends the process as Ctrl-C does, with its own status."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(signum: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(exit_status(signum))

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Report:
    """Events, as text or JSON. The same trouble is told once a minute."""

    def __init__(self, args: argparse.Namespace, place: Callable[[FollowedVersion], Path]) -> None:
        self._prog: str = args.parser.prog
        self._is_json: bool = args.json
        self._place = place
        self._troubles: dict[str, float] = {}

    def written(self, version: FollowedVersion, nbytes: int, took_s: float) -> None:
        directory = str(self._place(version))
        if self._is_json:
            self._print(version, directory=directory, bytes=nbytes, seconds=round(took_s, 3))
        else:
            show(printable(f"{version.name}: {size(nbytes)} in {took_s:.1f} s, {directory}"))

    def ended(self, version: FollowedVersion, status: int) -> None:
        if self._is_json:
            self._print(version, status=status)
        if status:
            how = f"status {status}" if status > 0 else signal_name(-status)
            show(f"{self._prog}: {version.name}: the command ended with {how}", is_error=True)

    def trouble(self, text: str) -> None:
        now = time.monotonic()
        if now - self._troubles.get(text, -REPEATED_S) >= REPEATED_S:
            self._troubles = {text: now}
            show(f"{self._prog}: {printable(text)}", is_error=True)

    def over(self, text: str) -> None:
        show(f"{self._prog}: {printable(text)}", is_error=True)

    def _print(self, version: FollowedVersion, **more: Any) -> None:
        print(json.dumps({"version": version.version, "timeline": version.timeline, **more}), flush=True)
