"""Values that are stored in bfloat16: how they are rounded, and that it is the same wherever a row lies."""

import numpy as np
import pytest
from helpers_rules import Case, cases
from table_model import SGD, spec_of

from psd_core.initial import Constant, Normal, Zeros
from psd_core.table import TableSpec, TableStore, mixed

GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)


def mix(*numbers):
    return mixed(np.array(numbers, np.uint64).reshape(-1))


def rounded(value, seed, key, step):
    """The reference: 16 random bits are added below those that are kept."""
    with np.errstate(over="ignore"):
        of_row = mix(seed ^ mix(np.uint64(key) + GOLDEN_RATIO)[0])[0]
        start = mix(of_row ^ mix(np.uint64(step) + GOLDEN_RATIO)[0])[0]
        i = np.arange(len(value), dtype=np.uint64)
        words = mix(start + GOLDEN_RATIO * (i // np.uint64(64) * np.uint64(16) + i % np.uint64(16) + np.uint64(1)))
    random = words >> i % np.uint64(64) // np.uint64(16) * np.uint64(16) & np.uint64(0xFFFF)
    bits = np.array(value, np.float32).view(np.uint32) + random.astype(np.uint32)
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


def seed_of(spec):
    """The seed of a table as its format has it: FNV-1a of the name, on the seed's hash."""
    value = int(mix(spec.seed)[0])
    for byte in spec.name.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return np.uint64(value)


def stored(path, values, spec, ids=None, step=1):
    store = TableStore.create(path, spec)
    ids = np.arange(len(values)) if ids is None else ids
    store.write(ids, np.ascontiguousarray(values, np.float32), step=step)
    return store


@pytest.mark.parametrize("dim", [1, 7, 64, 150])
@pytest.mark.parametrize("rule", ["adagrad", "adam"])
def test_each_step_is_computed_in_float32_and_then_rounded(rule, dim, memory_path, rng):
    case = cases(rule)[-1]
    spec = spec_of(case, dim=dim, init=Normal(1.0), seed=7, dtype="bfloat16")
    store = TableStore.create(memory_path / "table", spec)
    ids = np.array([3, -8, 1 << 60])
    values = store.read(ids)
    slots = [np.zeros((len(ids), dim), np.float32) for _ in case.slots]
    for step in range(1, 5):
        grads = rng.standard_normal((len(ids), dim)).astype(np.float32)
        store.push(ids, grads, case.named)
        for row, key in enumerate(ids.view(np.uint64)):
            case.update(values[row], grads[row], [slot[row] for slot in slots], step)
            values[row] = rounded(values[row], seed_of(spec), key, step)
        rows, _ = store.read_rows(ids)
        assert (rows == np.concatenate([values, *slots], axis=1)).all()
        assert (store.read(ids) == values).all()


def test_some_roundings_are_as_they_ever_were(memory_path):
    """Golden values: what a table was trained to does not depend on the release."""
    spec = TableSpec("t", 4, "sgd", seed=7, dtype="bfloat16")
    values = np.tile(np.array([1 + 2**-8, -3.3, 1e-40, 0.1], np.float32), (4, 1))
    store = stored(memory_path / "table", values, spec, step=9)

    bits = store.read(np.arange(4)).view(np.uint32) >> 16
    assert bits.tolist() == [
        [16256, 49236, 1, 15821],
        [16256, 49235, 1, 15820],
        [16257, 49235, 1, 15821],
        [16256, 49236, 1, 15820],
    ]


def test_what_is_lost_by_rounding_is_not_lost_on_average(memory_path):
    """Steps of an eighth of what the type can resolve: rounded to the nearest, nothing would ever change."""
    spec = TableSpec("t", 1000, "sgd", init=Constant(1.0), dtype="bfloat16")
    store = TableStore.create(memory_path / "table", spec)
    step = np.full((10, 1000), 2.0**-10, np.float32)
    for _ in range(100):
        store.push(np.arange(10), step, SGD.named | {"lr": -1.0}, distinct=True)

    values = store.read(np.arange(10))
    assert abs(values.mean() - (1 + 100 * 2.0**-10)) < 1e-3
    assert len(np.unique(values)) > 5


def test_ends_of_the_range_stay_what_they_are(memory_path):
    """A NaN whose bits would round to infinity, infinities, the largest number, zeros of both signs."""
    bits = np.array([[0x7F800001, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0xFF7FFFFF, 0, 0x80000000]], np.uint32)
    values = np.repeat(bits, 500, axis=0).view(np.float32)
    store = stored(memory_path / "table", values, TableSpec("t", 8, "sgd", dtype="bfloat16"))

    found = store.read(np.arange(500))
    assert np.isnan(found[:, :2]).all()
    assert (found[:, 2:4] == [np.inf, -np.inf]).all()
    assert np.isfinite(found[:, 4:6]).all()
    assert (found[:, 6:].view(np.uint32) == [0, 0x80000000]).all()


@pytest.mark.parametrize("updates", ["lazy", "catch_up"])
def test_rows_round_trip_and_are_the_same_on_any_number_of_shards(updates, memory_path, rng):
    """Snapshot and write keep every bit, and training goes on with the same ones."""
    case = next(case for case in cases("adam") if case.named["weight_decay"])
    spec = spec_of(case, dim=9, init=Normal(1.0), updates=updates, dtype="bfloat16")
    one = TableStore.create(memory_path / "one", spec)
    parts = [TableStore.create(memory_path / f"part{part}", spec) for part in range(3)]
    ids = np.arange(30)
    for step in range(20):
        if step == 10:
            with one.snapshot() as snapshot:
                for batch in snapshot:
                    for part, store in enumerate(parts):
                        mine = batch.heads["id"] % 3 == part
                        history = snapshot.history if updates == "catch_up" else None
                        store.write(batch.heads["id"][mine], batch.rows[mine], step=snapshot.step, history=history)
        some, grads = rng.permutation(ids)[:8], rng.standard_normal((8, 9)).astype(np.float32)
        one.push(some, grads, case.named)
        if step >= 10:
            for part, store in enumerate(parts):
                store.push(some[some % 3 == part], grads[some % 3 == part], case.named)
    for part, store in enumerate(parts):
        assert (store.read_rows(ids[part::3])[0] == one.read_rows(ids[part::3])[0]).all()


def test_a_row_that_catches_up_begins_from_the_rounded_value(memory_path):
    """And is read as it is computed: it is rounded when it is stored."""
    case = Case("sgd", (0.5, 0.9, 0.0, 0.01), ("momentum",))
    spec = spec_of(case, dim=5, init=Normal(1.0), updates="catch_up", dtype="bfloat16")
    store = TableStore.create(memory_path / "table", spec)
    ids = np.array([4])
    store.push(ids, np.full((1, 5), 0.1, np.float32), case.named)
    row = store.read_rows(ids)[0][0]
    value, momentum = row[:5].copy(), row[5:10].copy()
    assert (value.view(np.uint32) & 0xFFFF == 0).all()
    for step in range(2, 6):
        store.push(ids[:0], np.empty((0, 5), np.float32), case.named)
        case.update(value, np.zeros(5, np.float32), [momentum], step)

    assert (store.read(ids)[0] == value).all()
    assert (value.view(np.uint32) & 0xFFFF != 0).any()


def test_values_take_half_the_memory(memory_path):
    full, half = (
        TableStore.create(memory_path / dtype, TableSpec("t", 64, "sgd", init=Zeros(), dtype=dtype))
        for dtype in ("float32", "bfloat16")
    )
    for store in (full, half):
        for start in range(0, 20_000, 1000):
            store.push(np.arange(start, start + 1000), np.ones((1000, 64), np.float32), SGD.named)
    assert full.spec.row_bytes - half.spec.row_bytes == 128
    assert (full.used_bytes - half.used_bytes) / 20_000 == pytest.approx(128, rel=0.1)
    with pytest.raises(ValueError, match="dtype: must be one of float32, bfloat16"):
        TableSpec("t", 64, "sgd", dtype="float16")
