"""Measures how long a job of a large model takes to start, and how much memory that takes.

    python benchmarks/start.py [--transports shm,tcp,grpc] [--megabytes 1000] [--shards 1,2] [--tensors 1,300] [--rounds 3]

`provides` is the first worker's declare(): its values become the job's. `fetches` is a later worker's, which gets them. From
the beginning of the call to its return, with the connection made before; the shards make their arenas meanwhile. `push_pull` is
the provider's first step. The best of all rounds; they run against

    copy       of as many bytes to memory that is touched for the first time
    raw tcp    as many bytes over loopback, from one thread to another one's fresh memory

The ratios are the figures to compare: what fresh memory costs differs from machine to machine, and on virtual ones from minute
to minute. Peaks are a worker's resident memory at most during the call, with the caller's own values, and gradients in a
push_pull; in multiples of the model. What was declared is verified, to the bit. Exit status: 1 if psd failed or was wrong; the
criteria do not decide.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from argparse import Namespace
from contextlib import ExitStack
from typing import Any

import _report as report
import numpy as np
from _processes import Peer, Shard, cpu_s, private_bytes, resident_bytes, start_all
from _report import Criterion, ratio
from _turns import over_transports

LIMIT_S = {"shm": 2.5, "tcp": 4.0}
CALLS = ("provides", "fetches", "push_pull")


def copy_s(size: int) -> float:
    """Seconds for a copy of the model to fresh memory."""
    source = np.ones(size, np.float32)
    begun = time.monotonic()
    target = np.empty(size, np.float32)
    np.copyto(target, source)
    return time.monotonic() - begun


def raw_tcp_s(size: int) -> float:
    """Seconds for the model over loopback."""
    source = memoryview(np.ones(size, np.float32)).cast("B")
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sending:
        receiving, _ = listener.accept()
        with receiving:
            begun = time.monotonic()
            thread = threading.Thread(target=sending.sendall, args=(source,))
            thread.start()
            target = memoryview(np.empty(size, np.float32)).cast("B")
            while len(target):
                target = target[receiving.recv_into(target, min(len(target), 4 << 20), socket.MSG_WAITALL) :]
            thread.join()
    return time.monotonic() - begun


def start(transport: str, shard_count: int, tensors: int, args: Namespace) -> dict[str, Any]:
    """Start one job; the figures of each call, by its name, and the shards' memory."""
    size = args.megabytes * 10**6 // 4
    with ExitStack() as stack:
        shards = [Shard(index=index, count=shard_count) for index in range(shard_count)]
        start_all(stack, shards)
        told = {
            "servers": ",".join(shard.address for shard in shards),
            "world_size": 2,
            "transport": transport,
            "tensors": tensors,
            "size": size,
            "rule": args.rule,
            "is_lean": args.lean,
        }
        found: dict[str, Any] = {"transport": transport, "shards": shard_count, "tensors": tensors}
        peers = []
        for rank in range(2):
            peer = Peer("start_worker", {**told, "rank": rank})
            stack.callback(peer.end)
            peer.ready()
            peers.append(peer)
        asked = {"provides": (peers[0], "declare"), "fetches": (peers[1], "declare"), "push_pull": (peers[0], "push_pull")}
        for call, (peer, request) in asked.items():
            before = sum(cpu_s(shard.pid) for shard in shards)
            peer.ask(call=request)
            found[call] = peer.answer()
            found[call]["shards_cpu_s"] = sum(cpu_s(shard.pid) for shard in shards) - before
            found[call]["shards_private"] = max(private_bytes(shard.pid) for shard in shards)
            found[call]["shards_rss"] = max(resident_bytes(shard.pid) for shard in shards)
            assert found[call]["transport"].startswith(transport), found[call]["transport"]
    return found


def measure(transport: str, args: Namespace) -> list[dict[str, Any]]:
    """Measure over one transport; a row for each number of shards and of tensors."""
    rows = []
    for shard_count in args.shards:
        for tensors in args.tensors:
            rounds = []
            for number in range(args.rounds):
                report.progress(f"{transport}, {shard_count} shards, {tensors} tensors: round {number + 1} of {args.rounds}")
                size = args.megabytes * 10**6 // 4
                found = start(transport, shard_count, tensors, args)
                rounds.append({**found, "copy_s": copy_s(size), "tcp_s": raw_tcp_s(size)})
            best = {call: min((found[call] for found in rounds), key=lambda figures: figures["s"]) for call in CALLS}
            references = {name: min(found[name] for found in rounds) for name in ("copy_s", "tcp_s")}
            rows.append({"transport": transport, "shards": shard_count, "tensors": tensors, **best, **references})
    return rows


def main() -> int:
    """Print the figures."""
    parser = report.parser(__doc__, transports="shm,tcp,grpc", megabytes=1000, shards="1,2")
    parser.add_argument("--tensors", type=report.whole_numbers, default="1,300", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each, of which the best counts (default: %(default)s)")
    parser.add_argument("--rule", choices=("sgd", "adam"), default="sgd", help="adam: two slots (default: %(default)s)")
    parser.add_argument("--lean", action="store_true", help="declare with copy=False")
    args = parser.parse_args()
    about = report.machine()
    transports, results, left_out, failed = over_transports(args.transports, lambda transport: measure(transport, args))
    print(f"{args.megabytes} MB of parameters, {args.rule}; the best of {args.rounds} starts")
    print(report.machine_line(about) + "\n")
    gigabytes, nbytes = args.megabytes / 1000, args.megabytes * 10**6
    lines = []
    for found in results:
        for call in CALLS:
            figures = found[call]
            lines.append(
                [
                    f"{found['transport']} {call}",
                    found["shards"],
                    found["tensors"],
                    *(report.number(figures[name]) for name in ("s", "cpu_s", "shards_cpu_s")),
                    *(report.number(ratio(figures["s"], found[name]), 1) for name in ("copy_s", "tcp_s")),
                    *(report.number(part / nbytes, 1) for part in (figures["peak"], figures["after"]["rss"])),
                    *(report.number(figures["after"][name] / nbytes, 1) for name in ("private", "pss")),
                    *(report.number(figures[name] / nbytes, 1) for name in ("shards_rss", "shards_private")),
                ]
            )
    headers = ["", "shards", "tensors", "s", "CPU s", "shards CPU s", "x copy", "x raw tcp"]
    print(report.table([*headers, "peak", "after", "private", "PSS", "shard", "private"], lines))
    checked = []
    for transport in transports:
        for call in ("provides", "fetches"):
            times = [found[call]["s"] / gigabytes for found in results if found["transport"] == transport]
            if transport in LIMIT_S:
                what = f"{transport} {call}: seconds for 1 GB"
                checked.append(Criterion(10, what, max(times, default=None), LIMIT_S[transport]))
    return report.conclude(args.json, {"machine": about, "results": results}, checked, left_out, is_failed=bool(failed))


if __name__ == "__main__":
    sys.exit(main())
