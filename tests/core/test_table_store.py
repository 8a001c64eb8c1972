"""The store of a table's partition against a dict of rows, and what it refuses."""

import errno
import re
from pathlib import Path

import numpy as np
import pytest
from helpers_rules import Case, cases
from table_model import DIM, SGD, TableModel, check_places, rows_of, spec_of

from psd_core import InvalidArray
from psd_core import _store_file as files
from psd_core._arena import LARGE_PAGE_BYTES
from psd_core.arena import ArenaBusy, ArenaCorrupt, ArenaError, StoreClosed, StoreFull
from psd_core.initial import Zeros
from psd_core.table import ROWWISE_ADAGRAD, RowSums, TableSpec, TableStore, bytes_max, mixed


@pytest.fixture
def path(memory_path):
    """A place for a table."""
    return memory_path / "table"


def grads_for(rng, n, dim=DIM):
    return rng.standard_normal((n, dim)).astype(np.float32)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_a_row_has_the_bits_of_a_dense_tensor_under_every_rule(case, path, rng):
    """Also of dims that are no multiple of a vector, and with ids that repeat in a push."""
    store = TableStore.create(path, spec_of(case, dim=37))
    model = TableModel(store, case)
    for _ in range(4):
        ids = rng.integers(0, 12, 9).astype(np.uint64)
        grads = grads_for(rng, 9, 37)
        model.push(ids, grads)
        store.push(ids, grads, case.named)

    assert rows_of(store) == model.flat()


def test_a_long_row_with_a_scale_is_worked_off_in_tiles(path, rng):
    case = Case("adam", (0.01, 0.9, 0.99, 1e-8, 0.0), ())
    store = TableStore.create(path, spec_of(case, dim=700))
    model = TableModel(store, case)
    grads = grads_for(rng, 3, 700)
    model.push(np.array([4, 5, 4]), grads)
    total = np.stack([grads[0] + grads[2], grads[1]]) * np.float32(4)
    store.push(np.array([4, 5]), total, case.named, scale=0.25, distinct=True)

    assert rows_of(store) == model.flat()


def test_rowwise_adagrad_keeps_one_sum_for_a_row(path):
    """As FBGEMM: the mean of the squares is added, and its root divides; also of the mean of several workers' gradients."""
    spec = TableSpec("t", 3, ROWWISE_ADAGRAD, constants=(1.0,))
    store = TableStore.create(path, spec)
    sums = np.array([[12, 0, 0], [0, -12, 0]], np.float32)
    store.push(np.array([8, 9]), sums, {"lr": 0.5, "lr_decay": 0, "weight_decay": 0, "eps": 0}, scale=0.25)

    rows, found = store.read_rows(np.array([8, 9, 10]))

    assert found.tolist() == [True, True, False]
    assert rows.tolist() == [[-0.75, 0, 0, 4], [0, 0.75, 0, 4], [0, 0, 0, 1]]


@pytest.mark.parametrize("seed", range(3))
def test_random_operations_leave_what_they_leave_of_a_dict(seed, path):
    """Pushes, writes, removals, expiry, and opening again, while the index grows and shrinks its graves."""
    rng = np.random.default_rng(seed)
    case = Case("adagrad", (0.05, 0.0, 0.0, 1e-10), ())
    spec = spec_of(case, notes=1, max_rows=10_000)
    store = TableStore.create(path, spec)
    model, used = TableModel(store, case), {}
    for number in range(150):
        operation = rng.choice(["push", "push", "push", "write", "remove", "expire", "read", "open"])
        ids = (rng.zipf(1.3, rng.integers(0, 300)) % 4000).astype(np.int64) - 2000
        keys = ids.view(np.uint64).tolist()
        if operation == "push":
            grads = grads_for(rng, len(ids))
            model.push(ids.view(np.uint64), grads)
            store.push(ids, grads, case.named, clock=number, notes=np.array([number], np.uint64))
            assert store.notes().tolist() == [number]
        elif operation == "write":
            rows = np.abs(grads_for(rng, len(ids), 2 * DIM))
            store.write(ids, rows, clock=number)
            model.rows |= {key: [row[:DIM], row[DIM:]] for key, row in zip(keys, rows, strict=True)}
        elif operation == "remove":
            gone = model.rows.keys() & set(keys[:50])
            assert store.remove(ids[:50]) == len(gone)
            model.rows = {key: row for key, row in model.rows.items() if key not in gone}
        elif operation == "expire":
            store.expire(number, 20)
            model.rows = {key: row for key, row in model.rows.items() if number - used[key] <= 20}
        elif operation == "read":
            before = rows_of(store)
            values = store.read(ids, clock=number)
            assert all((value == model.row(key)[0]).all() for key, value in zip(keys, values, strict=True))
            assert rows_of(store) == before
        else:
            store.close(remove=False)
            store = model._store = TableStore.open(path)
        if operation in ("push", "write", "read"):
            used |= dict.fromkeys(keys, number)
        assert store.counters()["rows"] == len(model.rows)
    assert rows_of(store) == model.flat()
    check_places(store)


