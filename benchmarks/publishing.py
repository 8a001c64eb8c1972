"""Measures what publishing weights and reading them costs, beside a push and a pull of the same bytes.

    python benchmarks/publishing.py [--megabytes 1024] [--transports shm,tcp,grpc] [--rounds 5] [--waits 50] [--json FILE]

One shard holds a store, another a job that trains as many numbers of float32 with plain SGD and exact aggregation, as a store
does; one process is publisher, worker and reader. They take turns, so that a noisy machine hurts all alike; times are medians.

put         all tensors, of which all numbers have changed; x push: of the same bytes over the same lane
read        all of them by a reader, over the same lane; x pull: a worker's pull of the same bytes
bfloat16    likewise with dtype="bfloat16"
changed     the reader has the version before, of which 2 % of the numbers have changed since
bytes       that the reader receives, by those of the tensors; in shared memory, where none travel, all are written
waiting     a reader waits for a version of 1 MB: from the return of `put` to that of its pull; negative: it was first

What readers get is compared with what was put. Exit status: 1 if psd failed or was wrong.
"""

from __future__ import annotations

import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import _report as report
import numpy as np
from _processes import Shard, cleanly, start_all
from _report import Criterion, ratio

import psd_client
from psd_client.reader import Reader

TENSORS = 16
SMALL = 250_000
"""Numbers of the version that a reader waits for."""


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that a call takes, and what it returns."""
    begun = time.monotonic()
    found = call()
    return time.monotonic() - begun, found


def fetched(reader: Reader, **options: Any) -> tuple[float, int, Any]:
    """Seconds and payload bytes of a reader's pull, and what it has brought."""
    before = reader.received_bytes
    seconds, found = timed(lambda: reader.pull(**options))
    return seconds, reader.received_bytes - before, found


def check(found: Any, expected: dict[str, Any], what: str) -> None:
    """Raise unless each tensor has the bits that were put."""
    for name, values in expected.items():
        if not np.array_equal(found[name], values):
            raise RuntimeError(f"{what}: {name} is not what was put")


def turns(transport: str, args: Namespace) -> dict[str, Any]:
    """Put, push, read and pull in turn, over one lane."""
    n = (args.megabytes << 20) // 4 // TENSORS
    random = np.random.default_rng(0)
    values = {f"w{i}": random.normal(size=n).astype(np.float32) for i in range(TENSORS)}
    times: dict[str, list[float]] = {}
    shares: dict[str, list[float]] = {}
    with cleanly() as stack:
        shards = [Shard("--max-message-bytes", str(64 << 20)), Shard()]
        start_all(stack, shards)
        store = stack.enter_context(psd_client.publish(shards[0].address, transport=transport))
        ps = stack.enter_context(psd_client.connect(shards[1].address, 0, 1, transport=transport))
        ps.declare(values, psd_client.SGD(lr=1.0), aggregation="exact")
        readers = {
            name: stack.enter_context(psd_client.connect(shards[0].address, role="reader", transport=transport))
            for name in ("read", "bfloat16", "changed")
        }

        def note(name: str, seconds: float, nbytes: int = 0) -> None:
            times.setdefault(name, []).append(seconds)
            shares.setdefault(name, []).append(nbytes / sum(array.nbytes for array in values.values()))

        for number in range(args.rounds + 1):  # the first one declares, and touches memory for the first time
            report.progress(f"{transport}: round {number} of {args.rounds}")
            for array in values.values():
                array += np.float32(0.25) + array * np.float32(0.1)
            put, _ = timed(lambda: store.put(values))
            push, _ = timed(lambda: ps.push(values))
            pull, _ = timed(ps.pull)
            whole = {}
            for name, options in (("read", {}), ("bfloat16", {"dtype": "bfloat16"})):
                seconds, nbytes, found = fetched(readers[name], **options)
                whole[name] = seconds, nbytes
                if not options:
                    check(found, values, name)
                del found  # as the worker's parameters are dropped: its memory is used again
            fetched(readers["changed"], newer_than=0)
            for array in values.values():
                array[number % 50 :: 50] += 1
            store.put(values)
            seconds, nbytes, found = fetched(readers["changed"])
            check(found, values, "changed")
            del found
            if number:
                note("put", put)
                note("push", push)
                note("pull", pull)
                note("changed", seconds, nbytes)
                for name, (seconds, nbytes) in whole.items():
                    note(name, seconds, nbytes)
    medians = {name: report.median(found) for name, found in times.items()}
    return {"transport": transport, "seconds": medians, "bytes": {name: max(found) for name, found in shares.items()}}


def waits(args: Namespace) -> list[float]:
    """Seconds from the return of put until a waiting reader has the version."""
    found: list[float] = []
    with cleanly() as stack:
        shard = Shard()
        start_all(stack, [shard])
        store = stack.enter_context(psd_client.publish(shard.address))
        reader = stack.enter_context(psd_client.connect(shard.address, role="reader"))
        values = {"w": np.zeros(SMALL, np.float32)}
        version = store.put(values)
        reader.pull()
        for _ in range(args.waits):
            ended: list[float] = []

            def follow(version: int = version, ended: list[float] = ended) -> None:
                reader.pull(newer_than=version)
                ended.append(time.monotonic())

            thread = threading.Thread(target=follow)
            thread.start()
            time.sleep(0.02)  # it waits at the shard by now
            values["w"] += 1
            version = store.put(values)
            done = time.monotonic()
            thread.join()
            found.append(ended[0] - done)
    return found


def main() -> int:
    """Print the figures."""
    parser = report.parser(__doc__, transports="shm,tcp,grpc", rounds=5)
    parser.add_argument("--megabytes", type=int, default=1024, help="of the tensors (default: %(default)s)")
    parser.add_argument("--waits", type=int, default=50, help="versions of 1 MB that a reader waits for (default: %(default)s)")
    args = parser.parse_args()
    about = report.machine()
    results = [turns(transport, args) for transport in args.transports]
    waited = waits(args)
    print(f"{args.megabytes} MB of float32; medians of {args.rounds}, in seconds\n" + report.machine_line(about) + "\n")
    rows = []
    criteria = []
    for result in results:
        lane, seconds, shares = result["transport"], result["seconds"], result["bytes"]
        for name, beside in (("put", "push"), ("read", "pull"), ("bfloat16", "pull"), ("changed", "pull")):
            times = ratio(seconds[name], seconds[beside])
            share = shares[name] if beside == "pull" else None
            rows.append(
                [f"{name}, {lane}", report.number(seconds[name]), report.number(times), beside, report.number(share, 3)]
            )
        criteria += [
            Criterion(2, f"{lane}: put / push", ratio(seconds["put"], seconds["push"]), 1.1),
            Criterion(2, f"{lane}: read / pull", ratio(seconds["read"], seconds["pull"]), 1.15),
        ]
    criteria += [
        *(
            Criterion(2, f"{what}: bytes / all", max(shares), limit)
            for name, what, limit in (("bfloat16", "bfloat16", 0.51), ("changed", "2 % changed", 0.08))
            if (shares := [result["bytes"][name] for result in results if result["transport"] != "shm"])
        ),
        Criterion(2, "waiting, median / 20 ms", ratio(report.median(waited), 0.020), 1),
    ]
    print(report.table(["", "s", "x", "", "bytes"], rows))
    millis = [1e3 * seconds for seconds in waited]
    print(f"\nwaiting: median {report.median(millis):.1f} ms, longest {max(millis):.1f} ms")
    return report.conclude(args.json, {"machine": about, "results": results, "waits_s": waited}, criteria, {}, is_failed=False)


if __name__ == "__main__":
    sys.exit(main())
