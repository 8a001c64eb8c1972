"""Reads of a table's partition beside pushes."""

import contextlib
import threading

import numpy as np
import pytest
from helpers_rules import Case
from table_model import SGD

from psd_core import _table_pages as pages
from psd_core import table
from psd_core._store_format import StoreClosed, StoreFull
from psd_core._table import ROWS
from psd_core.table import TableSpec, TableStore

KEYS, DIM, PUSHES = np.arange(3000), 33, 150


MOVING = Case("sgd", (1.0, 0.5, 0.0, 0.0), ("momentum",))


@pytest.mark.parametrize(("case", "updates"), [(SGD, "lazy"), (MOVING, "catch_up")], ids=["lazy", "catch_up"])
def test_a_read_sees_each_push_whole_or_not_at_all_while_the_index_grows(case, updates, memory_path):
    """Every other push adds 1 to all numbers of all of these rows, each brings new ones, and no read sees two sums at once.

    Where rows catch up, they are behind after each push in between.
    """
    spec = TableSpec("t", DIM, "sgd", case.flags, max_rows=1_000_000, updates=updates)
    store = TableStore.create(memory_path / "table", spec)
    seen, problems, is_over = set(), [], threading.Event()

    def read():
        out = np.empty((len(KEYS), DIM), np.float32)
        clock = 0
        while not is_over.is_set():
            clock += 1
            store.read(KEYS, out, clock=clock)
            if (out != out[0, 0]).any():
                problems.append(out.copy())
            seen.add(float(out[0, 0]))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    value, momentum = np.zeros(1, np.float32), np.zeros(1, np.float32)
    for number in range(PUSHES):
        ids = np.concatenate([KEYS[: len(KEYS) * (number % 2)], 10_000 + 200 * number + np.arange(200)])
        store.push(ids, np.full((len(ids), DIM), -1, np.float32), case.named | {"lr": 1.0}, distinct=True)
        if number % 2 or updates == "catch_up":
            grad = np.full(1, -(number % 2), np.float32)
            Case("sgd", (1.0, *case.scalars[1:]), case.flags).update(value, grad, [momentum][: len(case.slots)], number + 1)
    is_over.set()
    for reader in readers:
        reader.join()

    assert problems == []
    assert len(seen) > 1
    assert (store.read(KEYS) == value).all()


def test_a_reader_that_is_behind_takes_no_row_from_a_push_that_needs_room(memory_path):
    """It marks rows as used long ago, while the push that has found them looks for what was not used for longest."""
    spec = TableSpec("t", 4, "sgd", max_rows=1000, push_max=1000)
    store = TableStore.create(memory_path / "table", spec)
    hot = np.arange(500, dtype=np.uint64)
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            store.read(hot, clock=0)

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(1, 300):
        ids = np.concatenate([hot, np.arange(1000 * step, 1000 * step + 300, dtype=np.uint64)])
        store.push(ids, np.ones((800, 4), np.float32), SGD.named, clock=step, distinct=True)
    is_over.set()
    reader.join()

    counters = store.counters()
    assert counters["rows"] == counters["created"] - counters["evicted"] == 1000
    assert len({row.tobytes() for row in store.read(hot)[:, 1:]} | {row.tobytes() for row in store.read(hot)[:, :-1]}) < 10


def test_rows_that_a_reader_ahead_has_used_are_not_the_oldest(memory_path):
    """Clocks go around, and so would their age."""
    spec = TableSpec("t", 4, "sgd", max_rows=64, push_max=64)
    store = TableStore.create(memory_path / "table", spec)
    ids = np.arange(64, dtype=np.uint64)
    store.push(ids, np.ones((64, 4), np.float32), SGD.named, clock=1)
    store.read(ids[:32], clock=100)

    store.push(ids[:16] + 1000, np.ones((16, 4), np.float32), SGD.named, clock=2)
    store.expire(2, 0)

    assert store.counters()["evicted"] == 16
    assert store.read_rows(ids[:32])[1].all()


