"""Server-side vectors through real shards: random programs against NumPy, matrices, jobs of vectors alone, bad input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from client_faults import in_threads
from numpy.typing import NDArray
from vector_programs import Mirror

import psd_client
from psd.contract.config import Limits
from psd.contract.errors import (
    InvalidRequest,
    InvalidTensor,
    PsdError,
    RuleFailed,
    SpecMismatch,
    UnknownVector,
)  # fmt: skip
from psd.rim.views import shard_status
from psd.v1 import vectors_pb2
from psd_core.vector import VectorStore

Start = Callable[..., Any]

BATCHES = 25


def connect(servers: str, rank: int = 0, world_size: int = 1, **config: Any) -> psd_client.ParameterServer:
    return psd_client.connect(servers, rank, world_size, wait_timeout=60, **config)


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64"])
def test_batches_when_they_are_random_then_numpy_agrees_and_the_bits_are_those_of_any_number_of_shards(
    cluster: Start, dtype: str
) -> None:
    answers = []
    for shards in (1, 2, 3):
        rng = np.random.default_rng(7)
        with connect(cluster(shards).servers) as ps:
            mirror = Mirror(ps, dtype)
            found = [mirror.run(rng, 8) for _ in range(BATCHES)]
            mirror.check()
        answers.append([np.asarray(value).tobytes() for batch in found for value in batch])

    assert answers[0] == answers[1] == answers[2]


def test_matrix_when_rows_are_shared_by_shards_then_pulls_and_adds_see_whole_rows(cluster: Start) -> None:
    rng = np.random.default_rng(3)
    with connect(cluster(3).servers) as ps:
        counts = ps.matrix("counts", rows=200, cols=100, dtype="int64")  # five stripes, none a multiple of the rows
        expected = np.zeros((200, 100), np.int64)
        rows = rng.integers(0, 200, (7, 9))
        values = rng.integers(-9, 9, (7, 9, 100))
        counts.add_rows(values, rows)
        np.add.at(expected, rows, values)
        places = rng.integers(0, 200, 50), rng.integers(0, 100, 50)
        counts.add(1, places)
        np.add.at(expected, places, 1)

        assert (counts.shape, counts.sum()) == ((200, 100), int(expected.sum()))
        np.testing.assert_array_equal(counts.pull(), expected)
        np.testing.assert_array_equal(counts.pull(-5), expected[-5:])
        np.testing.assert_array_equal(counts.pull_rows(rows), expected[rows])
        np.testing.assert_array_equal(counts.pull(indices=places), expected[places])
        assert counts.pull_rows([]).shape == (0, 100)

        counts.fill(0)
        counts.put([2_200_000_000, 2_200_000_000, -1], 0)  # their squares add up to a number between 2**63 and 2**64
        ones = ps.matrix("ones", rows=200, cols=100, dtype="int64")
        ones.put([-1], 0)
        with ps.batch() as batch:
            gram = batch.gram([counts, ones])
        assert gram.value.tolist() == [[2 * 2_200_000_000**2 + 1, -2_200_000_000], [-2_200_000_000, 1]]
        assert isinstance(ps.vectors["counts"], psd_client.Matrix)


def test_random_when_the_seed_is_the_same_then_so_are_the_numbers_whatever_the_shards(cluster: Start) -> None:
    found = []
    for shards in (1, 3):
        with connect(cluster(shards).servers) as ps:
            x = ps.vector("x", 20_000, "float32")
            x.random(5, low=-1)
            found.append(x.pull())

    assert (found[0].min() >= -1, found[0].max() < 1, abs(found[0].mean()) < 0.05) == (True, True, True)
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("transport", ["grpc", "shm", "tcp"])
def test_put_when_it_exceeds_a_message_then_it_goes_on_the_lane_all_the_same(cluster: Start, transport: str) -> None:
    values = np.random.default_rng(1).standard_normal(1_300_000)  # 5 MB for each of two shards
    shards = cluster(2)
    with connect(shards.servers, transport=transport) as ps:
        x = ps.vector("x", len(values))
        x.put(values)

        np.testing.assert_array_equal(x.pull(), values)
        np.testing.assert_array_equal(x.pull(indices=[0, 1_299_999]), values[[0, -1]])
        for shard in shards.shards:
            batches = {lane: sum(counts.calls["batch"].counts) for lane, counts in shard.shard._core.counters.lanes.items()}
            assert batches == {lane: lane == transport for lane in ("shm", "tcp", "grpc")}


def test_job_when_it_has_vectors_alone_then_it_has_workers_barriers_readers_and_a_status(cluster: Start) -> None:
    shards = cluster(2)

    def work(rank: int) -> float:
        with connect(shards.servers, rank, 2) as ps:
            total = ps.vector("total", 5000)
            for _ in range(10):
                total.add(np.ones(100), np.arange(100) + 4050 * rank)
            ps.barrier("added")
            assert sorted(ps.vectors) == ["total"]
            found = total.sum()
            if rank == 0:
                with psd_client.connect(shards.servers, role="reader") as reader:
                    vector = reader.vectors["total"]
                    assert vector.pull().sum() == found
                    with pytest.raises(InvalidRequest, match="a reader only pulls"):
                        vector.scale(2)
                status = shard_status(shards.shards[0].shard, "", None)
                assert (status.numbers["vectors"], status.numbers["vector_bytes"], status.consistency) == (1, 4096 * 8, "async")
                assert status.numbers["vector_batches"] >= 10
            ps.barrier("read")
        return found

    assert in_threads(lambda: work(0), lambda: work(1)) == [2000.0, 2000.0]


def test_job_when_vectors_were_made_before_it_is_declared_then_they_stay(cluster: Start) -> None:
    """A job of vectors alone becomes one that trains; a worker that has declared nothing goes on with its vectors."""
    servers = cluster(2).servers
    with connect(servers, 0, 2) as ps, connect(servers, 1, 2) as other:
        ps.vector("v", 10).fill(2.0)
        ps.declare({"w": np.zeros(3, np.float32)}, psd_client.SGD(lr=1.0), consistency="async")
        ps.push_pull({"w": np.ones(3, np.float32)})

        assert other.vector("v").sum() == 20.0
        other.declare({"w": np.ones(3, np.float32)}, psd_client.SGD(lr=1.0), consistency="async")
        assert (other.pull()["w"].tolist(), ps.vectors["v"].sum()) == ([-1, -1, -1], 20.0)
        with pytest.raises(InvalidRequest, match="declared its job already"):
            ps.declare({"w": np.zeros(3, np.float32)}, psd_client.SGD(lr=1.0))


def doubled(piece: Any) -> Any:
    return 2 * piece


def shifted(piece: Any, other: Any, by: float) -> Any:
    return piece + other * by


def broken(piece: Any) -> Any:
    raise ArithmeticError(f"{len(piece)} are too many")


def test_function_when_the_operator_has_listed_it_then_shards_apply_it_to_pieces(cluster: Start) -> None:
    here = "test_client_vectors"
    rules = tuple(f"{here}:{function.__name__}" for function in (doubled, shifted, broken))
    with connect(cluster(2, rules=rules).servers) as ps:
        x, y = ps.vector("x", 10_000), ps.vector("y", 10_000)
        x.fill(1)
        y.fill(3)
        x.map(f"{here}:doubled")
        x.zip(f"{here}:shifted", y, 0.5)

        assert (x.min(), x.max()) == (3.5, 3.5)
        with pytest.raises(RuleFailed, match=r"vector 'x': the function raised ArithmeticError: .* are too many"):
            x.map(f"{here}:broken")
        with pytest.raises(InvalidRequest, match="'test_client_vectors:work' is not allowed on shard 0"):
            x.map(f"{here}:work")
        assert x.sum() == 35_000


def test_pull_when_a_range_is_long_then_no_shard_copies_more_than_a_portion_of_it(
    cluster: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    portion = 8 * 1000
    monkeypatch.setattr("psd.state.desks.vectors.FETCH_BYTES_MAX", portion)
    monkeypatch.setattr("psd_client.worker.vectors.fetches.FETCH_BYTES_MAX", portion)
    copied, read = [], VectorStore.read

    def noted(self: VectorStore, *args: Any) -> NDArray[Any]:
        copied.append(read(self, *args))
        return copied[-1]

    monkeypatch.setattr(VectorStore, "read", noted)
    shards = cluster(2)
    numbers = np.arange(20_000.0)
    with connect(shards.servers) as ps:
        x, m = ps.vector("x", 20_000), ps.matrix("m", 3, 5000)
        x.put(numbers)
        np.testing.assert_array_equal(x.pull(), numbers)
        np.testing.assert_array_equal(x.pull(5000, 15_001), numbers[5000:15_001])
        assert m.pull_rows([1, 2]).shape == (2, 5000)
        monkeypatch.setattr("psd_client.worker.vectors.fetches.FETCH_BYTES_MAX", 2 * portion)
        with pytest.raises(InvalidRequest, match="16000 bytes of 'x' are above 8000, the limit of a call"):
            x.pull()

    assert max(part.nbytes for part in copied) <= portion


def bad_calls() -> dict[str, tuple[type[PsdError], str, Callable[[Any, Any, Any, Any], Any]]]:
    """By name: the error, its words, and the call, given the connection, a vector, one of int64 and a matrix."""
    return {
        "size": (InvalidRequest, "size: must be 1 to", lambda ps, x, k, m: ps.vector("new", 0)),
        "too large": (InvalidRequest, f"size: must be 1 to {1 << 40}", lambda ps, x, k, m: ps.vector("new", (1 << 40) + 1)),
        "dtype": (InvalidRequest, "dtype: expected one of float64", lambda ps, x, k, m: ps.vector("new", 5, "float16")),
        "name": (InvalidRequest, "name: must have 1 to 256 bytes", lambda ps, x, k, m: ps.vector("", 5)),
        "other size": (SpecMismatch, "vector 'x' is a vector of 100 float64, not", lambda ps, x, k, m: ps.vector("x", 5)),
        "no matrix": (SpecMismatch, "no matrix", lambda ps, x, k, m: ps.matrix("x")),
        "unknown": (UnknownVector, "there is no vector 'none'", lambda ps, x, k, m: ps.vector("none")),
        "too many": (InvalidRequest, "there are 3 already, the shard's --max-vectors", lambda ps, x, k, m: ps.vector("new", 5)),
        "another dtype": (
            InvalidRequest,
            "axpy: x: expected 100 of float64, .* got 'k' with",
            lambda ps, x, k, m: x.axpy(1, k),
        ),
        "no vector": (InvalidRequest, "vector: expected one of", lambda ps, x, k, m: x.dot(np.ones(100))),
        "index": (InvalidRequest, "indices: 100 is out of range: 'x' has 0 to 99", lambda ps, x, k, m: x.add(1, [3, 100])),
        "negative": (InvalidRequest, "indices: -1 is out of range", lambda ps, x, k, m: x.pull(indices=[-1])),
        "row": (InvalidRequest, "rows: 10 is out of range", lambda ps, x, k, m: m.pull_rows([10])),
        "shape": (InvalidTensor, r"values: shape must be \(100,\), that of 'x'", lambda ps, x, k, m: x.put(np.ones(99))),
        "ragged": (InvalidTensor, "values: NumPy makes no array of it", lambda ps, x, k, m: x.put([1.0, [2.0]])),
        "name of bytes": (InvalidRequest, "name: .* has control characters", lambda ps, x, k, m: ps.vector("a\udcff", 5)),
        "start": (InvalidRequest, "start: 2 elements from 99 on do not lie", lambda ps, x, k, m: x.put([1.0, 2.0], 99)),
        "kind": (InvalidTensor, "dtype float64 does not go into vector 'k'", lambda ps, x, k, m: k.add(np.ones(100))),
        "whole": (InvalidRequest, "alpha .vector 'k' is int64.: expected a whole", lambda ps, x, k, m: k.scale(0.5)),
        "function": (InvalidRequest, "map: no function 'cube'; there are abs", lambda ps, x, k, m: x.map("cube")),
        "arguments": (InvalidRequest, "clip takes the arguments: low, high; got 1", lambda ps, x, k, m: x.map("clip", 1.0)),
        "not for int64": (InvalidRequest, "map: sqrt is not for int64", lambda ps, x, k, m: k.map("sqrt")),
        "not listed": (InvalidRequest, "'os:remove' is not allowed on shard 0", lambda ps, x, k, m: x.map("os:remove")),
        "operations": (InvalidRequest, "operations: must be 1 to 4", lambda ps, x, k, m: five(ps, x)),
        "limits": (InvalidRequest, "high: must be above low", lambda ps, x, k, m: x.random(1, 2, 2)),
    }


def five(ps: Any, x: Any) -> None:
    with ps.batch() as b:
        for _ in range(5):
            b.fill(x, 9.0)


def test_bad_input_when_it_is_refused_then_by_name_and_nothing_has_changed(
    cluster: Start, caplog: pytest.LogCaptureFixture
) -> None:
    shards = cluster(2, limits=Limits(vectors_max=3, batch_operations_max=4))
    with connect(shards.servers) as ps:
        x, k, m = ps.vector("x", 100), ps.vector("k", 100, "int64"), ps.matrix("m", 10, 10)
        x.fill(1)
        k.fill(1)
        before = shards.shards[0].shard.vectors.status()
        caplog.clear()
        for name, (error, words, call) in bad_calls().items():
            with pytest.raises(error, match=words):
                call(ps, x, k, m)
            assert shards.shards[0].shard.vectors.status() == before, name

        assert (x.sum(), k.sum(), m.sum()) == (100.0, 100, 0.0)
        assert [record.message for record in caplog.records] == []
        m.drop()
        with pytest.raises(UnknownVector, match="no vector 'm'; it was dropped"):
            m.sum()


def entry(**fields: Any) -> vectors_pb2.VectorOperation:
    return vectors_pb2.VectorOperation(**fields)


@pytest.mark.parametrize(
    ("operation", "payload", "words"),
    [
        (entry(operator=99), b"", r"operations\[0\].operator: 99 is none"),
        (entry(operator=4, out=0, x=[1], numbers=[1.0]), b"", "x: 1 is not below the number of `vectors`, 1"),
        (entry(operator=4, out=0, x=[0, 0], numbers=[1.0]), b"", "x: expected 1 vectors, got 2"),
        (entry(operator=4, out=0, x=[0]), b"", "numbers: expected 1, got 0"),
        (entry(operator=14, x=[0]), b"", "x: expected 2 vectors, got 1"),
        (entry(operator=9, out=0, x=[0], function="os:remove"), b"", "function: 'os:remove' is not allowed"),
        (entry(operator=10, out=0, start=99, count=2), bytes(16), "start: 2 elements from 99 on do not lie in vector 'x'"),
        (entry(operator=10, out=0, count=2), bytes(8), "payload: has 8 bytes, but the operations bring more"),
        (entry(operator=10, out=0, count=1), bytes(16), "payload: has 16 bytes, but the operations bring 8"),
        (entry(operator=12, out=0, count=1), np.array([100, 0]).tobytes(), "indices: 100 is out of range"),
        (entry(operator=13, out=0, count=1), bytes(16), "'x' is a vector, which has no rows"),
        (entry(operator=6, out=0, numbers=[1.0, 1.0]), b"", "high: must be above low"),
        (entry(operator=5, out=0, x=[0] * 65, numbers=[1.0] * 65), b"", "names 65 vectors, the limit is 64"),
    ],
)
def test_shard_when_a_foreign_client_sends_nonsense_then_it_names_the_field(
    module_cluster: Start, operation: Any, payload: bytes, words: str
) -> None:
    shards = module_cluster(1)
    with connect(shards.servers) as ps:
        x = ps.vector("x", 100)
        caller = psd_client.client.worker_of(ps)._session.caller(0)
        spec = vectors_pb2.VectorSpec(name="x", size=100, dtype=2)
        batch = vectors_pb2.VectorBatch(caller=caller, seq=99, vectors=[spec], operations=[operation])
        with pytest.raises(InvalidRequest, match=words):
            shards.shards[0].shard.vectors.run(batch, memoryview(payload))
        assert x.sum() == 0


def test_answer_when_the_batch_has_not_run_then_it_has_no_value(cluster: Start) -> None:
    with connect(cluster(1).servers) as ps:
        x = ps.vector("x", 10)
        with pytest.raises(ZeroDivisionError), ps.batch() as b:
            b.fill(x, 1)
            d = b.sum(x)
            raise ZeroDivisionError
        with pytest.raises(RuntimeError, match=r"sum\(x\): has no value before its batch has run"):
            float(d)
        assert x.sum() == 0
    with pytest.raises(RuntimeError, match="closed"):
        x.sum()
