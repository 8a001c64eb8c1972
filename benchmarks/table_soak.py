"""Trains sparse tables for minutes while rows are admitted, expire and are evicted, a shard is killed, checkpoints are taken.

    python benchmarks/table_soak.py [--minutes 5] [--transport auto]

Two workers push to two shards, asynchronously. Shard 1 is killed and started again every few seconds; shard 0 and the workers
stay. Of those, memory and open descriptors are sampled every second; after a fifth of the time, in which buffers, pools and
caches fill, they must stay where they are. At the end every sum of one table must be exact; of the other one, whose rows come
and go, the counters must add up on each shard: as many rows as were created, less those that were evicted, expired or removed.

Exit status: 1 if psd failed, or a sum or a counter is wrong; the criteria do not decide.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import _report as report
import numpy as np
from _processes import PEERS, Peer, ProcessFailed, Shard, cleanly, descriptors, private_bytes, start_all
from _report import Criterion
from soak import WARM_SHARE, slope

sys.path.insert(0, str(PEERS))
import soak_rows

WORKERS = 2
SHARDS = 2
Samples = list[tuple[float, dict[str, tuple[int, int]]]]


def start(stack: ExitStack, folder: Path, args: Any) -> tuple[list[Shard], list[Peer]]:
    """Start shards and workers."""
    flags = ("--checkpoint-dir", str(folder / "checkpoints"), "--checkpoint-secs", "5", "--checkpoint-keep", "2")
    shards = [
        Shard(*flags, "--state-dir", str(folder / f"shard-{index}"), index=index, count=SHARDS) for index in range(SHARDS)
    ]
    start_all(stack, shards)
    told = {"servers": ",".join(shard.address for shard in shards), "world_size": WORKERS, "transport": args.transport}
    told["expire_steps"] = args.expire_steps
    workers = [Peer("soak_rows", {**told, "rank": rank}, threads=1) for rank in range(WORKERS)]
    for worker in workers:
        stack.callback(worker.end)
    for worker in workers:
        worker.ready()
    return shards, workers


def run(shards: list[Shard], workers: list[Peer], seconds: float, every_s: float) -> tuple[Samples, int]:
    """Kill shard 1 again and again; return samples of the others, from a fifth of the time on, and the number of kills."""
    pids = {"shard 0": shards[0].pid} | {f"worker {rank}": worker.pid for rank, worker in enumerate(workers)}
    samples: Samples = []
    kills = 0
    begun = time.monotonic()
    next_kill = begun + every_s
    while (now := time.monotonic()) < begun + seconds:
        if now - begun >= WARM_SHARE * seconds:
            for process in (shards[0], *workers):
                process.check()
            samples.append((now - begun, {name: (private_bytes(pid), descriptors(pid)) for name, pid in pids.items()}))
        if now >= next_kill:
            shards[1].kill()
            shards[1].start()
            shards[1].wait_ready()
            kills += 1
            next_kill = time.monotonic() + every_s
        time.sleep(max(0.0, now + 1 - time.monotonic()))
    return samples, kills


def wrong_counters(shards: list[Shard]) -> list[str]:
    """Counters that do not add up, in words; prints those of the table whose rows come and go."""
    wrong = []
    for index, shard in enumerate(shards):
        for table in shard.status().tables:
            found = {name: int(number) for name, number in table.numbers.items()}
            gone = found["evicted"] + found["expired"] + found["removed"]
            if table.name == "passing":
                report.progress(
                    f"shard {index}: {found['rows']} rows, {found['bytes'] / 1e6:.1f} MB; created {found['created']}, evicted "
                    f"{found['evicted']}, expired {found['expired']}, not admitted {found['unadmitted']}"
                )
            if found["rows"] != found["created"] - gone:
                wrong.append(
                    f"shard {index}, table {table.name}: {found['created']} created, {gone} gone, {found['rows']} rows"
                )
    return wrong


def wrong_sums(steps: list[int], bits: list[list[int]]) -> list[str]:
    """The rows whose sum is not that of all pushes, in words."""
    expected = np.zeros((soak_rows.COUNTED_ROWS, soak_rows.DIM))
    for rank, count in enumerate(steps):
        for step in range(count):
            ids, grads = soak_rows.counted(rank, step)
            np.subtract.at(expected, ids, grads)
    found = np.array(bits, np.uint32).view(np.float32)
    wrong = int((found != expected).any(axis=1).sum())
    return [f"{wrong} of {len(expected)} rows do not have the sum of their gradients"] if wrong else []


def main() -> int:
    """Print the figures."""
    parser = report.parser(__doc__, minutes=5, transport="auto", grown_mb=8)
    parser.add_argument("--every", type=float, default=8, help="seconds from one kill to the next (default: %(default)s)")
    parser.add_argument("--expire-steps", type=int, default=300, help="after which rows expire (default: %(default)s)")
    args = parser.parse_args()
    about = report.machine()
    try:
        with cleanly() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="psd-soak-")))
            shards, workers = start(stack, folder, args)
            samples, kills = run(shards, workers, args.minutes * 60, args.every)
            for worker in workers:
                worker.ask()
            wrong = wrong_counters(shards)
            answers = [worker.answer() for worker in workers]
            wrong += wrong_sums([answer["steps"] for answer in answers], answers[0]["bits"])
            cuts = sorted(path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith("timeline"))
    except ProcessFailed as error:
        print(f"psd failed: {error}", file=sys.stderr)
        return 1
    times = [at for at, _ in samples]
    rows, grown = [], []
    for name in samples[0][1]:
        memory, open_ = ([sample[name][i] for _, sample in samples] for i in range(2))
        grown.append(slope(times, memory) * (times[-1] - times[0]))
        rows.append(
            [name, *(report.number(n / 1e6, 1) for n in (memory[0], memory[-1], grown[-1])), f"{open_[0]}", f"{open_[-1]}"]
        )
    steps = sum(answer["steps"] for answer in answers)
    print(f"{args.minutes:g} minutes, {SHARDS} shards, {WORKERS} workers, {steps} pushes, {kills} kills; private memory in MB")
    print(f"newest checkpoint: {cuts[-1] if cuts else 'none'}")
    print(report.machine_line(about) + "\n")
    print(report.table(["", "first", "last", "grown by", "descriptors", "last"], rows))
    checked = [Criterion(6, "memory that a process has grown by / --grown-mb", max(grown) / 1e6 / args.grown_mb, 1)]
    print("\n" + report.criteria_table(checked))
    for line in wrong:
        print(f"\nWRONG: {line}")
    report.write_json(args.json, {"machine": about, "kills": kills, "pushes": steps, "wrong": wrong}, checked)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
