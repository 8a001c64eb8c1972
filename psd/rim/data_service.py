"""DataService, the gRPC carrier of the data plane: turns frames into blocks and back. One function per RPC.

It builds answers as bytes (`frames.join` copies the payload once, out of the pinned page), so a page is pinned only while it is
copied.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import grpc
from numpy.typing import NDArray

from psd.contract import frames
from psd.contract.errors import CutMissed, InvalidRequest, Overloaded, WaitTimeout
from psd.contract.rows import parts_of
from psd.rim.calls import CallGuard, Frame, Waiter, checked, frame_parser, message_parser, wait_s
from psd.rim.data_plane import LENT_BYTES_MIN, DataPlane, PulledBlock, PulledRows, PushedBlock, RowsAsked, RowsFrames
from psd.rim.strangers import CALLS_MAX, Strangers
from psd.state.cuts.snapshots import Done
from psd.state.shard import Shard
from psd.v1 import data_pb2

SERVICE = data_pb2.DESCRIPTOR.services_by_name["DataService"].full_name

ROWS_FRAMES_MAX = 16
"""Most frames of rows in one SmallPush."""

_FRAMES, _AHEAD = data_pb2.SmallPush.FRAMES_FIELD_NUMBER, data_pb2.SmallPush.AHEAD_FIELD_NUMBER
"""Numbers of the fields of SmallPush, and of SmallAnswer."""
_PUSH_FRAME, _ROWS_REQUEST = frame_parser(data_pb2.PushFrame), frame_parser(data_pb2.RowsRequest)

AnswerT = TypeVar("AnswerT")


class DataService:
    """The data plane of one shard."""

    def __init__(self, shard: Shard, plane: DataPlane, guard: CallGuard) -> None:
        self._shard = shard
        self._guard = guard
        self._plane = plane
        self._reads = threading.BoundedSemaphore(shard.config.limits.reads_max)
        self._strangers = Strangers(CALLS_MAX)

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """A handler for the methods, with psd's own (de)serializers."""
        guard, bounded = self._guard, self._bounded
        push, pull, init = data_pb2.PushFrame, data_pb2.PullRequest, data_pb2.InitializeFrame
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Push": grpc.stream_unary_rpc_method_handler(
                    guard.unary(bounded(self.push)), frame_parser(push), data_pb2.PushReply.SerializeToString
                ),
                "Pull": grpc.unary_stream_rpc_method_handler(guard.stream(self.pull), message_parser(pull)),
                "Read": grpc.unary_stream_rpc_method_handler(guard.stream(self.read), message_parser(data_pb2.ReadRequest)),
                "PushPull": grpc.stream_stream_rpc_method_handler(guard.stream(bounded(self.push_pull)), frame_parser(push)),
                "PullRows": grpc.stream_stream_rpc_method_handler(
                    guard.stream(bounded(self.pull_rows)), frame_parser(data_pb2.RowsRequest)
                ),
                "ReadRows": grpc.stream_stream_rpc_method_handler(
                    guard.stream(bounded(self.read_rows)), frame_parser(data_pb2.RowsRequest)
                ),
                "PushPullSmall": grpc.unary_unary_rpc_method_handler(guard.unary(self.push_pull_small)),
                "StoreBuffers": grpc.unary_unary_rpc_method_handler(
                    guard.unary(self.store_buffers),
                    message_parser(data_pb2.BuffersRequest),
                    data_pb2.BuffersReply.SerializeToString,
                ),
                "SetParameters": grpc.unary_unary_rpc_method_handler(
                    guard.unary(self.set_parameters),
                    message_parser(data_pb2.ParametersRequest),
                    data_pb2.ParametersReply.SerializeToString,
                ),
                "Initialize": grpc.stream_unary_rpc_method_handler(
                    guard.unary(bounded(self.initialize)), frame_parser(init), data_pb2.InitializeReply.SerializeToString
                ),
            },
        )

    def _bounded(
        self, method: Callable[[Iterator[Frame], grpc.ServicerContext], AnswerT]
    ) -> Callable[[Iterator[Frame], grpc.ServicerContext], AnswerT]:
        """Wrap the method with a limit on calls that have sent no frame."""
        return lambda requests, context: method(self._strangers.first_of(requests, context.cancel), context)

    def push(self, requests: Iterator[Frame], context: grpc.ServicerContext) -> data_pb2.PushReply:
        frame = _next(requests)
        (reply,) = self._plane.push(_header(frame), _blocks(frame, requests), Waiter(self._shard, context))
        return reply

    def pull(self, request: data_pb2.PullRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
        for answer in self._plane.pull(request, Waiter(self._shard, context)):
            yield self._frame(answer, with_payload=not request.versions_only)

    def read(self, request: data_pb2.ReadRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
        with self.reading("Read"):
            yield from self._read(request, context)

    @contextlib.contextmanager
    def reading(self, call: str) -> Iterator[None]:
        """Count a fetching call; refuse it if there are too many."""
        if not self._reads.acquire(blocking=False):
            limit = self._shard.config.limits.reads_max
            raise Overloaded(f"{call}: {limit} callers are fetching already (the shard's --max-reads)")
        try:
            yield
        finally:
            self._reads.release()

    def _read(self, request: data_pb2.ReadRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
        done: Done = SimpleQueue()
        snapshot = self._shard.begin_read(request, done)
        try:
            if not context.add_callback(lambda: done.put(None)):
                return
            try:
                is_done = done.get(timeout=wait_s(context)) is not None
            except Empty:
                raise WaitTimeout(f"cut: the blocks have not reached step {request.cut.step} in time", missing=[]) from None
            if not is_done:
                raise InvalidRequest("the reader hung up")
            if snapshot.why_missed:
                raise CutMissed(f"cut.step: cut {request.cut.id} at step {request.cut.step}: {snapshot.why_missed}")
            positions = snapshot.positions.digest if snapshot.positions is not None else 0
            for index in request.blocks or list(snapshot.pages):
                page = snapshot.pages.pop(index)
                yield self._frame(PulledBlock(snapshot.job.blocks[index], (page.version, page)), positions=positions)
        finally:
            self._shard.cuts.abandon(snapshot)

    def push_pull(self, requests: Iterator[Frame], context: grpc.ServicerContext) -> Iterator[bytes]:
        waiter = Waiter(self._shard, context)
        for item in requests:
            self._shard.check_draining()
            frame: Frame = checked(item)
            for answer in self._plane.push_pull(_header(frame), _blocks(frame, requests), waiter):
                if isinstance(answer, PulledBlock):
                    yield self._frame(answer)
                elif isinstance(answer, data_pb2.PushReply):
                    yield data_pb2.PullFrame(push=answer).SerializeToString()

    def pull_rows(self, requests: Iterator[Frame], context: grpc.ServicerContext) -> Iterator[bytes]:
        first = _first_rows(requests, "pull")
        pull, counts_no_use = first.head.pull, first.head.counts_no_use
        waiter = Waiter(self._shard, context)
        yield from _rows_frames(self._plane.pull_rows(pull, _rows(first, requests), waiter, counts_no_use=counts_no_use))

    def read_rows(self, requests: Iterator[Frame], context: grpc.ServicerContext) -> Iterator[bytes]:
        del context
        with self.reading("ReadRows"):
            first = _first_rows(requests, "read")
            yield from _rows_frames(self._plane.read_rows(first.head.read, _rows(first, requests)))

    def push_pull_small(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        frames_in, ahead = self._small(request)
        if [frame.head.last for frame in frames_in] != [False] * (len(frames_in) - 1) + [True]:
            raise InvalidRequest("last: must stand on the last frame of a push, and on no other")
        following = iter(frames_in)
        first = next(following)
        answer: list[tuple[int, bytes, Sequence[frames.Piece]]] = []
        sent = saved = 0
        for item in self._plane.push_pull(_header(first), _blocks(first, following), Waiter(self._shard, context), ahead):
            if isinstance(item, PulledRows):
                answer.append((_AHEAD, *_rows_frame(item)))
            elif isinstance(item, PulledBlock):
                try:
                    numbers = (
                        item.payload() if item.codec else item.values
                    ).tobytes()  # so that no page is pinned during a wait
                finally:
                    item.release()
                head = data_pb2.PullFrame(block=item.block, version=item.version)
                answer.append((_FRAMES, head.SerializeToString(), (numbers,)))
                sent += len(numbers)
                saved += item.values.nbytes - len(numbers)
            else:
                answer.append((_FRAMES, data_pb2.PullFrame(push=item).SerializeToString(), ()))
        self._plane.counts.count_bytes(sent=sent, saved=saved)
        return frames.join_nested(answer)

    def _small(self, request: bytes) -> tuple[list[Frame], RowsAsked | None]:
        """The frames of a small push, and the rows that it asks for ahead; views of the request."""
        job = self._shard.job  # None while a checkpoint is loaded; then the push is refused anyway
        count_max = frames.FIELDS_MAX
        if job is not None:
            count_max = max(1, len(job.blocks) + (ROWS_FRAMES_MAX if job.tables is not None else 0))
        found: list[Frame] = []
        ahead: RowsAsked | None = None
        for field, data in frames.split_nested(request, "SmallPush", count_max + 2):
            if field == _FRAMES:
                if len(found) == count_max:
                    raise InvalidRequest(f"frames: has more than {count_max} entries, the limit for the shard's blocks")
                found.append(checked(_PUSH_FRAME(data)))
            elif field == _AHEAD:
                asked = checked(_ROWS_REQUEST(data))
                ahead = asked.head.rows, asked.payload, ()
        return found, ahead

    def initialize(self, requests: Iterator[Frame], context: grpc.ServicerContext) -> data_pb2.InitializeReply:
        del context
        frame = next(requests, None)
        if frame is None:
            raise InvalidRequest("InitializeFrame: the stream ended without a frame")
        first: Frame = checked(frame)
        if not first.head.HasField("caller"):
            raise InvalidRequest("caller: the first frame of an initialization must have one")
        (reply,) = self._plane.initialize(first.head, _initial_blocks(first, requests))
        return reply

    def store_buffers(self, request: data_pb2.BuffersRequest, context: grpc.ServicerContext) -> data_pb2.BuffersReply:
        del context
        self._plane.counts.count_bytes(received=self._shard.buffers.store(request))
        return data_pb2.BuffersReply()

    def set_parameters(self, request: data_pb2.ParametersRequest, context: grpc.ServicerContext) -> data_pb2.ParametersReply:
        del context
        self._plane.counts.count_bytes(received=self._shard.parameters.set(request))
        return data_pb2.ParametersReply()

    def _frame(self, answer: PulledBlock, *, with_payload: bool = True, positions: int = 0) -> bytes:
        try:
            head = data_pb2.PullFrame(block=answer.block, version=answer.version, positions=positions, steps=answer.steps)
            payload = None if not with_payload else answer.payload() if answer.codec else answer.values
            if payload is not None:
                self._plane.counts.count_bytes(sent=payload.nbytes, saved=answer.values.nbytes - payload.nbytes)
            return frames.join(head.SerializeToString(), payload)
        finally:
            answer.release()


def _next(requests: Iterator[Frame]) -> Frame:
    frame = next(requests, None)
    if frame is None:
        raise InvalidRequest("last: the stream ended before the last frame")
    found: Frame = checked(frame)
    return found


def _first_rows(requests: Iterator[Frame], field: str) -> Frame:
    first = _next(requests)
    if not first.head.HasField(field):
        raise InvalidRequest(f"{field}: the first frame of a request for rows must have it")
    return first


def _rows(first: Frame, requests: Iterator[Frame]) -> RowsFrames:
    """The frames of a request for rows, from its first to its last."""
    frame = first
    while True:
        yield frame.head.rows, frame.payload, ()
        if frame.head.last:
            return
        frame = _next(requests)
        for field in ("pull", "read"):
            if frame.head.HasField(field):
                raise InvalidRequest(f"{field}: stands on a frame that is not the first")


def _rows_frames(answers: Iterable[PulledRows]) -> Iterator[bytes]:
    for answer in answers:
        head, numbers = _rows_frame(answer)
        yield frames.join(head, *numbers)


def _rows_frame(answer: PulledRows) -> tuple[bytes, list[NDArray[Any]]]:
    head = data_pb2.RowsFrame(rows=parts_of(answer.rows), version=answer.version)
    return head.SerializeToString(), [rows.values for rows in answer.rows]


def _initial_blocks(first: Frame, requests: Iterator[Frame]) -> Iterator[PushedBlock]:
    """The blocks of initial values, from the first frame to the end of the stream."""
    frame: Frame | None = first
    while frame is not None:
        head, payload = frame
        if frame is not first and head.HasField("caller"):
            raise InvalidRequest("caller: stands on a frame that is not the first")
        if head.HasField("block"):
            yield PushedBlock(head.block, b"", payload)
        elif payload.nbytes:
            raise InvalidRequest("block: absent, but the frame has a payload")
        elif frame is not first:
            raise InvalidRequest("block: absent from a frame that is not the first")
        following = next(requests, None)
        frame = None if following is None else checked(following)


def _header(frame: Frame) -> data_pb2.PushHeader:
    if not frame.head.HasField("push"):
        raise InvalidRequest("push: the first frame of a push must have a header")
    header: data_pb2.PushHeader = frame.head.push
    return header


def _blocks(first: Frame, requests: Iterator[Frame]) -> Iterator[PushedBlock]:
    """The blocks of a push, from its first frame to its last."""
    frame = first
    while True:
        head, payload = frame
        if head.HasField("block"):
            is_lent = bool(head.rows) or payload.nbytes >= LENT_BYTES_MIN  # each frame has memory of its own
            yield PushedBlock(head.block, head.present, payload, is_lent, rows=head.rows, more=head.more)
        elif payload.nbytes or head.present or head.rows:
            raise InvalidRequest("block: absent, but the frame has a payload")
        if head.last:
            return
        frame = _next(requests)
        if frame.head.HasField("push"):
            raise InvalidRequest("push: a header stands on a frame that is not the first of its push")
        if not frame.head.HasField("block") and not frame.head.last:
            raise InvalidRequest("block: absent from a frame that is neither the first nor the last of its push")
