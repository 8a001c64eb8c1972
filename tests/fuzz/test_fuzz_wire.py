"""Bytes that arrive: frames, and messages of the bulk lane at either end. Whatever they are, an error of psd's, or numbers."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from fuzzing import allocates_at_most, ends_in, fuzzed, messages
from hypothesis import given
from hypothesis import strategies as st
from known_fields import OF_VECTORS, PAYLOADS, ROWS, known_fields
from malformed_target import LAYOUT, ME, Target

from psd.contract import bounds, frames
from psd.contract.bounds import check_parts
from psd.contract.errors import InvalidRequest, PsdError
from psd.contract.rows import TableRows
from psd.contract.wire import PREFIX, READ_AHEAD_BYTES, Disconnected, Kind, Stream
from psd.rim.bulk_connection import READER, ServedConnection
from psd.rim.calls import CallGuard, Frame, frame_parser
from psd.rim.data_plane import DataPlane
from psd.rim.pace import Pace
from psd.v1 import bulk_pb2, control_pb2, data_pb2, vectors_pb2
from psd_client.lanes.bulk_connection import BulkClient
from psd_client.lanes.bulk_reads import ReadingClient
from psd_client.lanes.flat import FlatBuffers, Mismatch, share_memory
from psd_client.lanes.frames import WantedRows
from psd_client.lanes.transport import Call, Scope, Traffic

HEAD_BYTES_MAX = 1 << 16

frame_bytes = st.binary(max_size=300) | st.builds(
    lambda head, payload, cut: frames.join(head.SerializeToString(), payload)[: cut or None],
    messages(data_pb2.PushFrame),
    st.binary(max_size=64),
    st.integers(-5, 0),
)


@fuzzed
@given(frame_bytes)
def test_frames(data: bytes) -> None:
    """A frame is taken apart as protobuf does it, or refused; the payload is a view, and nothing is larger than what came."""
    with allocates_at_most(len(data)):
        parsed = frame_parser(data_pb2.PushFrame)(data)

    if isinstance(parsed, Frame):
        whole = data_pb2.PushFrame.FromString(data)
        assert bytes(parsed.payload) == whole.payload
        whole.ClearField("payload")
        assert parsed.head == whole
        ends_in(PsdError, lambda: frames.numbers(parsed.payload, np.dtype("<f4"), len(parsed.payload) // 4, "x"))
    else:
        assert isinstance(parsed, PsdError)


@fuzzed
@given(
    messages(control_pb2.DeclareRequest) | messages(bulk_pb2.BulkCall) | messages(vectors_pb2.VectorBatch),
    st.binary(max_size=30),
    st.integers(0, 30),
)
def test_parts(message: Any, noise: bytes, parts_max: int) -> None:
    """A message of few parts passes, one of more is refused; and whatever the bytes are, nothing else happens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounds, "UNCOUNTED_BYTES", 0)
        data, parts = message.SerializeToString(), parts_of(message)
        check_parts(data, message.DESCRIPTOR, parts + len(data))
        passes = ends_in(InvalidRequest, lambda: (check_parts(data, message.DESCRIPTOR, parts_max),)) is not None
        assert not passes or parts <= parts_max
        ends_in(InvalidRequest, lambda: check_parts(noise + data, message.DESCRIPTOR, parts_max))


def parts_of(message: Any) -> int:
    """Messages, strings and runs of bytes in the lists of a message, at all depths."""
    count = 0
    for field, value in message.ListFields():
        values = value if field.is_repeated else [value]
        if field.is_repeated and field.type in (field.TYPE_MESSAGE, field.TYPE_STRING, field.TYPE_BYTES):
            count += len(values)
        if field.type == field.TYPE_MESSAGE:
            count += sum(parts_of(inner) for inner in values)
    return count


@fuzzed
@given(st.binary(max_size=40), st.integers(0, 2000))
def test_bitmaps(bits: bytes, segments: int) -> None:
    """Which tensors are present: as many as there are segments, or refused."""
    mask = ends_in(PsdError, lambda: frames.present_mask(bits, segments))

    assert mask is None or mask.shape == (segments,)


@contextmanager
def fed(data: bytes) -> Iterator[Stream]:
    """A stream from which these bytes can be received and then the end."""
    here, there = socket.socketpair()
    with here, there:
        there.sendall(data)
        there.shutdown(socket.SHUT_WR)
        yield Stream(here, HEAD_BYTES_MAX)


