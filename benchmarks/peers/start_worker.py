"""One worker of psd that declares a large model once, or starts to push; says how long it took, and how much memory at most."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import work
from turns import Turns

import psd_client


def cpu_s() -> float:
    """CPU seconds of this process, and of no other."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def peak_bytes() -> int:
    """Most memory that the process has had since `forget_peak`, with what it shares."""
    return next(int(line.split()[1]) << 10 for line in _lines("status") if line.startswith("VmHWM:"))


def forget_peak() -> None:
    """Measure the most memory from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def memory() -> dict[str, int]:
    """Memory now: Rss, Pss and private bytes."""
    found = {line.split(":")[0]: int(line.split()[1]) << 10 for line in _lines("smaps_rollup")[1:]}
    return {"rss": found["Rss"], "pss": found["Pss"], "private": found["Private_Clean"] + found["Private_Dirty"]}


def _lines(name: str) -> list[str]:
    return Path(f"/proc/self/{name}").read_text().splitlines()


def main() -> None:
    """Declare, and push, when told."""
    turns = Turns()
    told = turns.arguments
    optimizer = psd_client.SGD(lr=work.LR) if told["rule"] == "sgd" else psd_client.Adam(lr=work.LR)
    options = {"copy": False} if told["is_lean"] else {}
    names = [f"t{index:03}" for index in range(told["tensors"])]
    sizes = [told["size"] // len(names)] * len(names)
    sizes[0] += told["size"] - sum(sizes)
    # Rank 0's values are the job's; another worker's are ones, which must not come back.
    values: Any = {name: np.ones(size, np.float32) for name, size in zip(names, sizes, strict=True)}
    if told["rank"] == 0:
        for name, size in zip(names, sizes, strict=True):
            values[name][...] = work.gradient(7, size)
    with psd_client.connect(
        told["servers"], told["rank"], told["world_size"], transport=told["transport"], wait_timeout=120
    ) as ps:

        def declare() -> Any:
            return ps.declare(values, optimizer, consistency="async", **options)

        def answered(request: dict[str, Any]) -> dict[str, Any]:
            nonlocal values
            gradients = {}
            if request["call"] == "push_pull":
                gradients = {name: np.full(size, 0, np.float32) for name, size in zip(names, sizes, strict=True)}
            forget_peak()
            before, cpu, begun = memory(), cpu_s(), time.monotonic()
            values = ps.push_pull(gradients) if gradients else declare()
            took, cpu = time.monotonic() - begun, cpu_s() - cpu
            for value in values.values():
                value.max()  # what a shard has written counts when it is read
            facts = {"s": took, "cpu_s": cpu, "peak": peak_bytes(), "before": before, "after": memory()}
            if told["rule"] != "adam" or not gradients:
                for name, size in zip(names, sizes, strict=True):
                    if not np.array_equal(values[name], work.gradient(7, size)):
                        sys.exit(f"worker {told['rank']}: {name} is not what worker 0 has declared")
            return {**facts, "transport": ps.transports[0]}

        turns.answer(answered)


if __name__ == "__main__":
    main()
