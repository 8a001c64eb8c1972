"""Rows of tables over the wire with stock stubs and raw sockets: what is asked is answered, what is wrong is refused by its
field, and what was not completed has changed nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from raw_bulk import SIZE, BulkWorker, answer, send
from raw_client import TIMEOUT_S, RawWorker, failure, reason, spec

from psd.contract.config import Limits
from psd.contract.errors import InvalidRequest, PsdError
from psd.contract.wire import Kind, Stream
from psd.rim.metrics import OTHER, TABLES_MAX, Metrics, ShardFamilies, by_table
from psd.state.tables.block import TableCounts
from psd.v1 import bulk_pb2, control_pb2, data_pb2, job_pb2
from psd_core.distinct import shard_of

F32, F16 = job_pb2.DTYPE_FLOAT32, job_pb2.DTYPE_FLOAT16
TABLES = {"a": 3, "b": 2}
TABLES_BLOCK = 1
IDS_MAX = 20


def tables_spec() -> job_pb2.JobSpec:
    """A job of one block and two tables."""
    job = spec(1)
    job.groups.add(rule="sgd")
    for name, dim in TABLES.items():
        job.tables.add(
            name=name,
            dim=dim,
            group=1,
            init="Zeros",
            dtype=F32,
            admit_after=1,
            admit_probability=1.0,
            updates="lazy",
            at_limit="evict",
        )
    return job


class RowsWorker(BulkWorker):
    """A worker of a declared job of one block and two tables."""

    def __init__(self, channel: grpc.Channel, **where: int) -> None:
        RawWorker.__init__(self, channel, 0, 1, **where)
        self.declare(tables_spec(), blocks=[0])
        self.streams: list[Stream] = []

    def push_frames(self, clock: int, *rows: data_pb2.PushFrame) -> list[data_pb2.PushFrame]:
        """A push of the block and of these frames."""
        frames = [*self.frames(clock, [[1.0] * 3]), *rows]
        frames[0].last = False
        frames[-1].last = True
        return frames

    def asked(self, *frames: data_pb2.RowsRequest, clock: int = 0) -> list[data_pb2.RowsRequest]:
        frames[0].pull.CopyFrom(self.pull_request(clock))
        frames[-1].last = True
        return list(frames)

    def pull_rows(self, *ids: int, table: int = 0, clock: int = 0) -> list[list[float]]:
        (frame,) = self.data.PullRows(iter(self.asked(request(ids, table=table), clock=clock)), timeout=TIMEOUT_S)
        return np.frombuffer(frame.payload, np.float32).reshape(len(ids), -1).tolist()


def rows(ids: Sequence[int], value: float = 1.0, *, table: int = 0, **fields: Any) -> data_pb2.PushFrame:
    """A frame of gradients."""
    dim = list(TABLES.values())[table]
    part = data_pb2.RowsPart(table=table, rows=len(ids), dtype=F32)
    payload = np.array(ids, np.uint64).tobytes() + np.full(len(ids) * dim, value, np.float32).tobytes()
    return data_pb2.PushFrame(**{"block": TABLES_BLOCK, "rows": [part], "payload": payload} | fields)


def request(ids: Sequence[int], *, table: int = 0, dtype: Any = F32) -> data_pb2.RowsRequest:
    part = data_pb2.RowsPart(table=table, rows=len(ids), dtype=dtype)
    return data_pb2.RowsRequest(rows=[part], payload=np.array(ids, np.uint64).tobytes())


Join = Callable[..., RowsWorker]


@pytest.fixture
def join(dial: Callable[..., grpc.Channel]) -> Iterator[Join]:
    """join(address) -> a worker, whose connections are closed in the end."""
    workers: list[RowsWorker] = []

    def make(address: str, **where: int) -> RowsWorker:
        workers.append(RowsWorker(dial(address), **where))
        return workers[-1]

    yield make
    for worker in workers:
        for stream in worker.streams:
            stream.close()


@pytest.fixture
def worker(cluster: Callable[..., Any], join: Join) -> RowsWorker:
    return join(cluster(1, limits=Limits(push_ids_max=IDS_MAX)).shards[0].address)


def test_rows_are_pushed_in_frames_and_pulled_as_they_are_asked_for(worker: RowsWorker) -> None:
    """Ids that come twice are summed, over frames, too; each answer has its request's order and dtype; readers read on."""
    frames = worker.push_frames(0, rows([7, 5, 7], more=True), rows([5], 2.0, more=True), rows([9], 4.0, table=1))

    assert worker.data.Push(iter(frames), timeout=TIMEOUT_S).blocks_counted == 2
    first, second = worker.data.PullRows(
        iter(worker.asked(request([5, 6, 7]), request([9], table=1, dtype=F16), clock=1)), timeout=TIMEOUT_S
    )

    assert np.frombuffer(first.payload, np.float32).reshape(3, 3).tolist() == [[-3.0] * 3, [0.0] * 3, [-2.0] * 3]
    assert np.frombuffer(second.payload, np.float16).tolist() == [-4.0] * 2
    assert (first.version, second.version) == (1, 1)
    read = data_pb2.RowsRequest(read=data_pb2.ReadRequest(layout_digest=worker.digest), last=True)
    read.MergeFrom(request([7]))
    (frame,) = worker.data.ReadRows(iter([read]), timeout=TIMEOUT_S)
    assert np.frombuffer(frame.payload, np.float32).tolist() == [-2.0] * 3
    status = worker.control.Status(control_pb2.StatusRequest(), timeout=TIMEOUT_S)
    counted = [(t.name, *(t.numbers[name] for name in ("rows", "created", "reads", "hits"))) for t in status.tables]
    assert counted == [("a", 2, 2, 4, 3), ("b", 1, 1, 1, 1)]


