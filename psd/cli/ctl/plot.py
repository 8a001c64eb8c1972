"""`psdctl plot`: draws the curves of runs into one picture, to compare them.

Needs matplotlib, an extra: it writes both PNG and SVG, and a writer of our own would have to draw axes and letters for both.
Must not know how the files are read.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from psd.cli.ctl.curve_files import CurveSummary, LoggedRun, read_run, summarized
from psd.cli.words import arguments
from psd.cli.words.arguments import EXIT_OK, Commands, whole_number
from psd.cli.words.terminal import show
from psd.contract.config import ConfigError
from psd.contract.printable import printable
from psd.contract.scalars import as_json

SUFFIXES = (".png", ".svg")
PANELS_MAX = 64

_DESCRIPTION = """\
Draw what workers have logged by ps.log: a panel for each scalar, in it a line for each run. With several
workers the line is their mean, and the band around it goes from the least to the largest value."""

_EPILOG = """\
A RUN is a directory that psd-run --log-dir has filled, or one file of it, such as logs/worker-0.jsonl.

examples:
  psdctl plot logs                                     draws logs into curves.svg
  psdctl plot adam sgd --scalar loss --to loss.png     compares two runs
  psdctl plot logs --x time --smooth 50
  psdctl plot logs --json | jq '.runs[0].curves.loss[-1].mean'

Steps at which a scalar was NaN or infinite are gaps in the line, with a mark on the axis below. Of a worker
that was restarted and went back, the later points hold.

--json prints an object instead of drawing: "runs", for each "name" and "curves", by the name of the scalar
a list of "step", "time" (seconds since 1970), "mean", "low" and "high"; NaN and infinity are strings.

