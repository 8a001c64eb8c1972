"""Batches on server-side vectors against NumPy: every bit, for any number of shards, sent once or again."""

import itertools
import os

import numpy as np
import pytest
import vector_words as ops
from vector_model import INEXACT, Model, merged, random_batch, same_answers

from psd_core.vector import BatchName, VectorSpec, VectorStore
from psd_core.vector_operations import STRIPE

SMALL = [
    *(VectorSpec(f"d{i}", 20, "float64") for i in range(3)),
    *(VectorSpec(f"f{i}", 20, "float32") for i in range(3)),
    *(VectorSpec(f"i{i}", 24, "int64", columns=6 * (i == 0)) for i in range(2)),
]
LARGE = [
    *(VectorSpec(f"d{i}", 2 * STRIPE + 999, "float64") for i in range(3)),
    *(VectorSpec(f"f{i}", 3 * STRIPE, "float32", columns=64 * 3) for i in range(2)),
    *(VectorSpec(f"i{i}", STRIPE + 1, "int64", columns=241 * (i == 0)) for i in range(2)),
]


def stores_of(path, shards, specs):
    stores = [VectorStore.create(path / f"{shards}-{k}", shard=k, shards=shards, senders=4) for k in range(shards)]
    for store, spec in itertools.product(stores, specs):
        store.create_vector(spec)
    return stores


def whole(stores, name):
    return np.concatenate([store.read(name) for store in stores])


BATCHES = int(os.environ.get("PSD_TEST_BATCHES", "2400"))
"""Of small vectors."""


