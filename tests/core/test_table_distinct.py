"""The distinct ids of a batch, by shard, and rows that go to them and come back."""

import numpy as np
import pytest

import psd_core
from psd_core import distinct as module
from psd_core.distinct import SHARDS_MAX, distinct, shard_of
from psd_core.table import RowSums, mixed


def batch(rng, n, dim=5):
    return (rng.zipf(1.3, n) % (n + 1)).astype(np.int64) - 7, rng.standard_normal((n, dim)).astype(np.float32)


@pytest.mark.parametrize("shards", [1, 2, 5, 1000])
@pytest.mark.parametrize("n", [0, 1, 40, 3000])
def test_ids_are_grouped_by_shard_in_the_order_in_which_they_came_first(n, shards, rng):
    ids, grads = batch(rng, n)
    found = distinct(ids, shards)

    keys = ids.view(np.uint64)
    shard = ((mixed(keys) >> np.uint64(32)) * np.uint64(shards) >> np.uint64(32)).tolist()
    once = sorted(dict(zip(keys.tolist(), shard, strict=True)).items(), key=lambda pair: pair[1])
    assert found.ids.tolist() == [key for key, _ in once]
    assert np.diff(found.starts).tolist() == np.bincount([of for _, of in once], minlength=shards).tolist()
    assert (found.ids[found.inverse] == keys).all()
    assert (shard_of(found.ids, shards) == np.repeat(np.arange(shards), np.diff(found.starts))).all()

    sums = RowSums(grads.shape[1])
    sums.add(ids, grads)
    total = found.sum(grads)
    assert {key: row.tobytes() for key, row in zip(found.ids.tolist(), total, strict=True)} == {
        key: row.tobytes() for key, row in zip(sums.ids.tolist(), sums.values, strict=True)
    }
    out = np.empty_like(grads)
    assert found.expand(total, out) is out
    assert (out == total[found.inverse]).all()


def test_a_batch_of_distinct_ids_for_one_shard_is_sent_as_it_is(rng):
    ids = rng.permutation(1000).astype(np.uint64)
    grads = rng.standard_normal((1000, 3)).astype(np.float32)
    found = distinct(ids)

    assert (found.ids == ids).all()
    assert found.sum(grads) is grads


@pytest.mark.parametrize("half", [np.float16, np.uint16])
def test_half_precision_is_widened(half, rng):
    ids, grads = batch(rng, 50)
    narrow = grads.astype(np.float16) if half is np.float16 else (grads.view(np.uint32) >> 16).astype(np.uint16)
    wide = psd_core.widened(narrow.reshape(-1)).reshape(narrow.shape)
    found = distinct(ids, 3)

    assert (found.sum(narrow) == found.sum(wide)).all()
    k = len(found.ids)
    assert (found.expand(narrow[:k]) == found.expand(wide[:k])).all()


def test_no_result_depends_on_the_seed_of_the_hash_table(monkeypatch, rng):
    """It is the process's own, so that nobody can choose ids that collide."""
    ids, grads = batch(rng, 500)
    first = distinct(ids, 4)
    monkeypatch.setattr(module, "_SEED", 12345)
    second = distinct(ids, 4)

    assert (first.ids == second.ids).all()
    assert (first.sum(grads) == second.sum(grads)).all()


def test_shards_of_some_ids_are_as_they_ever_were():
    """Golden values: a table that was saved is restored by the same rule."""
    ids = np.array([0, 1, 2, 3, 1 << 40, -1, -(1 << 63)], np.int64)

    assert shard_of(ids, 5).tolist() == [0, 1, 4, 0, 0, 3, 0]
    counts = np.bincount(shard_of(np.arange(100_000), 4), minlength=4)
    assert counts.max() / counts.mean() < 1.02


def test_arguments_that_do_not_fit_are_refused_by_name():
    found = distinct(np.array([1, 1, 2]))
    for call, says in [
        (lambda: distinct(np.zeros(3)), "ids: expected a 1-D array of int64 or uint64"),
        (lambda: distinct(np.arange(3), 0), "shards: expected a whole number from 1 to 65536, got 0"),
        (lambda: shard_of(np.arange(3), SHARDS_MAX + 1), "shards: expected"),
        (lambda: found.sum(np.zeros((2, 4), np.float32)), r"grads: expected a C-contiguous aligned \(3, dim\) array"),
        (lambda: found.expand(np.zeros((2, 4))), "rows: expected float32, float16 or uint16"),
        (lambda: found.expand(np.zeros((2, 4), np.float32), np.zeros((3, 3), np.float32)), "out: expected a writable"),
    ]:
        with pytest.raises(ValueError, match=says):
            call()
