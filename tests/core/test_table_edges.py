"""A table far in its life, and the order in which its rows go: no counter comes to an end, and no chance decides."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_rules import Case, cases
from table_model import SGD, check_places, rows_of, spec_of

from psd_core import InvalidArray, _arena
from psd_core.initial import Zeros
from psd_core.table import TableSpec, TableStore, mixed

EDGES = [2**31 - 2, 2**32 - 2, 2**53 - 2]
ROOT = ("check", "commit", "step", "version", "clock", "rows")
CONTROL = 4096


def at_version(path, store, version):
    """The store, closed and opened with another version in its root."""
    store.close(remove=False)
    data = bytearray(path.read_bytes())
    words = np.frombuffer(data, np.uint64, offset=CONTROL)
    root_words = -(-(25 + store.spec.notes) * 8 // 64) * 8
    root = words[16 + int(words[0]) % 2 * root_words :][:root_words]
    assert root[0] == _arena.checksum(root[1:].tobytes())
    root[ROOT.index("version")] = version
    root[0] = _arena.checksum(root[1:].tobytes())
    with path.open("r+b") as file:
        file.write(data)
    return TableStore.open(path)


@pytest.fixture
def path(memory_path):
    return memory_path / "table"


def taken(store, since=None):
    with store.snapshot(since) as snapshot:
        return snapshot.mark, snapshot.is_full, sorted(int(key) for batch in snapshot for key in batch.heads["id"])


@pytest.mark.parametrize("edge", EDGES)
def test_rows_at_rest_are_in_every_snapshot_after_any_number_of_pushes(edge, path):
    """Their version was kept in 32 bits: after 2^31 more pushes they were taken for rows to come, and left out."""
    store = TableStore.create(path, TableSpec("t", 1, "sgd", max_rows=1300, push_max=64))
    one = np.ones((1, 1), np.float32)
    store.push(np.array([7]), one, SGD.named)
    store = at_version(path, store, edge)
    assert taken(store)[2] == [7]
    mark = taken(store)[0]
    for number in range(4):
        store.push(np.array([number]), one, SGD.named)
        assert taken(store)[2] == [*range(number + 1), 7]
        assert taken(store, mark)[1:] == (False, list(range(number + 1)))

    assert store.counters()["version"] == edge + 4


@pytest.mark.parametrize("edge", EDGES)
def test_marks_tell_the_order_of_uses_however_far_they_are_apart(edge, path):
    """In 32 bits what was not used for 2^31 clocks was the newest of all."""
    store = TableStore.create(path, TableSpec("t", 1, "sgd", max_rows=3))
    one = np.ones((1, 1), np.float32)
    for key, clock in enumerate([1, edge, edge + 1]):
        store.push(np.array([key]), one, SGD.named, clock=clock)
    store.push(np.array([9]), one, SGD.named, clock=edge + 2)
    assert rows_of(store).keys() == {1, 2, 9}
    store.read(np.array([1]), clock=edge + 3)
    store.expire(edge + 5, 2)
    assert rows_of(store).keys() == {1}
    store.close(remove=False)
    store = TableStore.open(path)
    store.expire(3 * edge, edge)
    assert rows_of(store).keys() == set()


@pytest.mark.parametrize("edge", EDGES)
def test_a_row_catches_up_after_any_number_of_steps(edge, path):
    """A row's step was kept in 32 bits: what had rested for 2^31 steps was taken for one that is ahead."""
    case = Case("sgd", (0.0, 0.0, 0.0, 0.0), ())
    spec = spec_of(case, dim=1, updates="catch_up")
    store = TableStore.create(path, spec)
    decaying = {**case.named, "lr": 0.5, "weight_decay": 0.5}
    resting = np.array([[1, *case.scalars]])
    row = np.array([[64.0, 0, 0]], np.float32)[:, : spec.layout.width]
    store.write(np.array([7]), row, step=edge, history=resting)
    for _ in range(3):
        store.push(np.array([8]), np.zeros((1, 1), np.float32), decaying)

    assert store.counters()["step"] == edge + 3
    assert store.read(np.array([7])).tolist() == [[27.0]]
    assert store.snapshot().history[:, 0].tolist() == [1, edge + 1]


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("case", [cases(rule)[0] for rule in ("adam", "adagrad", "adamax", "nadam")], ids=str)
def test_rules_compute_with_steps_as_they_are(case, edge, path):
    """The step counts in 64 bits, in tensors and rows alike, and enters the arithmetic in float64."""
    rate = dict(case.named, lr_decay=1e-9) if case.rule == "adagrad" else dict(case.named)
    case = Case(case.rule, tuple(rate.values()), case.flags)
    store = TableStore.create(path, spec_of(case, dim=1, init=Zeros()))
    store.write(np.empty(0, np.uint64), np.empty((0, store.spec.layout.width), np.float32), step=edge)
    param, ones = np.zeros(1, np.float32), np.ones(1, np.float32)
    slots = case.new_slots(param)
    for step in range(edge + 1, edge + 4):
        case.update(param, ones, slots, step)
        store.push(np.array([5]), ones[:, None], case.named)
    assert store.counters()["step"] == edge + 3
    assert store.read(np.array([5]))[0] == param != 0
    if case.rule == "adagrad":
        fresh = np.zeros(1, np.float32)
        case.update(fresh, ones, case.new_slots(fresh), edge + 3)
        assert fresh == -np.float32(rate["lr"] / (1 + float(edge + 2) * 1e-9)) / (np.float32(1) + np.float32(rate["eps"]))


