"""Sums of a round's sparse gradients, and a round as one process would step it."""

import numpy as np
import pytest
from helpers_rules import cases
from table_model import DIM, TableModel, rows_of, spec_of

import psd_core
from psd_core.table import RowSums, TableStore


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
