"""Measures memory while workers push as fast as they can at a shard that is held back.

    python benchmarks/backpressure.py [--transports grpc,tcp,shm] [--workers 8] [--megabytes 64] [--seconds 30]

The shard is suspended (SIGSTOP) for nine tenths of the time, in turns of a second, and the workers, asynchronous, push without
pause. A system without back-pressure would queue what they push: in the shard up to --workers x --megabytes, or in the workers.
The resident memory of every process is sampled 20 times a second, shared memory included; "of it private" leaves that out. What
workers share with the shard is counted with the workers, whose it is, and not again with the shard.

A process may grow beyond what it had before the first push, when its parameters and buffers were in place already, by

    --in-flight-mb for each of its connections    (a shard has one per worker, a worker one per shard)
    --own-mb                                      (the heap, threads' stacks, spare pages of the arena)

What the pushes have computed is verified, to the bit. Exit status: 1 if psd failed or was wrong; the criterion
does not decide.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from argparse import Namespace
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import _contenders as contenders
import _report as report
from _contenders import Contender
from _processes import attached_bytes, private_bytes, resident_bytes
from _report import Criterion
from _turns import over_transports
from peers import work

HELD_S, FREE_S = 0.9, 0.1
SAMPLE_S = 0.05
PUSHES_MIN = 8
PUSHES_FREE = 5
"""Pushes of each worker while nothing is held back, to see how long they take."""


class Memory:
    """The resident memory of some processes: before, and at most."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self.before = {name: _own_bytes(name, pid) for name, pid in pids.items()}
        self.most = dict(self.before)
        self.most_private = {name: private_bytes(pid) for name, pid in pids.items()}

    def sample(self) -> None:
        """Sample once."""
        for name, pid in self._pids.items():
            self.most[name] = max(self.most[name], _own_bytes(name, pid))
            self.most_private[name] = max(self.most_private[name], private_bytes(pid))


def _own_bytes(name: str, pid: int) -> int:
    return resident_bytes(pid) - (attached_bytes(pid) if name == "shard" else 0)


def watch(turn: Future[None], memory: Memory, held: list[int]) -> None:
    """Sample until a turn is done, and hold some processes back meanwhile."""
    done = threading.Event()
    turn.add_done_callback(lambda _: done.set())
    begun = time.monotonic()
    is_held = False
    try:
        while not done.wait(SAMPLE_S):
            memory.sample()
            must_hold = (time.monotonic() - begun) % (HELD_S + FREE_S) < HELD_S
            if must_hold != is_held:
                is_held = must_hold
                for pid in held:
                    os.kill(pid, signal.SIGSTOP if is_held else signal.SIGCONT)
    finally:
        for pid in held:
            os.kill(pid, signal.SIGCONT)
    turn.result()


def measure(transport: str, args: Namespace) -> list[dict[str, Any]]:
    """Measure; one table row for each process."""
    with ExitStack() as stack:
        model = f"{args.megabytes}mb"
        contender: Contender = contenders.psd(transport, args.workers, 1, model, consistency="async", call="push")(stack)
        shards = contender.server_pids
        pids = {"shard": shards[0]} | {f"worker {rank}": peer.pid for rank, peer in enumerate(contender.peers)}
        memory = Memory(pids)
        with ThreadPoolExecutor(1) as pool:
            watch(pool.submit(contender.take_turn, 0, PUSHES_FREE), memory, [])
            free = dict(memory.most)
            push_s = sum(contender.seconds) / PUSHES_FREE
            pushes = max(PUSHES_MIN, int(args.seconds * FREE_S / (HELD_S + FREE_S) / push_s))
            begun = time.monotonic()
            watch(pool.submit(contender.take_turn, 0, pushes), memory, shards)
            took_s = time.monotonic() - begun
        contender.verify()
    report.progress(f"{transport}: {args.workers} x {pushes} pushes in {took_s:.0f} s, {push_s:.2f} s each when free")
    return [
        {
            "transport": transport,
            "process": name,
            "before_bytes": memory.before[name],
            "most_bytes_free": free[name],
            "most_bytes_held": memory.most[name],
            "most_private_bytes": memory.most_private[name],
            "bound_bytes": memory.before[name]
            + (args.own_mb + args.in_flight_mb * (args.workers if name == "shard" else 1)) * 10**6,
            "pushes": pushes,
            "held_s": took_s * HELD_S,
        }
        for name in pids
    ]


def main() -> int:
    """Print the figures."""
    parser = report.parser(__doc__, transports="grpc,tcp,shm", workers=8, megabytes=64)
    parser.add_argument("--seconds", type=float, default=30, help="about as long is the shard held back (default: %(default)s)")
    parser.add_argument("--in-flight-mb", type=int, default=16, help="per connection (default: %(default)s)")
    parser.add_argument("--own-mb", type=int, default=32, help="per process (default: %(default)s)")
    args = parser.parse_args()
    if not 1 <= args.workers <= work.WORKERS_MAX:
        parser.error(f"--workers: expected 1 to {work.WORKERS_MAX}, with which float32 arithmetic is exact, got {args.workers}")
    if args.megabytes < 1 or args.seconds <= 0:
        parser.error("--megabytes, --seconds: expected more than 0")
    about = report.machine()
    transports, results, left_out, failed = over_transports(args.transports, lambda transport: measure(transport, args))
    print(f"{args.megabytes} MB of parameters, {args.workers} workers push without pause; resident memory in MB")
    print(report.machine_line(about) + "\n")
    columns = ("before_bytes", "most_bytes_free", "most_bytes_held", "most_private_bytes", "bound_bytes")
    rows = [[f"{r['transport']} {r['process']}", *(report.number(r[c] / 1e6, 0) for c in columns)] for r in results]
    print(report.table(["", "before", "shard is free", "shard is held", "of it private", "bound"], rows))
    checked = []
    for transport in transports:
        shares = [r["most_bytes_held"] / r["bound_bytes"] for r in results if r["transport"] == transport]
        what = f"{transport}: memory of the process closest to its bound / bound"
        checked.append(Criterion(9, what, max(shares, default=None), 1))
    return report.conclude(args.json, {"machine": about, "results": results}, checked, left_out, is_failed=bool(failed))


if __name__ == "__main__":
    sys.exit(main())
