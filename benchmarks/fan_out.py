"""Measures what many readers cost training: 200 of them at one shard, and at one shard with four relays.

    python benchmarks/fan_out.py [--readers 200] [--relays 4] [--megabytes 1] [--steps 10] [--interval 0.5] [--rounds 3]

A worker makes a step every --interval seconds, or as often as it can; each step is a version. In each job it first makes steps
alone, and then with readers: what these cost is the difference within one job, on the same processes. The readers, threads of
four processes, follow: each pulls the newest version as soon as there is one. The worker's own bytes are left out. Shard and
relays keep no versions, so that each travels whole, as where all of a model changes with each.

The measure of what training loses is the shard's processor time, since it does not depend on how many cores are idle: relays
and readers are to have machines of their own, and here they share its cores, though at the lowest priority. They take them from
the worker, too; so `longer` says more about a machine with few cores than about psd. The row without readers has the same steps
twice, and shows how far chance alone goes.

to readers  bytes that the shard sends to readers, or relays, for each step, by the size of the parameters
shard's CPU milliseconds of the shard's processor time for each step; x: by that of the same shard before the readers came
taken       what of that readers cost, as a part of the interval: of one core's time, so much is lost to training
step        the worker's push_pull, by shared memory
longer      what it takes longer than before the readers came, as a part of the interval
versions    versions that a reader has taken for each step, of all that there were
last reader seconds from the beginning of the last step until the last reader has its version

Every value that a reader gets is compared with what its version says. Exit status: 1 if psd failed or was wrong.
"""

from __future__ import annotations

import sys
import threading
import time
from argparse import Namespace
from contextlib import ExitStack
from typing import Any

import _report as report
import numpy as np
from _processes import Peer, ProcessFailed, Relay, Shard, all_ready, cleanly, cpu_s, start_all

import psd_client

IN_A_PROCESS = 50
"""Readers, at most."""

GIVING_WAY = ("nice", "-n", "19")


def addresses(args: Namespace, kind: str, shard: Shard, stack: ExitStack) -> list[str]:
    """The address, or the alternatives, of each reader."""
    if kind == "no readers":
        return []
    if kind == "shard":
        return [shard.address] * args.readers
    limit = "--max-reads", str(2 * args.readers), "--keep-versions", "0"
    relays = [Relay(shard.address, *limit, prefix=GIVING_WAY) for _ in range(args.relays)]
    start_all(stack, relays)
    found = [relay.address for relay in relays]
    turned = ["|".join([*found[first:], *found[:first]]) for first in range(len(found))]
    return [turned[reader % len(turned)] for reader in range(args.readers)]


def measure(kind: str, args: Namespace) -> dict[str, Any]:
    """Run one job, and let its readers follow it."""
    size = args.megabytes * 1_000_000 // 4
    ones = {"w": np.ones(size, np.float32)}
    step_s: list[float] = []

    def step() -> float:
        """Make a step, and wait for the end of the interval; returns when it began."""
        begun = time.monotonic()
        ps.push_pull(ones)
        step_s.append(time.monotonic() - begun)
        threading.Event().wait(max(0.0, begun + args.interval - time.monotonic()))
        return begun

    last_s: list[float] = []
    taken: list[int] = []
    with cleanly() as stack:
        shard = Shard("--max-reads", str(2 * args.readers), "--keep-versions", "0")
        start_all(stack, [shard])
        ps = stack.enter_context(psd_client.connect(shard.address, 0, 1, wait_timeout=600))
        ps.declare({"w": np.zeros(size, np.float32)}, psd_client.SGD(lr=1.0))
        ps.push_pull(ones)
        cpu = cpu_s(shard.pid)
        report.progress(f"{kind}: nobody reads yet")
        steps = args.rounds * args.steps
        for _ in range(steps):
            step()
        alone_cpu_s, alone_step_s = (cpu_s(shard.pid) - cpu) / steps, report.median(step_s)
        step_s.clear()
        servers = addresses(args, kind, shard, stack)
        processes = -(-len(servers) // IN_A_PROCESS)
        parts = [servers[first::processes] for first in range(processes)]
        peers = [Peer("readers", {"servers": part}, prefix=GIVING_WAY) for part in parts]
        all_ready(stack, peers)
        version, sent, cpu = 1 + steps, shard.status().numbers["sent_bytes"], cpu_s(shard.pid)
        for number in range(args.rounds):
            report.progress(f"{kind}: round {number + 1} of {args.rounds}")
            for peer in peers:
                peer.ask(until=version + args.steps)
            for _ in range(args.steps):
                begun = step()
            version += args.steps
            for peer in peers:
                answer = peer.answer()
                if answer["wrong"]:
                    raise ProcessFailed(f"{kind}: {answer['wrong']} versions are not what they are called")
                last_s.append(max(answer["had_at"]) - begun)
                taken += answer["taken"]
        sent_bytes = shard.status().numbers["sent_bytes"] - sent - steps * 4 * size
        return {
            "readers_at": kind,
            "readers": len(servers),
            "steps": steps,
            "sent_per_step": sent_bytes / (4 * size) / steps,
            "shard_cpu_s": (cpu_s(shard.pid) - cpu) / steps,
            "alone_cpu_s": alone_cpu_s,
            "step_s": report.median(step_s),
            "alone_step_s": alone_step_s,
            "versions_share": sum(taken) / len(taken) / args.steps if taken else None,
            "last_s": max(last_s) if last_s else None,
        }


def main() -> int:
    """Print the figures."""
    parser = report.parser(__doc__, megabytes=1, steps=10, rounds=3)
    parser.add_argument("--readers", type=int, default=200, help="in all (default: %(default)s)")
    parser.add_argument("--relays", type=int, default=4, help="of the shard (default: %(default)s)")
    parser.add_argument("--interval", type=float, default=0.5, help="seconds of a step at least (default: %(default)s)")
    args = parser.parse_args()
    if args.readers < 1 or args.relays < 1 or args.interval <= 0:
        parser.error("--readers and --relays: expected at least 1; --interval: above 0")
    about = report.machine()
    results, left_out = [], {}
    for kind in ("no readers", "shard", f"{args.relays} relays"):
        try:
            results.append(measure(kind, args))
        except ProcessFailed as error:
            left_out[kind] = str(error)
    print(f"{args.readers} readers of {args.megabytes} MB")
    print(report.machine_line(about) + "\n")
    rows = [
        [
            r["readers_at"],
            report.number(r["sent_per_step"], 1),
            report.number(1e3 * r["shard_cpu_s"], 1),
            report.number(report.ratio(r["shard_cpu_s"], r["alone_cpu_s"])),
            f"{(r['shard_cpu_s'] - r['alone_cpu_s']) / args.interval:.1%}",
            report.number(1e3 * r["step_s"], 1),
            f"{(r['step_s'] - r['alone_step_s']) / args.interval:.1%}",
            report.number(r["versions_share"]),
            report.number(r["last_s"]),
        ]
        for r in results
    ]
    heads = ["readers at", "x sent", "ms shard's CPU", "x", "taken", "ms step", "longer", "versions", "s last reader"]
    print(report.table(heads, rows, words=1))
    return report.conclude(args.json, {"machine": about, "results": results}, [], left_out, is_failed=bool(left_out))


if __name__ == "__main__":
    sys.exit(main())