def test_the_index_grows_little_by_little_and_takes_little(path):
    """42 to 44.5 bytes beside value and slots; behind the step of growth memory goes back at once."""
    spec = TableSpec("t", 1, "sgd", max_rows=340_000)
    store = TableStore.create(path, spec)
    rows = 150_000
    for start in range(0, rows, 2500):
        if start % 10_000 == 0:
            store.close(remove=False)
            store = TableStore.open(path)
        ids = np.arange(start, start + 2500)
        store.push(ids, np.full((2500, 1), -1, np.float32), SGD.named | {"lr": 1.0}, distinct=True)

    counters = store.counters()
    assert counters["rows"] == counters["created"] == rows
    assert (store.read(np.arange(rows + 5))[:, 0] == [1] * rows + [0] * 5).all()
    assert 0.6 < rows / (8 * counters["buckets"]) <= 0.8
    assert store.used_bytes - 4 * rows < 48 * rows
    check_places(store)


def test_a_push_in_two_parts_is_one_push(path, rng):
    """Ids that come again, in either part, are summed in the order in which they come; the limit of a push is for both."""
    case = Case("adam", (0.01, 0.9, 0.99, 1e-8, 0.0), ())
    ids, grads = np.array([4, 5, 9, 5, 4, 6, 4]), grads_for(rng, 7)
    stores = [TableStore.create(path.with_name(name), spec_of(case, push_max=7)) for name in ("one", "two")]
    stores[0].push(ids, grads, case.named, scale=0.5)
    stores[1].push(ids[:3], grads[:3], case.named, scale=0.5, more=(ids[3:], grads[3:]))

    assert rows_of(stores[1]) == rows_of(stores[0])
    with pytest.raises(InvalidArray, match="at most 7 in a push, got 8"):
        stores[1].push(ids, grads, case.named, more=(ids[:1], grads[:1]))
    with pytest.raises(InvalidArray, match="more: expected"):
        stores[1].push(ids[:3], grads[:3], case.named, more=(ids[3:], grads[:3]))


def test_large_pages_hold_the_rows_where_the_system_has_them(path):
    """Whole ones alone: beside them nothing but growth is taken, and opening finds them again."""
    spec = TableSpec("t", 256, "sgd", max_rows=125_000)
    store = TableStore.create(path, spec)
    ids = np.arange(8_000)
    for part in np.split(ids, 8):
        store.push(part, np.full((1000, 256), -1, np.float32), SGD.named | {"lr": 1.0}, distinct=True)

    (lying,) = (lines for lines in mappings() if lines[0].endswith(str(path)))
    start = int(lying[0].split("-")[0], 16)
    assert start % LARGE_PAGE_BYTES == 0
    assert store.used_bytes < 8_000 * (1024 + 32) + (1 << 20)
    large_kb = sum(int(line.split()[1]) for line in lying if line.startswith("ShmemPmdMapped:"))
    is_supported = store._partition.enlarge_page(2 * LARGE_PAGE_BYTES)
    assert large_kb * 1024 >= 2 * LARGE_PAGE_BYTES * is_supported
    store.close(remove=False)
    assert (TableStore.open(path).read(ids) == 1).all()


def mappings():
    """Lines of smaps, those of each mapping together."""
    text = Path("/proc/self/smaps").read_text()
    return [part.splitlines() for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text)]


def test_at_the_limit_rows_not_used_for_long_make_room(path):
    spec = TableSpec("t", 1, "sgd", max_rows=200)
    store = TableStore.create(path, spec)
    hot = np.arange(50)
    for clock in range(40):
        cold = 1000 + 30 * clock + np.arange(30)
        ids = np.concatenate([hot, cold])
        store.push(ids, np.full((80, 1), -1, np.float32), SGD.named | {"lr": 1.0}, clock=clock)

    counters = store.counters()
    assert counters["rows"] <= spec.max_rows == 200
    assert counters["created"] == 50 + 40 * 30 == counters["rows"] + counters["evicted"]
    assert store.read(hot)[:, 0].tolist() == [40] * 50
    assert counters["refused"] == 0
    check_places(store)


def test_a_push_may_replace_all_rows_at_the_limit(path):
    """All of them are older; what it has itself, and nothing else, is left."""
    store = TableStore.create(path, TableSpec("t", 1, "sgd", max_rows=200))
    for clock, start in enumerate([0, 1000, 2000]):
        store.push(start + np.arange(200 - clock), np.ones((200 - clock, 1), np.float32), SGD.named, clock=clock)

    assert store.counters()["refused"] == 0
    assert sum(id_ >= 2000 for id_ in rows_of(store)) == 198
    check_places(store)


