"""Rows that catch up: seldom touched or never, they have the bits of a dense tensor that every step touches."""

import numpy as np
import pytest
from helpers_rules import Case, cases, keras_cases
from table_model import check_places, rows_of, spec_of

from psd_core import RULES, InvalidArray
from psd_core._table import LOG_MAX
from psd_core.initial import Normal, Zeros
from psd_core.table import ROWWISE_ADAGRAD, TableSpec, TableStore

DIM = 6
ROWS = 12
IDS = np.arange(ROWS)


class Dense:
    """All rows as one dense tensor each, stepped with zeros where a push does not touch them."""

    def __init__(self, store, case):
        self.case = case
        self.step = 0
        kept = [start for start, at in zip(store.spec.layout.starts, store.spec.layout.slots, strict=True) if at >= 0]
        self.rows = [[value, *(np.full(DIM, start, np.float32) for start in kept)] for value in store.read(IDS)]

    def push(self, ids, grads, scalars):
        self.step += 1
        case = Case(self.case.rule, tuple(scalars.values()), self.case.flags)
        for key, (value, *slots) in enumerate(self.rows):
            grad = grads[ids.tolist().index(key)] if key in ids else np.zeros(DIM, np.float32)
            case.update(value, grad, slots, self.step)

    @property
    def values(self):
        return np.stack([row[0] for row in self.rows])

    @property
    def whole(self):
        return np.stack([np.concatenate(row) for row in self.rows])