prefixes = st.builds(PREFIX.pack, st.integers(0, 12), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))


@fuzzed
@given(prefixes, st.binary(max_size=200))
def test_messages_on_the_wire(prefix: bytes, rest: bytes) -> None:
    """Whatever lengths a prefix says, no more is made room for than a head may have."""
    with fed(prefix + rest) as stream, allocates_at_most(HEAD_BYTES_MAX + READ_AHEAD_BYTES):
        received = ends_in((PsdError, Disconnected), stream.receive)
        if received is not None:
            ends_in(Disconnected, lambda: stream.skip(received[2]))


def packed(kind: int, head: bytes, payload: bytes = b"") -> bytes:
    return PREFIX.pack(kind, len(head), len(payload)) + head + payload


def any_of(*kinds: tuple[Kind, Any]) -> st.SearchStrategy[bytes]:
    """One message: of a kind with a head that may be its, or with any bytes."""
    return st.one_of(
        *(
            st.builds(lambda head, payload, kind=kind: packed(kind, head.SerializeToString(), payload), made, payloads)
            for kind, made in kinds
        ),
        st.builds(packed, st.sampled_from(Kind), st.binary(max_size=20), payloads),
    )


payloads = st.binary(max_size=16) | st.sampled_from(PAYLOADS)


def sent_by_a_worker(target: Target) -> st.SearchStrategy[list[bytes]]:
    known = known_fields(target) | {
        "method": st.sampled_from([1, 2, 3, 5, 6, 7, 60]),
        "timeout_s": 0.0,
        "present": b"",
        "rows_at": [64],
        "in_memory": [0],
    }
    known |= {"batch": OF_VECTORS, "fetch": OF_VECTORS}
    return st.lists(
        any_of(
            (Kind.HELLO, messages(bulk_pb2.BulkHello)),
            (Kind.ATTACH, messages(bulk_pb2.BulkAttach, known)),
            (Kind.CALL, messages(bulk_pb2.BulkCall, known)),
            (Kind.FRAME, messages(data_pb2.PushFrame, known)),
            (Kind.FRAME, messages(data_pb2.InitializeFrame, known)),
            (Kind.FRAME, messages(data_pb2.RowsRequest, known)),
        ),
        max_size=5,
    )


@pytest.mark.parametrize("rank", [ME, READER])
@fuzzed
@given(data=st.data())
def test_what_a_worker_or_a_reader_sends(target: Callable[[], Target], rank: int, data: st.DataObject) -> None:
    """A connection of the bulk lane ends when its bytes do; nothing escapes it, and the shard's log has no defect."""
    shard = target()
    sent = data.draw(sent_by_a_worker(shard))
    guard = StrictGuard(shard.shard)

    def admit(connection: ServedConnection, key: bytes) -> int:
        connection.is_welcome = None
        return rank

    with fed(packed(Kind.HELLO, b"") + b"".join(sent)) as stream:
        plane = DataPlane(shard.shard, "tcp")
        connection = ServedConnection(stream, shard.shard, plane, shard.vectors, guard, lambda: False)
        connection.serve(admit, 5.0)
        connection.close()

    assert guard.defects == []


class StrictGuard(CallGuard):
    """Notes what it would log as a defect of the shard."""

    def __init__(self, shard: Any) -> None:
        super().__init__(shard, Pace())
        self.defects: list[Exception] = []

    def as_error(self, error: Exception) -> PsdError:
        if not isinstance(error, PsdError):
            self.defects.append(error)
        return super().as_error(error)


sent_by_a_shard = st.lists(
    any_of(
        (Kind.ANSWER, messages(data_pb2.PullFrame, {"block": 0})),
        (Kind.REPLY, messages(bulk_pb2.BulkReply, {"blocks": [0], "versions": [1]})),
        (Kind.ERROR, messages(bulk_pb2.BulkError, {"reason": "WaitTimeout", "detail": '{"missing": [1]}'})),
    ),
    max_size=4,
)


