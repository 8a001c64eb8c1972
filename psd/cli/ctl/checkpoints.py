"""psdctl's commands for checkpoints: list them, verify every byte, export a model, import a table. They only read files, and
ask no shard.

psd/checkpoint finds out the facts about a checkpoint; this module presents them to people and programs. It is imported where it
is needed: other commands start sooner without.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from psd.cli.ctl.report import table
from psd.cli.words.arguments import EXIT_FAILURE, EXIT_OK, CommandFailed, Commands, Parser, add_command, location
from psd.cli.words.terminal import show
from psd.contract.config import SAFETENSORS_SUFFIX, ConfigError
from psd.contract.locations import shown
from psd.contract.printable import printable
from psd.watch.words import size

if TYPE_CHECKING:
    from psd.checkpoint import CheckpointDirectory, CheckpointInfo

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
                "shard_count" (or null), "nbytes" and "reason" (why it is not valid); "rows" of its tables
                (null: it has none), and "base", the checkpoint whose rows it needs, too ("": none);
                "learning_rate_scale", that of psdctl set-lr at its step (1: none was ordered)

BUILDS ON names the step of the checkpoint that is needed, too: this one has the rows of tables that have
changed since. It is kept for that. LR SCALE is shown where psdctl set-lr has scaled the learning rate; a job
that goes on from there has the same scale.

A timeline begins whenever a job goes back to a checkpoint; a later timeline counts as newer, whatever the step. So
does, in a timeline, a later cut, where names have its number.

exit status:
  0     there is a valid checkpoint, and none is damaged
  1     there is no valid checkpoint, or one is damaged, or the directory cannot be read
  2     the options are wrong"""

_VERIFY_DESCRIPTION = """\
Read every byte of one checkpoint, or of all, and compare it with the checksums written with it. If it builds
on another one, the rows of that one are read, too."""

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
Write the parameters and buffers of a checkpoint as one plain safetensors file: named tensors in the shapes and
dtypes that the workers declared. Of a table "user" there are two: "user.ids", (n,) int64, the bits of the ids,
and "user.rows", (n, dim) float32, in the same order; where it belongs to a PyTorch module, they have that
module's name instead. The optimizer's slots stay behind."""

_EXPORT_EPILOG = """\
examples:
  psdctl export /data/checkpoints --to model.safetensors
  psdctl export s3://bucket/run-7 timeline-00000-step-000000001200-7f3a --to /tmp/model.safetensors
  psdctl export /data/checkpoints --table user --to user.parquet       columns "id" and "row"; needs pyarrow
  psdctl export /data/checkpoints --config config.json --to my-model   for AutoModel.from_pretrained("my-model")

In Python:
  safetensors.torch.load_model(model, "model.safetensors")
The file has the model's buffers, such as BatchNorm's; a job with buffers="local" has none: pass strict=False.
What has several names, such as tied parameters, is there once. The file's metadata has each other name, with
the one that is there.

Every byte is checked on the way. The file appears when it is complete; an older one of that name is replaced.

exit status:
  0     the file is written
  1     there is no valid checkpoint, or it turned out to be damaged, or a file cannot be read or written
  2     the options are wrong"""


_IMPORT_DESCRIPTION = """\
Make a safetensors file for --from-checkpoint of the ids and rows of a table in another file, so that a job can
begin with embeddings that another program has trained."""

_IMPORT_EPILOG = """\
examples:
  psdctl import user.parquet --table user --to start.safetensors
  psdctl import vectors.safetensors --ids keys --rows weight --table user --to start.safetensors
  psdctl import item.parquet --table item --with start.safetensors --to both.safetensors
  psdctl import dump/model.ebc --dynamicemb user_table --table user --to start.safetensors

and then:
  psd-run ... --from-checkpoint both.safetensors --parameters-only train.py

Such a job takes all its parameters and tables from the file, so --with a file that has the others. Slots and
clocks begin anew; rows that the file does not have begin as the table's init says.

Of Parquet files the columns are "id", whole numbers, and "row", lists of floating numbers; of safetensors files
the tensors are NAME.ids, (n,) int64 or uint64, and NAME.rows, (n, dim) floating. With --dynamicemb FILE is a
folder that DynamicEmbDump has written for one collection: NAME_emb_keys.rank_..., ids as int64, and
NAME_emb_values.rank_..., rows as float32, of all processes. Scores and optimizer values are left out.

