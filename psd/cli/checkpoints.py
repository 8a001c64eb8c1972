"""psdctl's commands for checkpoints: lists them, reads every byte, exports a model. Ask no shard; work on the files alone.

What is true of a checkpoint is psd/checkpoint's to say; here it is put into words for people and programs.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from psd.checkpoint import CheckpointDirectory, CheckpointInfo, CheckpointState
from psd.cli.arguments import EXIT_FAILURE, EXIT_OK, Commands, Parser, add_command
from psd.cli.report import size, table
from psd.cli.terminal import show
from psd.contract.config import ConfigError
from psd.contract.errors import PsdError
from psd.contract.printable import printable

_LIST_DESCRIPTION = """\
List the checkpoints in a directory, newest first. Reads the small documents and the sizes of the files, not
the numbers; psdctl verify reads every byte."""

_LIST_EPILOG = """\
examples:
  psdctl checkpoints /data/checkpoints
  psdctl checkpoints s3://bucket/run-7 --json | jq -r '.newest'

states:
  valid        all files are there with the right sizes; a new cluster starts from the newest of these
  incomplete   has no manifest.json, which is written last: it is being written now, or whoever wrote it died
  damaged      its files are not those that its manifest.json describes; never used
  unsupported  whole, but another version of psd has stored it in a way that this one does not read

--json prints one object:
  url           the directory, without credentials
  newest        name of the newest valid checkpoint, or null
  checkpoints   for each "name", "state", "step", "timeline", "created_at" (seconds since 1970, or null),
                "shard_count" (or null), "nbytes" and "reason" (why it is not valid)

A timeline begins whenever a job goes back to a checkpoint; a later timeline counts as newer, whatever the step.

exit status:
  0     there is a valid checkpoint, and none is damaged
  1     there is no valid checkpoint, or one is damaged, or the directory cannot be read
  2     the options are wrong"""

_VERIFY_DESCRIPTION = """\
Read every byte of one checkpoint, or of all, and compare it with the checksums written with it."""

_VERIFY_EPILOG = """\
examples:
  psdctl verify /data/checkpoints                  all of them
  psdctl verify /data/checkpoints timeline-00000-step-000000001200-7f3a

Without NAME, an incomplete checkpoint is only mentioned: it may be still being written.

exit status:
  0     every byte is as it was written
  1     some bytes differ, as the lines say; or there is no checkpoint; or the directory cannot be read
  2     the options are wrong"""

_EXPORT_DESCRIPTION = """\
Write parameters and buffers of a checkpoint as one plain safetensors file: named tensors in the shapes and dtypes
that the workers declared. The optimizer's slots stay behind."""

_EXPORT_EPILOG = """\
examples:
  psdctl export /data/checkpoints --to model.safetensors
  psdctl export s3://bucket/run-7 timeline-00000-step-000000001200-7f3a --to /tmp/model.safetensors

In Python:
  model.load_state_dict(safetensors.torch.load_file("model.safetensors"))
It holds the buffers, too, such as BatchNorm's statistics; without them (buffers="local") the model needs strict=False.

Every byte is checked on the way. The file appears when it is complete; an older one of that name is replaced.

exit status:
  0     the file is written
  1     there is no valid checkpoint, or it turned out to be damaged, or a file cannot be read or written
  2     the options are wrong"""


def add_commands(commands: Commands) -> None:
    """Add `checkpoints`, `verify` and `export` to psdctl."""
    parser = add_command(commands, "checkpoints", "URL [--json]", _LIST_DESCRIPTION, _LIST_EPILOG)
    _where(parser, None)
    how = parser.add_argument_group("output")
    how.add_argument("--json", action="store_true", help="one JSON object, on one line, instead of a table")
    _finish(parser, _run_list)

    parser = add_command(commands, "verify", "URL [NAME]", _VERIFY_DESCRIPTION, _VERIFY_EPILOG)
    _where(parser, "one checkpoint, as psdctl checkpoints shows it (default: all)")
    _finish(parser, _run_verify)

    parser = add_command(commands, "export", "URL [NAME] --to FILE", _EXPORT_DESCRIPTION, _EXPORT_EPILOG)
    _where(parser, "one checkpoint, as psdctl checkpoints shows it (default: the newest valid one)")
    what = parser.add_argument_group("what to write")
    what.add_argument("--to", required=True, metavar="FILE", help="path or URL of the file to write")
    _finish(parser, _run_export)


def _where(parser: Parser, name_help: str | None) -> None:
    group = parser.add_argument_group("which checkpoints" if name_help is None else "which checkpoint")
    group.add_argument("url", metavar="URL", help="a local path, or any URL that fsspec takes: s3://, gs://, hdfs://, ...")
    if name_help is not None:
        group.add_argument("name", metavar="NAME", nargs="?", help=name_help)


