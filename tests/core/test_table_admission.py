"""Which ids get a row of a table."""

import numpy as np
import pytest
from table_model import SGD

from psd_core.table import TableSpec, TableStore


def make(memory_path, **options):
    return TableStore.create(memory_path / "table", TableSpec("t", 1, "sgd", **({"max_rows": 21_000} | options)), salt=7)


def push(store, ids, value):
    store.push(np.array(ids), np.full((len(ids), 1), value, np.float32), {**SGD.named, "lr": 1.0})


def test_an_id_gets_a_row_when_it_was_seen_often_enough(memory_path):
    """What came before is counted and dropped, also over an opening. An id that repeats in a push was seen once."""
    store = make(memory_path, admit_after=3)
    push(store, [1, 1, 1, 2], -1)
    store.read(np.array([1, 2]), clock=1)
    push(store, [1], -10)
    store.close(remove=False)
    store = TableStore.open(memory_path / "table")
    assert store.counters()["rows"] == 0
    push(store, [2, 1, 3], -100)
    push(store, [1, 2], -1000)

    assert store.read(np.array([1, 2, 3]))[:, 0].tolist() == [1100, 1000, 0]
    counters = store.counters()
    assert (counters["rows"], counters["created"], counters["unadmitted"], counters["refused"]) == (2, 2, 5, 0)
    store.remove(np.array([1]))
    push(store, [1], -5)
    assert store.read(np.array([1]))[0, 0] == 0  # a row that went is not admitted for what was seen before


def test_ids_of_one_push_are_all_counted(memory_path):
    """Many of them have neighbours among the sightings; there are words for all."""
    store = make(memory_path, admit_after=3)
    for ids in (np.arange(600), np.arange(600)[::-1], np.arange(600)):
        assert store.counters()["rows"] == 0
        push(store, ids, -1)

    assert store.counters()["rows"] >= 595


def test_what_is_counted_takes_little_memory_whatever_the_limit_of_rows(memory_path):
    """It is taken when the table is made: a sixteenth of the limit would be as long a wait, and lost to everybody else."""
    store = make(memory_path, admit_after=3, max_rows=350_000_000)
    taken = store.used_bytes
    store.close(remove=True)

    assert taken < 80 << 20


def test_rows_that_are_written_are_admitted(memory_path):
    store = make(memory_path, admit_after=3)
    push(store, [8], -1)
    push(store, [8], -1)
    store.write(np.array([7, 9]), np.array([[3], [5]], np.float32))
    push(store, [7, 8], -1)

    assert store.read(np.array([7, 8, 9]))[:, 0].tolist() == [4, 1, 5]


def test_many_that_are_seen_once_do_not_push_out_those_seen_more_often(memory_path):
    store = make(memory_path, admit_after=4)
    often = np.arange(100)
    for number in range(3):
        push(store, often, -1)
        push(store, 1000 + 20_000 * number + np.arange(20_000), -1)
    assert store.counters()["rows"] == 0
    push(store, often, -1)

    assert store.counters()["rows"] >= 95


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_a_share_of_sightings_counts(probability, memory_path):
    """By chance that is the same in every run and on every machine."""
    store = make(memory_path, admit_probability=probability)
    push(store, range(10_000), -1)
    first = store.counters()["rows"]
    push(store, range(10_000), -1)
    second = store.counters()["rows"]
    store.close(remove=True)

    assert abs(first - 10_000 * probability) < 200
    assert abs(second - 10_000 * (1 - (1 - probability) ** 2)) < 200
    again = make(memory_path, admit_probability=probability)
    push(again, range(10_000), -1)
    assert again.counters()["rows"] == first
