"""Measures the cost of watching a shard: step time with metrics and a scrape every second, against without.

    python benchmarks/overhead.py [--transports grpc,tcp,shm] [--model convnet] [--rounds 20]

Each transport runs twice, side by side: the same job with and without --metrics-port, all of which take
turns, to and fro. While the one with metrics has its turn, its shard is scraped every second, as Prometheus would. A round's
ratio is that of its two turns' median step times, so that what disturbs the machine for longer than a turn cancels; the figure
is the median of the rounds' ratios, and beside it the middle half of them. "shard CPU" is the ratio of the CPU time per step.
Numbers are counted in either case: what is compared is the collecting, the web server, and what both keep others from doing.

What each job has computed is verified, to the bit. Exit status: 1 if psd failed or was wrong; the criteria do not decide.
"""

from __future__ import annotations

import sys
import threading
import time
import urllib.request
from argparse import Namespace
from contextlib import ExitStack
from typing import Any

import _contenders as contenders
import _report as report
from _contenders import Contender
from _processes import free_ports
from _report import Criterion
from _turns import over_transports
from peers import work

SCRAPE_S = 1.0


class Scraper:
    """A thread that asks for a shard's metrics every second while in a `with`; does nothing without a port."""

    def __init__(self, port: int | None) -> None:
        self.seconds: list[float] = []
        self._port = port
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Scraper:
        if self._port is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._port is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            begun = time.monotonic()
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=30) as answer:
                answer.read()
            self.seconds.append(time.monotonic() - begun)
            if self._over.wait(SCRAPE_S):
                return


def measure(transport: str, args: Namespace) -> list[dict[str, Any]]:
    """Measure; one table row for each cost."""
    (port,) = free_ports(1)
    kinds: dict[str, dict[str, Any]] = {"plain": {}, "metrics": {"flags": [f"--metrics-port={port}"]}}
    with ExitStack() as stack:
        jobs = {kind: contenders.psd(transport, args.workers, 1, args.model, **told)(stack) for kind, told in kinds.items()}
        for job in jobs.values():
            job.take_turn(1, 2)
        steps = max(1, int(args.seconds / min(jobs["plain"].seconds)))
        turns: dict[str, list[tuple[float, float]]] = {kind: [] for kind in jobs}
        scrapes: list[float] = []
        for number in range(args.rounds):
            report.progress(f"{transport}: round {number + 1} of {args.rounds}, {steps} steps each")
            for kind in list(jobs)[:: -1 if number % 2 else 1]:
                with Scraper(port if kind == "metrics" else None) as scraper:
                    turns[kind].append(_turn(jobs[kind], steps))
                scrapes += scraper.seconds
        for job in jobs.values():
            job.verify()
    return [_row(transport, kind, turns, scrapes) for kind in jobs if kind != "plain"]


def _turn(job: Contender, steps: int) -> tuple[float, float]:
    """Median step time, and processor time of the shard per step."""
    del job.seconds[:]
    cpu_before = job.server_cpu_s
    job.take_turn(1, steps)
    median_s = report.median(job.seconds)
    assert median_s is not None
    return median_s, (job.server_cpu_s - cpu_before) / (steps + 1)


def _row(transport: str, kind: str, turns: dict[str, list[tuple[float, float]]], scrapes: list[float]) -> dict[str, Any]:
    pairs = list(zip(turns["plain"], turns[kind], strict=True))
    ratios = [other[0] / plain[0] for plain, other in pairs]
    return {
        "transport": transport,
        "kind": kind,
        "step_s_plain": report.median([plain[0] for plain, _ in pairs]),
        "step_s": report.median([other[0] for _, other in pairs]),
        "ratio": report.median(ratios),
        "ratio_quarter": report.quantile(ratios, 0.25),
        "ratio_three_quarters": report.quantile(ratios, 0.75),
        "shard_cpu": report.median([other[1] / plain[1] for plain, other in pairs]),
        "scrape_s": report.median(scrapes) if kind == "metrics" else None,
        "ratios": ratios,
    }


def main() -> int:
    """Print the figures."""
    parser = report.parser(__doc__, transports="grpc,tcp,shm")
    parser.add_argument("--workers", type=int, default=2, help="default: %(default)s")
    parser.add_argument(
        "--model", choices=[m for m in work.MODELS if m != "1kb"], default="convnet", help="shapes (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=20, help="turns of each (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1, help="of a turn, about (default: %(default)s)")
    args = parser.parse_args()
    about = report.machine()
    _, results, left_out, failed = over_transports(args.transports, lambda transport: measure(transport, args))
    print(f"{args.model}, {args.workers} workers, {args.rounds} rounds; ms per step, and ratios to the plain job")
    print(report.machine_line(about) + "\n")
    rows = [
        [
            f"{r['transport']} {r['kind']}",
            *(report.number(1e3 * r[field], 2) for field in ("step_s_plain", "step_s")),
            *(report.number(r[field], 3) for field in ("ratio", "ratio_quarter", "ratio_three_quarters", "shard_cpu")),
            report.number(None if r["scrape_s"] is None else 1e3 * r["scrape_s"], 1),
        ]
        for r in results
    ]
    print(report.table(["", "plain", "with", "ratio", "25 %", "75 %", "shard CPU", "ms/scrape"], rows))
    checked = [
        Criterion(5, f"{r['transport']}: step with metrics / without", r["ratio"], 1.02)
        for r in results
        if r["kind"] == "metrics"
    ]
    return report.conclude(args.json, {"machine": about, "results": results}, checked, left_out, is_failed=bool(failed))


if __name__ == "__main__":
    sys.exit(main())
