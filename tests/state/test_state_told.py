"""What a shard tells programs of other languages: where elements lie, and no integer that a double does not have."""

from __future__ import annotations

import pytest
from shard_driver import Driver, job_spec, tables_spec

from psd.contract.errors import InvalidRequest
from psd.contract.integers import INTEGER_MAX, drawn_integer
from psd.contract.layout_message import layout_message
from psd.state.core import ShardCore
from psd.state.cuts.positions import Positions
from psd.state.cuts.snapshots import check_cuts
from psd.v1 import control_pb2, data_pb2


def test_who_declares_and_who_reads_is_told_the_shards_blocks() -> None:
    """Whoever declares hears of them before there are values, and a reader when there are."""
    driver = Driver(tables_spec(2, blocks=3), shard=0, shards=2)
    seats = [driver.join(rank) for rank in range(2)]

    told = [driver.declare(seat)[0].layout for seat in seats]
    driver.initialize(seats[0])
    described = driver.shard.describe(control_pb2.DescribeRequest(shard_count=2)).layout

    assert told == [layout_message(driver.layout, 0)] * 2
    assert described == told[0]
    assert [block.index for block in described.blocks] == [0, 2]
    assert described.tables_block == 3


def test_lives_of_a_shard_have_numbers_that_a_double_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker in JavaScript was told that its shard had restarted: 62 bits were rounded on the way through it."""
    drawn = [drawn_integer() for _ in range(100)]
    assert min(drawn) >= 1
    assert max(drawn) <= INTEGER_MAX
    assert max(drawn) > INTEGER_MAX >> 4  # there are enough of them

    driver = Driver(job_spec(1))
    monkeypatch.setattr(driver, "incarnation", None)
    driver.kill()
    driver._start()

    assert isinstance(driver.core, ShardCore)
    assert 1 <= driver.join(0).caller.incarnation <= INTEGER_MAX
    assert 1 <= driver.join(0).session <= INTEGER_MAX


@pytest.mark.parametrize("found", [{0: 1}, {0: 5, 1: 7}, dict.fromkeys(range(100), INTEGER_MAX)])
def test_what_stands_for_positions_is_a_number_that_a_double_holds(found: dict[int, int]) -> None:
    """Readers in JavaScript compare it between shards."""
    assert 1 <= Positions(0.0, found=found).digest <= INTEGER_MAX


def test_numbers_that_others_would_be_told_are_refused_beyond_that() -> None:
    """Whoever sends them: a session to another shard than the first, a timeline, a cut."""
    other = Driver(job_spec(1), shard=1, shards=2)
    with pytest.raises(InvalidRequest, match="session"):
        other.join(0, session=INTEGER_MAX + 1)
    assert other.join(0, session=INTEGER_MAX).session == INTEGER_MAX

    driver = Driver(job_spec(1))
    with pytest.raises(InvalidRequest, match="timeline"):
        driver.rollback("timeline-00001-step-000000000001-x", INTEGER_MAX + 1)
    for field in ("step", "position"):
        with pytest.raises(InvalidRequest, match="position"):
            check_cuts([data_pb2.Cut(id="c", **{field: INTEGER_MAX + 1})])
    check_cuts([data_pb2.Cut(id="c", step=INTEGER_MAX, position=INTEGER_MAX)])
