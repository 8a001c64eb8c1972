"""Parameters that come as differences while shards and workers are killed (-9): one version has one set of bits."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from comparing_worker import versions
from loaded_programs import Program
from shard_processes import ShardProcess, servers_of

pytestmark = pytest.mark.process

LIVES = 4
STEPS = 5
"""That a worker makes at least before it is killed."""


@pytest.mark.parametrize(("transport", "codec"), [("tcp", "int4"), pytest.param("grpc", "int8", marks=pytest.mark.chaos)])
def test_workers_when_others_and_shards_are_killed_between_then_all_who_have_a_version_have_the_same_bits(
    shard_processes: Callable[..., list[ShardProcess]], transport: str, codec: str
) -> None:
    """One worker lives on; the other begins anew four times, and gets all numbers then; each time a shard does, too."""
    source, over = random.Random(5), threading.Event()
    shards = shard_processes(2, "--lease", "60")
    program = str(Path(__file__).with_name("comparing_worker.py"))
    arguments = [servers_of(shards), "1", transport, codec]

    def live() -> dict[str, str]:
        seen: dict[str, str] = {}
        for found in versions(servers_of(shards), 0, transport, codec):
            seen |= found
            if over.is_set():
                break
        return seen

    theirs: list[dict[str, str]] = []
    with ThreadPoolExecutor(1) as pool:
        mine = pool.submit(live)
        for life in range(LIVES):
            with Program([program, *arguments]) as other:
                lines = [other.stdout.readline() for _ in range(STEPS)]
                shards[life % 2].kill()
                shards[life % 2].start()
                lines += [other.stdout.readline() for _ in range(STEPS)]
                threading.Event().wait(source.random() * 0.03)  # the instant itself is random
                if life == LIVES - 1:
                    over.set()
                    mine.result(100)
                other.kill()
                lines += [line for line in other.stdout if line.endswith("\n")]
            theirs += [dict(pair.split("=") for pair in line.split()) for line in lines]
        seen = mine.result(100)

    common = [(name, found) for each in theirs for name, found in each.items() if name in seen]
    assert len(common) >= LIVES * 2 * STEPS
    assert [name for name, found in common if seen[name] != found] == []