def test_a_push_that_is_behind_does_not_make_a_row_older(memory_path):
    """The marks of pushes, as those of reads, only go forward."""
    store = TableStore.create(memory_path / "table", TableSpec("t", 4, "sgd", max_rows=1000, push_max=64))
    ids = np.arange(8, dtype=np.uint64)
    store.push(ids, np.ones((8, 4), np.float32), SGD.named, clock=1)
    store.read(ids, clock=50)

    store.push(ids[:4], np.ones((4, 4), np.float32), SGD.named, clock=20)
    store.expire(60, 15)

    assert store.read_rows(ids)[1].all()


@pytest.mark.parametrize("is_full", [False, True])
def test_a_push_waits_for_no_page_that_another_thread_takes_ahead(is_full, memory_path, monkeypatch):
    """Where that finds no space the push takes it, as if nobody had tried."""
    take_space, waits, aheads = pages.take_space, [], []

    def noted(file, partition, region, have, end):
        if region == ROWS:
            is_ahead = threading.current_thread() is not threading.main_thread()
            (aheads if is_ahead else waits).append(have)
            if is_ahead and is_full:
                raise StoreFull("no space")
        take_space(file, partition, region, have, end)

    monkeypatch.setattr(pages, "_SHARE_MAX", 1.0)
    monkeypatch.setattr(pages, "take_space", noted)
    monkeypatch.setattr(table, "take_space", noted)
    store = TableStore.create(memory_path / "table", TableSpec("t", 256, "sgd", max_rows=60_000))
    ids, ones = np.arange(20_000), np.ones((500, 256), np.float32)
    for number, some in enumerate(ids.reshape(-1, 500)):
        if number == 10:
            waits.clear()  # a partition of less than a page waits
        store.push(some, ones, {**SGD.named, "lr": -1.0})
        if (thread := store._page_ahead._thread) is not None:
            thread.join()

    assert (len(waits) > 0) == is_full
    assert len(aheads) > 5
    assert (store.read(ids) == 1).all()
    store.close(remove=True)


class NotedLock:
    """A lock that notes when another thread than the one that made it asks for it."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self._lock = threading.Lock()
        self._owner = threading.current_thread()

    def acquire(self) -> None:
        if threading.current_thread() is not self._owner:
            self.asked.set()
        self._lock.acquire()

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def test_a_store_is_closed_while_a_push_begins_to_take_a_page_ahead(memory_path, monkeypatch):
    """The thread for it is made and has not started: `close` waits for it, and none begins after that."""
    monkeypatch.setattr(pages, "_SHARE_MAX", 1.0)
    store = TableStore.create(memory_path / "table", TableSpec("t", 256, "sgd", max_rows=60_000))
    store._writing = store._page_ahead._lock = lock = NotedLock()
    closing, errors, make = [], [], threading.Thread

    def close() -> None:
        try:
            store.close(remove=True)
        except RuntimeError as error:
            errors.append(error)
        lock.asked.set()

    class Made(make):
        def start(self) -> None:
            if self.name == "psd-table-page" and not closing:
                closing.append(make(target=close))
                closing[0].start()
                lock.asked.wait()
            super().start()

    monkeypatch.setattr(pages.threading, "Thread", Made)
    ones = np.ones((500, 256), np.float32)
    with contextlib.suppress(StoreClosed):  # whoever has the lock first
        for number in range(40):
            store.push(np.arange(500) + 500 * number, ones, SGD.named)
    closing[0].join()

    assert errors == []
    assert not store._page_ahead._thread.is_alive()
    TableStore.create(memory_path / "table", store.spec).close(remove=True)


def test_a_push_goes_on_where_the_system_has_no_room_for_a_thread(memory_path, monkeypatch):
    """It was made before anything is taken ahead, and must not be sent again."""

    def start(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(pages, "_SHARE_MAX", 1.0)
    monkeypatch.setattr(pages.threading.Thread, "start", start)
    store = TableStore.create(memory_path / "table", TableSpec("t", 256, "sgd", max_rows=60_000))
    ids = np.arange(10_000)
    for some in ids.reshape(-1, 500):
        store.push(some, np.ones((500, 256), np.float32), {**SGD.named, "lr": -1.0})

    assert (store.read(ids) == 1).all()
    store.close(remove=True)