def test_a_small_push_pull_has_rows(worker: RowsWorker) -> None:
    """One message each way; of the tables their version comes back. Frames beyond blocks and 16 of rows are refused."""
    frames = worker.push_frames(0, rows([3], more=True), rows([]))
    answered = worker.data.PushPullSmall(data_pb2.SmallPush(frames=frames), timeout=TIMEOUT_S).frames

    assert [(f.block, f.version, len(f.payload)) for f in answered[:-1]] == [(0, 1, 12), (TABLES_BLOCK, 1, 0)]
    assert worker.pull_rows(3, clock=1) == [[-1.0] * 3]
    many = data_pb2.SmallPush(frames=worker.push_frames(1, *[rows([1], more=True)] * 17))
    error = failure(worker.data.PushPullSmall, many, timeout=TIMEOUT_S)
    assert (reason(error), error.details()[:6]) == ("InvalidRequest", "frames")


WRONG = {
    "a table that is not there": (
        rows([1], rows=[data_pb2.RowsPart(table=2, rows=1, dtype=F32)]),
        "InvalidRequest",
        "rows.table",
    ),
    "numbers of 64 bits": (
        rows([1], rows=[data_pb2.RowsPart(rows=1, dtype=job_pb2.DTYPE_FLOAT64)]),
        "InvalidTensor",
        "rows.dtype",
    ),
    "a number too few": (rows([1], payload=bytes(16)), "InvalidRequest", "payload"),
    "more rows than there are": (rows([1], rows=[data_pb2.RowsPart(rows=2**32 - 1, dtype=F32)]), "InvalidRequest", "rows: "),
    "too many ids": (rows(range(IDS_MAX + 1)), "InvalidRequest", "--max-push-ids"),
    "rows of a block": (rows([1], block=0), "InvalidRequest", "rows"),
    "a payload without rows": (rows([1], rows=[]), "InvalidRequest", "payload"),
    "present": (rows([1], present=b"\2"), "InvalidRequest", "present"),
    "present of another number of tables": (rows([1], present=b"\1\0"), "InvalidRequest", "present"),
    "present on a frame before the last": (rows([1], present=b"\1", more=True), "InvalidRequest", "present"),
    "rows of nothing": (rows([1], block=None), "InvalidRequest", "block"),
    "another block": (rows([1], block=2), "BlockOutOfRange", "block"),
    "more, and no rows": (rows([], more=True), "InvalidRequest", "more"),
    "more at the end": (rows([1], more=True, last=True), "InvalidRequest", "block: 1 is missing"),
    "NaN": (rows([4], float("nan")), "NonFiniteGradient", "payload"),
}


