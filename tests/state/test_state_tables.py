"""Tables on a shard: a push of rows is counted once and whole, in every mode; what is wrong changes nothing."""

from __future__ import annotations

import pytest
from shard_driver import Driver, tables_spec


@pytest.mark.parametrize("mode", ["sync", "async", "ssp:2"])
@pytest.mark.parametrize("frames", [1, 3])
def test_rows_are_pushed_once_however_often_they_are_sent(mode, frames):
    """A row goes against its gradient; ids that come twice are summed, those of no push stay as they began."""
    driver = Driver(tables_spec(1, mode=mode))
    (seat,) = driver.start()

    for _ in range(2):
        driver.push_rows(seat, 0, {0: ([7, 9, 7], [1.0, 2.0, 4.0]), 1: ([7], [8.0])}, frames=frames)

    assert driver.pull_rows(seat, 1, 0, [7, 8, 9]).tolist() == [[-5.0] * 3, [0.0] * 3, [-2.0] * 3]
    assert driver.rows(1, [7]) == [-8.0]
    assert driver.core.counters.pushes_duplicate == 1


def test_a_round_has_one_step_of_each_worker_whichever_rows_it_touches():
    """A worker that has no gradient for a row counts as a zero; none at all is a step, too."""
    driver = Driver(tables_spec(3, blocks=1))
    a, b, c = driver.start()

    driver.push_rows(a, 0, {0: ([1, 2], 3.0)}, weight=1.0)
    driver.push_rows(b, 0, {0: ([2], 3.0), 1: ([2], 6.0)}, weight=4.0)
    waiting = driver.pull_rows(a, 1, 0, [1])
    assert not waiting.future.done()
    driver.push_rows(c, 0, {}, weight=1.0)

    assert waiting.future.done()
    assert driver.pull_rows(a, 1, 0, [1, 2]).tolist() == [[-0.5] * 3, [-2.5] * 3]
    assert driver.rows(1, [2]) == [-4.0]
