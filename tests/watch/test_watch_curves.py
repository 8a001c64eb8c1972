"""The arithmetic of the dashboard's curves, psd/watch/dashboard/static/curves.js, in Node.js. Skipped where there is none."""

import json
import math
import shutil
import subprocess
from importlib import resources

import pytest

NODE = shutil.which("node") or shutil.which("nodejs")

pytestmark = pytest.mark.skipif(NODE is None, reason="there is no Node.js on this machine")


def called(function, *arguments):
    """The value of a function of curves.js."""
    source = (resources.files("psd.watch.dashboard") / "static" / "curves.js").read_text()
    call = f"console.log(JSON.stringify({function}(...{json.dumps(arguments)}) ?? null));"
    done = subprocess.run(
        [NODE, "--input-type=module"], input=f"{source}\n{call}", capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def lines(*several):
    return [{"name": f"worker {rank}", "points": points} for rank, points in enumerate(several)]


def test_smoothing_is_an_average_that_does_not_begin_at_zero_and_leaves_gaps():
    """As TensorBoard: each value is divided by the sum of the weights that it is made of."""
    points = [[1, 8.0], [2, 4.0], [3, None], [5, 0.0]]
    weights = [0.5**2 / 2, 0.5 / 2, 0.5]

    found = called("smoothed", points, 0.5)

    assert [x for x, _ in found] == [1, 2, 3, 5]
    assert found[0][1] == 8.0
    assert found[1][1] == pytest.approx((0.25 * 8 + 0.5 * 4) / 0.75)
    assert found[2][1] is None
    assert found[3][1] == pytest.approx((weights[0] * 8 + weights[1] * 4) / sum(weights))
    assert called("smoothed", points, 0) == points
    assert called("smoothed", [[x, 3.0] for x in range(50)], 0.99)[-1][1] == pytest.approx(3.0)


def test_workers_together_are_their_mean_and_the_band_from_the_lowest_to_the_highest():
    """Also of workers that log at other steps: between its points a line is straight."""
    found = called("together", lines([[0, 1.0], [2, 3.0], [4, 5.0]], [[0, 3.0], [4, 3.0]]))

    assert found["mean"] == [[0, 2.0], [2, 3.0], [4, 4.0]]
    assert found["band"] == [[0, 1.0, 3.0], [2, 3.0, 3.0], [4, 3.0, 5.0]]


def test_where_one_worker_has_no_number_the_mean_has_none():
    """A diverged worker is not averaged away; the band is that of the others."""
    found = called("together", lines([[0, 1.0], [1, None], [2, 1.0]], [[0, 3.0], [1, 3.0], [2, 3.0]]))

    assert found["mean"] == [[0, 2.0], [1, None], [2, 2.0]]
    assert found["band"][1] == [1, 3.0, 3.0]


def test_the_mean_ends_where_the_last_worker_is_but_waits_for_none_that_is_gone():
    """Else it would jump to the foremost worker's values at its end, or stop with one that was killed long ago."""
    ahead = [[step, 0.0] for step in range(100)]
    behind = [[step, 1.0] for step in range(97)]
    gone = [[step, 1.0] for step in range(20)]

    assert called("together", lines(ahead, behind))["mean"][-1] == [96, 0.5]
    assert called("together", lines(ahead, gone))["mean"][-1] == [99, 0.0]


def test_many_points_become_as_many_as_there_are_columns():
    many = [[step, math.sin(step / 1000)] for step in range(20_000)]

    found = called("together", lines(many, [[x, y + 1] for x, y in many]), 200)

    assert len(found["mean"]) == 200
    assert all(y == pytest.approx(math.sin(x / 1000) + 0.5, abs=0.01) for x, y in found["mean"])
    assert called("together", [], 200) == {"mean": [], "band": []}


@pytest.mark.parametrize(
    ("several", "are_alike"),
    [
        ([[[1, 0.5], [2, 0.25]], [[1, 0.5], [2, 0.25], [3, 0.1]]], True),
        ([[[1, None]], [[1, None]]], True),
        ([[[1, 0.5], [2, 0.25]], [[1, 0.5], [2, 0.2500001]]], False),
        ([[[1, 0.5]], [[2, 0.5]]], False),
    ],
)
def test_workers_are_alike_if_all_log_the_same_wherever_two_log(several, are_alike):
    assert called("areAlike", lines(*several)) is are_alike


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.02, 3.0, [0.02, 0.05, 0.1, 0.2, 0.5, 1, 2]),
        (1e-7, 10.0, [1e-7, 1e-5, 1e-3, 1e-1, 10]),
        (0.3, 0.4, []),
        (5e-324, 1e-323, [5e-324, 1e-323]),
    ],
)
def test_marks_of_a_logarithmic_axis_are_round_and_few(low, high, ticks):
    found = called("logTicks", low, high)

    assert found == ticks