def test_wrong_rows_are_refused_by_their_field_and_change_nothing(worker: RowsWorker) -> None:
    """Over gRPC, streamed and in one message, and over a bulk connection; the same push then counts."""
    stream = worker.connect()
    for what, (frame, name, word) in WRONG.items():
        frames = worker.push_frames(0, frame)
        for call, sent in ((worker.data.Push, iter(frames)), (worker.data.PushPullSmall, data_pb2.SmallPush(frames=frames))):
            error = failure(call, sent, timeout=TIMEOUT_S)
            assert (reason(error), word in error.details()) == (name, True), f"{what}: {error.details()}"
        if frame.HasField("block"):
            with pytest.raises(PsdError, match=word) as caught:
                push(stream, worker, frames)
            assert type(caught.value).__name__ == name, what

    assert push(stream, worker, worker.push_frames(0, rows([1]))).push.blocks_counted == 1
    assert worker.pull_rows(1, 4, clock=1) == [[-1.0] * 3, [0.0] * 3]


def push(stream: Stream, worker: RowsWorker, frames: Sequence[data_pb2.PushFrame]) -> bulk_pb2.BulkReply:
    """The same push over a bulk connection."""
    stream.send(Kind.CALL, worker.call(bulk_pb2.BULK_METHOD_PUSH))
    send(stream, frames)
    return bulk_pb2.BulkReply.FromString(answer(stream, Kind.REPLY))


def test_wrong_requests_for_rows_are_refused_by_their_field(worker: RowsWorker) -> None:
    """A call begins with its head, and ends with a last frame; ids are limited over all its frames."""
    pull, read = worker.asked(request([1]))[0], data_pb2.RowsRequest(read=data_pb2.ReadRequest(), last=True)
    unended = data_pb2.RowsRequest(pull=pull.pull)
    many = worker.asked(request(range(IDS_MAX)), request([1]))
    wrong: list[tuple[Any, list[data_pb2.RowsRequest], str]] = [
        (worker.data.PullRows, [], "pull: the stream ended"),
        (worker.data.PullRows, [unended], "last: the stream ended"),
        (worker.data.PullRows, [request([1])], "pull: the first frame"),
        (worker.data.PullRows, [read], "pull: the first frame"),
        (worker.data.PullRows, [unended, pull], "pull: stands on a frame"),
        (worker.data.PullRows, many, "--max-push-ids"),
        (worker.data.PullRows, worker.asked(request([1], dtype=job_pb2.DTYPE_FLOAT64)), "rows.dtype"),
        (worker.data.ReadRows, [pull], "read: the first frame"),
        (worker.data.ReadRows, [read], "layout_digest"),
    ]
    for call, frames, word in wrong:
        error = failure(call, iter(frames), timeout=TIMEOUT_S)
        assert word in error.details(), word

    stream = worker.connect()
    for wanted, word in ((request([1], table=2), "rows.table"), (request([1]), "")):
        stream.send(Kind.CALL, worker.call(bulk_pb2.BULK_METHOD_PULL_ROWS))
        send(stream, worker.asked(wanted))
        if word:
            with pytest.raises(InvalidRequest, match=word):
                answer(stream, Kind.ANSWER)
    assert data_pb2.RowsFrame.FromString(answer(stream, Kind.ANSWER)).version == 0
    answer(stream, Kind.REPLY)


@pytest.mark.parametrize("lane", ["grpc", "bulk"])
def test_a_push_whose_worker_hangs_up_among_its_rows_has_changed_none(worker: RowsWorker, lane: str) -> None:
    """The block before them has counted; rows count together, when the last of them is there, or not at all."""
    frames = worker.push_frames(0, rows([1], more=True), rows([2]))
    if lane == "grpc":
        error = failure(worker.data.Push, iter(frames[:-1]), timeout=TIMEOUT_S)
        assert "last: the stream ended" in error.details()
    else:
        stream = worker.connect()
        stream.send(Kind.CALL, worker.call(bulk_pb2.BULK_METHOD_PUSH))
        send(stream, frames[:-1])
        stream.close()
        worker.connect()  # when it is welcomed, nothing of the one before is under way

    assert worker.pull_rows(1, 2) == [[0.0] * 3] * 2
    reply = worker.data.Push(iter(frames), timeout=TIMEOUT_S)
    assert (reply.blocks_counted, reply.blocks_duplicate) == (1, 1)
    assert worker.pull_rows(1, 2, clock=1) == [[-1.0] * 3] * 2


