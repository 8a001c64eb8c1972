"""A program for test_recovery_publishing.py: puts one version after the other, and may die in the midst of one.

python publisher.py SERVERS FIRST COUNT DEATH [PARTS]. Puts COUNT versions, whose numbers are all FIRST, FIRST + 1, and so on,
and says "VERSION NUMBER" after each. With the last one it dies as DEATH says: "none"; "push", when one shard has it; or
"commit", when all shards have it, and shard 0 alone knows that. With PARTS it is rank 0 of two, and puts `big`.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, NoReturn

import numpy as np

import psd_client
from psd_client.lanes.shard_lane import ShardLane
from psd_client.worker.exchange.value_exchange import ValueExchange

SIZES = {"big": 900_000, "small": 10}
"""Of tensors with blocks on each of three shards, and with one block."""


def state_of(number: int) -> dict[str, Any]:
    return {name: np.full(size, number, np.float32) for name, size in SIZES.items()}


def parts_of(number: int) -> list[dict[str, Any]]:
    """What each of two ranks puts."""
    return [{name: value} for name, value in state_of(number).items()]


def die(*_: Any, **__: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it lives")


def die_with(death: str) -> None:
    """Have the next put die."""
    if death == "commit":
        ValueExchange._fetch = die  # type: ignore[method-assign]
    elif death == "push":
        push = ShardLane.push

        def push_or_die(lane: ShardLane, *arguments: Any) -> Any:
            reply = push(lane, *arguments) if lane.shard == 0 else None
            return die() if reply is not None else push(lane, *arguments)

        ShardLane.push = push_or_die  # type: ignore[method-assign]


def main(servers: str, first: int, count: int, death: str, parts: str = "") -> None:
    what: dict[str, Any] = {"parts": parts_of(0), "rank": 0} if parts else {"like": state_of(0)}
    with psd_client.publish(servers, **what, retry_timeout=100, wait_timeout=100) as store:
        for number in range(first, first + count):
            if number == first + count - 1:
                die_with(death)
            version = store.put(parts_of(number)[0] if parts else state_of(number), {"number": number})
            sys.stdout.write(f"{version} {number}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