@pytest.mark.parametrize("order", [1, -1])
def test_of_rows_that_are_restored_into_less_room_those_used_last_stay(order, path):
    """Whether the older ones come first or last: each has the clock of its own last use."""
    store = TableStore.create(path, TableSpec("t", 1, "sgd", max_rows=200))
    used = np.arange(1, 401, dtype=np.uint64)[::order]
    for first in range(0, 400, 20):
        part = used[first : first + 20]
        store.write(part.astype(np.uint64), np.ones((20, 1), np.float32), clock=part.copy())

    assert len(rows_of(store)) == 200
    assert min(rows_of(store)) == 201


@pytest.mark.parametrize("at_limit", ["refuse", "evict"])
def test_what_finds_no_room_is_counted_and_hits_no_other_row(at_limit, path):
    """PERSIA gave the gradient of a row that was not there to the next one. Nothing can be evicted: all are of this push."""
    store = TableStore.create(path, TableSpec("t", 1, "sgd", max_rows=10, at_limit=at_limit))
    store.push(np.arange(30), np.arange(30, dtype=np.float32).reshape(30, 1), SGD.named)

    counters = store.counters()
    assert (counters["rows"], counters["created"], counters["refused"]) == (10, 10, 20)
    assert store.read(np.arange(30))[:, 0].tolist() == [-0.5 * i for i in range(10)] + [0.0] * 20


def test_a_use_counts_only_with_a_clock(path):
    store = TableStore.create(path, TableSpec("t", 1, "sgd"))
    store.push(np.array([1, 2, 3]), np.zeros((3, 1), np.float32), SGD.named, clock=10)

    store.read(np.array([1]), clock=20)
    store.read(np.array([2, 99]))
    store.expire(20, 5)

    assert rows_of(store).keys() == {1}
    assert store.counters()["expired"] == 2


def test_no_space_is_an_error_that_changes_nothing(path, rng, monkeypatch):
    store = TableStore.create(path, spec_of(SGD))
    store.push(np.arange(10), grads_for(rng, 10), SGD.named)
    before, counters = rows_of(store), store.counters()

    def full(*_):
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "posix_fallocate", full)
        with pytest.raises(StoreFull, match=r"no space for .* bytes"):
            store.push(np.arange(20_000), grads_for(rng, 20_000), SGD.named)
        with pytest.raises(StoreFull):
            TableStore.create(path.with_name("other"), spec_of(SGD))
        assert [file.name for file in path.parent.iterdir()] == ["table"]
        assert (rows_of(store), store.counters()) == (before, counters)
    store.push(np.arange(20_000), grads_for(rng, 20_000), SGD.named)
    assert store.counters()["rows"] == 20_000


def test_arguments_that_do_not_fit_are_refused_by_name(path):
    store = TableStore.create(path, spec_of(SGD, push_max=3, notes=2))
    ids, grads = np.arange(3), np.zeros((3, DIM), np.float32)
    for arguments, says in [
        ((ids.astype(np.int32), grads, SGD.named), "ids: expected a 1-D array of int64 or uint64, got 1-D int32"),
        ((np.arange(4), np.zeros((4, DIM), np.float32), SGD.named), "ids: expected at most 3 in a push, got 4"),
        ((ids, grads[:2], SGD.named), "grads: expected a C-contiguous"),
        ((ids, grads.astype(np.float64), SGD.named), "grads: expected float32, float16 or uint16"),
        ((ids, grads, {"lr": 1.0}), "scalars: expected lr, momentum"),
    ]:
        with pytest.raises(ValueError, match=says):
            store.push(*arguments)
    with pytest.raises(InvalidArray, match="notes: expected 2 uint64"):
        store.push(ids, grads, SGD.named, notes=np.zeros(3, np.uint64))
    with pytest.raises(InvalidArray, match="out: expected a writable"):
        store.read(ids, np.zeros((2, DIM), np.float32))
    assert store.counters()["step"] == 0
    for options, says in [
        ({"dim": 0}, "dim: must be a whole number from 1"),
        ({"rule": "lamb"}, "rule: must be one of"),
        ({"flags": ("amsgrad",)}, "flags: must be some of"),
        ({"constants": (1.0,)}, "constants: must be none, got 1"),
        ({"max_rows": 0}, "max_rows: must be a whole number from 1 to 2147483648, got 0"),
        ({"at_limit": "wait"}, "at_limit: must be one of evict, refuse"),
    ]:
        with pytest.raises(ValueError, match=says):
            TableSpec(**({"name": "t", "dim": 2, "rule": "sgd"} | options))


