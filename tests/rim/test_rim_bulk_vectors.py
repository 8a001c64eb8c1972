"""Batches on vectors over the bulk lane as a stranger sees them: right and wrong messages. No psd_client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from raw_bulk import BulkWorker, answer

from psd.contract.config import Limits
from psd.contract.errors import PsdError
from psd.contract.wire import PREFIX, Disconnected, Kind
from psd.v1 import bulk_pb2, vectors_pb2, vectors_pb2_grpc

SPEC = vectors_pb2.VectorSpec(name="x", size=1000, dtype=2)
ADD = vectors_pb2.VectorOperation(operator=11, out=0, start=10, count=2)
SUM = vectors_pb2.VectorOperation(operator=16, x=[0])
LIMITS = Limits(batch_bytes_max=1 << 20)


@pytest.fixture
def worker(cluster: Callable[..., Any], dial: Callable[..., grpc.Channel]) -> Iterator[BulkWorker]:
    """A worker that has made a vector on one shard."""
    found = BulkWorker(dial(cluster(1, limits=LIMITS).servers))
    change = vectors_pb2.VectorChange(caller=found.caller, seq=1, vector=SPEC)
    vectors_pb2_grpc.VectorServiceStub(found.channel).Create(change, timeout=100)
    yield found
    for stream in found.streams:
        stream.close()


def call_of(worker: BulkWorker, payload: bytes, *, seq: int = 2, **fields: Any) -> bytes:
    """A batch that adds two numbers, as the head of a CALL."""
    given = {
        "caller": worker.caller,
        "seq": seq,
        "vectors": [SPEC],
        "operations": [ADD],
        "payload_bytes": len(payload),
    } | fields
    batch = vectors_pb2.VectorBatch(**given)
    return bulk_pb2.BulkCall(method=bulk_pb2.BULK_METHOD_RUN_VECTORS, batch=batch, timeout_s=30).SerializeToString()


def fetch_of(worker: BulkWorker, stop: int = 1000) -> bytes:
    fetch = vectors_pb2.VectorFetch(caller=worker.caller, vector=SPEC, start=0, stop=stop)
    return bulk_pb2.BulkCall(method=bulk_pb2.BULK_METHOD_FETCH_VECTOR, fetch=fetch, timeout_s=30).SerializeToString()


def fetched(stream: Any, worker: BulkWorker) -> Any:
    stream.send(Kind.CALL, fetch_of(worker))
    kind, head, payload_bytes = stream.receive()
    assert (kind, head, payload_bytes) == (Kind.REPLY, b"", 8000)
    values = np.empty(1000)
    stream.read_into(values.data.cast("B"))
    return values


TWO = np.array([1.5, 2.5]).tobytes()


@pytest.mark.parametrize("local", [False, True], ids=["tcp", "local"])
def test_a_batch_runs_once_and_its_numbers_are_fetched(worker: BulkWorker, local: bool) -> None:
    """The same name again is answered, and not run."""
    stream = worker.connect(local=local)
    for _ in range(2):
        stream.send(Kind.CALL, call_of(worker, TWO), TWO)
        assert bulk_pb2.BulkReply.FromString(answer(stream, Kind.REPLY)).HasField("vectors")

    expected = np.zeros(1000)
    expected[10:12] = 1.5, 2.5
    np.testing.assert_array_equal(fetched(stream, worker), expected)


@pytest.mark.parametrize(
    ("payload", "fields", "words"),
    [
        (TWO, {"payload_bytes": 8}, "payload: has 16 bytes, payload_bytes is 8"),
        (b"", {"payload_bytes": 16}, "payload: has 0 bytes, payload_bytes is 16"),
        (bytes((1 << 20) + 8), {}, "payload: 1048584 bytes are above the shard's --max-batch-bytes 1048576"),
        (TWO, {"operations": []}, "operations: must be 1 to 1024"),
        (TWO, {"vectors": []}, "out: 0 is not below the number of `vectors`, 0"),
        (TWO + TWO, {}, "payload: has 32 bytes, but the operations bring 16"),
        (TWO, {"seq": 0}, "seq: must be at least 1, got 0"),
    ],
)
def test_a_wrong_batch_is_refused_by_name_and_the_connection_goes_on(
    worker: BulkWorker, payload: bytes, fields: dict[str, Any], words: str
) -> None:
    """What comes with it is skipped, and no number has changed."""
    stream = worker.connect()

    stream.send(Kind.CALL, call_of(worker, payload, **fields), payload)

    with pytest.raises(PsdError, match=words):
        answer(stream, Kind.REPLY)
    assert not fetched(stream, worker).any()


def test_a_call_for_another_rank_is_refused(worker: BulkWorker) -> None:
    """A connection belongs to the worker that its ticket was issued to."""
    stream = worker.connect()
    worker.caller.rank = 1

    for sent in (call_of(worker, b""), fetch_of(worker)):
        stream.send(Kind.CALL, sent)
        with pytest.raises(PsdError, match=r"caller.rank: is 1, but this connection is worker 0's"):
            answer(stream, Kind.REPLY)


def test_a_fetch_beyond_the_vector_is_refused(worker: BulkWorker) -> None:
    """The range is named, and the connection goes on."""
    stream = worker.connect()

    stream.send(Kind.CALL, fetch_of(worker, stop=1001))

    with pytest.raises(PsdError, match="start: 0 to 1001 is no range of 'x': 1000"):
        answer(stream, Kind.REPLY)
    assert not fetched(stream, worker).any()


def test_a_payload_behind_another_call_ends_the_connection(worker: BulkWorker) -> None:
    """The two sides do not agree on what follows."""
    stream = worker.connect()

    stream.send(Kind.CALL, fetch_of(worker), TWO)

    with pytest.raises(PsdError, match="payload: has 16 bytes, but only a batch on vectors has any"):
        answer(stream, Kind.REPLY)
    with pytest.raises(Disconnected):
        answer(stream, Kind.REPLY)


def test_a_batch_that_is_cut_off_changes_nothing(worker: BulkWorker) -> None:
    """A worker that dies in the middle of a payload leaves no part of it, and its next connection runs the batch."""
    stream = worker.connect()
    head = call_of(worker, TWO)
    stream.socket.sendall(PREFIX.pack(Kind.CALL, len(head), len(TWO)) + head + TWO[:8])
    stream.close()
    worker.streams.remove(stream)

    stream = worker.connect()
    assert not fetched(stream, worker).any()
    stream.send(Kind.CALL, head, TWO)
    answer(stream, Kind.REPLY)

    assert fetched(stream, worker)[10:12].tolist() == [1.5, 2.5]
