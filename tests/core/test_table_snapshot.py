"""Snapshots of a table's partition: one moment, while everything changes; and chains of what has changed."""

import numpy as np
import pytest
from helpers_rules import cases
from table_model import SGD, check_places, rows_of, spec_of

from psd_core.arena import ArenaError
from psd_core.table import TableSpec, TableStore


def contents(snapshot):
    """All rows of a snapshot, as bytes; none comes twice."""
    found = {}
    for batch in snapshot:
        for key, row in zip(batch.heads["id"].tolist(), batch.rows, strict=True):
            assert key not in found
            found[key] = row.tobytes()
    return found


def push(store, ids, clock=None, value=-1.0):
    store.push(ids, np.full((len(ids), store.spec.dim), value, np.float32), SGD.named, clock=clock)


@pytest.fixture
def store(memory_path):
    """A store with room for 40,000 rows, and 20,000 in it."""
    made = TableStore.create(memory_path / "table", TableSpec("t", 1, "sgd", max_rows=40_000, notes=1))
    for start in range(0, 20_000, 5000):
        push(made, np.arange(start, start + 5000), clock=1)
    return made


def test_a_snapshot_is_of_one_moment_while_rows_come_change_and_go(store):
    """Growth of the index, eviction, expiry and removal between its batches; afterwards no place is lost."""
    rng = np.random.default_rng(3)
    before, step = rows_of(store), store.counters()["step"]
    found, fresh = {}, 20_000
    with store.snapshot() as snapshot:
        for number, batch in enumerate(snapshot):
            for key, row in zip(batch.heads["id"].tolist(), batch.rows, strict=True):
                assert key not in found
                found[key] = row.tobytes()
            push(store, rng.integers(0, 20_000, 3000), clock=number + 2)
            push(store, np.arange(fresh, fresh + 5000), clock=number + 2, value=number)
            fresh += 5000
            store.remove(rng.integers(0, fresh, 500))
            if number == 2:
                store.expire(number + 2, 2)
        assert number > 4
        assert (snapshot.step, snapshot.mark.version, snapshot.is_full) == (step, step, True)
        with pytest.raises(ArenaError, match="a snapshot is under way"):
            store.snapshot()

    assert found == before
    assert (snapshot.count, snapshot.width) == (20_000, 1)
    assert min(store.counters()[name] for name in ("evicted", "expired", "removed")) > 0
    check_places(store)
    assert contents(store.snapshot()) == rows_of(store)


def test_a_chain_of_changes_restores_the_table_across_openings(store, memory_path):
    """First what went, then what came: a row that went and came back is there."""
    rng = np.random.default_rng(4)
    with store.snapshot() as snapshot:
        chain, mark = contents(snapshot), snapshot.mark
    for number in range(4):
        store.remove(rng.integers(0, 25_000, 700))
        push(store, rng.integers(0, 25_000, 900), clock=2)
        store.write(rng.integers(0, 25_000, 50), np.full((50, 1), number, np.float32))
        if number % 2:
            store.close(remove=False)
            store = TableStore.open(memory_path / "table")
        with store.snapshot(since=mark) as snapshot:
            changed = contents(snapshot)
            assert not snapshot.is_full
            assert len(changed) < 1000
            gone = set(snapshot.removed.tolist())
            chain = {key: row for key, row in chain.items() if key not in gone} | changed
            mark = snapshot.mark
        assert chain == rows_of(store)


def test_a_snapshot_is_full_where_more_went_than_is_remembered(store):
    with store.snapshot() as snapshot:
        mark = snapshot.mark
    store.remove(np.arange(13_000))

    with store.snapshot(since=mark) as snapshot:
        assert (snapshot.is_full, len(snapshot.removed)) == (True, 0)
        assert contents(snapshot) == rows_of(store)


def test_rows_and_step_that_are_written_go_on_as_if_nothing_had_been(memory_path, rng):
    """A restored table takes the same next step as the one that was stored, slots and bias correction included."""
    case = cases("adam")[-1]
    one = TableStore.create(memory_path / "one", spec_of(case))
    two = TableStore.create(memory_path / "two", spec_of(case))
    ids, grads = np.arange(30), rng.standard_normal((30, one.spec.dim)).astype(np.float32)
    for _ in range(3):
        one.push(ids, grads, case.named)
    one.read(ids[:7], clock=50)
    with one.snapshot() as snapshot:
        for batch in snapshot:
            clocks = batch.heads["used"].copy()
            two.write(batch.heads["id"].astype(np.int64), batch.rows, clock=clocks, step=snapshot.step)
    for store in (one, two):
        store.expire(50, 20)
        assert store.counters()["rows"] == 7
        store.push(ids[::2], grads[::2].copy(), case.named)

    assert rows_of(one) == rows_of(two)
    assert one.counters()["step"] == two.counters()["step"] == 4


def test_an_index_that_was_made_for_all_rows_does_not_grow_with_them(memory_path):
    """As when the rows of a snapshot are written to another table."""
    spec = TableSpec("t", 1, "sgd")
    one, two = TableStore.create(memory_path / "one", spec), TableStore.create(memory_path / "two", spec)
    one.write(np.arange(50_000), np.ones((50_000, 1), np.float32))
    is_growing = []

    two.reserve(50_000)
    with one.snapshot() as snapshot:
        for batch in snapshot:
            two.write(batch.heads["id"].copy(), batch.rows)
            is_growing.append(two._partition.is_moving)

    assert not any(is_growing)
    assert rows_of(two) == rows_of(one)


def test_a_snapshot_since_a_mark_has_what_was_used_after_it(store):
    """A row that was read alone would be as old as at the mark after a restoration, and go before its time."""
    with store.snapshot() as snapshot:
        mark = snapshot.mark
    store.read(np.array([5, 6]), clock=2)
    store.read(np.array([7]))
    push(store, np.array([9]), clock=2)

    with store.snapshot(since=mark) as snapshot:
        found = {
            int(key): int(used) for batch in snapshot for key, used in zip(batch.heads["id"], batch.heads["used"], strict=True)
        }
    assert (found, snapshot.is_full, snapshot.clock) == ({5: 2, 6: 2, 9: 2}, False, 2)
