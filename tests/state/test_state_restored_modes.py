"""A checkpoint goes on as any other kind of job: every pair of modes, of numbers of workers and of numbers of shards."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from stored_job import MODES, STEP, begun, enter, restored, spec_of, store, trained

from psd.checkpoint import CheckpointDirectory
from psd.contract.errors import SpecMismatch

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

    A third of the pairs of numbers of workers, each tried with another pair of numbers of shards; every pair occurs.
    """
    for turn in range((MODES.index(before) + MODES.index(after)) % 3, len(PAIRS), 3):
        workers, workers_after = PAIRS[turn]
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


@pytest.mark.parametrize("mode", MODES)
def test_gradients_count_where_the_clock_is_behind_that_of_the_machine_before(tmp_path, mode):
    """Sessions grow with time, and those of before the restore were issued by another machine."""
    directory = CheckpointDirectory(str(tmp_path))
    before = trained(mode, 2, 1, ahead_s=1e6)
    cluster = restored(directory, store(before, directory), mode, 2, 1)
    assert cluster.seats[0][0].session < before.seats[0][0].session

    replies = cluster.train(STEP)

    assert [(reply.blocks_late, reply.blocks_duplicate) for reply in replies] == [(0, 0)] * 2
    np.testing.assert_array_equal(cluster.parameters()[1], before.parameters()[1] + cluster.update)


def test_a_restored_shard_that_is_killed_still_lets_its_workers_say_how_they_go_on(tmp_path):
    """Killed before anybody has declared, the checkpoint's kind of job does not bind them; after that, theirs does."""
    directory = CheckpointDirectory(str(tmp_path / "checkpoints"))
    name = store(trained("sync", 2, 1), directory)
    (driver,) = begun(directory, name, "async", 3, 1, state_dir=str(tmp_path / "state"))

    driver.restart(directory=directory)
    (seat, *_), *_ = enter("async", [driver]).seats
    assert (driver.declare(seat)[0].clock, driver.core.declared().spec) == (STEP, driver.spec)

    driver.restart(directory=directory)
    with pytest.raises(SpecMismatch):
        driver.declare(driver.join(0), spec_of("sync", 3))
