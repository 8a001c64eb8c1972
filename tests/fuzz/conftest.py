"""The shard in mid-training that the tests of the rim send wrong requests to is the fuzz targets' target, too."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "rim"))

from malformed_target import Target

USES = 50
"""Of one shard; by then its workers may have left it, or worse."""


@pytest.fixture
def target() -> Iterator[Callable[[], Target]]:
    """target() -> a shard in mid-training, often the one of the call before."""
    made: list[Target] = []
    uses = 0

    def get() -> Target:
        nonlocal uses
        if uses % USES == 0:
            for used in made:
                used.close()
            made[:] = [Target()]
        uses += 1
        return made[0]

    yield get
    for used in made:
        used.close()
