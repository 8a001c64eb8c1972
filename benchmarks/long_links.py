"""Measures a large push_pull over a long link, by the number of TCP connections that it is divided over (`streams`).

    sudo -E env PATH=$PATH python benchmarks/long_links.py [--streams 1,2,4,8] [--rtt-ms 50] [--megabytes 64] [--json FILE]

A worker and a shard are hosts of their own: network namespaces, joined by a link that delays packets and limits nothing. So a
connection carries what its window lets it in each round trip. The kernel's own limits of the window hold (net.core.rmem_max
and wmem_max). "MB/s" is of one direction, of two in which as much travels. A step's gradient and parameters are verified.
Exit status: 2 where no such link can be made; the criterion does not decide.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
import time
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import _report as report
import numpy as np
from _long_link import LongLink
from _network import NetworkError
from _processes import START_S, Process, Shard, cleanly, environment, start_all
from _report import Criterion, ratio

import psd_client

TURN_S = 600.0


def step(task: dict[str, Any]) -> None:
    """Make steps as the worker; print their times, in seconds."""
    size = task["megabytes"] * 250_000
    with psd_client.connect(task["server"], 0, 1, transport="tcp", streams=task["streams"]) as ps:
        ps.declare({"w": np.zeros(size, np.float32)}, psd_client.SGD(lr=1.0))
        gradient, seconds = {"w": np.arange(size, dtype=np.float32) % 8}, []
        for _ in range(task["steps"] + 1):
            begun = time.perf_counter()
            values = ps.push_pull(gradient)["w"]
            seconds.append(time.perf_counter() - begun)
        if not np.array_equal(values, -(task["steps"] + 1) * gradient["w"]):
            raise SystemExit("the parameters are wrong")
        print(json.dumps(seconds[1:]))


def measure(link: LongLink, streams: int, args: Namespace) -> dict[str, Any]:
    """Measure one table row."""
    with ExitStack() as stack:
        shard = Shard("--insecure", listen=f"{link.address('a')}:7000", prefix=link.prefix("a"))
        stack.callback(shard.kill)
        start_all(stack, [shard])
        task = {"server": shard.address, "streams": streams, "megabytes": args.megabytes, "steps": args.steps}
        command = [*link.prefix("b"), sys.executable, str(Path(__file__)), "--worker", json.dumps(task)]
        worker = Process("worker", command, environment(1), signal.SIGKILL)
        stack.callback(worker.end, 0)
        seconds = json.loads(worker.read_line(START_S + TURN_S))
    middle = statistics.median(seconds)
    return {"streams": streams, "seconds": seconds, "step_s_median": middle, "mb_per_s": args.megabytes / middle}


def arguments() -> Namespace:
    """Parse the command line."""
    parser = report.parser(__doc__)
    parser.add_argument("--streams", type=report.whole_numbers, default="1,2,4,8", metavar="N,N", help="connections")
    parser.add_argument("--rtt-ms", type=float, default=50, help="round trip (default: %(default)s)")
    parser.add_argument("--megabytes", type=int, default=64, help="of parameters (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps (default: %(default)s)")
    return parser.parse_args()


def main() -> int:
    """Print the figures."""
    if sys.argv[1:2] == ["--worker"]:
        step(json.loads(sys.argv[2]))
        return 0
    args = arguments()
    about = report.machine()
    with cleanly() as stack:
        try:
            link = LongLink(stack, args.rtt_ms / 1e3)
        except NetworkError as error:
            print(f"long_links.py cannot run here: {error}", file=sys.stderr)
            return 2
        results = []
        for streams in args.streams:
            results.append(measure(link, streams, args))
            report.progress(f"{streams} streams: {results[-1]['step_s_median']:.2f} s")
    print(f"{args.megabytes} MB of parameters, one worker and one shard, {args.rtt_ms:g} ms for a round trip")
    print(report.machine_line(about))
    found = {r["streams"]: r["step_s_median"] for r in results}
    rows = [[r["streams"], f"{r['step_s_median']:.2f}", f"{r['mb_per_s']:.0f}"] for r in results]
    print(report.table(["streams", "s/step", "MB/s"], rows))
    checked = [Criterion(0, "1 stream / 4 streams", ratio(found.get(1), found.get(4)), 2, at_least=True)]
    figures = {"machine": about, "settings": {**vars(args), "json": None}, "results": results}
    return report.conclude(args.json, figures, checked, {}, is_failed=False)


if __name__ == "__main__":
    sys.exit(main())