def scheduled(case, number):
    """Scalars that change now and then: a rate that falls in steps, and a weight decay that begins late."""
    scalars = dict(case.named)
    scalars["lr"] *= 0.5 ** (number // 9)
    return scalars


CASES = [case for case in cases() + keras_cases() if not RULES[case.rule].row.goes_in_turns]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_have_the_bits_of_dense_tensors_under_every_rule(case, memory_path, rng):
    """Some are touched often, some once, some never; they are read in between, and by another process's store."""
    path = memory_path / "table"
    store = TableStore.create(path, spec_of(case, dim=DIM, init=Normal(0.5), updates="catch_up"))
    dense = Dense(store, case)
    for number in range(40):
        ids = np.array([], np.int64) if number % 4 == 3 else rng.permutation(ROWS // 2 if number > 20 else ROWS - 2)[:3]
        grads = rng.standard_normal((len(ids), DIM)).astype(np.float32)
        scalars = scheduled(case, number)
        dense.push(ids, grads, scalars)
        store.push(ids, grads, scalars, distinct=True)
        if number % 13 == 12:
            before = rows_of(store)
            assert (store.read(IDS) == dense.values).all()
            rows, found = store.read_rows(IDS)
            assert (rows[found, :-2] == dense.whole[found]).all()
            assert rows_of(store) == before
            assert found.sum() == len(before) < ROWS
            store.close(remove=False)
            store = TableStore.open(path)


@pytest.mark.parametrize("rule", ["adagrad", "sgd", "ftrl", ROWWISE_ADAGRAD])
def test_it_costs_nothing_where_zeros_change_nothing(rule, memory_path, rng):
    """Neither a rule applied nor a read: rows lie as a push has left them, thousands of steps later, and have the lazy bits."""
    scalars = dict(cases("adagrad" if rule == ROWWISE_ADAGRAD else rule)[0].named)
    lazy, late = (
        TableStore.create(memory_path / updates, TableSpec("t", DIM, rule, updates=updates)) for updates in ("lazy", "catch_up")
    )
    for number in range(2000):
        ids = np.arange(number, number + 2 if number % 500 == 0 else number)
        grads = rng.standard_normal((len(ids), DIM)).astype(np.float32)
        for store in (lazy, late):
            store.push(ids, grads, scalars)
    rows, found = late.read_rows(np.arange(2000))

    assert (rows[:, :-2] == lazy.read_rows(np.arange(2000))[0]).all()
    assert set(rows[found, -2:].copy().view(np.uint64)[:, 0]) == {1, 501, 1001, 1501}
    assert not rows[~found].any()


def test_a_gap_of_many_steps_ends_where_nothing_moves_any_more(memory_path):
    """A momentum that has died out: each step of the gap would be a kernel, and there are 100,000."""
    case = Case("sgd", (0.1, 0.5, 0.0, 0.0), ("momentum",))
    store = TableStore.create(memory_path / "table", spec_of(case, dim=DIM, init=Zeros(), updates="catch_up"))
    dense = Dense(store, case)
    store.push(IDS, np.ones((ROWS, DIM), np.float32), case.named)
    dense.push(IDS, np.ones((ROWS, DIM), np.float32), case.named)
    rows, _ = store.read_rows(IDS)
    store.write(IDS, rows, step=100_000, history=np.array([[1, *case.scalars]]))
    for _ in range(300):
        dense.push(IDS[:0], rows[:0, :DIM], case.named)

    assert (store.read(IDS) == dense.values).all()
    assert (store.read_rows(IDS)[0][:, -2:].copy().view(np.uint64) == 100_000).all()


def test_values_from_elsewhere_wait_for_their_first_gradient(memory_path):
    """Written with slots as they begin; then they are as those that nobody has trained: 50,000 steps of Adam are none."""
    case = cases("adam")[0]
    store = TableStore.create(memory_path / "table", spec_of(case, dim=DIM, init=Zeros(), updates="catch_up"))
    rows = np.concatenate([np.ones((ROWS, DIM), np.float32), np.zeros((ROWS, 2 * DIM + 2), np.float32)], axis=1)
    store.write(IDS, rows, step=50_000, history=np.array([[1, *case.scalars]]))

    assert (store.read_rows(IDS)[0][:, :-2] == rows[:, :-2]).all()


def test_a_moment_that_has_died_out_is_a_zero(memory_path, rng):
    """Numbers below 2^-126 make each step ten times as long. Values keep their bits."""
    case = cases("adam")[0]
    store = TableStore.create(memory_path / "table", spec_of(case, dim=DIM, init=Normal(1.0), updates="catch_up"))
    dense = Dense(store, case)
    grads = rng.standard_normal((ROWS, DIM)).astype(np.float32)
    for number in range(1200):
        ids = IDS if number == 0 else IDS[:0]
        dense.push(ids, grads[: len(ids)], case.named)
        store.push(ids, grads[: len(ids)], case.named)
    rows, _ = store.read_rows(IDS)

    assert (rows[:, :DIM] == dense.values).all()
    assert (rows[:, DIM : 2 * DIM] == 0).all()
    assert (dense.whole[:, DIM : 2 * DIM] != 0).any()
    assert (rows[:, 2 * DIM : -2] == dense.whole[:, 2 * DIM :]).all()


def test_a_snapshot_restores_rows_that_lag_and_what_they_have_missed(memory_path, rng):
    """Into other partitions, by id: as if they had been there from the start. So does a chain of changes."""
    case = [case for case in cases("adam") if case.named["weight_decay"]][-1]
    spec = spec_of(case, dim=DIM, init=Normal(1.0), updates="catch_up")
    one = TableStore.create(memory_path / "one", spec)
    dense, mark = Dense(one, case), None
    others = [TableStore.create(memory_path / f"other{part}", spec) for part in range(2)]
    for number in range(60):
        ids = rng.permutation(ROWS - 2)[: 1 if number < 55 else 0]
        grads = rng.standard_normal((len(ids), DIM)).astype(np.float32)
        one.push(ids, grads, scheduled(case, number))
        dense.push(ids, grads, scheduled(case, number))
        if number % 30 == 29:
            with one.snapshot(since=mark) as snapshot:
                assert snapshot.is_full == (number < 30)
                mark = snapshot.mark
                for batch in snapshot:
                    for part, other in enumerate(others):
                        mine = batch.heads["id"] % 2 == part
                        other.write(batch.heads["id"][mine], batch.rows[mine], step=snapshot.step, history=snapshot.history)
    for part, other in enumerate(others):
        assert (other.read(IDS[part::2]) == dense.values[part::2]).all()
        assert other.counters()["step"] == 60
        other.push(IDS[part::2], np.ones((ROWS // 2, DIM), np.float32), case.named)
    dense.push(IDS, np.ones((ROWS, DIM), np.float32), case.named)
    for part, other in enumerate(others):
        assert (other.read(IDS[part::2]) == dense.values[part::2]).all()
        check_places(other)


def test_the_log_is_bounded_and_what_it_forgets_is_the_oldest(memory_path, monkeypatch):
    """A rate that changes with every step: what was not touched for so long takes the oldest one that is known."""
    case = Case("sgd", (1.0, 0.0, 0.0, 0.5), ())
    spec = spec_of(case, dim=1, init=Normal(1.0), updates="catch_up")
    store = TableStore.create(memory_path / "table", spec)
    start = store.read(IDS)
    history = np.stack([np.arange(1, LOG_MAX + 1), *np.tile([0.0, 0.0, 0.0, 0.5], (LOG_MAX, 1)).T], axis=1)
    history[1:, 1] = 2.0**-60
    store.write(IDS[:0], np.empty((0, 3), np.float32), step=LOG_MAX, history=history)
    for rate in (0.0, 2.0):
        store.push(IDS[:0], np.empty((0, 1), np.float32), {**case.named, "lr": rate})

    with store.snapshot() as snapshot:
        assert snapshot.history[[0, -1], :2].tolist() == [[3, 2.0**-60], [LOG_MAX + 2, 2.0]]
    assert (store.read(IDS) == 0 * start).all()
    store.close(remove=False)
    store = TableStore.open(memory_path / "table")
    assert (store.read(IDS) == 0 * start).all()


def test_a_history_that_does_not_fit_is_refused(memory_path):
    case = cases("adam")[0]
    lazy = TableStore.create(memory_path / "lazy", spec_of(case, dim=DIM))
    late = TableStore.create(memory_path / "late", spec_of(case, dim=DIM, updates="catch_up"))
    row = (IDS[:1], np.zeros((1, late.spec.layout.width), np.float32))
    good = np.array([[1, *case.scalars]])
    for store, history, says in [
        (late, good[:, 1:], "history: expected at most 16384 rows of 6 float64"),
        (late, np.concatenate([good, good]), "history: expected steps from 1 on that rise"),
        (lazy, good, "history: expected none"),
    ]:
        with pytest.raises(InvalidArray, match=says):
            store.write(row[0], row[1][:, : store.spec.layout.width].copy(), history=history)
    with pytest.raises(ValueError, match="updates: must be one of lazy, catch_up"):
        spec_of(case, updates="never")
    with pytest.raises(ValueError, match="updates: must be lazy, because updates by delayed_nesterov go in turns"):
        spec_of(cases("delayed_nesterov")[0], updates="catch_up")
