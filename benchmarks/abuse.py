"""Measures how much throughput workers keep, and how much memory a shard, while somebody abuses its ports.

    python benchmarks/abuse.py [--transports grpc,tcp,shm] [--attacks "silence grpc,streams push"] [--seconds 4] [--rounds 2]

The workers train, synchronously, in turns: one turn in peace, one under attack, and so on, so that a noisy machine hurts both
alike; the best turns count. The attacker (peers/attacker.py) knows where the shard listens, and no more; it opens 200
connections or calls a second, and holds 1,500 of them where it can. It runs on this machine, but only when
nobody else wants to (SCHED_IDLE); "attempts" shows whether it came to its turn. What it takes all the same, caches and the
kernel's work, counts. "shard CPU" is what the shard used per step, as a multiple of that in peace: the part of the damage that
is its own.

    silence   connections that say nothing             garbage   random bytes, at each port
    drip      a byte at a time                         streams   calls of which nothing comes
    promise   4 GiB announced, nothing sent            calls     Status, Join, an unknown method
    oversize  messages of 64 MiB                       scrapes   the metrics, asked for without end
    crowds    streams, on many connections             bystander nothing but a busy processor; what sharing the machine costs

Throughput under attack must be 80 % of that in peace, the shard's memory may grow by --own-mb, its open descriptors by
--descriptors. What the workers have computed is verified, to the bit. Exit status: 1 if psd failed or was wrong; the
criteria do not decide.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import _contenders as contenders
import _report as report
from _contenders import Contender
from _processes import Peer, descriptors, free_ports, private_bytes
from _report import Criterion, ratio
from _turns import over_transports

BYSTANDER = "bystander"
ATTACKS = (
    BYSTANDER,
    *(f"silence {where}" for where in ("grpc", "tcp", "local", "metrics")),
    *(f"promise {where}" for where in ("grpc", "tcp", "local")),
    *(f"drip {where}" for where in ("tcp", "local")),
    *(f"garbage {where}" for where in ("grpc", "tcp", "local", "metrics")),
    *(f"streams {where}" for where in ("push", "watch", "reflection")),
    *(f"crowds {where}" for where in ("push", "watch")),
    *(f"calls {where}" for where in ("status", "join", "nothing")),
    "oversize Push",
    "scrapes metrics",
)
SAMPLE_S = 0.1
CHUNK_S = 0.2
"""Approximate seconds of training per request to the workers."""


class Growth:
    """The growth of a process's memory and descriptors, at most; sampled by a thread while in a `with`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before = private_bytes(pid), descriptors(pid)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.bytes, self.descriptors = 0, 0

    def __enter__(self) -> Growth:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self.bytes = max(self.bytes, private_bytes(self._pid) - self._before[0])
            self.descriptors = max(self.descriptors, descriptors(self._pid) - self._before[1])


def local_name(pid: int) -> str:
    """Name of the shard's local socket, as anybody on the machine can find it."""
    inodes = {match[1] for fd in Path(f"/proc/{pid}/fd").iterdir() if (match := re.match(r"socket:\[(\d+)\]", _target(fd)))}
    for line in Path("/proc/net/unix").read_text().splitlines():
        words = line.split()
        if len(words) == 8 and words[6] in inodes and words[7].startswith("@psd-"):
            return words[7][1:]
    return ""


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


def measure(transport: str, args: Namespace) -> list[dict[str, Any]]:
    """Measure; one table row for each attack."""
    results = []
    with ExitStack() as stack:
        ports = dict(zip(("bulk_port", "metrics_port"), free_ports(2), strict=True))
        flags = [f"--bulk-port={ports['bulk_port']}", f"--metrics-port={ports['metrics_port']}"]
        contender = contenders.psd(transport, args.workers, 1, f"{args.megabytes}mb", flags=flags)(stack)
        (pid,) = contender.server_pids
        told = {"grpc": contender.servers[0], "local_name": local_name(pid), **ports}
        attacker = Peer("attacker", told, threads=1)
        stack.callback(attacker.end)
        attacker.ready()
        contender.take_turn(2, 5)
        steps = max(1, int(CHUNK_S / min(contender.seconds)))
        for attack in args.attacks:
            results.append({"transport": transport, "attack": attack, **_one(contender, attacker, attack, steps, pid, args)})
            report.progress(f"{transport}, {attack}: kept {results[-1]['kept']:.2f}")
        contender.verify()
    return results