@pytest.mark.parametrize("is_small", [True, False], ids=["grpc", "bulk"])
def test_rows_come_with_a_push_pull_and_wrong_ones_are_refused_before_it_counts(worker: RowsWorker, is_small: bool) -> None:
    """As of its answer, behind all blocks."""
    stream = worker.connect()

    def push_pull(clock: int, ahead: data_pb2.RowsRequest) -> data_pb2.RowsFrame:
        frames = worker.push_frames(clock, rows([7, 8]))
        if is_small:
            return worker.data.PushPullSmall(data_pb2.SmallPush(frames=frames, ahead=ahead), timeout=TIMEOUT_S).ahead
        stream.send(Kind.CALL, worker.call(bulk_pb2.BULK_METHOD_PUSH_PULL, ahead=ahead))
        send(stream, frames)
        for _ in range(2):
            answer(stream, Kind.ANSWER)
        _, head, nbytes = stream.receive()
        payload = bytearray(nbytes)
        stream.read_into(memoryview(payload))
        answer(stream, Kind.REPLY)
        return data_pb2.RowsFrame(rows=data_pb2.RowsFrame.FromString(head).rows, payload=bytes(payload))

    with pytest.raises((grpc.RpcError, InvalidRequest), match=f"rows: {IDS_MAX + 1} ids are above"):
        push_pull(0, request(range(IDS_MAX + 1)))
    for clock in range(2):
        frame = push_pull(clock, request([9, 8]))
        assert np.frombuffer(frame.payload, np.float32).tolist() == [0.0] * 3 + [-clock - 1.0] * 3


@pytest.fixture
def sharing(worker: RowsWorker, memory: int) -> Stream:
    """A connection to whose shard the worker's memory is attached."""
    stream = worker.connect(local=True)
    worker.attach(stream, memory, gradient_starts=(64,), parameter_starts=(192,))
    return stream


def in_memory(ids: Sequence[int], *starts: int) -> dict[str, Any]:
    """The fields of a frame for rows of table a whose numbers do not travel."""
    part = data_pb2.RowsPart(table=0, rows=len(ids), dtype=F32)
    return {"rows": [part], "rows_at": starts, "payload": np.array(ids, np.uint64).tobytes()}


def test_rows_in_attached_memory_are_read_and_written_there(worker: RowsWorker, sharing: Stream, memory: int) -> None:
    """Ids alone travel. A frame that others follow is copied when it comes: its memory is the worker's again."""
    os.pwrite(memory, np.array([[1] * 3, [2] * 3], np.float32).tobytes(), 1024)
    os.pwrite(memory, np.array([[4] * 3], np.float32).tobytes(), 2052)
    first, last = rows([], more=True, **in_memory([7, 8], 1024)), rows([], **in_memory([7], 2052))
    sharing.send(Kind.CALL, worker.call(bulk_pb2.BULK_METHOD_PUSH))
    send(sharing, worker.push_frames(0, first, last))
    assert bulk_pb2.BulkReply.FromString(answer(sharing, Kind.REPLY)).push.blocks_counted == 2

    sharing.send(Kind.CALL, worker.call(bulk_pb2.BULK_METHOD_PULL_ROWS, clock=1))
    send(sharing, worker.asked(data_pb2.RowsRequest(**in_memory([8, 9, 7], SIZE - 36)), clock=1))
    kind, head, nbytes = sharing.receive()

    assert (kind, nbytes, data_pb2.RowsFrame.FromString(head).version) == (Kind.ANSWER, 0, 1)
    answer(sharing, Kind.REPLY)
    pulled = np.frombuffer(os.pread(memory, 36, SIZE - 36), np.float32).reshape(3, 3)
    assert pulled.tolist() == [[-2.0] * 3, [0.0] * 3, [-5.0] * 3]


@pytest.mark.parametrize(
    ("starts", "match"),
    [
        ((0,), "rows_at: rows from byte 0 to 24 must begin at a multiple of 4, at least 64"),
        ((66,), "rows_at: rows from byte 66"),
        ((SIZE - 20,), f"rows_at: rows from byte {SIZE - 20} to {SIZE + 4} .* and end within {SIZE}"),
        (((1 << 64) - 4,), "rows_at: rows from byte"),
        ((64, 128), "rows_at: has 2 entries for 1 parts"),
    ],
)
def test_rows_outside_the_attached_memory_are_refused(
    worker: RowsWorker, sharing: Stream, starts: tuple[int, ...], match: str
) -> None:
    """No request lets a shard reach beyond it, or read it unaligned; the connection serves on."""
    sharing.send(Kind.CALL, worker.call(bulk_pb2.BULK_METHOD_PULL_ROWS))
    send(sharing, worker.asked(data_pb2.RowsRequest(**in_memory([1, 2], *starts))))

    with pytest.raises(InvalidRequest, match=match):
        answer(sharing, Kind.ANSWER)

    plain = worker.connect(local=True)
    plain.send(Kind.CALL, worker.call(bulk_pb2.BULK_METHOD_PULL_ROWS))
    send(plain, worker.asked(data_pb2.RowsRequest(**in_memory([1, 2], 64))))
    with pytest.raises(InvalidRequest, match="in_memory: nothing is attached"):
        answer(plain, Kind.ANSWER)


