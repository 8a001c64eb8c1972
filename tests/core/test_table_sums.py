"""Sums of a round's sparse gradients, and a round as one process would step it."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers_rules import cases
from table_model import DIM, SGD, TableModel, rows_of, spec_of

import psd_core
from psd_core.table import RowSums, TableSpec, TableStore


def contribution(rng, n, distinct=True):
    ids = rng.permutation(3 * n)[:n] if distinct else rng.integers(0, n, n)
    return ids.astype(np.int64) - 5, rng.standard_normal((n, DIM)).astype(np.float32)


def test_sums_have_the_bits_of_the_dense_kernels(rng):
    """Row by row: scaled_copy for the first contribution, accumulate for the others. The memory of a round serves the next."""
    sums = RowSums(DIM)
    for round_ in range(3):
        sums.clear()
        expected = {}
        for weight in (1.0, 0.3, 2.5):
            ids, grads = contribution(rng, 1500 if round_ else 5)
            sums.add(ids, grads, weight)
            for key, grad in zip(ids.view(np.uint64).tolist(), grads, strict=True):
                if key in expected:
                    psd_core.accumulate(expected[key], grad, weight)
                else:
                    expected[key] = np.empty(DIM, np.float32)
                    psd_core.scaled_copy(expected[key], grad, weight)
        assert len(sums) == len(expected)
        assert sums.ids.tolist() == list(expected)
        assert (sums.values == np.stack(list(expected.values()))).all()


def test_repeated_ids_are_added_to_each_other_first(rng):
    ids, grads = contribution(rng, 40, distinct=False)
    sums, one = RowSums(DIM), RowSums(DIM)
    sums.add(ids, grads, 0.7)
    for key in dict.fromkeys(ids.tolist()):
        total = grads[ids == key].astype(np.float32)
        while len(total) > 1:
            total = np.concatenate([total[:1] + total[1:2], total[2:]])
        one.add(np.array([key]), total, 0.7)

    assert (sums.ids == one.ids).all()
    assert (sums.values == one.values).all()


@pytest.mark.parametrize("half", [np.float16, np.uint16])
def test_half_precision_is_widened_first(half, rng):
    ids, grads = contribution(rng, 9)
    narrow = grads.astype(np.float16) if half is np.float16 else (grads.view(np.uint32) >> 16).astype(np.uint16)
    sums, wide = RowSums(DIM), RowSums(DIM)
    sums.add(ids, narrow)
    wide.add(ids, psd_core.widened(narrow.reshape(-1)).reshape(narrow.shape))

    assert (sums.values == wide.values).all()


def test_a_round_of_workers_steps_as_one_process(rng, memory_path):
    """A worker that did not touch a row counts as zeros; what each has sent is added in the order of ranks."""
    case = cases("adam")[0]
    store = TableStore.create(memory_path / "table", spec_of(case))
    model, sums = TableModel(store, case), RowSums(DIM)
    for _ in range(5):
        sums.clear()
        shares = [contribution(rng, 20) for _ in range(4)]
        for ids, grads in shares:
            sums.add(ids, grads)
        total = {}
        for ids, grads in shares:
            for key, grad in zip(ids.tolist(), grads, strict=True):
                total[key] = total[key] + grad if key in total else grad
        model.push(np.array(list(total)).view(np.uint64), np.stack(list(total.values())) * np.float32(0.25))
        store.push(sums.ids, sums.values, case.named, scale=0.25, distinct=True)

    assert rows_of(store) == model.flat()


def test_arguments_of_a_sum_are_checked():
    sums = RowSums(2)
    with pytest.raises(psd_core.InvalidArray, match="grads: expected a C-contiguous"):
        sums.add(np.arange(3), np.zeros((3, 3), np.float32))
    with pytest.raises(psd_core.InvalidArray, match="ids: expected a 1-D array"):
        sums.add(np.zeros((2, 2), np.int64), np.zeros((2, 2), np.float32))
    assert len(sums) == 0
    assert sums.values.shape == (0, 2)


@pytest.mark.parametrize("what", ["sums", "push"])
def test_memory_of_the_largest_round_is_given_back_when_rounds_have_long_been_small(what, memory_path):
    """A job's first round may have all rows; its process need not keep the memory for them."""
    # In a process of its own: this one's heap has holes of all sizes.
    asked = (
        f"import sys; sys.path[:] = {sys.path!r}; from test_table_sums import *; use_much_then_little({what!r}, sys.argv[1])"
    )
    command = [sys.executable, "-c", asked, str(memory_path / "table")]
    found = subprocess.run(command, capture_output=True, text=True, check=True)

    most, after = map(int, found.stdout.split())
    assert most > 32 << 20
    assert after < 16 << 20


def use_much_then_little(what, path):
    """Write by how much the process's memory has grown at most, and in the end."""
    dim, ids = 1024, np.arange(16_384) // 2
    sums, store = RowSums(dim), TableStore.create(path, TableSpec("t", dim, "sgd", max_rows=100_000))

    def use(count: int) -> None:
        if what == "sums":
            sums.add(ids[:count], np.ones((count, dim), np.float32))
            sums.clear()
        else:
            store.push(ids[:count], np.ones((count, dim), np.float32), SGD.named)

    before = anonymous_bytes()
    use(len(ids))
    most = anonymous_bytes()
    for _ in range(600):
        use(4)

    sys.stdout.write(f"{most - before} {anonymous_bytes() - before}")
    store.close(remove=True)


def anonymous_bytes() -> int:
    """Ordinary memory of this process."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) << 10
