"""Trains for minutes while workers come, leave and are killed, checkpoints are taken, readers read and metrics are scraped.

    python benchmarks/soak.py [--minutes 5] [--transport auto] [--shards 2]

Four workers train synchronously with exact aggregation. Two stay; one leaves and joins again every few seconds; one is killed
and started again as often. Memory and open descriptors of the shards and of the workers that stay are sampled every second;
after a fifth of the time, in which buffers, pools and caches fill, they must stay where they are: printed are the slopes of
straight lines through the samples. At the end every push that was answered must have been counted once, every other one at
most once.

Exit status: 1 if psd failed or counted wrongly; the criteria do not decide.
"""

from __future__ import annotations

import socket
import sys
import tempfile
import time
import urllib.request
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import _report as report
from _processes import Peer, ProcessFailed, Shard, cleanly, descriptors, private_bytes, start_all
from _report import Criterion
from peers.work import COUNTS

import psd_client

WORLD = 4
STAYS, LEAVES, DIES = (0, 1), 2, 3
SLICE = 250_000
LEASE_S = 1.0
WARM_SHARE = 0.2


class Soak:
    """One run."""

    def __init__(self, stack: ExitStack, args: Namespace) -> None:
        self._args = args
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="psd-soak-")))
        self._stack = stack
        self.ports = [_free_port() for _ in range(args.shards)]
        flags = ("--lease", str(LEASE_S), "--checkpoint-dir", str(self._folder / "checkpoints"), "--checkpoint-secs", "5")
        self.shards = [
            Shard(*flags, "--checkpoint-keep", "2", f"--metrics-port={port}", index=index, count=args.shards)
            for index, port in enumerate(self.ports)
        ]
        start_all(stack, self.shards)
        self.servers = ",".join(shard.address for shard in self.shards)
        self.counts: dict[int, list[Path]] = {rank: [] for rank in range(WORLD)}
        self.workers = {rank: self.start(rank) for rank in range(WORLD)}
        for worker in self.workers.values():
            worker.ready()
        self.events = dict.fromkeys(("left", "killed", "scrapes", "reads"), 0)

    def start(self, rank: int) -> Peer:
        """Start a worker, with its own file for its counts."""
        path = self._folder / f"{rank}-{len(self.counts[rank])}"
        path.write_bytes(COUNTS.pack(0, 0))
        self.counts[rank].append(path)
        told = {"servers": self.servers, "rank": rank, "world_size": WORLD, "slice_size": SLICE, "counts": str(path)}
        worker = Peer("soak_worker", {**told, "transport": self._args.transport, "pause_s": 0.02}, threads=1)
        self._stack.callback(worker.end)
        return worker

    def disturb(self) -> None:
        """Let one worker leave and come back, kill another one, which comes back; read as a reader."""
        self.workers[LEAVES].ask(values=False)
        self.workers[LEAVES].answer()
        self.workers[LEAVES].end()
        self.events["left"] += 1
        self.workers[DIES].end(0)
        self.events["killed"] += 1
        for rank in (LEAVES, DIES):
            self.workers[rank] = self.start(rank)
        for rank in (LEAVES, DIES):
            self.workers[rank].ready()
        with psd_client.connect(self.servers, role="reader") as reader:
            reader.pull()
        self.events["reads"] += 1

    def scrape(self) -> None:
        """Scrape all shards' metrics."""
        for port in self.ports:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                assert b"psd_pushes_total" in answer.read()
            self.events["scrapes"] += 1

    def sample(self) -> dict[str, tuple[int, int]]:
        """Sample private memory and descriptors, by process."""
        pids = {f"shard {index}": shard.pid for index, shard in enumerate(self.shards)}
        pids |= {f"worker {rank}": self.workers[rank].pid for rank in STAYS}
        return {name: (private_bytes(pid), descriptors(pid)) for name, pid in pids.items()}

    def verify(self) -> list[str]:
        """Let all workers leave; return the error in the counts, in words."""
        for rank in range(1, WORLD):
            self.workers[rank].ask(values=False)
            self.workers[rank].answer()
        self.workers[0].ask(values=True)
        counted = self.workers[0].answer()["counted"]
        wrong = []
        for rank, (least, most) in enumerate(counted):
            pairs = [COUNTS.unpack(path.read_bytes()) for path in self.counts[rank]]
            begun, answered = (sum(numbers) for numbers in zip(*pairs, strict=True))
            report.progress(f"worker {rank}: {begun} pushes begun, {answered} answered, {least:g} counted")
            if least != most or not answered <= least <= begun:
                wrong.append(f"worker {rank}: {begun} pushes begun, {answered} answered, {least:g} to {most:g} counted")
        return wrong


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Slope of the straight line that fits best, per second."""
    mean_t, mean_v = sum(times) / len(times), sum(values) / len(values)
    spread = sum((t - mean_t) ** 2 for t in times)
    return sum((t - mean_t) * (v - mean_v) for t, v in zip(times, values, strict=True)) / spread if spread else 0.0


def run(soak: Soak, seconds: float, every_s: float) -> list[tuple[float, dict[str, tuple[int, int]]]]:
    """Run; return samples with their times, from a fifth of the time on."""
    samples = []
    begun = time.monotonic()
    next_event = begun + every_s
    while (now := time.monotonic()) < begun + seconds:
        soak.scrape()
        if now - begun >= WARM_SHARE * seconds:
            samples.append((now - begun, soak.sample()))
        if now >= next_event:
            soak.disturb()
            next_event = time.monotonic() + every_s
        time.sleep(max(0.0, now + 1 - time.monotonic()))
    return samples


def main() -> int:
    """Print the figures."""
    parser = report.parser(__doc__, minutes=5, shards=2, transport="auto", grown_mb=8)
    parser.add_argument("--every", type=float, default=4, help="so many seconds a worker leaves, and one dies (default: 4)")
    parser.add_argument("--grown-descriptors", type=float, default=4, help="likewise (default: %(default)s)")
    args = parser.parse_args()
    about = report.machine()
    try:
        with cleanly() as stack:
            soak = Soak(stack, args)
            samples = run(soak, args.minutes * 60, args.every)
            wrong = soak.verify()
    except ProcessFailed as error:
        print(f"psd failed: {error}", file=sys.stderr)
        return 1
    times = [at for at, _ in samples]
    results: list[dict[str, Any]] = []
    for name in samples[0][1]:
        memory, open_ = ([sample[name][i] for _, sample in samples] for i in range(2))
        took_s = times[-1] - times[0]
        results.append(
            {
                "process": name,
                "bytes_first": memory[0],
                "bytes_last": memory[-1],
                "bytes_per_minute": 60 * slope(times, memory),
                "grown_bytes": slope(times, memory) * took_s,
                "descriptors_first": open_[0],
                "descriptors_last": open_[-1],
                "grown_descriptors": slope(times, open_) * took_s,
            }
        )
    print(f"{args.minutes:g} minutes, {args.shards} shards, {WORLD} workers; {soak.events}; private memory in MB")
    print(report.machine_line(about) + "\n")
    rows = [
        [
            r["process"],
            *(report.number(r[field] / 1e6, 1) for field in ("bytes_first", "bytes_last", "bytes_per_minute")),
            *(str(r[f"descriptors_{which}"]) for which in ("first", "last")),
            report.number(r["grown_descriptors"]),
        ]
        for r in results
    ]
    print(report.table(["", "first", "last", "MB/minute", "descriptors", "last", "grown by"], rows))
    checked = [
        Criterion(4, "memory that a process has grown by / --grown-mb", _most(results, "grown_bytes") / 1e6 / args.grown_mb, 1),
        Criterion(4, "descriptors / --grown-descriptors", _most(results, "grown_descriptors") / args.grown_descriptors, 1),
    ]
    print("\n" + report.criteria_table(checked))
    for line in wrong:
        print(f"\nWRONG: {line}")
    context = {"machine": about, "events": soak.events, "wrong": wrong, "results": results}
    report.write_json(args.json, context, checked)
    return 1 if wrong else 0


def _most(results: list[dict[str, Any]], field: str) -> float:
    return max(float(r[field]) for r in results)


if __name__ == "__main__":
    sys.exit(main())
