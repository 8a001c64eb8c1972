"""Whatever workers, shards and the network do: reads are right, nothing counts twice, and nobody waits for ever."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
from shard_driver import tables_spec
from simulation import Simulation

MODES = ("sync", "quorum", "exact", "exact quorum", "exact norms", "exact norms quorum", "ssp:0", "ssp:1", "ssp:3", "async")
SEEDS_PER_CASE = int(os.environ.get("PSD_TEST_SEEDS", "25"))


def simulate(seed, mode, *, trouble, kills=0):
    """Run a world whose size follows from the seed."""
    rng = random.Random(seed)
    workers, shards = rng.choice((1, 2, 3, 4)), rng.choice((1, 2, 3))
    is_exact = mode.startswith("exact")
    blocks = rng.choice((shards, shards + 1, 2 * shards))
    spec = tables_spec(
        workers,
        tables=2 if seed % 4 == 1 else 0,
        blocks=blocks,
        size=2,
        mode="sync" if is_exact or mode == "quorum" else mode,
        flags=("momentum",) if is_exact else (),
        reduction=rng.choice(("mean", "sum")),
        quorum=rng.randrange(1, workers + 1) if mode.endswith("quorum") else 0,
        aggregation="exact" if is_exact else "fast",
        clip_norm=20.0 if "norms" in mode else 0.0,
        nan_policy="skip" if "norms" in mode else "refuse",
    )
    if not spec.tables:
        spec = replace(spec, groups=spec.groups[:-1])
    world = Simulation(seed, spec, shards, rng.choice((4, 8)), trouble=trouble, kills=kills)
    world.run()
    return world


@pytest.mark.parametrize("mode", MODES)
def test_undisturbed_workers_end_where_the_oracle_does(mode):
    """Any interleaving of workers that nothing happens to: every read is the oracle's, and no gradient is lost or doubled."""
    worlds = [simulate(seed, mode, trouble=False) for seed in range(SEEDS_PER_CASE)]

    assert sum(world.oracle.reads for world in worlds) > 20 * SEEDS_PER_CASE
    assert sum(world.barriers for world in worlds) > 2 * SEEDS_PER_CASE
    assert mode.startswith("exact") or sum(world.push_pulls for world in worlds) > 2 * SEEDS_PER_CASE


@pytest.mark.parametrize("mode", MODES)
def test_crashes_zombies_and_repeats_break_no_promise(mode):
    """With workers that die in mid-push, come back, are suspended beyond their lease, and send everything twice: reads are the
    oracle's, bounds hold, versions never go back, and whoever lives goes on."""
    worlds = [simulate(seed, mode, trouble=True) for seed in range(1000, 1000 + SEEDS_PER_CASE)]

    assert sum(world.rejoins for world in worlds) > SEEDS_PER_CASE / 4, "the faults did not happen"
    assert sum(world.duplicates for world in worlds) > SEEDS_PER_CASE, "the repeats did not happen"
    assert not mode.startswith("exact") or any(world.waits_for_decisions for world in worlds), "nobody entered late"


@pytest.mark.parametrize("mode", MODES)
def test_killed_shards_lose_nothing(mode):
    """Shards that die at any instant and come back on their arenas, beneath workers that live on: every gradient is in every
    block, once, and nobody waits for ever. Exact: parameters, slots and steps to the bit."""
    worlds = [simulate(seed, mode, trouble=False, kills=5) for seed in range(2000, 2000 + SEEDS_PER_CASE)]

    assert sum(world.kills for world in worlds) > SEEDS_PER_CASE, "nobody was killed"
    assert sum(world.resumes for world in worlds) > 2 * SEEDS_PER_CASE, "nobody resumed"
    assert sum(world.barriers for world in worlds) > 2 * SEEDS_PER_CASE
    assert mode.startswith(("ssp", "async")) or sum(world.pushes_again for world in worlds) > SEEDS_PER_CASE / 10


def test_a_barrier_that_opened_as_its_shard_died_stays_opened_for_those_who_ask_again():
    """A lease ran out and the barrier opened without that worker, which is back when the others are answered."""
    assert simulate(200600, "exact quorum", trouble=True, kills=4).barriers == 3


@pytest.mark.parametrize("mode", MODES)
def test_killed_shards_and_workers_together_break_no_promise(mode):
    """Workers die and are fenced while shards die, too: what was acknowledged counts once (async), what was decided holds
    everywhere (exact), and a half push of a dead worker leaves no trace. A round whose gradient was lost with a worker and a
    shard at once is reported, and no wait."""
    worlds = [simulate(seed, mode, trouble=True, kills=4) for seed in range(3000, 3000 + SEEDS_PER_CASE)]

    assert sum(world.kills for world in worlds) > SEEDS_PER_CASE, "nobody was killed"
    assert sum(world.rejoins for world in worlds) > SEEDS_PER_CASE / 4, "the faults did not happen"
    assert sum(world.is_lost for world in worlds) <= SEEDS_PER_CASE / 4
