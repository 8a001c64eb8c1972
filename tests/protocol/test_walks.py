"""Walks at random through larger worlds, with several faults each: shards that die at crash points, workers that die or stall,
messages that are lost or late. `make check-protocol` takes many more."""

from __future__ import annotations

import os

import planted
import pytest
from check_protocol import WALKS, walk
from setting import Setting

pytestmark = pytest.mark.slow

SEEDS = int(os.environ.get("PSD_TEST_SEEDS", "1"))
NAMED = {setting.name: setting for setting in WALKS}
IN_OTHERS = (
    *("sync", "quorum", "norms", "async", "ssp:2", "parts", "parts-exact", "fragments", "tables"),
    *("residuals", "residuals-exact", "residuals-quorum", "armed-quorum-large", "armed-ssp-large"),
    *("exact-quorum", "tables-async"),
)
"""Left to `make check-protocol`: all that these have is in others, two things at a time."""


@pytest.mark.parametrize("setting", [each for each in WALKS if each.name not in IN_OTHERS], ids=lambda setting: setting.name)
def test_whatever_happens_nothing_is_wrong(setting: Setting) -> None:
    """Nothing counts twice, what was acknowledged counts, blocks of one round agree, nobody waits for ever or is ended."""
    explorer, told = walk(setting, range(SEEDS))

    assert told == []
    assert explorer.depth > 20


def test_a_defect_is_found_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves on before the commit: blocks of a round end with different gradients."""
    planted.clock_before_commit(monkeypatch)

    _, told = walk(NAMED["exact"], [12])

    assert told
    assert "round 1 is made of different gradients" in told[0]
    assert "worker 0 is started" in told[0]