exit status:
  0     drawn; the file's name is printed
  2     the options are wrong, a RUN has no scalars, or matplotlib is not installed"""


def add_command(commands: Commands) -> None:
    """Add `plot` to psdctl."""
    parser = arguments.add_command(commands, "plot", "RUN... [options]", _DESCRIPTION, _EPILOG)
    what = parser.add_argument_group("what to draw")
    what.add_argument("runs", nargs="+", metavar="RUN", help="a --log-dir of psd-run, or a .jsonl file of it")
    what.add_argument(
        "--scalar", action="append", default=[], metavar="NAME", help="only this one; may be given several times (default: all)"
    )
    how = parser.add_argument_group("how")
    how.add_argument("--to", default="curves.svg", metavar="FILE", help="a .png or .svg file (default: %(default)s)")
    how.add_argument(
        "--x", choices=("step", "time"), default="step", help="horizontal axis: steps, or the run's time (default: %(default)s)"
    )
    how.add_argument(
        "--smooth", type=whole_number, default=1, metavar="N", help="draw means of N steps, the last ones before each"
    )
    how.add_argument("--json", action="store_true", help="print the numbers as one JSON object, instead of drawing them")
    parser.finish(_run)


def _run(args: argparse.Namespace) -> int:
    _check(args)
    runs = [read_run(Path(run)) for run in args.runs]
    names = _names(runs, args.scalar)
    if args.json:
        print(json.dumps(_numbers(runs, names)), flush=True)
    else:
        _draw(_named_apart(runs, args.runs), names, args)
    for run in runs:
        if run.skipped:
            show(f"psdctl plot: {run.name}: {run.skipped} lines that cannot be read are left out", is_error=True)
    if not args.json:
        show(args.to)
    return EXIT_OK


def _check(args: argparse.Namespace) -> None:
    if args.smooth < 1:
        raise ConfigError(f"--smooth: expected 1 or more, got {args.smooth}")
    if not args.to.endswith(SUFFIXES):
        raise ConfigError(f"--to: expected a file that ends in {' or '.join(SUFFIXES)}, got {args.to!r}")


def _names(runs: Sequence[LoggedRun], wanted: Sequence[str]) -> list[str]:
    """Names of the scalars to draw, in the order in which they were first logged."""
    known = list(dict.fromkeys(name for run in runs for name in run.curves))
    for name in wanted:
        if name not in known:
            raise ConfigError(f"--scalar: no run has {name!r}; there are {', '.join(known[:20])}")
    names = list(wanted) or known
    if len(names) > PANELS_MAX:
        raise ConfigError(f"--scalar: there are {len(names)} scalars, more than {PANELS_MAX} in one picture; name some")
    return names


def _named_apart(runs: Sequence[LoggedRun], paths: Sequence[str]) -> dict[str, LoggedRun]:
    """The runs by a unique name: that of the directory, or its path if two names are alike."""
    names = [run.name for run in runs]
    return {path if names.count(run.name) > 1 else run.name: run for run, path in zip(runs, paths, strict=True)}


def _numbers(runs: Sequence[LoggedRun], names: Sequence[str]) -> dict[str, Any]:
    return {
        "runs": [
            {"name": run.name, "curves": {n: [_entry(p) for p in summarized(run.curves[n])] for n in names if n in run.curves}}
            for run in runs
        ]
    }


def _entry(point: CurveSummary) -> dict[str, float | str]:
    return {"step": point.step, "time": point.at, **as_json({"mean": point.mean, "low": point.low, "high": point.high})}


def smoothed(values: Sequence[float], count: int) -> list[float]:
    """Running means over `count` values. Values that are not finite are left out, and their own mean is NaN."""
    found = []
    for index, value in enumerate(values):
        window = [each for each in values[max(0, index + 1 - count) : index + 1] if math.isfinite(each)]
        found.append(math.fsum(window) / len(window) if math.isfinite(value) else math.nan)
    return found


def _draw(runs: dict[str, LoggedRun], names: Sequence[str], args: argparse.Namespace) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("it needs matplotlib, which is not installed: pip install 'psd[plot]'") from None
    columns = min(len(names), 2)
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(6.4 * columns, 3.6 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for panel, name in zip(panels, names, strict=False):
        lines = {
            label: _drawn_line(panel, run, name, f"C{index}", args)
            for index, (label, run) in enumerate(runs.items())
            if name in run.curves
        }
        panel.set_title(printable(name), parse_math=False)
        panel.set_xlabel("step" if args.x == "step" else "seconds")
        panel.grid(visible=True, alpha=0.3)
        if len(runs) > 1:
            _name_lines(panel, lines)
    for panel in list(panels)[len(names) :]:
        panel.set_visible(False)
    try:
        figure.savefig(args.to)
    except OSError as error:
        raise ConfigError(f"--to: {args.to}: {error.strerror or error}") from error


def _name_lines(panel: Any, lines: dict[str, Any]) -> None:
    """Show the runs' names unchanged: matplotlib leaves out names that begin with _, and reads text between two $ as math."""
    legend = panel.legend(lines.values(), map(str, range(len(lines))))
    for text, label in zip(legend.get_texts(), lines, strict=True):
        text.set_parse_math(False)
        text.set_text(printable(label))


def _drawn_line(panel: Any, run: LoggedRun, name: str, color: str, args: argparse.Namespace) -> Any:
    """The line of a run, with its band and its gaps."""
    points = summarized(run.curves[name])
    across = [point.step if args.x == "step" else point.at - run.begun_at for point in points]
    (line,) = panel.plot(across, smoothed([point.mean for point in points], args.smooth), color=color, linewidth=1.2)
    if len(points) == 1:
        panel.plot(across, [points[0].mean], ".", color=color)
    if len(run.curves[name]) > 1 and args.smooth == 1:
        panel.fill_between(across, [p.low for p in points], [p.high for p in points], color=color, alpha=0.2, linewidth=0)
    lost = [x for x, point in zip(across, points, strict=True) if not math.isfinite(point.mean)]
    if lost:
        panel.plot(lost, [0.0] * len(lost), "x", color=color, transform=panel.get_xaxis_transform(), clip_on=False)
    return line