@fuzzed
@given(sent_by_a_shard, st.booleans())
def test_what_a_shard_sends(sent: list[bytes], into_memory: bool) -> None:
    """A worker's end: parameters, or an error of psd's that the caller can handle."""
    parameters, awaited = FlatBuffers(LAYOUT), {0: LAYOUT.blocks[0].nbytes}
    call = bulk_pb2.BulkCall(method=bulk_pb2.BULK_METHOD_PULL, pull=data_pb2.PullRequest(blocks=[0]))
    with fed(packed(Kind.WELCOME, b"") + b"".join(sent)) as stream:
        connection = BulkClient(stream, 0, "127.0.0.1:1", b"ticket", Call(5.0, Scope()), Traffic())
        if into_memory:
            connection._attached = [parameters]

        ends_in(PsdError, lambda: connection.transfer(call, None, awaited, parameters, Call(5.0, Scope())))
        connection.close()


answers_to_a_reader = st.lists(
    any_of(
        (Kind.ANSWER, messages(data_pb2.PullFrame, {"block": 0})),
        (Kind.REPLY, messages(bulk_pb2.BulkReply, {"blocks": [0], "versions": [1], "contents": [1]})),
        (Kind.ALIVE, st.just(data_pb2.PullFrame())),
        (Kind.ERROR, messages(bulk_pb2.BulkError, {"reason": "CutMissed"})),
    ),
    max_size=4,
)


@fuzzed
@given(answers_to_a_reader, st.booleans(), st.booleans())
def test_what_a_shard_sends_to_a_reader(sent: list[bytes], into_memory: bool, has_base: bool) -> None:
    """Parameters, or an error that the reader can handle."""
    parameters, awaited = FlatBuffers(LAYOUT), {0: LAYOUT.blocks[0].nbytes}
    if into_memory:
        segment = share_memory(LAYOUT, is_reader=True)
        assert segment is not None
        parameters = FlatBuffers(LAYOUT, segment=segment)
    parameters.base = FlatBuffers(LAYOUT) if has_base else None
    with fed(packed(Kind.WELCOME, b"") + b"".join(sent)) as stream:
        connection = ReadingClient(stream, 0, "127.0.0.1:1", b"ticket", Call(5.0, Scope()), Traffic())
        if into_memory:
            connection._attached = [parameters]

        request = data_pb2.ReadRequest(blocks=[0], held=[1])
        ends_in((PsdError, Mismatch), lambda: connection.read(request, awaited, parameters, Call(5.0, Scope())))
        connection.close()


answers_of_vectors = st.lists(
    any_of(
        (Kind.REPLY, messages(bulk_pb2.BulkReply)),
        (Kind.ERROR, messages(bulk_pb2.BulkError, {"reason": "UnknownVector"})),
    ),
    max_size=3,
)


@fuzzed
@given(answers_of_vectors, st.sampled_from([0, 8, 16]))
def test_what_a_shard_sends_of_vectors(sent: list[bytes], awaited: int) -> None:
    """As many numbers as were asked for, or an error of psd's."""
    call = bulk_pb2.BulkCall(method=bulk_pb2.BULK_METHOD_FETCH_VECTOR)
    with fed(packed(Kind.WELCOME, b"") + b"".join(sent)) as stream:
        connection = BulkClient(stream, 0, "127.0.0.1:1", b"ticket", Call(5.0, Scope()), Traffic())

        out = memoryview(bytearray(awaited))
        ends_in(PsdError, lambda: connection.exchange(call, (), out, Call(5.0, Scope())))
        connection.close()


answers_of_rows = st.lists(
    any_of(
        (Kind.ANSWER, messages(data_pb2.RowsFrame, {"rows": ROWS})),
        (Kind.REPLY, messages(bulk_pb2.BulkReply)),
        (Kind.ERROR, messages(bulk_pb2.BulkError, {"reason": "WaitTimeout"})),
    ),
    max_size=3,
)


@fuzzed
@given(answers_of_rows)
def test_what_a_shard_sends_of_rows(sent: list[bytes]) -> None:
    """Rows in the arrays that want them, and nowhere else, or an error of psd's."""
    wanted = [
        TableRows(part.table, np.zeros(part.rows, np.uint64), np.zeros((part.rows, dim), dtype))
        for part, dim, dtype in zip(ROWS, (3, 2), (np.float32, np.float16), strict=True)
    ]
    call = bulk_pb2.BulkCall(method=bulk_pb2.BULK_METHOD_PULL_ROWS)
    with fed(packed(Kind.WELCOME, b"") + b"".join(sent)) as stream:
        connection = BulkClient(stream, 0, "127.0.0.1:1", b"ticket", Call(5.0, Scope()), Traffic())

        ends_in(PsdError, lambda: connection.pull_rows(call, WantedRows("shard 0", wanted), Call(5.0, Scope())))
        connection.close()
