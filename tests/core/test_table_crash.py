"""A table's partition after kill -9: copies at the stores of the protocol, and processes killed at random instants."""

import sys
from collections import Counter

import numpy as np
import pytest
from helpers_rules import Case
from killed_vectors import copy_sparse_file
from random_deaths import last_words_of_killed_processes
from table_model import SGD, check_places, rows_of, spec_of

from psd_core.initial import Zeros
from psd_core.table import CRASH_POINTS, TableSpec, TableStore

BEFORE_COMMIT = ("row", "record", "root", "commit", "index.copy")
"""Points at which death leaves what the commit before has left; at the others the commit under way has happened."""


SAMPLED = {"row": 5, "flip": 3, "index.copy": 3}
"""Points that a push comes by dozens of times, and of how many of them one is copied."""

SIGHTINGS = 4
"""Number of the region."""

DECAYING = Case("sgd", (0.5, 0.0, 0.0, 0.125), ())
"""SGD that changes rows which a push does not touch."""


class Watcher:
    """Opens copies of the file at its points, as the next process would; compares them with the commits around the point."""

    def __init__(self, path):
        self.path = path
        self.store = None
        self.error = None
        self.seen = Counter()
        self._copy = path.with_name("copy")
        self._committed = None
        self._waiting = []

    def __call__(self, point):
        """Keep the first error: nothing can be raised through C."""
        self.seen[point] += 1
        if self.store is not None and self.error is None:
            try:
                self._look(point)
            except BaseException as error:  # noqa: BLE001 - a failed assertion too
                self.error = error

    def _look(self, point):
        if point == "done":
            self._committed = self._state(self.store)
            assert all(state == self._committed for state in self._waiting)
            self._waiting.clear()
            return
        if self.seen[point] % SAMPLED.get(point, 1):
            return
        copy_sparse_file(self.path, self._copy)
        found = TableStore.open(self._copy)
        state = self._state(found)
        check_places(found)
        if point in BEFORE_COMMIT:
            assert state == self._committed
        else:
            self._waiting.append(state)
        if sum(self.seen.values()) % 5 == 0:
            self._go_on(found)
        found.close(remove=True)

    def _state(self, store):
        # Not by the methods that take the lock of whoever is interrupted here.
        notes = np.empty(store.spec.notes, np.uint64)
        store._partition.notes(notes)
        counters = {name: value for name, value in store._partition.counters().items() if name not in ("reads", "hits")}
        first, end = store._partition.removals()
        removed = np.empty(end - first, np.uint64)
        store._partition.removed(first, removed)
        start, size = store._partition.regions[SIGHTINGS]
        sightings = np.fromfile(store._path, np.uint64, size // 8, offset=start)
        history = np.empty((store._partition.logged, 1 + len(SGD.scalars)))
        store._partition.history(history)
        return rows_of(store), notes.tolist(), counters, removed.tolist(), sightings.tobytes(), history.tobytes()

    def _go_on(self, store):
        """A push after the crash finds every row as it is, and room for new ones."""
        rate, decay = np.float32(0.25), np.float32(DECAYING.named["weight_decay"] if store.spec.catches_up else 0)
        ids = np.arange(60, 90, dtype=np.uint64)
        before = store.read(ids)
        grads = np.arange(30 * store.spec.dim, dtype=np.float32).reshape(30, -1)
        store.push(ids, grads, DECAYING.named | {"lr": float(rate), "weight_decay": float(decay)})
        kept = store.read_rows(ids)[1]
        assert (store.read(ids) == before - rate * (np.where(kept[:, None], grads, 0) + decay * before)).all()
        check_places(store)


@pytest.mark.parametrize(("admit_after", "updates"), [(1, "lazy"), (2, "lazy"), (1, "catch_up")])
def test_a_copy_taken_at_stores_of_every_kind_opens_as_old_or_new(admit_after, updates, memory_path):
    """Pushes that grow the index and reach the limit of rows, removals and expiry: what the file holds is what death leaves.

    Where rows catch up, the rate changes with every other push.
    """
    rng = np.random.default_rng(5)
    path = memory_path / "table"
    watcher = Watcher(path)
    most, case = (265, SGD) if updates == "lazy" else (249, DECAYING)
    options = {"dim": 1, "admit_after": admit_after, "updates": updates}
    spec = spec_of(case, max_rows=most, notes=1, push_max=64, **options)
    store = watcher.store = TableStore.create(path, spec, crash_point=watcher)
    watcher("done")
    for number in range(14):
        ids = np.concatenate([rng.integers(0, 500, 20), 1000 + 35 * (number // admit_after) + np.arange(35)])
        grads, scalars = rng.standard_normal((55, 1)).astype(np.float32), case.named | {"lr": 0.5 ** (number // 2)}
        store.push(ids, grads, scalars, clock=number, notes=np.array([number], np.uint64))
    store.remove(np.arange(0, 500, 7))
    rows = np.ones((20, spec.layout.width), np.float32)
    store.write(np.arange(20), rows, clock=14, history=np.array([[1, *case.scalars]]) if spec.catches_up else None)
    store.expire(14, 4)

    counters = store.counters()
    if watcher.error is not None:
        raise watcher.error
    assert set(watcher.seen) == set(CRASH_POINTS)
    assert min(counters[name] for name in ("created", "expired", "removed")) >= 5
    assert counters["evicted" if admit_after == 1 else "unadmitted"] > 20
    watcher.store = None
    store.close(remove=True)


DIM, KEYS = 4, np.arange(0, 5000, 5)


def train_until_killed(path, connection):
    """Push 1 to every row, over and over, and say how many pushes are acknowledged; every third push adds rows, too."""
    store = TableStore.open(path)
    done = int(store.notes()[0])
    while True:
        done += 1
        new = np.arange(10_000 + 200 * done, 10_200 + 200 * done)
        ids = np.concatenate([KEYS, new])
        store.push(ids, np.full((len(ids), DIM), -1, np.float32), {**SGD.named, "lr": 1.0}, notes=np.array([done], np.uint64))
        connection.send(done)


@pytest.mark.process
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forkserver as on Linux")
def test_death_at_random_instants_leaves_whole_pushes(memory_path):
    """One partition; each process goes on with what the one before it left, and every sum is exact."""
    path = memory_path / "table"
    TableStore.create(path, TableSpec("t", DIM, "sgd", init=Zeros(), max_rows=250_000, push_max=2000, notes=1)).close(
        remove=False
    )
    for acknowledged in last_words_of_killed_processes(train_until_killed, path):
        store = TableStore.open(path)
        done = int(store.notes()[0])
        assert done >= acknowledged
        assert (store.read(KEYS) == done).all()
        assert (store.read(np.arange(10_200, 10_200 + 200 * done)) == 1).all()
        assert store.counters()["step"] == done
        assert store.counters()["rows"] == len(KEYS) + 200 * done
        check_places(store)
        store.close(remove=False)
