"""Reads of a table's partition beside pushes."""

import threading

import numpy as np
from table_model import SGD

from psd_core.table import TableSpec, TableStore

KEYS, DIM, PUSHES = np.arange(3000), 33, 150


def test_a_read_sees_each_push_whole_or_not_at_all_while_the_index_grows(memory_path):
    """Every push adds 1 to all numbers of all of these rows, and brings some new ones; no read sees two sums at once."""
    store = TableStore.create(memory_path / "table", TableSpec("t", DIM, "sgd", max_bytes=1 << 27))
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
    for number in range(PUSHES):
        ids = np.concatenate([KEYS, 10_000 + 200 * number + np.arange(200)])
        store.push(ids, np.full((len(ids), DIM), -1, np.float32), SGD.named | {"lr": 1.0}, distinct=True)
    is_over.set()
    for reader in readers:
        reader.join()

    assert problems == []
    assert len(seen) > 1
    assert (store.read(KEYS) == PUSHES).all()