def test_a_file_has_one_owner_and_says_what_is_wrong_with_it(path, rng):
    spec = spec_of(SGD, init=Zeros(), push_max=64, max_rows=200)
    store = TableStore.create(path, spec)
    store.push(np.arange(10), grads_for(rng, 10), SGD.named)
    with pytest.raises(ArenaError, match="holds a table already"):
        TableStore.create(path, spec_of(SGD))
    with pytest.raises(ArenaBusy):
        TableStore.open(path)
    store.close(remove=False)
    with pytest.raises(StoreClosed):
        store.read(np.arange(3))
    good = path.read_bytes()
    second_root = 4096 + 128 + 256
    for at, says in [(0, "magic"), (8, "format"), (40, "checksum"), (4096, "applied"), (second_root + 16, "root: .* checksum")]:
        bad = bytearray(good)
        bad[at] ^= 2
        path.write_bytes(bad)
        with pytest.raises(ArenaCorrupt, match=says):
            TableStore.open(path)
    path.write_bytes(good[:50_000])
    with pytest.raises(ArenaCorrupt, match="truncated"):
        TableStore.open(path)
    path.write_bytes(good)
    store = TableStore.open(path)
    assert store.spec == spec
    store.close(remove=True)
    assert not path.exists()


def of_hash(x):
    """The ids that have these hashes: SplitMix64's finalizer, backwards."""
    for shift, factor in ((31, 0x319642B2D24D8EC3), (27, 0x96DE1B173F119089), (30, 1)):
        x = (x ^ x >> np.uint64(shift) ^ x >> np.uint64(2 * shift)) * np.uint64(factor)
    return x


@pytest.mark.parametrize("half", ["upper", "lower"])
def test_ids_that_were_chosen_to_collide_do_not(half, path):
    """One tag for all would be a chain that each push follows to its end and no scan gets past; one slot, a quadratic sum."""
    numbers, ones = np.arange(20_000, dtype=np.uint64), np.ones((20_000, 1), np.float32)
    hashes = numbers | np.uint64(5 << 32) if half == "upper" else numbers << np.uint64(32) | np.uint64(5)
    ids = of_hash(hashes)
    assert (mixed(ids) == hashes).all()
    store = TableStore.create(path, TableSpec("t", 1, "sgd", max_rows=22_000))
    for start in range(0, 20_000, 2000):
        store.push(ids[start : start + 2000], ones[:2000], SGD.named | {"lr": -1.0}, clock=1)
    sums = RowSums(1)
    for _ in range(2):
        sums.add(ids, ones)

    assert rows_of(store).keys() == set(ids.tolist())
    assert (sums.values == 2).all()
    store.push(np.arange(4000), np.ones((4000, 1), np.float32), SGD.named, clock=2)
    assert store.counters()["evicted"] == 2000
    store.expire(20, 18)
    assert store.counters()["rows"] == 4000


def test_the_salt_of_a_table_decides_where_rows_lie_and_nothing_else(path, rng):
    grads, found = grads_for(rng, 3000), []
    for number, salt in enumerate([5, 5, None, None]):
        store = TableStore.create(path.with_name(str(number)), spec_of(SGD), salt=salt)
        store.push(np.arange(3000), grads, SGD.named)
        store.close(remove=False)
        store = TableStore.open(path.with_name(str(number)))
        found.append(rows_of(store))

    assert list(found[0]) == list(found[1]) != list(found[2]) != list(found[3])
    assert found[0] == found[1] == found[2] == found[3]


@pytest.mark.parametrize("admit_after", [1, 3])
@pytest.mark.parametrize("push_max", [500, 4000, 1 << 20])
@pytest.mark.parametrize(("dim", "rows"), [(1, 30_000), (64, 3000)])
def test_a_file_takes_no_more_than_is_said_however_it_is_used(memory_path, dim, rows, push_max, admit_after):
    """Pushes of many ids at once, at the limit and beyond it, evictions and removals; and it is no idle number."""
    spec = TableSpec("t", dim, "adagrad", max_rows=rows, push_max=push_max, admit_after=admit_after)
    store = TableStore.create(memory_path / "table", spec)
    most, count = 0, min(push_max, 3 * rows)
    grads, scalars = np.ones((count, dim), np.float32), dict.fromkeys(spec.facts.scalars, 0.1)
    for number in range(8):
        ids = np.arange(count) + number // 2 * count // 2
        store.push(ids, grads, scalars, clock=number, distinct=True)
        store.remove(ids[: count // 10])
        most = max(most, store.used_bytes)
    for start in range(0, 2 * rows, count):
        store.push(np.arange(start, start + count), grads, scalars, clock=9, distinct=True)
        most = max(most, store.used_bytes)
    store.close(remove=True)

    assert most <= bytes_max(spec)
    if admit_after == 1:  # else a push may bring more sightings than these
        assert bytes_max(spec) < 3.5 * max(most, 1 << 20)
