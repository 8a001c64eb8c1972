"""Rounds of tables: exact ones, quorums, workers that die, and rows that find no room."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from settling import bring, commit, decision
from shard_driver import Driver, tables_spec

from psd.contract.errors import InvalidRequest, OutOfSpace, SessionFenced
from psd.contract.jobspec import GroupSpec
from psd.state.tickets import Ticket
from psd_core.arena import StoreFull
from psd_core.distinct import shard_of

ADAGRAD = (0.1, 0.0, 0.0, 1e-10)  # lr, lr_decay, weight_decay, eps


def exact(world_size=2, **fields):
    return tables_spec(world_size, aggregation="exact", **fields)


def shards_of(spec, count):
    """The shards of a job, each with the seats of its workers."""
    drivers = [Driver(spec, shard=index, shards=count) for index in range(count)]
    seats = []
    for driver in drivers:
        joined = [driver.join(rank, session=0 if driver is drivers[0] else rank + 1) for rank in range(spec.world_size)]
        for seat in joined:
            driver.declare(seat)
        driver.initialize(joined[0])
        seats.append(joined)
    return drivers, seats


def trained_bits(shards, order):
    """The rows of a table after three exact rounds of three workers, whose pushes come in this order."""
    spec = exact(3, tables=1, blocks=0, dim=4)
    drivers, seats = shards_of(dataclasses.replace(spec, groups=(GroupSpec("adagrad", (), (0.0,)),)), shards)
    rng = np.random.default_rng(5)
    for clock in range(3):
        pushed = {rank: (rng.integers(0, 40, 25), rng.standard_normal((25, 4), np.float32)) for rank in range(3)}
        for driver, joined in zip(drivers, seats, strict=True):
            for rank in order:
                ids, values = pushed[rank]
                mine = shard_of(ids, shards) == driver.config.shard_index
                rows = {0: (ids[mine], values[mine])} if mine.any() else {}
                driver.push_rows(joined[rank], clock, rows, scalars=ADAGRAD, weight=rank + 0.3)
        for rank in order:
            commit(drivers[0], seats[0][rank], clock)
        for driver, joined in zip(drivers[1:], seats[1:], strict=True):
            bring(driver, joined[0], clock + 1, decisions=[decision(clock, 0, 1, 2)])
    rows = {}
    for driver in drivers:
        for batch in driver.core.job.tables.partitions[0].store.walk():
            rows.update(zip(batch.heads["id"].tolist(), map(bytes, batch.rows), strict=True))
    return rows


def test_exact_rounds_have_the_same_bits_whoever_comes_first_on_any_number_of_shards():
    """Gradients are summed in the order of ranks, and rounded alike where only one worker has a row."""
    found = trained_bits(1, [0, 1, 2])

    assert len(found) == 40
    assert trained_bits(1, [2, 0, 1]) == found
    assert trained_bits(3, [1, 2, 0]) == found


def test_half_a_push_of_a_dead_worker_leaves_no_trace():
    """With exact aggregation a round is made of those that have committed."""
    driver = Driver(exact(2))
    a, b = driver.start()
    driver.push_rows(b, 0, {0: ([1], 8.0)})
    driver.push_rows(a, 0, {0: ([1], 2.0)})
    commit(driver, a, 0)
    driver.leave(b, failed=True)

    assert driver.core.job.tables.version == 1
    assert driver.rows(0, [1]) == [-2.0]


def test_a_round_that_is_skipped_passes_without_a_step_of_the_tables():
    """No row is there, and bias corrections count one step less."""
    driver = Driver(exact(2, nan_policy="skip"))
    a, b = driver.start()
    driver.push_rows(a, 0, {0: ([1], 2.0)})
    driver.push_rows(b, 0, {}, weight=0.0)
    commit(driver, a, 0)
    commit(driver, b, 0, skip=True)

    tables = driver.core.job.tables
    assert tables.version == 1
    assert [partition.store.counters()["step"] for partition in tables.partitions] == [0, 0]
    assert driver.rows(0, [1]) == [0.0]


def test_a_push_that_comes_after_the_quorum_counts_nowhere():
    """It is late, and told so."""
    driver = Driver(tables_spec(3, quorum=2))
    a, b, c = driver.start()
    driver.push_rows(a, 0, {0: ([1], 2.0)})
    driver.push_rows(b, 0, {0: ([1], 4.0)})

    assert driver.push_rows(c, 0, {0: ([1], 8.0)}).blocks_late == 1
    assert driver.rows(0, [1]) == [-3.0]


def test_a_push_for_the_next_round_waits_for_it_with_all_its_frames():
    """What was staged is counted when the round opens, once."""
    driver = Driver(tables_spec(2, reduction="sum"))
    a, b = driver.start()
    driver.push_rows(a, 0, {0: ([1], 1.0)})
    push = driver.begin_push(a, 1)
    rows = {0: ([1, 2, 3], [1.0, 1.0, 1.0])}
    ticket = driver.push_tables(push, rows, frames=3)
    assert isinstance(ticket, Ticket)
    driver.push_rows(b, 0, {})
    assert ticket.future.done()
    # The carrier sends the last frame again.
    assert driver.push_tables(push, {0: ([3], 1.0)}) is None
    driver.shard.exchange.end_push(push)
    driver.push_rows(b, 1, {})

    assert driver.rows(0, [1, 2, 3]) == [-2.0, -1.0, -1.0]


def test_a_worker_that_dies_amid_its_frames_has_pushed_nothing():
    """Staged rows are the call's own; the session's last frames are refused, and its successor's push counts."""
    driver = Driver(tables_spec(1, reduction="sum"))
    (a,) = driver.start()
    push = driver.begin_push(a, 0)
    again = driver.join(0)
    driver.declare(again)
    driver.push_rows(again, 0, {0: ([1], 1.0)})

    with pytest.raises(SessionFenced):
        driver.push_tables(push, {0: ([1, 2], [8.0, 8.0])}, frames=2)
    assert driver.rows(0, [1, 2]) == [-1.0, 0.0]


