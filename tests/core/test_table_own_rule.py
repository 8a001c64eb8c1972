"""A caller's own rule on a table's rows: in batches, with the rows' own lives, and nothing changed where it raises."""

from __future__ import annotations

import numpy as np
import pytest

from psd_core.initial import Uniform
from psd_core.table import OWN, TableSpec, TableStore

DIM = 3


def spec_of(**options):
    return TableSpec("t", DIM, OWN, constants=(0.25, 0.0), init=Uniform(-1, 1), **options)


def momentum(value, grad, slots, step):
    """Both slots change, and so does the value; by the step, too."""
    total, count = slots
    total += grad
    count += 1
    value -= np.float32(1 / step) * total


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_go_through_the_rule_as_dense_ones_would_whatever_the_batches(memory_path, monkeypatch, dtype):
    """Repeated ids are summed and scaled beforehand; new rows begin with their initial values and slots."""
    monkeypatch.setattr("psd_core._table_own_rule._BATCH_BYTES", 4 * 9 * 7)
    store = TableStore.create(memory_path / "table", spec_of(max_rows=1000, dtype=dtype))
    rng = np.random.default_rng(3)
    rows = {}
    for step in range(1, 8):
        ids = rng.integers(0, 40, 30).astype(np.uint64)
        grads = rng.integers(-8, 8, (30, DIM)).astype(np.float32)
        distinct, inverse = np.unique(ids, return_inverse=True)
        sums = np.zeros((len(distinct), DIM), np.float32)
        np.add.at(sums, inverse, grads)
        before = store.read_rows(distinct)[0]
        sizes = []

        def own(value, grad, slots, number, sizes=sizes, step=step):
            assert number == step
            assert [array.shape for array in (value, grad, *slots)] == [(len(value), DIM)] * 4
            sizes.append(len(value))
            momentum(value, grad, slots, number)

        store.push(ids, grads, {}, scale=0.5, own=own)

        value, *slots = (before[:, at : at + DIM].copy() for at in (0, DIM, 2 * DIM))
        momentum(value, sums / 2, slots, step)
        after = store.read_rows(distinct)[0]
        assert (after[:, DIM:] == np.hstack(slots)).all()
        assert np.allclose(after[:, :DIM], value, rtol=0 if dtype == "float32" else 0.01, atol=0)
        assert sizes == [7] * (len(distinct) // 7) + [len(distinct) % 7] * (len(distinct) % 7 > 0)
        rows.update(zip(distinct.tolist(), after.copy(), strict=True))
    kept = store.read_rows(np.array(list(rows), np.uint64))
    assert kept[1].all()
    assert (kept[0] == np.array(list(rows.values()))).all()


@pytest.mark.parametrize("at_limit", ["evict", "refuse"])
def test_it_sees_no_row_that_is_not_admitted_or_finds_no_room(memory_path, at_limit):
    """As psd's own rules."""
    spec = spec_of(max_rows=8, admit_after=2, at_limit=at_limit, push_max=64)
    store = TableStore.create(memory_path / "table", spec)
    seen = []

    def own(value, grad, slots, step):
        seen.append(len(value))
        momentum(value, grad, slots, step)

    ids = np.arange(6, dtype=np.uint64)
    for first in (0, 0, 100, 100):
        store.push(ids + first, np.ones((6, DIM), np.float32), {}, own=own)

    counters = store.counters()
    assert sum(seen) == counters["created"] == 24 - counters["unadmitted"] - counters["refused"]
    assert (counters["rows"], counters["step"]) == (8, 4)
    assert counters["unadmitted"] >= 12
    assert counters["evicted" if at_limit == "evict" else "refused"] > 0


def test_what_it_raises_the_push_raises_and_no_row_has_changed(memory_path, monkeypatch):
    """Not even those of an earlier batch; the same push may come again, and the file knows its rule when it is opened."""
    monkeypatch.setattr("psd_core._table_own_rule._BATCH_BYTES", 4 * 9 * 4)
    path = memory_path / "table"
    store = TableStore.create(path, spec_of(max_rows=1000, notes=1))
    ids, ones = np.arange(10, dtype=np.uint64), np.ones((10, DIM), np.float32)
    store.push(ids[:6], ones[:6], {}, own=momentum)
    before = store.read_rows(ids)[0].tobytes(), store.counters()

    def own(value, grad, slots, step):
        momentum(value, grad, slots, step)
        if len(value) < 4:
            raise SystemExit(3)

    with pytest.raises(SystemExit):
        store.push(ids, ones, {}, notes=np.ones(1, np.uint64), own=own)
    for options in ({"own": None}, {"own": momentum, "scalars": {"lr": 1.0}}):
        with pytest.raises(ValueError, match=r"own: expected a rule|scalars: expected"):
            store.push(ids, ones, **{"scalars": {}, **options})

    assert (store.read_rows(ids)[0].tobytes(), store.notes()[0]) == (before[0], 0)
    store.close(remove=False)
    store = TableStore.open(path)
    assert store.spec == spec_of(max_rows=1000, notes=1)
    store.push(ids, ones, {}, own=momentum)
    assert store.counters()["step"] == before[1]["step"] + 1
    assert (store.read_rows(ids)[0][:, 2 * DIM] == [2.0] * 6 + [1.0] * 4).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"updates": "catch_up"}, "updates: must be lazy"),
        ({"constants": (0.0,) * 65}, "constants: must be at most 64, one for each slot, got 65"),
        ({"rule": "sgd"}, "constants: must be none, got 1"),
    ],
)
def test_a_wrong_declaration_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        TableSpec(**{"name": "t", "dim": DIM, "rule": OWN, "constants": (1.0,), **options})
