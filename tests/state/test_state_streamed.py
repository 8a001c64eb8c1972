"""Rules that write to pages whose checksum the kernel makes in passing: it is that of what the rule has left there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from psd.contract.jobspec import GroupSpec
from psd.state.aggregation.rules import Gradient, rule_of
from psd_core import _arena_blocks
from psd_core.arena import Arena, BlockShape

LENGTH = 5000


@pytest.mark.parametrize("lies_in_planes", [False, True])
@pytest.mark.parametrize(
    ("group", "scalars"),
    [
        (GroupSpec("sgd", ("momentum",)), (0.1, 0.9, 0.0, 0.0)),
        (GroupSpec("adam"), (0.1, 0.9, 0.99, 1e-8, 0.01)),
        (GroupSpec("lamb"), (0.1, 0.9, 0.99, 1e-8, 0.01)),
    ],
    ids=lambda value: value.rule if isinstance(value, GroupSpec) else "",
)
def test_a_rule_leaves_the_checksum_of_what_it_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: GroupSpec, scalars: tuple[float, ...], *, lies_in_planes: bool
) -> None:
    """A layer-wise rule changes the parameter after the kernel has written it. Opening the arena checks every byte."""
    monkeypatch.setattr(_arena_blocks, "STREAMED_BYTES", 1)
    monkeypatch.setattr(_arena_blocks, "STREAMED_BLOCK_BYTES", 1)
    rule, slots = rule_of(group, {}), len(group.info.slot_starts(group.flags, group.constants))
    arena = Arena.create(tmp_path / "state", meta=b"", shapes=[BlockShape("float32", LENGTH, slots, 2)], workers=1)
    first = arena.spare(0)
    for array in (*first.arrays, first.steps, first.sessions, first.clocks):
        array[:] = np.arange(array.size) % 5
    arena.publish(0, first, 0)
    if lies_in_planes:
        arena.begin_planes([0])
    ends, touched = np.array([3000, LENGTH], np.uint32), np.array([1, 0], np.uint8)
    grad = np.linspace(-1, 1, LENGTH, dtype=np.float32)
    for version in (1, 2, 3):
        page = arena.spare(0)
        assert page.sums is not None
        gradient = Gradient(grad, grad, 0.5, 1.0, touched, ratios=np.array([0.7, 0.0]))
        rule.apply(arena.current(0), page, gradient, ends, scalars)  # type: ignore[arg-type]
        page.sessions[:], page.clocks[:] = 1, version
        arena.publish(0, page, version)
    expected = [array.copy() for array in arena.current(0).arrays]  # type: ignore[union-attr]
    arena.close(remove=False)

    opened = Arena.open(tmp_path / "state")

    assert opened is not None
    for array, value in zip(opened.current(0).arrays, expected, strict=True):  # type: ignore[union-attr]
        assert np.array_equal(array, value)
    opened.close(remove=True)
