"""Bad input to the store of vectors: refused by name, and nothing has changed."""

import re

import numpy as np
import pytest
import vector_words as ops

from psd_core.arena import ArenaBusy, ArenaCorrupt, ArenaError, StoreClosed
from psd_core.vector import BatchName, NoSuchVector, VectorError, VectorSpec, VectorStore

ONES = np.ones(3)


@pytest.fixture
def store(memory_path):
    store = VectorStore.create(memory_path / "vectors", shard=0, shards=1, senders=2)
    for spec in (
        VectorSpec("x", 12),
        VectorSpec("i", 12, "int64", columns=4),
        VectorSpec("f", 12, "float32"),
        VectorSpec("s", 3),
    ):
        store.create_vector(spec)
    yield store
    store.close(remove=True)


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (ops.fill("w", 1), "operations[1], fill: out: there is no vector 'w'"),
        (ops.copy("x", "s"), "x: expected 12 of float64, as 'x' has, got 's' with 3 of float64"),
        (ops.axpy("x", 1.0, "f"), "x: expected 12 of float64, as 'x' has, got 'f' with 12 of float32"),
        (ops.scale("i", 0.5), "alpha (vector 'i' is int64): expected a whole number, got 0.5"),
        (ops.scale("i", 1 << 63), "alpha: expected a number from -9223372036854775808 to 9223372036854775807"),
        (ops.fill("x", "much"), "value: expected a number, got 'much'"),
        (ops.combine("x", [1.0], ["x", "x"]), "coefficients: expected one for each of 2 vectors, got 1"),
        (ops.combine("x", [], []), "x: expected at least one vector, got none"),
        (ops.random("x", -1), "seed: expected a whole number from 0 to 2**64 - 1, got -1"),
        (ops.random("x", 1, 2.0, 2.0), "high: must be above low, 2.0, got 2.0"),
        (ops.map("x", "sinh", "x"), "no function 'sinh'; there are abs, neg, sign"),
        (ops.map("i", "sqrt", "i"), "sqrt is not for int64"),
        (ops.map("x", "clip", "x", (1.0,)), "clip takes the arguments: low, high; got 1"),
        (ops.zip("x", "hypot", "x", "x"), "no function 'hypot'; there are add, sub, mul"),
        (ops.put("x", 10, ONES), "start: 3 elements from 10 on do not lie in vector 'x', which has 12"),
        (ops.add("x", -1, ONES), "start: 3 elements from -1 on do not lie in vector 'x', which has 12"),
        (ops.put("i", 0, ONES), "values: expected int64, got float64"),
        (ops.put("x", 0, np.ones((2, 2))), "values: expected one dimension, got shape (2, 2)"),
        (ops.add_at("x", np.array([0, 12, 1]), ONES), "indices: 12 is out of range: 'x' has 0 to 11"),
        (ops.add_at("x", np.array([0, -3, 1]), ONES), "indices: -3 is out of range: 'x' has 0 to 11"),
        (ops.add_at("x", ONES, ONES), "indices: expected whole numbers, got float64"),
        (ops.add_at("x", np.array([0, 1]), ONES), "values: expected shape (2,), got shape (3,)"),
        (ops.add_rows("x", np.array([0]), np.ones((1, 4))), "out: 'x' is a vector, which has no rows"),
        (ops.add_rows("i", np.array([3]), np.ones((1, 4), int)), "rows: 3 is out of range: 'i' has 0 to 2"),
        (ops.add_rows("i", np.array([0]), np.ones((1, 3), int)), "values: expected shape (1, 4), got shape (1, 3)"),
        (ops.custom("x", 3, ["x"]), "function: expected one that can be called, got 3"),
        (ops.dot("x", "s"), "x[1]: expected 12 of float64, as 'x' has"),
        (ops.gram(["x"], ["x", "nothing"]), "y[1]: there is no vector 'nothing'"),
        (ops.gram(["x"] * 50), "at most 1024 scalars may be answered, got 1275"),
        ("fill", "operations[1]: expected an operation on vectors, got str"),
    ],
)
def test_an_operation_that_cannot_be_refuses_the_whole_batch(store, operation, message):
    with pytest.raises(VectorError, match=re.escape(message)):
        store.run([ops.fill("x", 5.0), operation], BatchName(1, 1))

    assert (store.read("x") == 0).all()
    assert store.answer(BatchName(1, 1)) is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (VectorSpec("", 3), "name: expected 1 to 256 bytes, got ''"),
        (VectorSpec("n", 0), "size: expected a whole number from 1 to"),
        (VectorSpec("n", 3, "float16"), "dtype: expected one of float64, float32, int64, got 'float16'"),
        (VectorSpec("n", 10, "int64", 3), "columns: expected 0, or a divisor of size, 10, got 3"),
        (VectorSpec("x", 13), "'x': it is there as VectorSpec(name='x', size=12"),
    ],
)
def test_a_declaration_that_cannot_be_is_refused(store, spec, message):
    with pytest.raises(VectorError, match=re.escape(message)):
        store.create_vector(spec, BatchName(1, 1))

    assert len(store.vectors()) == 4
    assert store.sessions() == {}


