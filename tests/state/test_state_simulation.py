"""Whatever workers, shards and the network do: reads are right, nothing counts twice, and nobody waits for ever."""

from __future__ import annotations

import os
import random

import pytest
from shard_driver import job_spec
from simulation import Simulation

MODES = ("sync", "quorum", "ssp:0", "ssp:1", "ssp:3", "async")
SEEDS_PER_CASE = int(os.environ.get("PSD_TEST_SEEDS", "40"))


def simulate(seed, mode, *, trouble):
    """Run a world whose size follows from the seed."""
    rng = random.Random(seed)
    workers, shards = rng.choice((1, 2, 3, 4)), rng.choice((1, 2, 3))
    spec = job_spec(
        workers,
        blocks=rng.choice((shards, shards + 1, 2 * shards)),
        size=2,
        mode="sync" if mode == "quorum" else mode,
        reduction=rng.choice(("mean", "sum")),
        quorum=rng.randrange(1, workers + 1) if mode == "quorum" else 0,
    )
    world = Simulation(seed, spec, shards, rng.choice((4, 8)), trouble=trouble)
    world.run()
    return world


@pytest.mark.parametrize("mode", MODES)
def test_undisturbed_workers_end_where_the_oracle_does(mode):
    """Any interleaving of workers that nothing happens to: every read is the oracle's, and no gradient is lost or doubled."""
    worlds = [simulate(seed, mode, trouble=False) for seed in range(SEEDS_PER_CASE)]

    assert sum(world.reads for world in worlds) > 1000


@pytest.mark.parametrize("mode", MODES)
def test_crashes_zombies_and_repeats_break_no_promise(mode):
    """With workers that die in mid-push, come back, are suspended beyond their lease, and send everything twice: reads are the
    oracle's, bounds hold, versions never go back, and whoever lives goes on."""
    worlds = [simulate(seed, mode, trouble=True) for seed in range(1000, 1000 + SEEDS_PER_CASE)]

    assert sum(world.rejoins for world in worlds) > 10, "the faults did not happen"
    assert sum(world.duplicates for world in worlds) > 100, "the repeats did not happen"