@pytest.mark.parametrize(
    ("specs", "shards", "batches"), [(SMALL, 1, BATCHES), (LARGE, 2, BATCHES // 24), (LARGE, 3, BATCHES // 24)]
)
def test_random_batches_are_those_of_numpy(specs, shards, batches, memory_path, rng):
    """Thousands of batches: vectors and answers have the bits of the model. Every third batch is sent twice."""
    stores, model = stores_of(memory_path, shards, specs), Model(specs)
    for number in range(1, batches + 1):
        batch = random_batch(rng, specs)
        expected = model.run(batch)
        for _ in range(1 + (number % 3 == 0)):
            answers = merged([store.run(batch, BatchName(7, number)) for store in stores])
            assert same_answers(answers, expected), batch
        if number % 50 == 0:
            for spec in specs:
                assert np.array_equal(whole(stores, spec.name), model.arrays[spec.name], equal_nan=True), spec.name
                reset = ops.random(spec.name, number, *((-50, 50) if spec.dtype == "int64" else ()))  # before all is NaN
                model.run([reset])
                for store in stores:
                    store.run([reset])
    for store in stores:
        store.close(remove=True)


@pytest.mark.parametrize("function", INEXACT)
def test_exponentials_and_logarithms_are_near_numpy(function, memory_path, rng):
    """One unit in the last place, over the whole range, and what lies beyond it."""
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 5e-324, 1e-310, 1.0, -1.0, 709.78, 709.79, -745.1, -745.2, 1e300, -1e300]
    spread = (
        rng.uniform(-750, 720, 20_000) if function == "exp" else np.ldexp(rng.random(20_000), rng.integers(-1074, 1024, 20_000))
    )
    x = np.concatenate([special, spread, rng.standard_normal(20_000)])
    (store,) = stores_of(memory_path, 1, [VectorSpec("x", len(x))])

    store.run([ops.put("x", 0, x), ops.map("x", function, "x")])

    with np.errstate(all="ignore"):
        expected = getattr(np, function)(x)
        finite = np.isfinite(expected)
        error = np.abs(store.read("x")[finite] - expected[finite]) / np.maximum(np.spacing(np.abs(expected[finite])), 5e-324)
    assert np.array_equal(store.read("x")[~finite], expected[~finite], equal_nan=True)
    assert error.max() <= 1
    store.close(remove=True)


def test_a_batch_that_was_run_is_answered_and_not_run_again(memory_path):
    """Its answers come from the log, also after it was opened anew; of each sender's session the last eight are known."""
    (store,) = stores_of(memory_path, 1, [VectorSpec("x", 5)])
    step = [ops.add("x", 0, np.ones(5)), ops.sum("x")]
    first = [store.run(step, BatchName(3, n)) for n in range(1, 11)]
    store.close(remove=False)
    store = VectorStore.open(memory_path / "1-0")

    again = [store.run(step, BatchName(3, n)) for n in range(3, 11)]

    assert again == first[2:]
    assert (store.read("x") == 10).all()
    assert store.sessions() == {3: 10}
    with pytest.raises(ValueError, match="sequence: 1 is too old; the latest one of its session is 10"):
        store.run(step, BatchName(3, 1))
    assert store.answer(BatchName(2, 1, sender=1)) is None
    store.run(step, BatchName(2, 1, sender=1))
    assert store.answer(BatchName(4, 1)) is None
    store.run(step, BatchName(4, 1))
    assert store.sessions() == {4: 1, 2: 1}
    assert (store.session_of(0), store.session_of(1), store.session_of(2)) == (4, 2, 0)
    with pytest.raises(ValueError, match="session: 3 has ended; the latest one of its sender is 4"):
        store.run(step, BatchName(3, 11))
    assert (store.read("x") == 12).all()
    store.close(remove=True)


def test_a_users_function_changes_all_or_nothing(memory_path):
    """It sees what the batch has done before it; what it raises leaves everything as it was."""
    stores = stores_of(memory_path, 2, [VectorSpec("x", 3 * STRIPE), VectorSpec("y", 3 * STRIPE)])
    for store in stores:
        store.run([ops.fill("x", 2.0), ops.custom("y", lambda x: np.cumsum(x) * 0 + x**2, ["x"]), ops.scale("x", 3.0)])
    assert (whole(stores, "y") == 4).all()
    assert (whole(stores, "x") == 6).all()
    seen = []

    def fail(x):
        seen.append(len(x))
        if len(seen) == 2:
            raise RuntimeError("no more")
        return x

    with pytest.raises(RuntimeError, match="no more"):
        stores[1].run([ops.fill("x", 9.0), ops.copy("y", "x"), ops.custom("x", fail, ["y"])], BatchName(1, 1))

    assert (whole(stores, "x") == 6).all()
    assert (whole(stores, "y") == 4).all()
    assert stores[1].answer(BatchName(1, 1)) is None
    for wrong in (lambda x: x[1:], lambda x: x.astype(complex)):
        with pytest.raises(ValueError, match="function: expected 4096 of float64 to be returned, got"):
            stores[0].run([ops.custom("x", wrong, ["y"])])
    for store in stores:
        store.close(remove=True)


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_reads_give_what_is_here(shards, memory_path, rng):
    """Ranges, indices and rows are of the whole vector; shards together have each element once."""
    spec = VectorSpec("m", 4 * STRIPE + 96, "int64", columns=1030)
    stores = stores_of(memory_path, shards, [spec])
    values = rng.integers(-99, 99, spec.size)
    indices, rows = np.array([0, spec.size - 1, STRIPE, 5, 5]), np.array([3, 0, 3, 15])
    for store in stores:
        store.run([ops.put("m", 0, values), ops.add_rows("m", rows, np.ones((4, 1030), np.int64))])
    np.add.at(values.reshape(-1, 1030), rows, 1)

    extents = [store.extent("m") for store in stores]
    begins, ends = zip(*extents, strict=True)
    assert (begins[0], *ends) == (*begins, spec.size)
    for store, (begin, end) in zip(stores, extents, strict=True):
        assert np.array_equal(store.read("m", 100, 9000), values[max(begin, 100) : max(begin, 100, min(end, 9000))])
        mine = [values[i] for i in indices if begin <= i < end]
        assert store.read_at("m", indices).tolist() == mine
        parts = [values[max(begin, 1030 * r) : max(begin, 1030 * r, min(end, 1030 * r + 1030))] for r in rows]
        assert np.array_equal(store.read_rows("m", rows), np.concatenate(parts))
        store.close(remove=True)


def test_a_snapshot_is_of_one_moment(memory_path):
    """Whatever batches come while it is copied, in place and staged ones."""
    stores = stores_of(memory_path, 2, [VectorSpec("x", 2300 * STRIPE + 1), VectorSpec("y", 7)])
    for store in stores:
        store.run([ops.random("x", 1), ops.random("y", 2)], BatchName(1, 5))
    before = {name: whole(stores, name) for name in "xy"}
    found = {name: np.zeros_like(array) for name, array in before.items()}
    for store in stores:
        with store.snapshot() as snapshot:
            assert snapshot.sessions == {1: 5}
            for number, piece in enumerate(snapshot):
                found[piece.spec.name][piece.start : piece.start + len(piece.values)] = piece.values
                store.run(
                    [ops.axpy("x", 1.0, "x")] if number % 2 else [ops.fill("x", 0.0), ops.fill("y", 0.0)],
                    BatchName(1, 6 + number),
                )
            with pytest.raises(ValueError, match="snapshot: there is one already"):
                store.snapshot()
    assert all(np.array_equal(found[name], before[name]) for name in "xy")
    for store in stores:
        store.snapshot().end()
        store.drop_vector("x")
        store.close(remove=True)


def test_a_dot_product_has_the_same_bits_on_any_number_of_shards(memory_path):
    """So has a random vector."""
    totals = set()
    for shards in (1, 2, 3, 7):
        stores = stores_of(memory_path, shards, [VectorSpec("x", 50_001), VectorSpec("y", 50_001, "float64")])
        (answer,) = merged(
            [store.run([ops.random("x", 3, -1, 1), ops.random("y", 4, -1, 1), ops.dot("x", "y")]) for store in stores]
        )
        totals.add(answer.round())
        for store in stores:
            store.close(remove=True)

    assert len(totals) == 1
