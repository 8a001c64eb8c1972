"""Learners whose differences travel compressed: what the codec leaves out of one, also of one that comes late."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from learners import SUM, Walker, side_by_side  # noqa: E402

import psd_client  # noqa: E402
import psd_client.torch as psd  # noqa: E402

TOPK = "topk:0.25"
"""Of the four elements of a tensor, one."""


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    """What the test opens; closed in the end."""
    with contextlib.ExitStack() as opened:
        yield opened


def two(servers: str, stack: contextlib.ExitStack, local: psd.Local, **options: Any) -> list[Walker]:
    connections = [psd_client.connect(servers, rank, 2) for rank in range(2)]
    stack.callback(lambda: side_by_side(*(ps.close for ps in connections)))
    found: list[Walker] = side_by_side(
        *(lambda ps=ps: Walker(ps, local, **{"reduce": "sum", "quorum": 1, "compress": TOPK} | options) for ps in connections)
    )
    return found


def residuals(walker: Walker) -> list[float]:
    """By tensor, all that its learner's codec has left out."""
    return [float(each.sum()) for each in walker.optimizer._worker.declared.encoder._residuals.views]


def not_sent(walker: Walker) -> list[float]:
    """By tensor, all that the learner has learned since its base."""
    return [
        float((base - value.detach()).sum())
        for base, value in zip(walker.optimizer._base.values(), walker.model.parameters(), strict=True)
    ]


@pytest.mark.parametrize("is_late", [False, True])
def test_what_learners_have_learned_is_in_the_job_or_still_theirs_once(cluster: Any, stack: Any, is_late: bool) -> None:
    """A difference that comes late stays in its learner's parameters, as a whole: so the codec keeps nothing of it, too."""
    fast, slow = two(cluster(2).servers, stack, psd.Local(steps=2, outer=SUM))
    exchanges: list[Any] = []
    slow.optimizer.on_exchange = exchanges.append
    chosen = slow.optimizer._next_clock

    def overtaken() -> int | None:
        clock = chosen()
        fast.walk(2)
        return clock

    slow.walk(2)  # so that it has a residual
    if is_late:
        slow.optimizer._next_clock = overtaken
    slow.walk(2)
    slow.optimizer._next_clock = chosen
    slow.walk(2)
    fast.walk(2)

    assert [each.is_counted for each in exchanges] == [True, not is_late, True]
    still = [sum(each) for each in zip(residuals(fast), residuals(slow), not_sent(fast), not_sent(slow), strict=True)]
    made = 4 * (fast.optimizer.local_step + slow.optimizer.local_step)
    fast.optimizer.pull()
    has = [-float(value.detach().sum()) for value in fast.model.parameters()]
    assert [one + other for one, other in zip(has, still, strict=True)] == [made, made]
