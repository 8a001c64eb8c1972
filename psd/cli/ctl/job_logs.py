"""`psdctl logs`: shows the files that psd-run --log-dir keeps, one for each process. Must not know who writes them."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from psd.cli.ctl.job_arguments import add_job
from psd.cli.ctl.job_choice import chosen
from psd.cli.words import arguments
from psd.cli.words.arguments import EXIT_OK, CommandFailed, Commands, whole_number
from psd.cli.words.terminal import show
from psd.contract.config import ConfigError

POLL_S = 0.3
SUFFIX = ".log"

_READ_BYTES = 1 << 16

_DESCRIPTION = """\
Show what the processes of a job have written last, from the files of psd-run --log-dir."""

_EPILOG = """\
A PROCESS is worker-3, or just 3; shard-0; or psd-run.

examples:
  psdctl logs                                      your only job on this machine
  psdctl logs --log-dir logs                       the last lines of all
  psdctl logs 3 shard-0 --log-dir logs -n 100
  psdctl logs 3 --log-dir logs --follow

On Kubernetes the cluster keeps the logs: kubectl logs NAME-workers-3-..., as kubectl get pods lists them. On Ray
it does, too: ray list actors lists NAME/worker-3 and the others, ray logs actor --id ID shows what one has written.

exit status:
  0     shown
  1     there are no such files
  2     the options are wrong"""


def add_command(commands: Commands) -> None:
    """Add `logs` to psdctl."""
    usage = "[PROCESS...] [--job NAME | --log-dir DIR] [options]"
    parser = arguments.add_command(commands, "logs", usage, _DESCRIPTION, _EPILOG)
    which = parser.add_argument_group("which logs")
    which.add_argument("processes", nargs="*", metavar="PROCESS", help="only these (default: all)")
    which.add_argument("--log-dir", metavar="DIR", help="psd-run's --log-dir (default: PSD_LOG_DIR, or that of --job)")
    add_job(which)
    how = parser.add_argument_group("output")
    how.add_argument("-n", "--lines", type=whole_number, default=20, metavar="N", help="of each (default: %(default)s)")
    how.add_argument(
        "--follow",
        action="store_true",
        help="go on with what is written from now on, also by processes that begin later, until Ctrl-C",
    )
    how.add_argument("--json", action="store_true", help='for each line an object with "process" and "line"')
    parser.finish(_run)


def _run(args: argparse.Namespace) -> int:
    if args.lines < 0:
        args.parser.error(f"--lines: expected 0 or more, got {args.lines}")
    try:
        args.log_dir = _directory(args)
    except ConfigError as error:
        args.parser.error(f"--{error}")
    known = _logs_of(args.log_dir)
    names = [f"worker-{name}" if name.isdigit() else name for name in args.processes] or list(known)
    if not known or (unknown := [name for name in names if name not in known]):
        have = f"there are {', '.join(known)}" if known else "psd-run --log-dir makes them"
        what = f"no log of {unknown[0]}" if known else "no logs"
        raise CommandFailed(f"{args.log_dir} has {what}; {have}")
    printer = _Printer(len(names) > 1 or (args.follow and not args.processes), is_json=args.json)
    with contextlib.ExitStack() as files:
        try:
            opened = {name: files.enter_context(known[name].open("rb")) for name in names}
            for name, file in opened.items():
                printer.show(name, _last_lines(file, args.lines))
            while args.follow:
                time.sleep(POLL_S)
                more = {} if args.processes else _logs_of(args.log_dir)
                opened |= {name: files.enter_context(more[name].open("rb")) for name in more.keys() - opened.keys()}
                for name, file in opened.items():
                    printer.show(name, _new_lines(file))
        except OSError as error:
            raise CommandFailed(f"{error.filename or args.log_dir}: {error.strerror or error}") from error
    return EXIT_OK


def _directory(args: argparse.Namespace) -> str:
    """The directory that was given, or that of a job. ConfigError if there is none."""
    if args.job is not None and args.log_dir is not None:
        raise ConfigError("job: not beside --log-dir, which says which job")
    given = args.log_dir if args.log_dir is not None or args.job is not None else os.environ.get("PSD_LOG_DIR")
    if given:
        return str(given)
    job = chosen(args.parser.prog, args.job, "log-dir: expected that of psd-run, here or in PSD_LOG_DIR")
    if not job.log_dir:
        raise ConfigError(f"job: {job.name} has no --log-dir, so that there are no files of what it writes")
    return job.log_dir


def _logs_of(directory: str) -> dict[str, Path]:
    """The log files in a directory, by name of the process."""
    return {path.stem: path for path in sorted(Path(directory).glob(f"*{SUFFIX}")) if path.is_file()}


def _last_lines(file: BinaryIO, count: int) -> Sequence[bytes]:
    """The last complete lines of a file, read from its end. An incomplete line after them is left for the next call."""
    begin = file.seek(0, os.SEEK_END)
    data, nbytes = b"", _READ_BYTES
    while begin and data.count(b"\n") <= count:
        nbytes = min(begin, 2 * nbytes)
        begin = file.seek(begin - nbytes)
        data = file.read(nbytes) + data
    end = data.rfind(b"\n") + 1
    file.seek(begin + end)
    return data[:end].split(b"\n")[:-1][-count:] if count else []


def _new_lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines that have been added; a line that is not complete yet is left for the next call."""
    while True:
        at = file.tell()
        line = file.readline()
        if not line.endswith(b"\n"):
            file.seek(at)
            return
        yield line


class _Printer:
    """Prints lines, with the name of their process if there are several."""

    def __init__(self, is_named: bool, *, is_json: bool) -> None:
        self._is_named = is_named
        self._is_json = is_json

    def show(self, name: str, lines: Iterable[bytes]) -> None:
        for line in lines:
            text = line.decode(errors="replace").rstrip("\r\n")
            if self._is_json:
                print(json.dumps({"process": name, "line": text}), flush=True)
            else:
                show(f"[{name}] {text}" if self._is_named else text)
