"""What workers log, at shard 0: psd/state/curves.py."""

import math

import pytest

from psd.contract.errors import InvalidRequest
from psd.contract.points import CURVES_MAX, POINTS_MAX
from psd.state.curves import Curves
from psd.v1 import control_pb2 as pb


def points(steps, curve="loss", value=0.5):
    return [pb.Point(curve=curve, step=step, value=value, at=1e9 + step) for step in steps]


def test_points_are_given_once_to_who_asks_for_what_is_newer():
    """A reader asks with the number of the last point that it has."""
    curves = Curves()
    curves.add(1, points([1, 2]))
    first, last = curves.after(0)
    curves.add(0, points([3], value=math.nan))

    second, _ = curves.after(last)

    assert [(p.curve, p.rank, p.step) for p in first] == [("loss", 1, 1), ("loss", 1, 2)]
    assert [(p.rank, p.step, math.isnan(p.value)) for p in second] == [(0, 3, True)]


def test_a_long_curve_is_thinned_for_each_worker_alike_and_whole_at_its_end():
    """Two workers that log in turn keep the same share of their points."""
    curves = Curves()
    for step in range(5 * POINTS_MAX):
        for rank in (0, 1):
            curves.add(rank, points([step]))

    kept, _ = curves.after(0)

    steps = [[p.step for p in kept if p.rank == rank] for rank in (0, 1)]
    assert steps[0] == steps[1]
    assert len(kept) <= POINTS_MAX
    assert steps[0][0] == 0
    assert steps[0][-100:] == list(range(5 * POINTS_MAX - 100, 5 * POINTS_MAX))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (points([1], curve=""), "points: curve: expected 1 to 64 bytes, got 0"),
        (points([1], curve="x" * 65), "points: curve: expected 1 to 64 bytes, got 65"),
        (points([1], curve="a\x1b"), "characters that cannot be printed"),
        ([pb.Point(curve="a", at=math.inf)], "points: at: expected seconds since 1970, got inf"),
        (points(range(1001)), "points: at most 1000 in one request, got 1001"),
        ([p for n in range(CURVES_MAX + 1) for p in points([1], f"c{n}")], "a job has at most 64 curves, these would make 65"),
    ],
)
def test_wrong_points_are_refused_and_none_is_taken(wrong, message):
    """A request is taken whole or not at all."""
    curves = Curves()

    with pytest.raises(InvalidRequest, match=message):
        curves.add(0, wrong)

    assert curves.after(0) == ([], 0)
