"""Measures what a table saves where links are slow: examples/sparse_lr.py, with its weights in a table and in a dense tensor.

    sudo -E env PATH=$PATH python benchmarks/slow_links.py --data farm-ads-vect.gz [--mbit 100,1000] [--workers 1,4]

Each shard and each worker is a host of its own: a network namespace, joined to the others by a bridge, whose link carries so
many Mbit/s each way; 0 is loopback without a limit, which needs no root. Both forms make the same synchronous steps, each of
one row per worker, by the same rule; with the table, as in the example, a step's weights come in the round trip of the push
before it. steps/s are those of the worker of rank 0, without the time in which it prepares its batch; KB/step are what it sends
and receives. Without --data rows are generated.
Exit status: 1 if psd failed, or if one form has learned less than the other; 2 where no such network can be made; the criteria
do not decide.
"""

from __future__ import annotations

import json
import signal
import sys
from argparse import Namespace
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import _report as report
from _network import Network, NetworkError, shards_on
from _processes import START_S, TURN_S, Process, ProcessFailed, cleanly, environment, start_all
from _report import Criterion, ratio

EXAMPLE = Path(__file__).parents[1] / "examples" / "sparse_lr.py"
FORMS = ("table", "dense")
AUC_MAX_APART = 0.002


def speeds(text: str) -> list[int]:
    """Convert an argument of the type "0,100"."""
    return [int(word) for word in report.words(text)]


def arguments() -> Namespace:
    """Parse the command line."""
    parser = report.parser(__doc__, transports="tcp,grpc", workers="1,4", shards=2)
    parser.add_argument("--data", help="libsvm file, plain or gzipped, such as Farm Ads")
    parser.add_argument("--mbit", type=speeds, default="0,1000,100", metavar="M,M", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=300, help="of each form (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each; the best counts (default: %(default)s)")
    return parser.parse_args()


def train(network: Network | None, transport: str, workers: int, form: str, args: Namespace) -> dict[str, Any]:
    """Figures that the example prints."""

    def on(host: str) -> list[str]:
        return [] if network is None else network.prefix(host)

    with ExitStack() as stack:
        shards = shards_on(network, args.shards)
        start_all(stack, shards)
        command = [sys.executable, str(EXAMPLE), "--steps", str(args.steps), "--epochs", "100"]
        command += ["--data", args.data] if args.data else []
        command += ["--dense"] if form == "dense" else []
        told = {
            "PSD_SERVERS": ",".join(shard.address for shard in shards),
            "PSD_WORLD_SIZE": str(workers),
            "PSD_TRANSPORT": transport,
        }
        processes = []
        for rank in range(workers):
            environ = {**environment(1), **told, "PSD_RANK": str(rank)}
            processes.append(Process(f"worker {rank}", [*on(f"w{rank}"), *command], environ, signal.SIGKILL))
            stack.callback(processes[-1].end)
        line = processes[0].read_line(START_S)
        while not line.startswith("result "):
            line = processes[0].read_line(TURN_S)
        return dict(json.loads(line.removeprefix("result ")))


def measure(network: Network | None, mbit: int, transport: str, workers: int, args: Namespace) -> dict[str, Any]:
    """Measure one table row: both forms in turns."""
    found: dict[str, list[dict[str, Any]]] = {form: [] for form in FORMS}
    for _ in range(args.rounds):
        for form in FORMS:
            found[form].append(train(network, transport, workers, form, args))
    best = {form: max(turns, key=lambda turn: turn["steps_per_s"]) for form, turns in found.items()}
    apart = abs(best["table"]["auc"] - best["dense"]["auc"])
    if apart > AUC_MAX_APART:
        raise ProcessFailed(f"the forms' AUC differ by {apart:.4f}")
    return {
        "mbit": mbit,
        "transport": transport,
        "workers": workers,
        **{f"{form}_steps_per_s": best[form]["steps_per_s"] for form in FORMS},
        **{f"{form}_bytes_per_step": best[form]["bytes_per_step"] for form in FORMS},
        "times_as_fast": ratio(best["table"]["steps_per_s"], best["dense"]["steps_per_s"]),
        "times_fewer_bytes": ratio(best["dense"]["bytes_per_step"], best["table"]["bytes_per_step"]),
        "turns": found,
    }


def row(r: dict[str, Any]) -> list[str]:
    """Table row."""
    bytes_ = [r[f"{form}_bytes_per_step"] / 1e3 for form in FORMS]
    figures = [r[f"{form}_steps_per_s"] for form in FORMS] + [r["times_as_fast"], *bytes_, r["times_fewer_bytes"]]
    link = f"{r['mbit']} Mbit/s" if r["mbit"] else "loopback"
    return [link, r["transport"], str(r["workers"]), *map(report.number, figures, (0, 0, 1, 2, 2, 0))]


def criteria(results: list[dict[str, Any]]) -> list[Criterion]:
    """The project's criteria."""
    found = []
    for r in results:
        where = f"{row(r)[0]}, {r['transport']}, W = {r['workers']}"
        found.append(Criterion(5, f"{where}: speed of a table to that of a tensor", r["times_as_fast"], 5, at_least=True))
    most = min((r["times_fewer_bytes"] for r in results), default=None)
    return [*found, Criterion(5, "bytes of a tensor to those of a table", most, 50, at_least=True)]


def main() -> int:
    """Print the figures."""
    args = arguments()
    about = report.machine()
    results: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    hosts = [f"s{index}" for index in range(args.shards)] + [f"w{index}" for index in range(max(args.workers))]
    with cleanly():
        for mbit in args.mbit:
            try:
                with ExitStack() as own:
                    network = Network(own, hosts, mbit) if mbit else None
                    for transport, workers in product(args.transports, args.workers):
                        report.progress(f"{mbit or 'no'} Mbit/s, {transport}: W = {workers}")
                        try:
                            results.append(measure(network, mbit, transport, workers, args))
                        except ProcessFailed as error:
                            left_out[f"{mbit} Mbit/s, {transport}, W = {workers}"] = str(error)
            except NetworkError as error:
                print(f"slow_links.py cannot run here: {error}", file=sys.stderr)
                return 2
    print(f"{args.shards} shards, {args.steps} steps, the best of {args.rounds} turns")
    print(report.machine_line(about))
    headers = ["link", "transport", "W", "table steps/s", "dense", "ratio", "table KB/step", "dense", "ratio"]
    print(report.table(headers, [row(r) for r in results]))
    figures = {"machine": about, "data": args.data, "steps": args.steps, "results": results}
    return report.conclude(args.json, figures, criteria(results), left_out, is_failed=bool(left_out))


if __name__ == "__main__":
    sys.exit(main())