def _one(contender: Contender, attacker: Peer, attack: str, steps: int, pid: int, args: Namespace) -> dict[str, Any]:
    peace: list[tuple[float, float]] = []
    attacked: list[tuple[float, float]] = []
    tried = 0
    with Growth(pid) as growth:
        for _ in range(args.rounds):
            peace.append(_turn(contender, args.seconds, steps))
            attacker.ask(attack=attack, seconds=2 * args.seconds)
            time.sleep(args.seconds)  # until it is under way
            attacked.append(_turn(contender, args.seconds, steps))
            tried += attacker.answer()["tried"]
    (in_peace, cpu_in_peace), (under_attack, cpu_under_attack) = min(peace), min(attacked)
    return {
        "step_s_peace": in_peace,
        "step_s_attacked": under_attack,
        "kept": in_peace / under_attack,
        "shard_cpu": cpu_under_attack / cpu_in_peace,
        "tried": tried,
        "grown_bytes": growth.bytes,
        "grown_descriptors": growth.descriptors,
    }


def _turn(contender: Contender, seconds: float, steps: int) -> tuple[float, float]:
    """Seconds, and seconds of the shard's processor, per step."""
    done, cpu_before, begun = contender.all_steps, contender.server_cpu_s, time.monotonic()
    while time.monotonic() < begun + seconds:
        contender.take_turn(0, steps)
    count = contender.all_steps - done
    return (time.monotonic() - begun) / count, (contender.server_cpu_s - cpu_before) / count


def main() -> int:
    """Print the figures."""
    parser = report.parser(__doc__, transports="grpc,tcp,shm", workers=2, megabytes=16, seconds=4, rounds=2)
    parser.add_argument(
        "--attacks", type=report.some_of(ATTACKS), default=",".join(ATTACKS), metavar="A,A", help="default: all"
    )
    parser.add_argument("--own-mb", type=int, default=64, help="by which the shard may grow (default: %(default)s)")
    parser.add_argument("--descriptors", type=int, default=2000, help="by which its may grow (default: %(default)s)")
    args = parser.parse_args()
    about = report.machine()
    _, results, left_out, failed = over_transports(args.transports, lambda transport: measure(transport, args))
    print(f"{args.megabytes} MB of parameters, {args.workers} workers; ms per step, MB and descriptors by which the shard grew")
    print(report.machine_line(about) + "\n")
    rows = [
        [
            f"{r['transport']}: {r['attack']}",
            *(report.number(1e3 * r[f"step_s_{which}"], 1) for which in ("peace", "attacked")),
            report.number(r["kept"]),
            report.number(r["shard_cpu"]),
            str(r["tried"]),
            report.number(r["grown_bytes"] / 1e6, 1),
            str(r["grown_descriptors"]),
        ]
        for r in results
    ]
    print(report.table(["", "in peace", "attacked", "kept", "shard CPU", "attempts", "grown", "descriptors"], rows))
    kept = [r["kept"] for r in results if r["attack"] != BYSTANDER]
    checked = [
        Criterion(4, "throughput under the worst attack / in peace", min(kept, default=None), 0.8, True),
        Criterion(4, "memory grown / --own-mb", _most(results, "grown_bytes", args.own_mb * 1e6), 1),
        Criterion(4, "descriptors grown / --descriptors", _most(results, "grown_descriptors", args.descriptors), 1),
    ]
    return report.conclude(args.json, {"machine": about, "results": results}, checked, left_out, is_failed=bool(failed))


def _most(results: list[dict[str, Any]], field: str, limit: float) -> float | None:
    return ratio(max((r[field] for r in results), default=None), limit)


if __name__ == "__main__":
    sys.exit(main())
