"""The bulk lane as a stranger sees it: raw sockets and messages, right and wrong ones. No psd_client."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from raw_bulk import BLOCKS, ELEMENTS, SIZE, STARTS, BulkWorker, answer, push, send

from psd.contract.errors import PsdError
from psd.contract.wire import PREFIX, Disconnected, Kind
from psd.v1 import bulk_pb2, control_pb2, data_pb2, job_pb2

TABLES_BLOCK = BLOCKS
ROWS = data_pb2.RowsPart(rows=1, dtype=job_pb2.DTYPE_FLOAT32)


@pytest.fixture
def join(cluster: Callable[..., Any], dial: Callable[..., grpc.Channel]) -> Iterator[Callable[..., BulkWorker]]:
    """join(rank, world_size) -> a worker of one job on one shard."""
    address = cluster(1).servers
    joined: list[BulkWorker] = []

    def enter(rank: int = 0, world_size: int = 1) -> BulkWorker:
        joined.append(BulkWorker(dial(address), rank, world_size))
        return joined[-1]

    yield enter
    for worker in joined:
        for stream in worker.streams:
            stream.close()


@pytest.mark.parametrize("local", [False, True], ids=["tcp", "local"])
def test_push_pull_answers_every_block_and_then_the_push(join: Callable[..., BulkWorker], local: bool) -> None:
    """Blocks come with their versions, the reply last."""
    worker = join()
    stream = worker.connect(local=local)

    push(stream, worker, bulk_pb2.BULK_METHOD_PUSH_PULL, 0, (1, 2))

    for index in range(BLOCKS):
        kind, head, payload_bytes = stream.receive()
        values = np.empty(ELEMENTS, np.float32)
        stream.read_into(values.data.cast("B"))
        frame = data_pb2.PullFrame.FromString(head)
        assert (kind, payload_bytes, frame.block, frame.version) == (Kind.ANSWER, 12, index, 1)
        assert values.tolist() == [-(index + 1.0)] * ELEMENTS
    reply = bulk_pb2.BulkReply.FromString(answer(stream, Kind.REPLY)).push
    assert (reply.clock, reply.blocks_counted) == (1, BLOCKS)


def test_attached_memory_is_read_and_written_in_place(join: Callable[..., BulkWorker], memory: int) -> None:
    """Messages only name the blocks; the numbers never pass through the socket."""
    worker = join()
    stream = worker.connect(local=True)
    os.pwrite(memory, b"sixteen bytes ok", 0)
    os.pwrite(memory, np.full(ELEMENTS, 3, np.float32).tobytes(), STARTS["gradient_starts"][1])

    assert worker.attach(stream, memory) == b"sixteen bytes ok"
    stream.send(Kind.CALL, worker.call(bulk_pb2.BULK_METHOD_PUSH_PULL, into_memory=True))
    send(stream, [data_pb2.PushFrame(push=worker.header(), in_memory=[0, 1], last=True)])

    assert bulk_pb2.BulkReply.FromString(answer(stream, Kind.REPLY)).push.blocks_counted == BLOCKS
    assert np.frombuffer(os.pread(memory, 12, STARTS["parameter_starts"][1]), np.float32).tolist() == [-3.0] * ELEMENTS


@pytest.mark.parametrize(
    ("fields", "reason", "match"),
    [
        ({"layout_digest": b"x" * 16}, "LayoutMismatch", "layout_digest"),
        ({"size": SIZE + 1}, "InvalidRequest", "size: is 4097"),
        ({"size": 8}, "InvalidRequest", "size: is 8"),
        ({"size": 1 << 63}, "InvalidRequest", "size"),
        ({"gradient_starts": (64,)}, "InvalidRequest", "gradient_starts: has 1 entries"),
        ({"gradient_starts": (0, 64)}, "InvalidRequest", "gradient_starts: a space from byte 0"),
        ({"gradient_starts": (64, 100)}, "InvalidRequest", "multiple of 64"),
        ({"parameter_starts": (64, SIZE)}, "InvalidRequest", "parameter_starts: a space from byte 4096"),
        ({"parameter_starts": (64, (1 << 64) - 64)}, "InvalidRequest", "end within"),
    ],
)
def test_memory_that_does_not_fit_is_refused_and_the_connection_goes_on(
    join: Callable[..., BulkWorker], memory: int, fields: dict[str, Any], reason: str, match: str
) -> None:
    """No attachment lets a shard reach outside the memory, or read it unaligned; the error names the field."""
    worker = join()
    stream = worker.connect(local=True)

    with pytest.raises(PsdError, match=match) as caught:
        worker.attach(stream, memory, **fields)

    assert caught.value.reason == reason
    push(stream, worker, bulk_pb2.BULK_METHOD_PUSH, 0, (1, 2))
    assert bulk_pb2.BulkReply.FromString(answer(stream, Kind.REPLY)).push.blocks_counted == BLOCKS


def test_memory_that_could_shrink_is_refused(join: Callable[..., BulkWorker]) -> None:
    """A worker that truncated its file would kill a shard that reads it."""
    worker = join()
    stream = worker.connect(local=True)
    fd = os.memfd_create("psd-test", os.MFD_ALLOW_SEALING)
    try:
        os.truncate(fd, SIZE)
        with pytest.raises(PsdError, match="sealed against shrinking"):
            worker.attach(stream, fd)
    finally:
        os.close(fd)


def test_what_is_no_memory_file_is_refused(join: Callable[..., BulkWorker]) -> None:
    """Any other descriptor gets an error, not a mapping."""
    worker = join()
    stream = worker.connect(local=True)
    read, write = os.pipe()
    try:
        with pytest.raises(PsdError, match="shared memory: expected a memory file"):
            worker.attach(stream, read)
    finally:
        os.close(read)
        os.close(write)


@pytest.mark.parametrize(
    ("fields", "payload", "match"),
    [
        ({"block": 9}, 12, "9"),
        ({}, 12, "block: absent"),
        ({"block": 0}, 8, "payload has 8 bytes"),
        ({"block": 0}, 0, "payload has 0 bytes"),
        ({"block": 0}, (4 << 20) + 1, "payload: has 4194305 bytes, the limit is 4194304"),
        ({"block": 0}, 12, "block: 1 is missing"),
        ({"in_memory": [0]}, 0, "in_memory: nothing is attached"),
        ({"block": TABLES_BLOCK, "rows": [ROWS], "rows_at": [64]}, 8, "in_memory: nothing is attached"),
    ],
)
def test_a_wrong_frame_is_refused_by_name_and_the_connection_goes_on(
    join: Callable[..., BulkWorker], fields: dict[str, Any], payload: int, match: str
) -> None:
    """The rest of such a push is read, so that the next call begins where a message begins."""
    worker = join()
    stream = worker.connect()

    stream.send(Kind.CALL, worker.call(bulk_pb2.BULK_METHOD_PUSH))
    send(stream, [data_pb2.PushFrame(push=worker.header(), last=True, payload=bytes(payload), **fields)])
    with pytest.raises(PsdError, match=match):
        answer(stream, Kind.REPLY)

    stream.send(Kind.CALL, worker.call(bulk_pb2.BULK_METHOD_PULL))
    answer(stream, Kind.ANSWER)


@pytest.mark.parametrize(
    ("fields", "payload", "match"),
    [
        ({"in_memory": [0, 9]}, b"", "blocks: 9 is no block of the job"),
        ({"in_memory": [0, 1], "in_memory_present": [b""]}, b"", "in_memory_present: has 1 entries for 2 blocks"),
        ({"in_memory": [0]}, bytes(12), "in_memory: the blocks lie in memory, but there are 12 bytes of payload"),
        ({"in_memory": [0] * 3}, b"", "in_memory: names 3 blocks, and the job has 2"),
        ({"in_memory": [0], "present": b"\1"}, b"", "in_memory: stands on a frame that has a block of its own"),
        ({"in_memory": [0], "block": 1}, b"", "in_memory: stands on a frame that has a block of its own"),
        ({"in_memory": [0], "rows": [ROWS]}, b"", "in_memory: stands on a frame that has a block of its own"),
    ],
)
def test_a_frame_that_names_blocks_wrongly_is_refused_by_name(
    join: Callable[..., BulkWorker], memory: int, fields: dict[str, Any], payload: bytes, match: str
) -> None:
    """Nothing of it has counted: the same call, made right, does."""
    worker = join()
    stream = worker.connect(local=True)
    worker.attach(stream, memory)

    for named, is_right in (({"payload": payload} | fields, False), ({"in_memory": [0, 1]}, True)):
        stream.send(Kind.CALL, worker.call(bulk_pb2.BULK_METHOD_PUSH))
        send(stream, [data_pb2.PushFrame(push=worker.header(), last=True, **named)])
        if not is_right:
            with pytest.raises(PsdError, match=match):
                answer(stream, Kind.REPLY)

    assert bulk_pb2.BulkReply.FromString(answer(stream, Kind.REPLY)).push.blocks_counted == BLOCKS


@pytest.mark.parametrize("method", ["Push", "PushPull", "PushPullSmall"])
def test_over_grpc_no_frame_refers_to_memory(join: Callable[..., BulkWorker], method: str) -> None:
    """There is none: what only a bulk connection has is refused by its field, and not taken for an absent block."""
    worker = join()
    frame = data_pb2.PushFrame(push=worker.header(), in_memory=[0, 1], last=True)

    with pytest.raises(grpc.RpcError, match="in_memory: nothing is attached"):
        list(_called(worker, method, frame))


def _called(worker: BulkWorker, method: str, frame: data_pb2.PushFrame) -> Iterator[Any]:
    if method == "PushPullSmall":
        yield worker.data.PushPullSmall(data_pb2.SmallPush(frames=[frame]), timeout=100)
    elif method == "PushPull":
        yield from worker.data.PushPull(iter([frame]), timeout=100)
    else:
        yield worker.data.Push(iter([frame]), timeout=100)


def test_wrong_initial_values_are_refused_by_name_and_the_connection_goes_on(join: Callable[..., BulkWorker]) -> None:
    """As by gRPC; and values that come when the job has some change nothing."""
    worker = join()
    stream = worker.connect()

    for value in (np.nan, 7.0):
        stream.send(Kind.CALL, worker.call(bulk_pb2.BULK_METHOD_INITIALIZE))
        payload = np.full(ELEMENTS, value, np.float32).tobytes()
        offer = [data_pb2.InitializeFrame(block=block, payload=payload, last=block == 1) for block in range(BLOCKS)]
        offer[0].MergeFrom(data_pb2.InitializeFrame(caller=worker.caller, layout_digest=worker.digest, choice=9))
        send(stream, offer)
        if value != 7.0:
            with pytest.raises(PsdError, match=r"the initial values of worker 0 .* has nan"):
                answer(stream, Kind.REPLY)
    reply = bulk_pb2.BulkReply.FromString(answer(stream, Kind.REPLY))

    assert reply.HasField("initialize")
    assert not reply.initialize.accepted
    stream.send(Kind.CALL, worker.call(bulk_pb2.BULK_METHOD_PULL))
    assert stream.receive()[2] == ELEMENTS * 4
    values = np.empty(ELEMENTS, np.float32)
    stream.read_into(values.data.cast("B"))
    assert values.tolist() == [0.0] * ELEMENTS


def test_a_push_refused_in_its_middle_is_read_to_its_end(join: Callable[..., BulkWorker]) -> None:
    """The error comes after the last block, and the same connection takes the next push."""
    worker = join()
    stream = worker.connect()

    push(stream, worker, bulk_pb2.BULK_METHOD_PUSH, 0, (float("nan"), 2))
    with pytest.raises(PsdError, match="nan") as caught:
        answer(stream, Kind.REPLY)
    assert caught.value.reason == "NonFiniteGradient"

    push(stream, worker, bulk_pb2.BULK_METHOD_PUSH, 0, (1, 2))
    assert bulk_pb2.BulkReply.FromString(answer(stream, Kind.REPLY)).push.blocks_counted == BLOCKS


@pytest.mark.parametrize("method", [0, 77])
def test_an_unknown_method_is_refused(join: Callable[..., BulkWorker], method: int) -> None:
    """It is not taken for another one."""
    worker = join()
    stream = worker.connect()

    stream.send(Kind.CALL, worker.call(method))

    with pytest.raises(PsdError, match="method"):
        answer(stream, Kind.REPLY)


def test_a_call_for_another_rank_is_refused(join: Callable[..., BulkWorker]) -> None:
    """A connection belongs to the worker that its ticket was issued to."""
    first = join(0, 2)
    stream = first.connect()
    first.caller.rank = 1

    stream.send(Kind.CALL, first.call(bulk_pb2.BULK_METHOD_PULL))

    with pytest.raises(PsdError, match=r"caller.rank: is 1, but this connection is worker 0's"):
        answer(stream, Kind.REPLY)


@pytest.mark.parametrize("ticket", [b"", b"x" * 32])
def test_a_wrong_ticket_opens_nothing(join: Callable[..., BulkWorker], ticket: bytes) -> None:
    """Only who has spoken to the shard over gRPC gets in."""
    with pytest.raises(PsdError, match="ticket"):
        join().connect(ticket=ticket)


def test_a_ticket_opens_one_connection(join: Callable[..., BulkWorker]) -> None:
    """Used again, it is worth nothing."""
    worker = join()
    reply = worker.control.OpenBulk(control_pb2.OpenBulkRequest(caller=worker.caller))

    worker.connect(ticket=reply.ticket)

    with pytest.raises(PsdError, match="ticket"):
        worker.connect(ticket=reply.ticket)


def test_without_a_session_there_is_no_ticket(join: Callable[..., BulkWorker]) -> None:
    """A fenced worker cannot open a lane."""
    worker = join()
    worker.caller.session += 1

    with pytest.raises(grpc.RpcError, match="session"):
        worker.control.OpenBulk(control_pb2.OpenBulkRequest(caller=worker.caller))


@pytest.mark.parametrize(
    "sent",
    [
        PREFIX.pack(99, 0, 0),
        PREFIX.pack(Kind.CALL, (1 << 32) - 1, 0),
        PREFIX.pack(Kind.HELLO, 4, 0) + b"\xff\xff\xff\xff",
        PREFIX.pack(Kind.HELLO, 0, 1 << 63),
        PREFIX.pack(Kind.REPLY, 0, 0),
        b"GET / HTTP/1.1\r\nHost: psd\r\n\r\n",
    ],
    ids=["kind", "head", "protobuf", "payload", "reply", "http"],
)
@pytest.mark.parametrize("greet", [False, True], ids=["stranger", "worker"])
def test_what_is_no_message_ends_the_connection(join: Callable[..., BulkWorker], greet: bool, sent: bytes) -> None:
    """Nobody can say where the next message would begin; others are not affected."""
    worker = join()
    stream = worker.connect(greet=greet)

    stream.socket.sendall(sent)

    with pytest.raises((PsdError, Disconnected)):
        answer(stream, Kind.REPLY)
    with pytest.raises(Disconnected):
        while True:
            stream.skip(1)
    push(worker.connect(), worker, bulk_pb2.BULK_METHOD_PUSH, 0, (1, 2))  # and hurts nobody else


def test_a_new_connection_of_a_rank_ends_the_one_before(join: Callable[..., BulkWorker]) -> None:
    """A rank has one connection: its latest."""
    worker = join()
    before = worker.connect()

    worker.connect()

    with pytest.raises(Disconnected):
        before.receive()


def test_when_the_worker_hangs_up_its_wait_ends(join: Callable[..., BulkWorker], eventually: Callable[..., None]) -> None:
    """The half-closed connection is how a call is cancelled."""
    first, _ = join(0, 2), join(1, 2)
    stream = first.connect()
    status = control_pb2.StatusRequest()
    push(stream, first, bulk_pb2.BULK_METHOD_PUSH_PULL, 0, (1, 2))
    eventually(lambda: len(first.control.Status(status).waits) == 1, "the worker waits for the round")

    stream.shut_down(socket.SHUT_WR)

    eventually(lambda: not first.control.Status(status).waits, "the wait has ended")
    with pytest.raises(Disconnected):  # the shard's end: it has let go of the worker's memory
        stream.receive()


@pytest.mark.parametrize("is_last", [True, False], ids=["waits for its round", "is in mid push"])
def test_when_the_worker_vanishes_its_memory_is_let_go_of_at_once(
    join: Callable[..., BulkWorker], memory: int, eventually: Callable[..., None], is_last: bool
) -> None:
    """Without the help of the collector, which may not run for long in a shard that has nothing to do."""

    def is_mapped() -> bool:
        return "/memfd:psd-test" in Path("/proc/self/maps").read_text()

    first, _ = join(0, 2), join(1, 2)
    stream = first.connect(local=True)
    first.attach(stream, memory)
    assert is_mapped()
    gc.disable()
    try:
        stream.send(Kind.CALL, first.call(bulk_pb2.BULK_METHOD_PUSH_PULL, into_memory=True))
        named = [0, 1] if is_last else [0]
        send(stream, [data_pb2.PushFrame(push=first.header(), in_memory=named, last=is_last)])
        if is_last:
            eventually(lambda: len(first.control.Status(control_pb2.StatusRequest()).waits) == 1, "the worker waits")

        stream.close()

        eventually(lambda: not is_mapped(), "the memory is unmapped")
    finally:
        gc.enable()
