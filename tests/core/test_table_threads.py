"""Reads of a table's partition beside pushes."""

import threading

import numpy as np
import pytest
from helpers_rules import Case
from table_model import SGD

from psd_core.table import TableSpec, TableStore

KEYS, DIM, PUSHES = np.arange(3000), 33, 150


MOVING = Case("sgd", (1.0, 0.5, 0.0, 0.0), ("momentum",))


@pytest.mark.parametrize(("case", "updates"), [(SGD, "lazy"), (MOVING, "catch_up")], ids=["lazy", "catch_up"])
def test_a_read_sees_each_push_whole_or_not_at_all_while_the_index_grows(case, updates, memory_path):
    """Every other push adds 1 to all numbers of all of these rows, each brings new ones, and no read sees two sums at once.

    Where rows catch up, they are behind after each push in between.
    """
    spec = TableSpec("t", DIM, "sgd", case.flags, max_bytes=1 << 27, updates=updates)
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
