"""What disturbs the jobs of these tests does so before they end, however fast they are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from chaos import Chaos, steps_for

KILLS = 3


class StruckShard:
    """Notes the step at which it is killed."""

    def __init__(self) -> None:
        self.steps = 0
        self.struck_at: list[int] = []

    def kill(self) -> None:
        self.struck_at.append(self.steps)

    def start(self) -> None:
        """At once."""


def test_a_job_whose_steps_take_no_time_lasts_until_everything_has_struck() -> None:
    shard: Any = StruckShard()
    chaos = Chaos([shard], [], seed=1, kills=KILLS, faults=0)

    with ThreadPoolExecutor(1) as pool:
        disturbing = pool.submit(chaos.run)
        for step in range(1, steps_for(KILLS, 0) + 1):
            shard.steps = step
            chaos.on_step()
        disturbing.result(100)

    assert len(shard.struck_at) == KILLS
    assert shard.struck_at[-1] <= steps_for(KILLS, 0) - 3