def _finish(parser: Parser, run: Callable[[CheckpointDirectory, argparse.Namespace], int]) -> None:
    def guarded(args: argparse.Namespace) -> int:
        try:
            return run(CheckpointDirectory(args.url), args)
        except ConfigError as error:
            parser.error(str(error))
        except PsdError as error:
            show(f"{parser.prog}: error: {error}", is_error=True)
            return EXIT_FAILURE

    parser.add_information()
    parser.set_defaults(run=guarded, parser=parser)


# -- checkpoints --


def _run_list(directory: CheckpointDirectory, args: argparse.Namespace) -> int:
    found = directory.checkpoints()
    if args.json:
        print(json.dumps(as_json(directory.location, found)), flush=True)
    else:
        show(as_text(directory.location, found))
    states = {info.state for info in found}
    return EXIT_OK if CheckpointState.VALID in states and CheckpointState.DAMAGED not in states else EXIT_FAILURE


def as_json(location: str, found: Sequence[CheckpointInfo]) -> dict[str, Any]:
    """The object that psdctl checkpoints --help documents; later versions add keys and never change them."""
    return {
        "url": location,
        "newest": next((info.name for info in found if info.state is CheckpointState.VALID), None),
        "checkpoints": [
            {
                "name": info.name,
                "state": info.state.value,
                "step": info.step,
                "timeline": info.timeline,
                "created_at": info.created_at,
                "shard_count": info.shard_count,
                "nbytes": info.nbytes,
                "reason": info.reason,
            }
            for info in found
        ],
    }


def as_text(location: str, found: Sequence[CheckpointInfo]) -> str:
    """A table for people, and below it the reasons why some checkpoints are not valid; without a final line end."""
    if not found:
        return f"no checkpoints in {location}"
    rows: list[tuple[str, ...]] = [("CHECKPOINT", "STATE", "STEP", "TIMELINE", "CREATED", "SHARDS", "SIZE")]
    rows += [
        (
            info.name,
            info.state.value,
            f"{info.step}",
            f"{info.timeline}",
            "-" if info.created_at is None else _utc(info.created_at),
            "-" if info.shard_count is None else f"{info.shard_count}",
            size(info.nbytes),
        )
        for info in found
    ]
    trouble = "\n".join(f"{info.state.value}: {printable(info.reason)}" for info in found if info.reason)
    return table(rows, left={0, 1, 4}) + ("\n\n" + trouble if trouble else "")


def _utc(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, dt.timezone.utc).strftime("%Y-%m-%d %H:%M:%SZ")


# -- verify --


def _run_verify(directory: CheckpointDirectory, args: argparse.Namespace) -> int:
    found = directory.checkpoints()
    if args.name is None:
        wanted = [info for info in found if info.state is not CheckpointState.INCOMPLETE]
        for info in found:
            if info.state is CheckpointState.INCOMPLETE:
                show(f"{info.name}: incomplete, passed over")
    else:
        wanted = [info for info in found if info.name == args.name]
    if not wanted:
        what = "checkpoint that is complete" if args.name is None else f"checkpoint {args.name!r}"
        show(f"psdctl verify: error: there is no {what} in {directory.location}", is_error=True)
        return EXIT_FAILURE
    status = EXIT_OK
    for info in wanted:
        problems = directory.verify(info.name, _progress(f"reading {info.name}"))
        for problem in problems:
            show(f"problem: {printable(problem)}")
        if problems:
            status = EXIT_FAILURE
        else:
            show(f"{info.name}: every byte of {size(info.nbytes)} is as it was written")
    return status


# -- export --


def _run_export(directory: CheckpointDirectory, args: argparse.Namespace) -> int:
    manifest = directory.newest() if args.name is None else directory.load(args.name)
    if manifest is None:
        show(f"psdctl export: error: there is no valid checkpoint in {directory.location}", is_error=True)
        return EXIT_FAILURE
    directory.export(manifest, args.to, _progress(f"writing {args.to}"))
    show(f"{args.to}: {len(manifest.spec.tensors)} tensors of step {manifest.step}, from {manifest.name}")
    return EXIT_OK


def _progress(what: str) -> Callable[[int, int], None]:
    """Show a percentage on a terminal; nothing if standard error is not one."""
    shown = -1

    def show(done: int, total: int) -> None:
        nonlocal shown
        percent = 100 * done // max(total, 1)
        if percent != shown and sys.stderr.isatty():
            shown = percent
            end = "\r\x1b[K" if done >= total else ""
            print(f"\r{what}: {percent} %{end}", end="", file=sys.stderr, flush=True)

    return show
