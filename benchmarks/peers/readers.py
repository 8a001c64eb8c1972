"""Readers of a job of psd, for benchmarks/fan_out.py: threads of one process, each with a connection of its own.

A turn ends when every reader has a version; the answer says when each had it, how many versions it took until then, and what is
wrong with these.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from turns import Turns

import psd_client


def follow(reader: psd_client.Reader, until: int) -> tuple[float, int, int]:
    """Follow until a version; return when that was, how many were taken, and how many of them are not what they are called."""
    taken = wrong = version = 0
    while version < until:
        weights = reader.pull(newer_than=version)
        version = weights.version
        wrong += bool((weights["w"] != -version).any())
        taken += 1
    return time.monotonic(), taken, wrong


def main() -> None:
    """Connect, and take turns."""
    turns = Turns()
    readers = [psd_client.connect(each, role="reader", wait_timeout=600) for each in turns.arguments["servers"]]
    with ThreadPoolExecutor(len(readers)) as pool:
        list(pool.map(lambda reader: reader.pull(), readers))

        def answered(request: dict[str, Any]) -> dict[str, Any]:
            found = list(pool.map(lambda reader: follow(reader, request["until"]), readers))
            had_at, taken, wrong = zip(*found, strict=True)
            return {"had_at": had_at, "taken": taken, "wrong": sum(wrong)}

        turns.answer(answered)
        for reader in readers:
            reader.close()


if __name__ == "__main__":
    main()