def test_reads_and_names_that_cannot_be_are_refused(store):
    for call, message in (
        (lambda: store.read("x", 3, 13), "start and stop: expected 0 <= start <= stop <= 12, got 3 and 13"),
        (lambda: store.read_at("x", np.array([12])), "indices: 12 is out of range: 'x' has 0 to 11"),
        (lambda: store.read_rows("x", np.array([0])), "rows: 'x' is a vector, which has no rows"),
        (lambda: store.run([], BatchName(0, 1)), "session: expected a whole number from 1 to 2**63 - 1, got 0"),
        (lambda: store.run([], BatchName(1, 0)), "sequence: expected a whole number from 1 to 2**63 - 1, got 0"),
    ):
        with pytest.raises(VectorError, match=re.escape(message)):
            call()
    for call in (lambda: store.read("w"), lambda: store.drop_vector("w"), lambda: store.extent("w")):
        with pytest.raises(NoSuchVector, match="vector: there is no 'w'"):
            call()
    with pytest.raises(VectorError, match="sender: expected 0 to 1, got 2"):
        store.run([], BatchName(3, 1, sender=2))


def test_a_directory_has_one_store_and_whole_files(memory_path):
    path = memory_path / "vectors"
    with pytest.raises(VectorError, match="shard: expected 0 to 1, got 2"):
        VectorStore.create(path, shard=2, shards=2)
    store = VectorStore.create(path, shard=0, shards=1, senders=1)
    store.create_vector(VectorSpec("x", 5000))
    with pytest.raises(ArenaError, match="holds vectors already"):
        VectorStore.create(path, shard=0, shards=1)
    with pytest.raises(ArenaBusy):
        VectorStore.open(path)
    store.close(remove=False)
    store.close(remove=True)  # it is closed already
    with pytest.raises(StoreClosed):
        store.read("x")

    for name, damage, message in (
        ("vector-0", lambda data: data[:4096], "vector-0: it has 4096 bytes, expected 40960: truncated"),
        ("log", lambda data: data[:8192], "log: it has 8192 bytes"),
        ("log", lambda data: b"X" + data[1:], "superblock: expected magic"),
        ("log", lambda data: data[:24] + b"\5" + data[25:], "superblock: bytes 0 to 4096 do not have the checksum"),
        ("catalog", lambda _: b"[[", "catalog:"),
    ):
        file = path / name
        whole = file.read_bytes()
        file.write_bytes(damage(whole))
        with pytest.raises(ArenaCorrupt, match=message):
            VectorStore.open(path)
        file.write_bytes(whole)
    with pytest.raises(FileNotFoundError):
        VectorStore.open(memory_path / "nothing")
