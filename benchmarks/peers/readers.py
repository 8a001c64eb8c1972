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


class Follower:
    """One reader, which has the first version."""

    def __init__(self, servers: str) -> None:
        self._reader = psd_client.connect(servers, role="reader", wait_timeout=600)
        self._version = self._reader.pull().version

    def follow(self, until: int) -> tuple[float, int, int]:
        """Follow until a version; return when that was, how many were taken, and how many are not what they are called."""
        taken = wrong = 0
        while self._version < until:
            weights = self._reader.pull(newer_than=self._version)
            self._version = weights.version
            wrong += bool((weights["w"] != -self._version).any())
            taken += 1
        return time.monotonic(), taken, wrong

    def close(self) -> None:
        """Disconnect."""
        self._reader.close()


def main() -> None:
    """Connect, and take turns."""
    turns = Turns()
    servers = turns.arguments["servers"]
    with ThreadPoolExecutor(len(servers)) as pool:
        followers = list(pool.map(Follower, servers))

        def answered(request: dict[str, Any]) -> dict[str, Any]:
            found = list(pool.map(lambda follower: follower.follow(request["until"]), followers))
            had_at, taken, wrong = zip(*found, strict=True)
            return {"had_at": had_at, "taken": taken, "wrong": sum(wrong)}

        turns.answer(answered)
        for follower in followers:
            follower.close()


if __name__ == "__main__":
    main()
