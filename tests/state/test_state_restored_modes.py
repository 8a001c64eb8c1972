"""A checkpoint goes on as any other kind of job: every pair of modes, of numbers of workers and of numbers of shards."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from stored_job import MODES, STEP, restored, store, trained

from psd.checkpoint import CheckpointDirectory

COUNTS = (1, 2, 3)
PAIRS = tuple(itertools.product(COUNTS, COUNTS))


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """stored(mode, workers, shards) -> directory, the checkpoint's name, the parameters; each is made once."""
    made = {}

    def get(*key):
        if key not in made:
            cluster = trained(*key)
            directory = CheckpointDirectory(str(tmp_path_factory.mktemp("checkpoints")))
            made[key] = (directory, store(cluster, directory), cluster.parameters())
        return made[key]

    return get


@pytest.mark.parametrize("after", MODES)
@pytest.mark.parametrize("before", MODES)
def test_training_goes_on_from_any_kind_of_job_as_any_other(stored, before, after):
    """At the checkpoint's step, for every worker on every shard; each step then changes each block by what it must.

    Each pair of numbers of workers is tried with another pair of numbers of shards, so that every pair occurs.
    """
    for turn, (workers, workers_after) in enumerate(PAIRS):
        shards, shards_after = PAIRS[(turn + MODES.index(before) + 2 * MODES.index(after)) % len(PAIRS)]
        directory, name, values = stored(before, workers, shards)

        cluster = restored(directory, name, after, workers_after, shards_after)

        case = (workers, shards, workers_after, shards_after)
        assert {seat.clock for seats in cluster.seats for seat in seats} == cluster.clocks() == {STEP}, case
        if cluster.has_rounds:
            assert cluster.versions() == {STEP}, case
        versions, steps = {b.plan.index: b.version for _, b in cluster.blocks()}, cluster.steps()
        for clock in (STEP, STEP + 1):
            for reply in cluster.train(clock):
                assert (reply.clock, reply.blocks_late, reply.blocks_duplicate) == (clock + 1, 0, 0), case
            assert cluster.clocks() == {clock + 1}, case
        updates = 2 if cluster.has_rounds else 2 * workers_after
        for found, expected in zip(cluster.parameters(), values, strict=True):
            np.testing.assert_array_equal(found, expected + 2 * cluster.update)
        grown = {b.plan.index: b.version - versions[b.plan.index] for _, b in cluster.blocks()}
        assert grown == dict.fromkeys(versions, updates), case
        assert cluster.steps() == {index: [count + updates for count in counts] for index, counts in steps.items()}
