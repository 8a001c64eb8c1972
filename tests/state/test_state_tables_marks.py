"""By what rows are marked as used: something that always moves, in every mode, whoever leaves, dies or comes back."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from settling import bring, commit
from shard_driver import Driver, tables_spec

from psd.checkpoint import CheckpointDirectory, Cut
from psd.state.pages import SetMark
from psd.state.tables.partition import STEP


def new_rows(driver, seat, clocks, count=10, table=0):
    """Push gradients for so many new rows at each clock."""
    for clock in clocks:
        ids = 1_000_000 * (1 + seat.rank) + count * clock + np.arange(count)
        driver.push_rows(seat, clock, {table: (ids, 1.0)})


@pytest.mark.parametrize("mode", ["async", "ssp:1024"])
@pytest.mark.parametrize("end", ["leave", "expire", "rejoin", "stay"])
def test_rows_make_room_when_the_fastest_worker_is_gone_or_comes_back(mode, end):
    """They were marked by the largest clock that ever pushed, so nothing was old, and every new row was refused."""
    driver = Driver(tables_spec(2, tables=1, mode=mode, table={"max_rows": 50}))
    fast, slow = driver.start()
    new_rows(driver, fast, range(200))
    if end == "leave":
        driver.leave(fast)
    elif end == "expire":
        driver.expire(fast, keep=[slow])
    elif end == "rejoin":
        fast = driver.join(fast.rank)
    new_rows(driver, slow, range(100))

    (counts,) = driver.core.job.tables.counts
    assert (counts.rows, counts.refused, counts.evicted) == (50, 0, 2950)
    assert driver.rows(0, 2_000_000 + 10 * 95 + np.arange(50)) == [-1.0] * 50


@pytest.mark.parametrize("mode", ["async", "ssp:1024"])
def test_rows_expire_by_the_steps_of_those_who_train_when_the_fastest_worker_is_gone(mode):
    """A step is one of each worker that is waited for: of two that push in turn two pushes, of one alone each of its own."""
    driver = Driver(tables_spec(2, tables=1, mode=mode, table={"expire_steps": 20}))
    fast, slow = driver.start()
    new_rows(driver, fast, range(500), 1)
    assert driver.core.job.tables.counts[0].rows == 2 * 20 + 1
    driver.leave(fast)
    new_rows(driver, slow, range(200), 1)

    assert driver.core.job.tables.counts[0].rows == 20 + 1


def test_rows_expire_at_a_round_that_nothing_but_rounds_decides():
    """After so many rounds without a use, whether anybody looks meanwhile or not."""
    driver = Driver(tables_spec(1, tables=1, table={"expire_steps": 20}))
    (seat,) = driver.start()
    driver.push_rows(seat, 0, {0: ([1, 2], 1.0)})
    found = []
    for clock in range(1, 25):
        driver.push_rows(seat, clock, {0: ([3], 1.0)})
        if clock % 3 == 0:
            driver.shard.tick()
        if clock == 10:
            driver.pull_rows(seat, 11, 0, [2])
        found.append(driver.rows(0, [1, 2]))

    assert found == [[-1.0, -1.0]] * 20 + [[0.0, -1.0]] * 4


def test_rows_that_expire_by_time_make_room_at_any_number_of_steps_a_second():
    """They were marked by whole seconds, so all of a second were as old as each other."""
    driver = Driver(tables_spec(1, tables=1, table={"expire_seconds": 3600, "max_rows": 50}))
    (seat,) = driver.start()
    for clock in range(100):
        new_rows(driver, seat, [clock], 50)
        driver.time.value += 0.01 * (clock % 2)

    (counts,) = driver.core.job.tables.counts
    assert (counts.rows, counts.refused) == (50, 0)


@pytest.mark.parametrize("by", ["expire_steps", "expire_seconds"])
def test_marks_go_on_after_a_kill(by, tmp_path):
    """They are kept with the rows, so what was old stays older than what comes."""
    spec = tables_spec(2, tables=1, mode="async", table={by: 1000, "max_rows": 40})
    driver = Driver(spec, state_dir=str(tmp_path / "state"))
    a, b = driver.start()
    new_rows(driver, a, range(30))
    new_rows(driver, b, range(2))
    before = driver.core.job.tables.partitions[0].clock
    driver.restart(b)
    new_rows(driver, b, range(2, 4))

    (partition,) = driver.core.job.tables.partitions
    assert partition.clock > before
    assert driver.rows(0, 2_000_000 + np.arange(40)) == [-1.0] * 40
    assert driver.core.job.tables.counts[0].refused == 0


def test_a_time_that_is_set_back_stops_no_expiry():
    """Marks are not below those before; seconds then pass from there on."""
    driver = Driver(tables_spec(1, tables=1, table={"expire_seconds": 100}))
    (seat,) = driver.start()
    driver.time.value += 1e7
    driver.push_rows(seat, 0, {0: ([1], 1.0)})
    driver.time.value -= 1e7
    driver.shard.tick()
    driver.push_rows(seat, 1, {0: ([2], 1.0)})
    driver.time.value += 90
    driver.pull_rows(seat, 2, 0, [2])
    driver.heartbeat(seat)
    driver.shard.tick()
    assert driver.rows(0, [1, 2]) == [-1.0, -1.0]
    driver.time.value += 90
    driver.heartbeat(seat)
    driver.shard.tick()

    assert driver.rows(0, [1, 2]) == [0.0, -1.0]


@pytest.mark.parametrize("workers", [1, 3, 7, 1024])
def test_a_step_is_nearly_a_whole_number_of_pushes_of_any_number_of_workers(workers):
    """What is lost in the division is less than a part in 500."""
    assert 0 <= STEP - workers * (STEP // workers) < STEP / 500


def exactly_trained(tmp_path, order, tick_every, kill_every):
    """The rows of a table after exact rounds of three workers, whose pushes and pulls come in this order."""
    table = {"max_rows": 60, "expire_steps": 6, "admit_after": 2}
    spec = tables_spec(3, tables=1, aggregation="exact", table=table)
    driver = Driver(spec, state_dir=str(tmp_path / f"{order}-{tick_every}-{kill_every}"))
    seats = driver.start()
    rng = np.random.default_rng(7)
    for clock in range(40):
        ids = [rng.zipf(1.3, 12) % 400 for _ in range(6)]
        for rank in order:
            driver.pull_rows(seats[rank], clock, 0, ids[3 + rank])
            driver.push_rows(seats[rank], clock, {0: (ids[rank], rank + 0.1)})
        for seat in seats:
            commit(driver, seat, clock)
        bring(driver, seats[0], clock + 1, decisions=driver.shard.settlement.commit_reply(0, clock).decisions)
        driver.time.value += 0.3
        if clock % tick_every == 0:
            driver.shard.tick()
            for seat in seats:
                driver.heartbeat(seat)
        if clock % kill_every == kill_every - 1:
            driver.restart(*seats)
    (partition,) = driver.core.job.tables.partitions
    counters = partition.store.counters()
    assert counters["rows"] <= 60
    return {
        int(key): (int(used), bytes(row))
        for batch in partition.store.walk()
        for key, used, row in zip(batch.heads["id"], batch.heads["used"], batch.rows, strict=True)
    }, [counters[name] for name in ("evicted", "expired", "unadmitted", "refused")]


def test_rows_that_expire_and_make_room_have_the_same_bits_under_exact_aggregation(tmp_path):
    """They went by the shard's clock and a random salt. Whoever comes first, whenever the shard looks, and over kills."""
    found, counts = exactly_trained(tmp_path, (0, 1, 2), 2, 1000)

    assert exactly_trained(tmp_path, (2, 0, 1), 7, 1000) == (found, counts)
    assert exactly_trained(tmp_path, (1, 2, 0), 3, 9)[0] == found
    assert all(count > 0 for count in counts[:3])


