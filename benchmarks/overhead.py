"""Measures the cost of watching a shard: step time with metrics and a scrape every second, or beside psdctl dashboard or
psdctl top; against without.

    python benchmarks/overhead.py [--transports grpc,tcp,shm] [--model convnet] [--rounds 20] [--watchers metrics,dashboard,top]

Each transport runs several times, side by side: the same job with and without --metrics-port, and one that is watched, all of
which take turns, to and fro. While the one with metrics has its turn, its shard is scraped every second, as Prometheus would.
psdctl dashboard, with a page open, and psdctl top run on the same machine, and are stopped (SIGSTOP) while others have their
turns. A round's ratio is that of its two turns' median step times, so that what disturbs the machine for longer than a turn
cancels; the figure is the median of the rounds' ratios, and beside it the middle half of them. "shard CPU" is the ratio of the
CPU time per step, "cores" what psdctl itself uses while the job is at work.
Numbers are counted in either case: what is compared is the collecting, the web server, and what both keep others from doing.

What each job has computed is verified, to the bit. Exit status: 1 if psd failed or was wrong; the criteria do not decide.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
import urllib.request
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import _contenders as contenders
import _report as report
from _contenders import Contender
from _processes import ProcessFailed, cpu_s, free_ports
from _report import Criterion
from _turns import over_transports
from peers import work

SCRAPE_S = 1.0

WATCHERS = ("metrics", "dashboard", "top")


class Scraper:
    """A thread that asks for a shard's metrics every second while in a `with`; does nothing without a port."""

    cpu_s = 0.0  # of this process: not told

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


class Watcher:
    """A command that looks at a job; runs while in a `with` alone, and is stopped otherwise.

    Args:
        command: of psdctl, and its options. stack: ends it.
    """

    def __init__(self, stack: ExitStack, command: Sequence[str], server: str) -> None:
        self.seconds: list[float] = []  # of looks: not measured
        self._terminal, inner = pty.openpty()
        termios.tcsetwinsize(inner, (50, 140))
        words = [sys.executable, "-m", "psd.cli.psdctl", *command, "--servers", server]
        self._process = subprocess.Popen(
            words, stdin=inner, stdout=inner, stderr=inner, start_new_session=True, env={**os.environ, "TERM": "xterm-256color"}
        )
        os.close(inner)
        stack.callback(self._end)
        self._shown = b""
        threading.Thread(target=self._read, daemon=True).start()
        if command[0] == "dashboard":
            address = self._wait_for(rb"dashboard: (http://\S+)/")
            threading.Thread(target=_visit, args=(f"{address}/api/stream",), daemon=True).start()
        else:
            self._wait_for(rb"(WORKER|RANK)")
        os.killpg(self._process.pid, signal.SIGSTOP)

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # its end
            while data := os.read(self._terminal, 1 << 16):
                self._shown = (self._shown + data)[-(1 << 16) :]

    def _wait_for(self, pattern: bytes) -> str:
        for _ in range(300):
            if found := re.search(pattern, self._shown):
                return found[1].decode()
            time.sleep(0.1)
        raise ProcessFailed(f"psdctl has not shown {pattern!r}: {self._shown[-300:]!r}")

    def _end(self) -> None:
        for signum in (signal.SIGCONT, signal.SIGKILL):
            os.killpg(self._process.pid, signum)
        self._process.wait()
        os.close(self._terminal)

    @property
    def cpu_s(self) -> float:
        """Processor time that it has used."""
        return cpu_s(self._process.pid)

    def __enter__(self) -> Watcher:
        os.killpg(self._process.pid, signal.SIGCONT)
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGSTOP)


def _visit(address: str) -> None:
    """Read what an open page is sent, until its end."""
    with contextlib.suppress(OSError, http.client.HTTPException), urllib.request.urlopen(address) as answer:
        while answer.read1():
            pass


def measure(transport: str, args: Namespace) -> list[dict[str, Any]]:
    """Measure; one table row for each cost."""
    (port,) = free_ports(1)
    kinds: dict[str, dict[str, Any]] = {"plain": {}, **{kind: {} for kind in args.watchers}}
    if "metrics" in kinds:
        kinds["metrics"] = {"flags": [f"--metrics-port={port}"]}
    with ExitStack() as stack:
        jobs = {kind: contenders.psd(transport, args.workers, 1, args.model, **told)(stack) for kind, told in kinds.items()}
        for job in jobs.values():
            job.take_turn(1, 2)
        watchers = {
            kind: Watcher(stack, [kind, *(["--port", "0"] if kind == "dashboard" else [])], jobs[kind].servers[0])
            for kind in args.watchers
            if kind != "metrics"
        }
        steps = max(1, int(args.seconds / min(jobs["plain"].seconds)))
        turns: dict[str, list[tuple[float, float]]] = {kind: [] for kind in jobs}
        scrapes: list[float] = []
        cores: dict[str, list[float]] = {kind: [] for kind in jobs}
        for number in range(args.rounds):
            report.progress(f"{transport}: round {number + 1} of {args.rounds}, {steps} steps each")
            for kind in list(jobs)[:: -1 if number % 2 else 1]:
                with watchers.get(kind) or Scraper(port if kind == "metrics" else None) as watcher:
                    begun = time.monotonic(), watcher.cpu_s
                    turns[kind].append(_turn(jobs[kind], steps))
                    cores[kind].append((watcher.cpu_s - begun[1]) / (time.monotonic() - begun[0]))
                if kind == "metrics":
                    scrapes += watcher.seconds
        for job in jobs.values():
            job.verify()
    return [
        {**_row(transport, kind, turns, scrapes), "cores": report.median(cores[kind]) if kind in watchers else None}
        for kind in jobs
        if kind != "plain"
    ]


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
    parser = report.parser(__doc__, transports="grpc,tcp,shm", workers=2, rounds=20, seconds=1)
    parser.add_argument(
        "--model", choices=[m for m in work.MODELS if m != "1kb"], default="convnet", help="shapes (default: %(default)s)"
    )
    watchers = ",".join(WATCHERS)
    parser.add_argument(
        "--watchers", type=report.some_of(WATCHERS), default=watchers, help=f"which of {watchers} (default: all)"
    )
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
            report.number(r["cores"], 3),
        ]
        for r in results
    ]
    print(report.table(["", "plain", "with", "ratio", "25 %", "75 %", "shard CPU", "ms/scrape", "cores"], rows))
    checked = [Criterion(5, f"{r['transport']}: step with {r['kind']} / without", r["ratio"], 1.02) for r in results]
    return report.conclude(args.json, {"machine": about, "results": results}, checked, left_out, is_failed=bool(failed))


if __name__ == "__main__":
    sys.exit(main())
