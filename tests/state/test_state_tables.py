"""Tables on a shard: a push of rows is counted once and whole, in every mode; what is wrong changes nothing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import safetensors.numpy
from shard_driver import Driver, job_spec, tables_spec

from psd.contract.config import Limits
from psd.contract.errors import BlockOutOfRange, InvalidRequest, PsdError
from psd.contract.jobspec import GroupSpec
from psd.contract.layout import Layout
from psd_core.distinct import shard_of


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


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ({0: ([1, 2, 3, 4, 5], [1.0] * 5)}, {}, "rows: 5 ids are above the shard's --max-push-ids 4"),
        ({0: ([1, 2, 3, 4, 5], [1.0] * 5)}, {"frames": 5}, "rows: 5 ids are above"),
        ({0: ([1], [float("nan")])}, {}, r"worker 0 at step 0 has nan in table 's0' \(id 1\)"),
        ({}, {"frames": 2}, "more: stands on a frame without rows"),
    ],
)
def test_wrong_rows_are_refused_by_name_and_change_nothing(rows, options, message):
    """Neither rows nor the worker's place in the job."""
    driver = Driver(tables_spec(1), limits=Limits(push_ids_max=4))
    (seat,) = driver.start()
    before = driver.fingerprint()

    with pytest.raises(PsdError, match=message):
        driver.push_rows(seat, 0, rows, **options)

    assert driver.fingerprint() == before
    assert driver.push_rows(seat, 0, {0: ([1], 1.0)}).blocks_counted == 1


def test_rows_that_wait_for_a_last_frame_are_bounded_in_bytes():
    """A shard holds so much of one push, and says by which flag."""
    driver = Driver(tables_spec(1), limits=Limits(push_bytes_max=30))
    (seat,) = driver.start()

    with pytest.raises(InvalidRequest, match="rows: 40 bytes are above the shard's --max-push-bytes 30"):
        driver.push_rows(seat, 0, {0: ([1, 2, 3, 4], 1.0)}, frames=4)


def test_an_id_of_another_shard_is_refused_in_pushes_and_pulls():
    """The error says whose it is."""
    driver = Driver(tables_spec(1), shard=1, shards=2)
    seat = driver.join(0, session=1)
    driver.declare(seat)
    driver.initialize(seat)
    foreign, own = (int(np.flatnonzero(shard_of(np.arange(100), 2) == shard)[0]) for shard in (0, 1))

    for call in (
        lambda: driver.push_rows(seat, 0, {0: ([own, foreign], 1.0)}),
        lambda: driver.pull_rows(seat, 0, 1, [foreign]),
    ):
        with pytest.raises(BlockOutOfRange, match=f"id {foreign} of table 's[01]' is not on shard 1; shard 0 owns it"):
            call()
    driver.push_rows(seat, 0, {0: ([own], 1.0)})


def test_a_push_without_the_tables_block_is_not_whole():
    """A step without rows says so, and the others would wait for it."""
    driver = Driver(tables_spec(1, blocks=1))
    (seat,) = driver.start()

    with pytest.raises(InvalidRequest, match="block: 1 is missing; the push of clock 0 ended after 1 of 2 blocks"):
        driver.push(seat, 0, 1.0)


def test_a_gradient_of_age_one_moves_a_row_half_as_far():
    """Versions are those of the tables' block, behind the blocks'."""
    spec = tables_spec(1, tables=1, mode="async")
    driver = Driver(dataclasses.replace(spec, groups=(GroupSpec("sgd", staleness="lr"),)))
    (seat,) = driver.start()

    driver.push_rows(seat, 0, {0: ([1], 2.0)}, versions=[0])
    driver.push_rows(seat, 1, {0: ([1], 2.0)}, versions=[0])

    assert driver.rows(0, [1]) == [-3.0]
    assert (driver.core.job.ages, driver.core.job.age_total) == ([1, 1], 1)
    with pytest.raises(InvalidRequest, match="expected one per trained block of the shard, 1, got 2"):
        driver.push_rows(seat, 2, {}, versions=[0, 0])


@pytest.mark.parametrize("by", ["steps", "seconds"])
def test_rows_that_nobody_uses_expire(by):
    """Pulls are uses, and so are pushes; evaluation is not."""
    driver = Driver(tables_spec(1, tables=1, table={f"expire_{by}": 10}))
    (seat,) = driver.start()
    driver.push_rows(seat, 0, {0: ([1, 2, 3], [1.0] * 3)})
    for clock in range(1, 20):
        driver.pull_rows(seat, clock, 0, [1])
        driver.pull_rows(seat, clock, 0, [2], counts_no_use=True)
        driver.push_rows(seat, clock, {0: ([4], 1.0)})
        driver.time.value += 1
        driver.shard.tick()

    (counts,) = driver.core.job.tables.counts
    assert (counts.rows, counts.created, counts.expired) == (2, 4, 2)
    assert driver.rows(0, [1, 2, 3]) == [-1.0, 0.0, 0.0]