@pytest.mark.parametrize(
    ("where", "error", "text"),
    [("_make_room", StoreFull("no room"), "'s1'"), ("push", MemoryError("no memory"), "no memory")],
    ids=["file", "memory"],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_that_find_no_room_are_counted_when_there_is_some(monkeypatch, world_size, where, error, text):
    """No table has the push before all have it; whoever waits is told, and it follows. Where it was ordinary memory that lacked
    nobody tried again: the round had all its gradients, and never closed."""
    driver = Driver(tables_spec(world_size, reduction="sum"))
    seats = driver.start()

    def fails(*_, **__):
        raise error

    rows = {0: ([1], 1.0), 1: ([1], 1.0)}
    with monkeypatch.context() as full:
        full.setattr(driver.core.job.tables.partitions[1].store, where, fails)
        if world_size == 1:
            with pytest.raises(OutOfSpace, match=text):
                driver.push_rows(seats[0], 0, rows)
        else:
            for seat in seats:
                driver.push_rows(seat, 0, rows)
            with pytest.raises(OutOfSpace, match=text):
                driver.pull_rows(seats[0], 1, 0, [1])
        assert driver.core.job.tables.version == 0

    if world_size == 1:
        driver.push_rows(seats[0], 0, rows)
    else:
        driver.shard.tick()

    assert driver.core.job.tables.version == 1
    assert (driver.rows(0, [1]), driver.rows(1, [1])) == ([-world_size], [-world_size])


def lend(driver, seat, rows, *, clock=0, **header):
    """A push of rows alone that is lent, and its memory."""
    push, memory = driver.begin_push(seat, clock, **header), bytearray()
    assert driver.push_tables(push, rows, memory=memory) is None
    return push, memory


def close_round(driver, pushes):
    """Let all answers be found, and the calls end, with their memory."""
    exchange, tables = driver.shard.exchange, driver.core.job.tables
    for push, _ in pushes:
        exchange.read(tables, exchange.begin_answer(push))
    for push, memory in pushes:
        push.loan.end()
        memory[:] = bytes(len(memory))


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (1.0, 3.0, 1.0), (0.0, 1.0, 1.0), (2.0, 1.0, 0.0)])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_rows_that_are_lent_make_the_same_update_as_copied_ones(weights, world_size):
    """To the bit, for the mean and the sum, also of workers that have no row of a table."""
    given = [{0: ([1, 2, 7], 0.1)}, {0: ([2, 3], 0.7), 1: ([4], 0.3)}, {0: ([3, 1], 0.2)}][:world_size]
    for reduction in ("mean", "sum"):
        found = []
        for is_lent in (True, False):
            driver = Driver(tables_spec(world_size, reduction=reduction, blocks=0))
            seats = driver.start()
            for clock in range(2):
                pushes = []
                for seat, rows, weight in zip(seats, given, weights, strict=False):
                    if is_lent:
                        pushes.append(lend(driver, seat, rows, clock=clock, weight=weight))
                    else:
                        driver.push_rows(seat, clock, rows, weight=weight)
                close_round(driver, pushes)
            assert driver.core.job.tables.version == 2
            found.append((driver.rows(0, [1, 2, 3, 7]), driver.rows(1, [4])))
        assert found[0] == found[1]


