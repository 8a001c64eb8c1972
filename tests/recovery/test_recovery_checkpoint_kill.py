"""A shard that dies at each operation on files of checkpoints: the last good one is found, training goes on or resumes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import crash_job
import numpy as np
import pytest
from chaos import assert_same_bits, final_state
from shard_processes import ShardProcess, servers_of

import psd_client
from psd.checkpoint import CheckpointDirectory

pytestmark = pytest.mark.process

STEPS_BETWEEN = 5

OPERATIONS = {
    "first": [
        "make directory timeline-*:1",
        "fsync directory timeline-*:1",
        "make directory timeline-*:1",
        "create shard-*.chunks:1",
    ],
    "data": ["write *.chunks:1", "write *.chunks:9", "fsync *.chunks:1", "rename *.chunks:1"],
    "documents": ["create *.json:1", "write *.json:1", "fsync *.json:1", "rename *.json:1"],
    "manifest": ["create manifest.json:1", "write manifest.json:1", "rename manifest.json:1"],
    "removal": ["remove manifest.json:1", "remove *.json:3", "remove directory timeline-*:1"],
}
"""Crash points of shard 0, which announces the cuts; in lives one after the other."""


def newest_step(url: str) -> int:
    """Step of the newest checkpoint that can be relied on: every byte of it is read. 0 if there is none."""
    directory = CheckpointDirectory(url)
    while (manifest := directory.newest()) is not None:
        problems = directory.verify(manifest.name)
        if not problems:
            return manifest.step
        after = directory.newest()  # meanwhile newer ones may have been stored, and this one removed
        assert after is not None, problems
        assert after.step > manifest.step, problems
    return 0


def die_at_each(shards: Sequence[ShardProcess], operations: Sequence[str], stop: crash_job.Stop, url: str) -> None:
    """Shard 0, which has been started with the first one, dies there, and so on; then both die, and lose their memory."""
    newest = 0
    for following in [*operations[1:], ""]:
        assert shards[0].wait() == -9
        found = newest_step(url)
        assert found >= newest
        newest = found
        shards[0].start(following)
    while newest_step(url) <= newest:
        stop.wait_steps(STEPS_BETWEEN, 1)
    for shard in shards:
        shard.kill()
    for shard in shards:
        shard.lose_state()
        shard.start()


IN_SUITE = "manifest"
"""The others are for make chaos: tests/checkpoint goes through every operation without the rest of a shard."""


@pytest.mark.parametrize("what", [pytest.param(w, marks=[] if w == IN_SUITE else [pytest.mark.chaos]) for w in OPERATIONS])
def test_when_a_shard_dies_while_it_stores_then_a_good_checkpoint_is_found_and_training_ends_in_the_same_bits(
    shard_processes: Callable[..., list[ShardProcess]], tmp_path: Path, what: str
) -> None:
    """Goes on from its arena after each death, and from a checkpoint when the arenas of both shards are gone."""
    stop = crash_job.Stop()
    url = str(tmp_path / "disturbed")
    Path(url).mkdir()  # or whichever shard starts first would make it, and shard 0 die of that
    flags = ("--checkpoint-steps", f"{STEPS_BETWEEN}", "--checkpoint-keep", "2")
    shards = shard_processes(2, "--checkpoint-dir", url, *flags, crash_points=[OPERATIONS[what][0]])

    crash_job.run(servers_of(shards), stop, "exact", lambda: die_at_each(shards, OPERATIONS[what], stop, url))
    disturbed = final_state(shards, url)
    others = shard_processes(2, "--checkpoint-dir", str(tmp_path / "undisturbed"))
    crash_job.run(servers_of(others), crash_job.Stop(stop.clock), "exact")

    assert_same_bits(disturbed, final_state(others, str(tmp_path / "undisturbed")))


@pytest.mark.parametrize("victims", [1, 2])
def test_when_shards_die_while_they_store_a_finished_job_then_their_next_processes_store_the_same_checkpoint(
    shard_processes: Callable[..., list[ShardProcess]], tmp_path: Path, victims: int
) -> None:
    """They know, too, when the workers left, which is a checkpoint's time in all of its parts."""
    url = str(tmp_path / "checkpoints")
    points = [f"rename shard-0000{index}-of-*.json:1" for index in range(2)]
    shards = shard_processes(2, "--checkpoint-dir", url, crash_points=points[:victims])
    with psd_client.connect(servers_of(shards), rank=0, world_size=1) as ps:
        ps.declare({"w": np.zeros(50_000, np.float32)}, psd_client.SGD(lr=1.0))
        for _ in range(3):
            ps.push_pull({"w": np.ones(50_000, np.float32)})

    assert [shard.wait() for shard in shards] == [-9] * victims + [0] * (2 - victims)
    for shard in shards[:victims]:
        shard.start()

    assert [shard.wait() for shard in shards[:victims]] == [0] * victims
    assert newest_step(url) == 3
