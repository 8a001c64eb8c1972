"""The shard in mid-training that the tests of the rim send wrong requests to is the fuzz targets' target, too."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "rim"))

from malformed_target import ME, SPEC, WITH_TABLES, Target

from psd.state.workers.membership import WorkerState

USES = 50
"""Requests in use, at most of one shard; worker ME must not have left it."""


EXACT = replace(SPEC, aggregation="exact", clip_norm=1.0)
"""A job whose rounds close by decisions and verdicts; the first one is open, with two gradients of three."""


@pytest.fixture
def target() -> Iterator[Callable[..., Target]]:
    """target(is_exact) -> a shard in mid-training, often the one of the call before."""
    made: dict[bool, Target] = {}
    uses = 0

    def get(is_exact: bool = False) -> Target:
        nonlocal uses
        if uses % USES == 0:
            for used in made.values():
                used.close()
            made.clear()
        uses += 1
        if is_exact in made and made[is_exact].shard._core.members.worker(ME).state is not WorkerState.LIVE:
            made.pop(is_exact).close()
        if is_exact not in made:
            made[is_exact] = Target(spec=EXACT, steps=((0, 0), (0, 1))) if is_exact else Target(spec=WITH_TABLES)
        return made[is_exact]

    yield get
    for used in made.values():
        used.close()