exit status:
  0     the file is written
  1     a file cannot be read or written, an id comes twice, or a number is not finite; nothing is written
  2     the options are wrong"""


def add_commands(commands: Commands) -> None:
    """Add `checkpoints`, `verify`, `export` and `import` to psdctl."""
    parser = add_command(commands, "checkpoints", "URL [--json]", _LIST_DESCRIPTION, _LIST_EPILOG)
    _where(parser, None)
    _finish(parser, _run_list)

    parser = add_command(commands, "verify", "URL [NAME]", _VERIFY_DESCRIPTION, _VERIFY_EPILOG)
    _where(parser, "one checkpoint, as psdctl checkpoints shows it (default: all)")
    _finish(parser, _run_verify)

    parser = add_command(commands, "export", "URL [NAME] --to FILE|DIR", _EXPORT_DESCRIPTION, _EXPORT_EPILOG)
    _where(parser, "one checkpoint, as psdctl checkpoints shows it (default: the newest valid one)")
    what = parser.add_argument_group("what to write")
    what.add_argument(
        "--to", required=True, metavar="FILE", type=location, help="path or URL of the file, or directory, to write"
    )
    what.add_argument("--table", default="", metavar="NAME", help="write this table alone, and no tensors")
    what.add_argument(
        "--config",
        default="",
        metavar="FILE",
        type=location,
        help="make --to a directory for transformers' from_pretrained, with this config.json",
    )
    _finish(parser, _run_export)

    parser = add_command(commands, "import", "FILE --table NAME --to FILE", _IMPORT_DESCRIPTION, _IMPORT_EPILOG)
    what = parser.add_argument_group("what to read")
    what.add_argument(
        "source",
        metavar="FILE",
        type=location,
        help="a .parquet file, path or URL of a safetensors file, or a folder of a dump",
    )
    what.add_argument("--ids", default="", metavar="NAME", help="the column or tensor of ids (default: see below)")
    what.add_argument("--rows", default="", metavar="NAME", help="the column or tensor of rows (default: see below)")
    what.add_argument("--dynamicemb", default="", metavar="NAME", help="FILE is a dump of dynamicemb; the table's name there")
    what = parser.add_argument_group("what to write")
    what.add_argument("--table", required=True, metavar="NAME", help="name of the table in the job")
    what.add_argument("--to", required=True, metavar="FILE", type=location, help="path or URL of the safetensors file to write")
    what.add_argument(
        "--with", dest="others", default="", metavar="FILE", type=location, help="copy the other tensors of this file"
    )
    _finish(parser, _run_import)


def _where(parser: Parser, name_help: str | None) -> None:
    group = parser.add_argument_group("which checkpoints" if name_help is None else "which checkpoint")
    where = "a local path, any URL that fsspec takes: s3://, gs://, hdfs://, ..., or @FILE, a file that holds one"
    group.add_argument("url", metavar="URL", type=location, help=where)
    if name_help is not None:
        group.add_argument("name", metavar="NAME", nargs="?", help=name_help)


def _finish(parser: Parser, run: Callable[[argparse.Namespace], int]) -> None:
    how = parser.add_argument_group("output")
    how.add_argument("--json", action="store_true", help="one JSON object, on one line, instead of text")
    parser.finish(run)


def _opened(args: argparse.Namespace) -> CheckpointDirectory:
    from psd.checkpoint import CheckpointDirectory

    return CheckpointDirectory(args.url)


# -- checkpoints --


def _run_list(args: argparse.Namespace) -> int:
    from psd.checkpoint import CheckpointState

    directory = _opened(args)
    found = directory.checkpoints()
    if args.json:
        print(json.dumps(as_json(directory.location, found)), flush=True)
    else:
        show(as_text(directory.location, found))
    states = {info.state for info in found}
    return EXIT_OK if CheckpointState.VALID in states and CheckpointState.DAMAGED not in states else EXIT_FAILURE


def as_json(location: str, found: Sequence[CheckpointInfo]) -> dict[str, Any]:
    """The object that psdctl checkpoints --help documents; later versions add keys and never change them."""
    from psd.checkpoint import CheckpointState

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
                "rows": info.rows,
                "base": info.base,
                "learning_rate_scale": info.learning_rate_scale,
            }
            for info in found
        ],
    }


def as_text(location: str, found: Sequence[CheckpointInfo]) -> str:
    """A table for people, followed by the reasons why some checkpoints are not valid; without a final line end."""
    if not found:
        return f"no checkpoints in {location}"
    has_tables = any(info.rows is not None for info in found)
    has_scales = any(info.learning_rate_scale != 1 for info in found)
    heads: tuple[str, ...] = ("CHECKPOINT", "STATE", "STEP", "TIMELINE", "CREATED", "SHARDS", "SIZE")
    steps = {info.name: f"{info.step}" for info in found}
    rows = [heads + ("ROWS", "BUILDS ON") * has_tables + ("LR SCALE",) * has_scales]
    rows += [
        (
            info.name,
            info.state.value,
            f"{info.step}",
            f"{info.timeline}",
            "-" if info.created_at is None else _utc(info.created_at),
            "-" if info.shard_count is None else f"{info.shard_count}",
            size(info.nbytes),
            *(("-" if info.rows is None else f"{info.rows}", steps.get(info.base, "-")) if has_tables else ()),
            *((f"{info.learning_rate_scale:g}",) * has_scales),
        )
        for info in found
    ]
    trouble = "\n".join(f"{info.state.value}: {printable(info.reason)}" for info in found if info.reason)
    return table(rows, left={0, 1, 4}) + ("\n\n" + trouble if trouble else "")


def _utc(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, dt.timezone.utc).strftime("%Y-%m-%d %H:%M:%SZ")


# -- verify --


def _run_verify(args: argparse.Namespace) -> int:
    from psd.checkpoint import CheckpointState

    directory = _opened(args)
    found = directory.checkpoints()
    if args.name is None:
        wanted = [info for info in found if info.state is not CheckpointState.INCOMPLETE]
        for info in found:
            if info.state is CheckpointState.INCOMPLETE and not args.json:
                show(f"{info.name}: incomplete, passed over")
    else:
        wanted = [info for info in found if info.name == args.name]
    if not wanted:
        what = "checkpoint that is complete" if args.name is None else f"checkpoint {args.name!r}"
        raise CommandFailed(f"there is no {what} in {directory.location}")
    outcomes: dict[str, list[str]] = {}
    for info in wanted:
        outcomes[info.name] = problems = directory.verify(info.name, _progress(f"reading {info.name}"))
        if args.json:
            continue
        for problem in problems:
            show(f"problem: {printable(problem)}")
        if not problems:
            show(f"{info.name}: every byte of {size(info.nbytes)} is as it was written")
    if args.json:
        print(
            json.dumps({"checkpoints": [{"name": name, "problems": problems} for name, problems in outcomes.items()]}),
            flush=True,
        )
    return EXIT_FAILURE if any(outcomes.values()) else EXIT_OK


# -- export --


def _run_export(args: argparse.Namespace) -> int:
    directory = _opened(args)
    manifest = directory.newest() if args.name is None else directory.load(args.name)
    if manifest is None:
        raise CommandFailed(f"there is no valid checkpoint in {directory.location}")
    if args.config and (args.table or args.to.endswith(SAFETENSORS_SUFFIX)):
        other = "with --table" if args.table else f"with --to {shown(args.to)}, which must be a directory"
        raise ConfigError(f"--config: not {other}")
    if args.config:
        directory.export_model(manifest, args.to, args.config, _progress(f"writing {shown(args.to)}"))
    else:
        directory.export(manifest, args.to, _progress(f"writing {shown(args.to)}"), args.table)
    tables = [args.table] if args.table else [table.name for table in manifest.spec.tables]
    what = "" if args.table else f"{len(manifest.spec.tensors)} tensors"
    what += " and " * bool(what and tables) + (f"table{'s' * (len(tables) > 1)} {', '.join(tables)}" if tables else "")
    if args.json:
        tensors = 0 if args.table else len(manifest.spec.tensors)
        done = {"to": shown(args.to), "name": manifest.name, "step": manifest.step, "tensors": tensors, "tables": tables}
        print(json.dumps(done), flush=True)
    else:
        show(f"{shown(args.to)}: {what} of step {manifest.step}, from {manifest.name}")
    return EXIT_OK


# -- import --


def _run_import(args: argparse.Namespace) -> int:
    from psd.checkpoint import import_table

    if args.dynamicemb and (args.ids or args.rows):
        raise ConfigError("--dynamicemb: not with --ids or --rows, which are for names in files of other kinds")
    found = import_table(
        args.source, args.to, args.table, ids=args.ids, rows=args.rows, dynamicemb=args.dynamicemb, others=args.others
    )
    if args.json:
        print(json.dumps({"to": shown(args.to), "table": args.table, "rows": found.count, "dim": found.dim}), flush=True)
    else:
        show(f"{shown(args.to)}: table {args.table} with {found.count} rows of {found.dim} numbers, from {shown(args.source)}")
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