def test_a_step_that_a_history_could_not_tell_apart_is_refused(path):
    store = TableStore.create(path, spec_of(SGD, dim=1, updates="catch_up"))
    none = np.empty(0, np.uint64), np.empty((0, store.spec.layout.width), np.float32)
    for step, history in ((2**53 + 1, None), (5, np.array([[2.0**53 + 2, 1, 0, 0, 0]]))):
        with pytest.raises(InvalidArray, match=r"(step|history): expected .* 9007199254740992"):
            store.write(*none, step=step, history=history)
    assert store.counters()["step"] == 0


@pytest.mark.parametrize("salt", [None, 5])
def test_which_rows_go_is_a_function_of_their_uses(salt, path, rng):
    """Those not used for longest, and of these in the order of their ids' hash; whatever the salt is, wherever they lie."""
    most = 2000
    store = TableStore.create(path, TableSpec("t", 1, "sgd", max_rows=most), salt=salt)
    used: dict[int, int] = {}
    evicted = expired = 0
    for clock in range(1, 120):
        ids = np.unique(rng.integers(0, 6000, 150)).astype(np.uint64)
        if clock % 7 == 3:
            store.read(ids, clock=clock)
            used |= dict.fromkeys([key for key in ids.tolist() if key in used], clock)
            continue
        if clock % 10 == 1:
            gone = [key for key, last in used.items() if clock - last > 8]
            used = {key: last for key, last in used.items() if clock - last <= 8}
            expired += len(gone)
            store.expire(clock, 8)
        if clock % 40 == 9:
            store.close(remove=False)
            store = TableStore.open(path)
        store.push(ids, np.zeros((len(ids), 1), np.float32), SGD.named, clock=clock)
        used |= dict.fromkeys(ids.tolist(), clock)
        keys = np.array(list(used), np.uint64)
        order = np.lexsort((mixed(keys), list(used.values())))
        for key in keys[order[: max(0, len(used) - most)]].tolist():
            del used[key]
            evicted += 1
        assert rows_of(store).keys() == used.keys()
        check_places(store)

    counters = store.counters()
    assert (counters["evicted"], counters["expired"], counters["refused"]) == (evicted, expired, 0)
    assert evicted > 1000
    assert expired > 100


def test_rows_that_are_written_again_as_used_when_they_were_go_once(path):
    """The heap of old rows had them twice; a push that evicted several gave one place to two rows."""
    most = 40
    store = TableStore.create(path, TableSpec("t", 1, "sgd", max_rows=most))
    for key in range(most + 1):  # the last one makes room, so all that are old are known
        store.push(np.array([key]), np.ones((1, 1), np.float32), SGD.named, clock=key + 1)
    clock = store.counters()["clock"]
    for _ in range(2):
        for batch in store.walk():
            store.write(batch.heads["id"].copy(), batch.rows, clock=batch.heads["used"].copy())
    assert store.counters()["clock"] == clock
    for key in range(100, 100 + most, 4):
        store.push(np.arange(key, key + 4), np.ones((4, 1), np.float32), SGD.named, clock=key)
        check_places(store)

    assert rows_of(store).keys() == set(range(100, 100 + most))


def test_marks_of_rows_that_are_written_do_not_move_the_tables_clock(path):
    """A reader marks rows beyond it. Where those alone moved it, as slots begin anew, shards had clocks of their own."""
    store = TableStore.create(path, TableSpec("t", 1, "sgd", max_rows=1300, push_max=64))
    one = np.ones((1, 1), np.float32)
    store.push(np.array([1]), one, SGD.named, clock=10)
    store.read(np.array([1]), clock=20)
    store.write(np.array([1, 2]), np.ones((2, 1), np.float32), clock=np.array([20, 30], np.uint64))
    assert store.counters()["clock"] == 10

    store.expire(25, 3)
    assert rows_of(store).keys() == {2}
    store.write(np.array([3, 4]), np.ones((2, 1), np.float32), clock=np.array([5, 22], np.uint64))
    store.expire(25, 3)
    assert rows_of(store).keys() == {2, 4}
    store.push(np.array([6]), one, SGD.named, clock=8)  # of a caller whose clock falls
    store.expire(26, 3)
    assert rows_of(store).keys() == {2}


def test_which_ids_are_admitted_is_a_function_of_what_was_pushed(path, rng):
    """Sightings of more ids than are remembered give way to each other, by a hash that has no salt."""
    batches = [(rng.zipf(1.2, 4000) % 100_000).astype(np.int64) for _ in range(12)]
    found = []
    for number in range(2):
        spec = TableSpec("t", 1, "sgd", max_rows=500, admit_after=3, admit_probability=0.75)
        store = TableStore.create(path.with_name(str(number)), spec)
        for ids in batches:
            store.push(ids, np.ones((len(ids), 1), np.float32), SGD.named)
        found.append((rows_of(store), store.counters()["unadmitted"]))

    assert {key: found[0][0][key] for key in sorted(found[0][0])} == {key: found[1][0][key] for key in sorted(found[1][0])}
    assert found[0] == found[1]
