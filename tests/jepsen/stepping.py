"""Armed steps in the processes of a trial: workers count them, and shards revoke them again and again, for no other reason.

As a module that children.py runs, it is psd-server, with the average seconds between two revocations as the first argument.
"""

from __future__ import annotations

import random
import sys
import threading
from typing import Any

from psd.cli import server
from psd.rim.server import ShardServer
from psd_client.lanes.steps import SteppingLanes

_taken = [0, 0]


def watch() -> None:
    """Count all steps of this process from here on."""
    run = SteppingLanes.run

    def counted(steps: SteppingLanes, *args: Any) -> bool | None:
        took = run(steps, *args)
        if took is not None:
            _taken[not took] += 1
        return took

    SteppingLanes.run = counted  # type: ignore[method-assign]


def taken() -> list[int]:
    """The steps so far that were taken, and those that were begun, and then made as calls."""
    return _taken


def main() -> int:
    """psd-server, whose steps are revoked."""
    every_s = float(sys.argv.pop(1))
    start = ShardServer.start

    def revoking(own: ShardServer) -> None:
        start(own)
        threading.Thread(target=_revoke, args=(own, every_s), daemon=True).start()

    ShardServer.start = revoking  # type: ignore[method-assign]
    return server.main()


def _revoke(own: ShardServer, every_s: float) -> None:
    pause = threading.Event()
    while not pause.wait(2 * every_s * random.random()):
        own.shard._core.revoke()