@pytest.mark.parametrize("table", [{}, {"expire_steps": 1000}, {"expire_seconds": 1000}])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_rows_of_a_checkpoint_make_room_for_new_ones(mode, table, tmp_path):
    """All of them were younger than whatever came: all new rows were refused, for as long as the job had trained before."""
    spec = tables_spec(1, tables=1, blocks=1, mode=mode, table={"max_rows": 50, **table})
    directory = CheckpointDirectory(str(tmp_path / "checkpoints"))
    first = Driver(spec, run_id="mine", directory=directory)
    (seat,) = first.start()
    first.time.value += 1e6  # that machine's clock is ahead
    new_rows(first, seat, range(40))
    cut = Cut("a1", 40 if mode == "sync" else 3, 0, "mine", 5.0, first.core.job.layout)
    (partition,) = first.core.job.tables.partitions
    first.write_part(directory, cut, tables=[partition.store.snapshot()])
    assert directory.complete(cut)

    driver = Driver(spec, directory=directory)
    driver.rollback(cut.name, 1)
    seat = driver.join(0)
    driver.declare(seat)
    new_rows(driver, seat, range(seat.clock, seat.clock + 7))

    (restored,) = driver.core.job.tables.partitions
    assert restored.clock > partition.clock
    assert restored.clock == restored.store.counters()["clock"]
    assert driver.core.job.tables.counts[0].refused == 0
    assert driver.rows(0, 1_000_000 + 10 * (seat.clock + 2) + np.arange(50)) == [-1.0] * 50
    if "expire_seconds" in table:
        driver.time.value += 2000
        driver.heartbeat(seat)
        driver.shard.tick()
        assert driver.core.job.tables.counts[0].rows == 0


