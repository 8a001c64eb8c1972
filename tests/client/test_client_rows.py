"""Rows of tables over a bulk connection: both ends of a message, several frames under way, refusals in mid-call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from scripted_shard import Conversation, ScriptedShard, ToldLane

from psd.contract.errors import InternalError, InvalidRequest
from psd.contract.jobspec import GroupSpec, JobSpec, TensorSpec
from psd.contract.layout import Layout
from psd.contract.rows import TableRows, parts_of, rows_in
from psd.contract.tables import SparseTableSpec
from psd.contract.wire import Kind
from psd.v1 import bulk_pb2, data_pb2
from psd_client.lanes import bulk_connection, frames, transport
from psd_client.lanes.flat import FlatBuffers
from psd_client.lanes.overlap_feed import Feed
from psd_client.lanes.transport import Call, GradientPart, Scope

TABLES = (SparseTableSpec("a", 3), SparseTableSpec("b", 2))
DIMS = [3, 2]
SPEC = JobSpec(
    1,
    (TensorSpec("w", (4,), "float32", 0),),
    (GroupSpec("sgd"), GroupSpec("sgd")),
    tables=tuple(SparseTableSpec(table.name, table.dim, 1) for table in TABLES),
)
LAYOUT = Layout(SPEC, 1)
TABLES_BLOCK = 1
CALL = Call(30.0, Scope())

Connected = Callable[..., ToldLane]


@pytest.fixture
def connected(scripted: Callable[..., ScriptedShard], told: Connected) -> Connected:
    """connected(script) -> a lane to a shard that runs the script with its connection."""

    def start(script: Callable[[Conversation], None]) -> ToldLane:
        def welcome(conversation: Conversation) -> None:
            conversation.welcome()
            script(conversation)

        return told(scripted(welcome).port)

    return start


def next_frame(conversation: Conversation, of: Any = data_pb2.PushFrame) -> tuple[Any, memoryview]:
    """The next frame, and its payload."""
    kind, head, nbytes = conversation.stream.receive()
    assert kind is Kind.FRAME
    payload = memoryview(np.empty(nbytes, np.uint8)).cast("B")
    conversation.stream.read_into(payload)
    return of.FromString(head), payload


def next_call(conversation: Conversation) -> bulk_pb2.BulkCall:
    kind, head, _ = conversation.stream.receive()
    assert kind is Kind.CALL
    return bulk_pb2.BulkCall.FromString(head)


def asked_for(conversation: Conversation) -> Iterator[list[TableRows]]:
    """The requests of one call, of which the first has its head."""
    is_first, is_last = True, False
    while not is_last:
        message, payload = next_frame(conversation, data_pb2.RowsRequest)
        assert message.HasField("pull") is is_first or message == data_pb2.RowsRequest(last=True)
        is_first, is_last = False, message.last
        yield rows_in(message.rows, payload, DIMS, has_values=False)


def answer(conversation: Conversation, rows: list[TableRows], version: int = 7) -> None:
    """Each row's numbers are its id."""
    for part in rows:
        part.values[:] = part.ids[:, None]
    message = data_pb2.RowsFrame(rows=parts_of(rows), version=version)
    conversation.stream.send(Kind.ANSWER, message.SerializeToString(), *(part.values for part in rows))


def reply(conversation: Conversation, **fields: Any) -> None:
    conversation.stream.send(Kind.REPLY, bulk_pb2.BulkReply(**fields).SerializeToString())


def refuse(conversation: Conversation) -> None:
    conversation.stream.send(Kind.ERROR, bulk_pb2.BulkError(reason="InvalidRequest", message="no").SerializeToString())


def wanted(*sizes: int, dtype: Any = np.float32) -> list[TableRows]:
    return [
        TableRows(table, np.arange(size, dtype=np.uint64), np.full((size, dim), -1, dtype))
        for table, (size, dim) in enumerate(zip(sizes, DIMS, strict=False))
    ]


def test_pull_rows_when_there_are_many_then_asks_ahead_and_fills_the_arrays(connected: Connected, monkeypatch: Any) -> None:
    """The next frame is under way before one is answered, but no more than sockets hold: neither side waits for the other."""
    monkeypatch.setattr(frames, "FRAME_BYTES", 5_000)
    monkeypatch.setattr(bulk_connection, "SMALL_BYTES", 6_000)
    calls = []

    def script(conversation: Conversation) -> None:
        calls.append(next_call(conversation).method)
        requests = asked_for(conversation)
        first, version = next(requests), 9
        for request in requests:
            answer(conversation, first, version)
            first, version = request, 8
        answer(conversation, first, version)
        reply(conversation)

    lane, rows = connected(script), wanted(1_000, 500)
    version = lane.pull_rows(data_pb2.PullRequest(clock=3), rows, CALL, counts_no_use=True)

    assert calls == [bulk_pb2.BULK_METHOD_PULL_ROWS]
    assert version == 8
    for part in rows:
        assert (part.values == part.ids[:, None]).all()
    assert lane.traffic == transport.Traffic(8 * 1_500, 4 * (3_000 + 1_000))


