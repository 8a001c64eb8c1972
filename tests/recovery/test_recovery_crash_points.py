"""A shard that dies at each step at which its arena is between two states: training ends in the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import crash_job
import pytest
from chaos import assert_same_bits, final_state
from shard_processes import ShardProcess

from psd_core.arena import CRASH_POINTS

pytestmark = pytest.mark.process

SHORT = {
    "one thing after another": [
        "arena.create.before_rename:1",
        "arena.publish.before_flip:73",
        "arena.decision:5",
        "arena.trim:1",
    ],
}
LONG = {
    "the arena is made": [
        "arena.create.before_rename:1",
        "arena.grow.before_record:1",
        "arena.grow.after_record:1",
        "arena.create.after_rename:1",
        "arena.member:1",
        "arena.publish.before_flip:1",
        "arena.publish.after_flip:10",
    ],
    "a block is updated": [
        "arena.publish.before_header:61",
        "arena.publish.before_flip:73",
        "arena.publish.after_flip:85",
        "arena.free:97",
    ],
    "the arena grows and shrinks": [
        "arena.grow.before_record:2",
        "arena.grow.after_record:1",
        "arena.trim:1",
        "arena.trim:2",
    ],
    "a worker or a round is noted": [
        "arena.member:30",
        "arena.decision:5",
        "arena.decision:6",
        "arena.decision:7",
        "arena.decision:8",
    ],
}
"""Name and occurrence within a life, of lives one after the other."""


def test_every_crash_point_of_the_arena_is_here() -> None:
    assert {point.partition(":")[0] for points in LONG.values() for point in points} == set(CRASH_POINTS)


@pytest.mark.parametrize(
    "points",
    [
        *(pytest.param(points, id=when) for when, points in SHORT.items()),
        *(pytest.param(points, id=when, marks=pytest.mark.chaos) for when, points in LONG.items()),
    ],
)
def test_when_a_shard_dies_at_a_step_then_training_ends_in_the_same_bits(
    shard_processes: Callable[..., list[ShardProcess]], tmp_path: Path, points: list[str]
) -> None:
    """Each life ends at its step, by SIGKILL from within; the next one goes on."""
    stop = crash_job.Stop()
    (shard,) = shard_processes(1, "--checkpoint-dir", str(tmp_path / "disturbed"), crash_points=[points[0]])

    crash_job.run(shard.address, stop, "exact", lambda: crash_job.die_at_each(shard, points, stop))
    disturbed = final_state([shard], str(tmp_path / "disturbed"))
    (other,) = shard_processes(1, "--checkpoint-dir", str(tmp_path / "undisturbed"))
    crash_job.run(other.address, crash_job.Stop(stop.clock), "exact")

    assert_same_bits(disturbed, final_state([other], str(tmp_path / "undisturbed")))
