"""DataService, the gRPC carrier of the data plane: turns frames into blocks and back. One function per RPC.

It builds answers as bytes (`frames.join` copies the payload once, out of the pinned page), so a page is pinned only while it is
copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

import grpc

from psd.contract import frames
from psd.contract.errors import InvalidRequest
from psd.rim.calls import CallGuard, Frame, Waiter, checked, frame_parser, message_parser
from psd.rim.data_plane import DataPlane, PulledBlock, PulledRows, RowsAsked
from psd.rim.sent_frames import SentFrames
from psd.rim.strangers import CALLS_MAX, Strangers
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
        frames = SentFrames(requests)
        (reply,) = self._plane.push(frames.head("push").push, frames.blocks(), Waiter(self._shard, context))
        return reply

    def pull(self, request: data_pb2.PullRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
        for answer in self._plane.pull(request, Waiter(self._shard, context)):
            yield self._frame(answer, with_payload=not request.versions_only)

    def read(self, request: data_pb2.ReadRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
        for answer in self._plane.read(request, context):
            yield self._frame(answer)

    def push_pull(self, requests: Iterator[Frame], context: grpc.ServicerContext) -> Iterator[bytes]:
        waiter = Waiter(self._shard, context)
        for item in requests:
            self._shard.check_draining()
            frames = SentFrames(chain((item,), requests))
            for answer in self._plane.push_pull(frames.head("push").push, frames.blocks(), waiter):
                if isinstance(answer, PulledBlock):
                    yield self._frame(answer)
                elif isinstance(answer, data_pb2.PushReply):
                    yield data_pb2.PullFrame(push=answer).SerializeToString()

    def pull_rows(self, requests: Iterator[Frame], context: grpc.ServicerContext) -> Iterator[bytes]:
        frames = SentFrames(requests)
        head, waiter = frames.head("pull"), Waiter(self._shard, context)
        yield from _rows_frames(self._plane.pull_rows(head.pull, frames.rows(), waiter, counts_no_use=head.counts_no_use))

    def read_rows(self, requests: Iterator[Frame], context: grpc.ServicerContext) -> Iterator[bytes]:
        del context
        frames = SentFrames(requests)
        yield from _rows_frames(self._plane.read_rows(frames.head("read").read, frames.rows()))

    def push_pull_small(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        frames_in, ahead = self._small(request)
        if [frame.head.last for frame in frames_in] != [False] * (len(frames_in) - 1) + [True]:
            raise InvalidRequest("last: must stand on the last frame of a push, and on no other")
        sent_frames = SentFrames(iter(frames_in))
        answer: list[tuple[int, bytes, Sequence[frames.Piece]]] = []
        sent = saved = 0
        waiter = Waiter(self._shard, context)
        for item in self._plane.push_pull(sent_frames.head("push").push, sent_frames.blocks(), waiter, ahead):
            if isinstance(item, PulledRows):
                answer.append((_AHEAD, item.head(), [rows.values for rows in item.rows]))
            elif isinstance(item, PulledBlock):
                try:
                    numbers = item.payload().tobytes()  # so that no page is pinned during a wait
                finally:
                    item.release()
                answer.append((_FRAMES, item.head(), (numbers,)))
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
        frames = SentFrames(requests)
        (reply,) = self._plane.initialize(frames.head("caller"), frames.initial_blocks())
        return reply

    def store_buffers(self, request: data_pb2.BuffersRequest, context: grpc.ServicerContext) -> data_pb2.BuffersReply:
        del context
        self._plane.counts.count_bytes(received=self._shard.buffers.store(request))
        return data_pb2.BuffersReply()

    def set_parameters(self, request: data_pb2.ParametersRequest, context: grpc.ServicerContext) -> data_pb2.ParametersReply:
        del context
        self._plane.counts.count_bytes(received=self._shard.parameters.set(request))
        return data_pb2.ParametersReply()

    def _frame(self, answer: PulledBlock, *, with_payload: bool = True) -> bytes:
        """The frame of a block, whose page it gives back."""
        try:
            payload = None
            if with_payload:
                payload = answer.payload()
                self._plane.counts.count_bytes(sent=payload.nbytes, saved=answer.values.nbytes - payload.nbytes)
            return frames.join(answer.head(), payload)
        finally:
            answer.release()


def _rows_frames(answers: Iterable[PulledRows]) -> Iterator[bytes]:
    for answer in answers:
        yield frames.join(answer.head(), *(rows.values for rows in answer.rows))
