"""What is wrong with a checkpoint is found, and nothing where it is a cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from story import Story

MODES = ("fast", "exact", "async")
HALF = slice(0, 704)
"""Of each tensor, what is in some blocks alone."""


def trained(directory: Path, mode: str) -> Story:
    """Three gradients, each acknowledged, each counted once."""
    story = Story(directory, mode, checkpoint_steps=1)
    for number in range(3):
        story.push_pull(number, clock=number)
        story.count(number)
    story.call("close")
    story.end()
    return story


@pytest.mark.parametrize("mode", MODES)
def test_checks_when_each_checkpoint_is_a_prefix_then_they_find_nothing(tmp_path: Path, mode: str) -> None:
    story = trained(tmp_path, mode)
    story.restore()
    story.restore(0, state=0)
    story.restore(0, 1, state=1)

    assert story.found() == set()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("numbers", "how", "kinds"),
    [
        ((0, 2), {"state": 0}, {"no prefix"}),
        ((0, 1), {"state": 1, "part": HALF}, {"torn checkpoint"}),
        ((0, 1), {"state": 0}, {"client state of another moment"}),
        ((0, 1), {"state": 2}, {"client state of another moment"}),
        ((0,), {}, {"client state of another moment"}),
        ((0,), {"state": 0, "times": 2}, {"twice in a checkpoint"}),
    ],
    ids=str,
)
def test_checks_when_a_checkpoint_is_no_cut_then_they_find_it(
    tmp_path: Path, mode: str, numbers: tuple[int, ...], how: dict[str, Any], kinds: set[str]
) -> None:
    story = trained(tmp_path, mode)
    story.restore(*numbers, **how)

    assert story.found() == kinds


@pytest.mark.parametrize(
    ("run", "torn", "kinds"),
    [(1, 0, set()), (3, 0, set()), (2, 1, {"torn batch"}), (4, 0, {"batch ran twice"})],
)
def test_checks_when_a_checkpoint_has_batches_then_all_of_them_are_whole(
    tmp_path: Path, run: int, torn: int, kinds: set[str]
) -> None:
    """Three were acknowledged, perhaps after it was taken."""
    story = Story(tmp_path, checkpoint_steps=1)
    for _ in range(3):
        story.call("batch")
    story.end()
    story.batches(run, torn)
    story.restore()
    story.batches(3)

    assert story.found() == kinds


def test_checks_when_the_last_checkpoint_lacks_what_was_acknowledged_then_they_find_it(tmp_path: Path) -> None:
    """If the shards have ended in order."""
    story = trained(tmp_path, "fast")
    story.restore(0, 1, state=1)
    for shard in range(2):
        story.note("exit", name=f"shard {shard}", pid=9, status=0)

    assert story.found() == {"not in the last checkpoint"}
