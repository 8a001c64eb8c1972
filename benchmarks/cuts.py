"""Measures how long cuts hold pushes in a job without rounds: steps while a checkpoint is taken every second, against those of
the same job while none is.

    python benchmarks/cuts.py [--modes async,ssp:3] [--workers 2,8] [--megabytes 1,25] [--rounds 6] [--seconds 3]

A cut there is a position of each worker: a push beyond it waits on its shard until the pushes before it have come, and the
pages are pinned (docs/design/durability.md). Each job has two shards, and a tensor of that size on either. It has turns where
shard 0 is asked for a checkpoint every second, and turns in which it is not. A step is a push_pull over shared memory, and
workers do nothing between two; so the processors are busy all the time, and what is written competes with the workers for them.

step        the ratios are those of the turns with checkpoints to those without: of the steps of all workers
longest     the longest step of any worker while a checkpoint is taken, from the request until it is stored: median of the
            checkpoints, and the longest of all; and the same of as long windows, each second, in turns without

What the job has computed is verified, to the bit. Exit status: 1 if psd failed or was wrong.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from argparse import Namespace
from typing import Any

import _contenders as contenders
import _report as report
import grpc
from _contenders import Contender
from _processes import ProcessFailed, cleanly
from peers import work

from psd.v1 import control_pb2, control_pb2_grpc

CHECKPOINT_S = 1.0
WARM_UP_STEPS = 20
STEPS_MAX = work.STEPS_MAX - 100
"""Steps of a worker in all: beyond them sums are not exact."""

_Window = tuple[float, float]


class Asker:
    """A thread that asks a shard for a checkpoint every second while in a `with`.

    Attributes:
        windows: when each was asked for, and when it was stored.
    """

    def __init__(self, server: str) -> None:
        self.windows: list[_Window] = []
        self._over = threading.Event()
        self._server = server
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Asker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        with grpc.insecure_channel(self._server) as channel:
            stub = control_pb2_grpc.ControlServiceStub(channel)
            while True:
                begun = time.monotonic()
                stub.Checkpoint(control_pb2.CheckpointRequest(), timeout=600)
                self.windows.append((begun, time.monotonic()))
                if self._over.wait(max(0.0, begun + CHECKPOINT_S - time.monotonic())):
                    return


def turn(job: Contender, steps: int) -> list[list[_Window]]:
    """Let each worker make steps; when each began and ended, by worker."""
    for peer in job.peers:
        peer.ask(steps=steps)
    job.all_steps += steps
    return [peer.answer()["times"] for peer in job.peers]


def longest_in(times: list[list[_Window]], windows: list[_Window]) -> list[float]:
    """The longest step of any worker in each window in which there is one."""
    found = []
    for since, to in windows:
        inside = [end - begun for worker in times for begun, end in worker if begun < to and end > since]
        found += [max(inside)] if inside else []
    return found


def quiet_windows(times: list[list[_Window]], length_s: float) -> list[_Window]:
    """Windows of that length, one each second, in a turn without checkpoints."""
    begun, ended = min(worker[0][0] for worker in times), min(worker[-1][1] for worker in times)
    count = max(1, int((ended - begun) / CHECKPOINT_S))
    return [(begun + number * CHECKPOINT_S, begun + number * CHECKPOINT_S + length_s) for number in range(count)]


def measure(mode: str, workers: int, megabytes: int, args: Namespace) -> dict[str, Any]:
    """Run one job, and compare its turns."""
    model = f"2x{megabytes}mb"
    with cleanly() as stack:
        url = stack.enter_context(tempfile.TemporaryDirectory(prefix="psd-benchmark-"))
        flags = ("--checkpoint-dir", url, "--checkpoint-keep", "1")
        job = contenders.psd("shm", workers, 2, model, consistency=mode, flags=flags)(stack)
        warm = turn(job, WARM_UP_STEPS)
        step_s = report.median([end - begun for worker in warm for begun, end in worker])
        assert step_s is not None
        steps = min(max(1, int(args.seconds / step_s)), STEPS_MAX // (2 * args.rounds))
        quiet: list[float] = []
        during: list[float] = []
        longest_quiet: list[float] = []
        longest: list[float] = []
        taken: list[float] = []
        for number in range(args.rounds):
            report.progress(f"{mode}, W = {workers}, {megabytes} MB: round {number + 1} of {args.rounds}, {steps} steps each")
            with Asker(job.servers[0]) as asker:
                times = turn(job, steps)
            during += [end - begun for worker in times for begun, end in worker]
            longest += longest_in(times, asker.windows)
            taken += [end - begun for begun, end in asker.windows]
            times = turn(job, steps)
            quiet += [end - begun for worker in times for begun, end in worker]
            longest_quiet += longest_in(times, quiet_windows(times, report.median(taken) or 0.0))
        job.verify()
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {
        "mode": mode,
        "workers": workers,
        "megabytes": megabytes,
        "checkpoints": len(taken),
        "checkpoint_s": report.median(taken),
        "steps": len(quiet),
        **{f"{name}_s_quiet": report.quantile(quiet, share) for name, share in shares.items()},
        **{f"{name}_s": report.quantile(during, share) for name, share in shares.items()},
        "mean_ratio": (sum(during) / len(during)) / (sum(quiet) / len(quiet)),
        "longest_s_quiet": report.median(longest_quiet),
        "longest_s": report.median(longest),
        "longest_s_quiet_max": max(longest_quiet),
        "longest_s_max": max(longest),
    }


def main() -> int:
    """Print the figures."""
    parser = report.parser(__doc__, workers="2,8", megabytes="1,25", rounds=6, seconds=3)
    parser.add_argument("--modes", type=report.words, default="async,ssp:3", help="without rounds (default: %(default)s)")
    args = parser.parse_args()
    if max(args.workers) > work.WORKERS_MAX or 2 * args.rounds > STEPS_MAX:
        parser.error(f"--workers: expected at most {work.WORKERS_MAX}; --rounds: at most {STEPS_MAX // 2}")
    about = report.machine()
    results, left_out = [], {}
    for megabytes in args.megabytes:
        for workers in args.workers:
            for mode in args.modes:
                try:
                    results.append(measure(mode, workers, megabytes, args))
                except ProcessFailed as error:
                    left_out[f"{mode}, W = {workers}, {megabytes} MB"] = str(error)
    print("ms of a step, with a checkpoint every second and without, and of the longest step in each of its windows")
    print(report.machine_line(about) + "\n")
    rows = [
        [
            f"{r['mode']}, W = {r['workers']}, 2 x {r['megabytes']} MB",
            r["checkpoints"],
            report.number(r["checkpoint_s"]),
            report.number(1e3 * r["p50_s_quiet"], 1),
            *(report.number(r[f"{name}_s"] / r[f"{name}_s_quiet"]) for name in ("p50", "p90", "p99")),
            report.number(r["mean_ratio"]),
            *(report.number(1e3 * r[name], 1) for name in ("longest_s_quiet", "longest_s")),
            *(report.number(1e3 * r[name], 1) for name in ("longest_s_quiet_max", "longest_s_max")),
        ]
        for r in results
    ]
    heads = ["job", "checkpoints", "s each", "median", "x p50", "x p90", "x p99", "x mean", "longest", "with", "max", "with"]
    print(report.table(heads, rows))
    return report.conclude(args.json, {"machine": about, "results": results}, [], left_out, is_failed=bool(left_out))


if __name__ == "__main__":
    sys.exit(main())