def test_pull_rows_in_16_bits_and_of_nothing(connected: Connected) -> None:
    """Numbers travel as the array's dtype says; whoever wants none learns the version."""

    def script(conversation: Conversation) -> None:
        for _ in range(2):
            next_call(conversation)
            for request in asked_for(conversation):
                answer(conversation, request)
            reply(conversation)

    lane, rows = connected(script), wanted(5, dtype=np.float16)

    assert lane.pull_rows(data_pb2.PullRequest(), rows, CALL) == 7
    assert rows[0].values.tolist() == [[i] * 3 for i in range(5)]
    assert lane.pull_rows(data_pb2.PullRequest(), [], CALL) == 7


def test_pull_rows_when_it_is_refused_in_the_middle_then_the_connection_serves_on(
    connected: Connected, monkeypatch: Any
) -> None:
    """The worker ends its call, of which it has not sent everything; the next call is answered."""
    monkeypatch.setattr(frames, "FRAME_BYTES", 5_000)

    def script(conversation: Conversation) -> None:
        next_call(conversation)
        requests = asked_for(conversation)
        answer(conversation, next(requests))
        refuse(conversation)
        for _ in requests:
            pass
        next_call(conversation)
        for request in asked_for(conversation):
            answer(conversation, request)
        reply(conversation)

    lane = connected(script)

    with pytest.raises(InvalidRequest, match="no"):
        lane.pull_rows(data_pb2.PullRequest(), wanted(20_000), CALL)
    assert lane.pull_rows(data_pb2.PullRequest(), wanted(3), CALL) == 7


@pytest.mark.parametrize("wrong", ["part", "rows", "missing", "more"])
def test_pull_rows_when_the_answer_is_not_what_was_asked_then_says_so(connected: Connected, wrong: str) -> None:
    """A shard is not trusted with where its numbers go."""

    def script(conversation: Conversation) -> None:
        next_call(conversation)
        (request,) = asked_for(conversation)
        if wrong == "part":
            answer(conversation, [request[0]._replace(table=1)])
        elif wrong == "rows":
            answer(conversation, [TableRows(0, request[0].ids[1:], request[0].values[1:])])
        elif wrong == "more":
            answer(conversation, request)
            answer(conversation, request)
        reply(conversation)

    with pytest.raises(InternalError, match=r"shard 0 at 127\.0\.0\.1:9: (sent other rows|ANSWER was not|REPLY was not)"):
        connected(script).pull_rows(data_pb2.PullRequest(), wanted(4), CALL)


@pytest.mark.parametrize("has_feed", [False, True])
@pytest.mark.parametrize("sizes", [(), (5, 2)])
def test_push_pull_with_rows(connected: Connected, sizes: tuple[int, ...], has_feed: bool) -> None:
    """Rows come behind the blocks, at least one frame; the tables' version comes back as a block's does."""
    got = []

    def script(conversation: Conversation) -> None:
        next_call(conversation)
        message, payload = next_frame(conversation)
        got.append((message.block, message.last, payload.nbytes))
        message, payload = next_frame(conversation)
        got.append((message.block, message.last, message.more))
        got.append(rows_in(message.rows, payload, DIMS, has_values=True))
        for block, nbytes in ((0, 16), (TABLES_BLOCK, 0)):
            head = data_pb2.PullFrame(block=block, version=5 + block).SerializeToString()
            conversation.stream.send(Kind.ANSWER, head, bytes(nbytes))
        reply(conversation, push=data_pb2.PushReply(clock=1))

    rows, parameters = wanted(*sizes), FlatBuffers(LAYOUT)
    part = GradientPart(LAYOUT.blocks, parameters, header=data_pb2.PushHeader(), tables_block=TABLES_BLOCK, tables=rows)
    if has_feed:
        part.feed, part.tables = Feed(LAYOUT), ()
        part.feed.finish(None, [rows])

    assert connected(script).push_pull(part, parameters, CALL).clock == 1
    assert got[:2] == [(0, False, 16), (TABLES_BLOCK, True, False)]
    assert [(r.table, r.ids.tolist(), r.values.tolist()) for r in got[2]] == [
        (r.table, r.ids.tolist(), r.values.tolist()) for r in rows
    ]
    assert list(parameters.versions) == [5, 6]


def test_push_of_rows_in_several_frames(connected: Connected) -> None:
    """All but the last say that more of them come, and cover every row once."""
    got: list[Any] = []

    def script(conversation: Conversation) -> None:
        next_call(conversation)
        is_last = False
        while not is_last:
            message, payload = next_frame(conversation)
            is_last = message.last
            assert message.more is not is_last
            for rows in rows_in(message.rows, payload, DIMS, has_values=True):
                got.extend(rows.ids.tolist())
        reply(conversation, push=data_pb2.PushReply(clock=1))

    (sent,) = wanted(500_000)
    part = GradientPart((), FlatBuffers(LAYOUT), header=data_pb2.PushHeader(), tables_block=TABLES_BLOCK, tables=[sent])
    lane = connected(script)

    assert lane.push(part, CALL).clock == 1
    assert got == sent.ids.tolist()
    assert lane.traffic.sent_bytes == sent.nbytes