def test_a_tick_waits_for_no_update():
    """A user's rule may take a minute, and meanwhile nobody's lease would run out."""
    driver = Driver(tables_spec(1, tables=1, table={"expire_seconds": 100}))
    driver.start()
    tables = driver.core.job.tables
    store = tables.partitions[0].store
    tick = threading.Thread(target=driver.shard.tick, daemon=True)
    with tables.lock:
        store.hold(0)
        tick.start()
        tick.join(100)
        store.let_go()
        assert not tick.is_alive()


def existence_after_restoring(tmp_path, pulls):
    """When each of two rows is gone, of a job that goes on from a checkpoint; row 1 is pulled so often while that is stored."""
    spec = tables_spec(1, tables=1, table={"expire_steps": 20})
    directory = CheckpointDirectory(str(tmp_path / str(pulls)))
    first = Driver(spec, run_id="mine", directory=directory)
    (seat,) = first.start()
    first.push_rows(seat, 0, {0: ([1, 2], 1.0)})
    for clock in range(1, 10):
        first.push_rows(seat, clock, {0: ([3], 1.0)})
    cut = Cut("a1", 10, 0, "mine", 5.0, first.core.job.layout)
    snapshot = first.core.job.tables.partitions[0].store.snapshot()
    for clock in range(10, 10 + pulls):
        first.pull_rows(seat, clock, 0, [1])
        first.push_rows(seat, clock, {0: ([3], 1.0)})
    first.write_part(directory, cut, tables=[snapshot])
    assert directory.complete(cut)

    driver = Driver(spec, directory=directory)
    driver.rollback(cut.name, 1)
    seat = driver.join(0)
    driver.declare(seat)
    found = []
    for clock in range(10, 35):
        driver.push_rows(seat, clock, {0: ([3], 1.0)})
        found.append(driver.rows(0, [1, 2]))
    return [rows.index(0.0) for rows in zip(*found, strict=True)]


def test_rows_of_a_checkpoint_expire_when_they_would_have_whatever_was_pulled_while_it_was_stored(tmp_path):
    """The clock of a shard that had such rows was ahead of the others' from then on, and its rows expired too early."""
    assert existence_after_restoring(tmp_path, 0) == [20 - 9, 20 - 9]
    assert existence_after_restoring(tmp_path, 5) == [20, 20 - 9]


def test_slots_that_begin_anew_leave_marks_and_clock_as_they_are(tmp_path):
    """Written again, rows that were pulled moved the clock of their shard: the next process of it was a step ahead."""
    spec = tables_spec(1, tables=1, blocks=1, table={"expire_steps": 20})
    driver = Driver(spec, state_dir=str(tmp_path / "state"))
    (seat,) = driver.start()
    driver.push_rows(seat, 0, {0: ([1, 2], 1.0)})
    driver.push_rows(seat, 1, {0: ([3], 1.0)})
    driver.pull_rows(seat, 2, 0, [2])
    driver.core.job.tables.reset_slots(SetMark(1, 1), 2)
    driver.restart(seat)

    (partition,) = driver.core.job.tables.partitions
    assert partition.clock == 2 * STEP
    marks = {int(row["id"]): int(row["used"]) for batch in partition.store.walk() for row in batch.heads}
    assert marks == {1: STEP, 2: 3 * STEP, 3: 2 * STEP}