@pytest.mark.parametrize("at_limit", ["evict", "refuse"])
def test_a_shard_has_its_share_of_a_tables_rows(at_limit):
    """What comes at the limit takes the place of rows that were not used for long, or is counted and dropped."""
    driver = Driver(tables_spec(1, tables=1, table={"max_rows": 3000, "at_limit": at_limit}), shard=0, shards=2)
    (seat,) = driver.start()
    ids = np.arange(20_000)
    ids = ids[shard_of(ids, 2) == 0]
    for clock in range(40):
        driver.push_rows(seat, clock, {0: (ids[100 * clock :][:100], 1.0)})

    (counts,) = driver.core.job.tables.counts
    assert counts.rows <= 1500
    assert counts.name == "s0"
    assert (counts.evicted, counts.refused) == ((4000 - counts.rows, 0) if at_limit == "evict" else (0, 2500))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"max_rows": 5000}, "table 's1': max_rows: 5000 rows on each shard, .* do not fit: .*--max-table-bytes 600000"),
        ({"max_rows": 10_000}, "table 's0': max_rows: 10000 rows on each .* are above the shard's --max-table-rows 5000"),
        ({"max_rows": 1000, "admit_after": 2}, None),
    ],
)
def test_tables_that_do_not_fit_are_refused_at_the_declaration(table, message):
    """By name, with the limit; then another job may be declared."""
    driver = Driver(tables_spec(1, table=table), limits=Limits(table_bytes_max=600_000, table_rows_max=5000, push_ids_max=1000))
    seat = driver.join()
    if message is not None:
        with pytest.raises(PsdError, match=message):
            driver.declare(seat)
        assert driver.core.job is None
        driver.spec = job_spec(1)
        driver.layout = Layout(driver.spec, 1)
    driver.declare(seat)
    assert driver.initialize(seat)


def test_rows_that_come_from_a_file_are_as_old_as_the_job(tmp_path):
    """Where rows expire by time, those that a job begins with do not go at the first look."""
    file = tmp_path / "start.safetensors"
    safetensors.numpy.save_file({"s0.ids": np.arange(5), "s0.rows": np.ones((5, 3), np.float32)}, file)
    spec = tables_spec(1, tables=1, table={"expire_seconds": 100})
    driver = Driver(spec, from_checkpoint=str(file), parameters_only=True)
    (seat,) = [driver.join(0)]
    driver.declare(seat)

    driver.shard.tick()
    assert driver.rows(0, range(5)) == [1.0] * 5
    driver.pull_rows(seat, 0, 0, [1, 2])
    driver.time.value += 90
    driver.pull_rows(seat, 0, 0, [1, 2])
    driver.time.value += 30
    driver.shard.tick()

    assert driver.rows(0, range(5)) == [0.0, 1.0, 1.0, 0.0, 0.0]


def test_rows_expire_also_after_the_machines_clock_was_ahead_for_a_while():
    """What was looked at in that year is looked at again when the clock has been set right."""
    driver = Driver(tables_spec(1, tables=1, table={"expire_seconds": 100}))
    (seat,) = driver.start()
    driver.time.value += 1e7
    driver.shard.tick()
    driver.time.value -= 1e7
    driver.push_rows(seat, 0, {0: ([1], 1.0)})
    driver.time.value += 200
    driver.heartbeat(seat)
    driver.shard.tick()

    assert driver.rows(0, [1]) == [0.0]


def test_a_push_without_rounds_makes_no_list_of_what_all_workers_have_pushed(monkeypatch):
    """Each table is asked for its own worker's last push: with many tables and workers a list for each took a millisecond."""
    driver = Driver(tables_spec(3, tables=3, mode="async"))
    (seat,) = driver.start(2)

    def fail(*_):
        raise AssertionError("all workers' windows are read")

    monkeypatch.setattr("psd.state.tables.block.counted_in", fail)
    monkeypatch.setattr("psd.state.pages.counted", fail)
    for clock in (0, 0, 1):
        driver.push_rows(seat, clock, {0: ([1], 1.0), 2: ([1], 1.0)}, client_state=b"mine")

    assert driver.core.job.tables.last_counted(2) == (seat.session, 2)
    assert [driver.rows(table, [1]) for table in (0, 1, 2)] == [[-2.0], [0.0], [-2.0]]


def test_the_shards_together_have_as_many_rows_as_the_table_may_have():
    """Not so many for each as the largest share; and each has room for a row."""
    shares = []
    for shard in range(4):
        driver = Driver(tables_spec(1, tables=1, table={"max_rows": 10}), shard=shard, shards=4)
        driver.declare(driver.join(session=shard and 1))
        shares.append(driver.core.job.tables.partitions[0].store.spec.max_rows)
    few = Driver(tables_spec(1, tables=1, table={"max_rows": 3}), shards=4)

    assert shares == [3, 3, 2, 2]
    with pytest.raises(InvalidRequest, match="table 's0': max_rows: 3 rows are fewer than the 4 shards"):
        few.declare(few.join())