@pytest.mark.parametrize("leaver", [0, 1])
def test_rows_of_a_call_that_ends_before_the_round_are_copied(leaver):
    """Its memory is gone, and the round closes with what lay there."""
    driver = Driver(tables_spec(3, reduction="sum", blocks=0))
    seats = driver.start()
    pushes = [lend(driver, seat, {0: ([1, 2], 2.0)}) for seat in seats[:2]]
    push, memory = pushes.pop(leaver)
    push.loan.end()
    memory[:] = bytes(len(memory))

    close_round(driver, [*pushes, lend(driver, seats[2], {0: ([1], 1.0)})])

    assert driver.rows(0, [1, 2]) == [-5.0, -4.0]


def test_lent_rows_that_find_no_room_are_copied_and_counted_later(monkeypatch):
    """Whoever reads is told; the calls end, with their memory; and the round closes when there is room."""
    driver = Driver(tables_spec(2, reduction="sum", blocks=0))
    pushes = [lend(driver, seat, {0: ([1], 1.0), 1: ([1], 1.0)}) for seat in driver.start()]

    def fails(*_):
        raise StoreFull("no room")

    with monkeypatch.context() as full:
        full.setattr(driver.core.job.tables.partitions[1].store, "_make_room", fails)
        with pytest.raises(OutOfSpace, match="'s1'"):
            close_round(driver, pushes)
        for push, memory in pushes:
            push.loan.end()
            memory[:] = bytes(len(memory))
        assert driver.core.job.tables.version == 0

    driver.shard.tick()
    assert (driver.rows(0, [1]), driver.rows(1, [1])) == ([-2.0], [-2.0])


def test_rounds_that_everybody_skips_pass_without_a_step_of_the_tables():
    """A worker that says it is further on has no gradient in them."""
    driver = Driver(tables_spec(1))
    (a,) = driver.start()
    driver.heartbeat(a, 3)

    tables = driver.core.job.tables
    assert tables.version == 3
    assert driver.push_rows(a, 3, {0: ([1], 1.0)}, weight=0.0).blocks_counted == 1
    assert driver.push_rows(a, 4, {0: ([1], 1.0)}).blocks_counted == 1
    assert [partition.store.counters()["step"] for partition in tables.partitions] == [1, 1]
    assert driver.rows(0, [1]) == [-1.0]


@pytest.mark.parametrize("mode", ["sync", "exact", "async"])
@pytest.mark.parametrize("order", [1, -1])
def test_a_table_that_nobody_looks_up_rests(mode, order):
    """As tensors without a gradient do; a worker that has none for it does not count, and a shard without rows of it does."""
    fields = {"aggregation": "exact"} if mode == "exact" else {"mode": mode}
    driver = Driver(tables_spec(2, **fields))
    seats = driver.start()
    touched = [(b"\0", b"\0"), (b"\1", b"\0"), (b"\2", b"\0"), (b"\0", b"\0"), (b"\2", b"\2"), (b"", b"\0"), (b"\3", b"\1")]
    for clock, masks in enumerate(touched):
        for seat in seats[::order]:
            rows = {1: ([1], 1.0)} if masks[seat.rank] == b"\2" else {}
            driver.push_rows(seat, clock, rows, present=masks[seat.rank])
        if mode == "exact":
            for seat in seats:
                commit(driver, seat, clock)
            bring(driver, seats[0], clock + 1, decisions=driver.shard.settlement.commit_reply(0, clock).decisions)

    steps = [partition.store.counters()["step"] for partition in driver.core.job.tables.partitions]
    assert steps == ([4, 5] if mode == "async" else [3, 4])
    assert driver.core.job.tables.version == (14 if mode == "async" else 7)


def test_rows_of_a_table_that_is_not_present_are_refused():
    """Nothing has changed."""
    driver = Driver(tables_spec(1))
    (seat,) = driver.start()
    before = driver.fingerprint()
    for present, message in (
        (b"\1", "present: says that table 's1' has no gradient, but there are rows"),
        (b"\1\0", "present: bitmap has 2"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            driver.push_rows(seat, 0, {1: ([1], 1.0)}, present=present)

    assert driver.fingerprint() == before