def test_when_a_worker_vanishes_in_mid_push_nothing_counts_of_rows_in_its_memory(
    worker: RowsWorker, sharing: Stream, memory: int, eventually: Callable[..., None]
) -> None:
    """And the shard lets go of the memory."""
    os.pwrite(memory, np.ones(6, np.float32).tobytes(), 1024)
    sharing.send(Kind.CALL, worker.call(bulk_pb2.BULK_METHOD_PUSH))
    unended = rows([], more=True, push=worker.header(), **in_memory([7, 8], 1024))
    send(sharing, [unended])

    sharing.close()

    eventually(lambda: "/memfd:psd-test" not in Path("/proc/self/maps").read_text(), "the memory is unmapped")
    assert worker.pull_rows(7, 8) == [[0.0] * 3] * 2


def test_an_id_of_another_shard_is_refused_by_its_owner(cluster: Callable[..., Any], join: Join) -> None:
    """What is looked up where it cannot be would be silently another row than the one that is trained."""
    worker = join(cluster(2).shards[0].address, shards=2)
    foreign = next(i for i in range(100) if shard_of(np.array([i], np.uint64), 2)[0] == 1)

    error = failure(worker.data.PullRows, iter(worker.asked(request([foreign]))), timeout=TIMEOUT_S)

    assert reason(error) == "BlockOutOfRange"
    assert f"id {foreign} of table 'a'" in error.details()


def test_rows_are_not_served_while_the_shard_drains(cluster: Callable[..., Any], join: Join) -> None:
    """As every call of a worker's, so that it waits and comes back."""
    server = cluster(1).shards[0]
    worker = join(server.address)
    stream = worker.connect()
    server.shard.drain()

    for call in (worker.data.PullRows, worker.data.ReadRows):
        assert reason(failure(call, iter(worker.asked(request([1]))), timeout=TIMEOUT_S)) == "Draining"
    stream.send(Kind.CALL, worker.call(bulk_pb2.BULK_METHOD_PULL_ROWS))
    with pytest.raises(PsdError, match="shutting down"):
        answer(stream, Kind.ANSWER)


def test_metrics_have_each_tables_numbers(cluster: Callable[..., Any], join: Join) -> None:
    """Reads that found a row and others, rows made, gradients dropped: by table."""
    server = cluster(1).shards[0]
    worker = join(server.address)
    worker.data.Push(iter(worker.push_frames(0, rows([1, 2]))), timeout=TIMEOUT_S)
    worker.pull_rows(2, 3, clock=1)

    lines = Metrics(ShardFamilies(server.shard, lambda: None, dict)).render().decode().splitlines()

    a = 'shard="0",table="a"'
    for line in (
        f"psd_table_rows{{{a}}} 2.0",
        f"psd_table_reads_total{{{a}}} 2.0",
        f"psd_table_hits_total{{{a}}} 1.0",
        f"psd_table_rows_created_total{{{a}}} 2.0",
        f'psd_table_rows_removed_total{{reason="evicted",{a}}} 0.0',
        f'psd_table_gradients_dropped_total{{reason="unadmitted",{a}}} 0.0',
    ):
        assert line in lines, line


def test_metrics_of_very_many_tables_share_a_series() -> None:
    """The number of series is bounded, whatever a job declares; what they say adds up."""
    found = by_table([TableCounts(f"t{i}", *[i] * 10) for i in range(TABLES_MAX + 3)])

    assert [counts.name for counts in found[-2:]] == [f"t{TABLES_MAX - 1}", OTHER]
    assert found[-1].rows == found[-1].unadmitted == 3 * TABLES_MAX + 3
