"""VectorService: carries batches on server-side vectors, and their values, over gRPC.

Payloads that exceed a message are sent in frames. Must not know what operations do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc

from psd.contract import frames
from psd.contract.errors import InvalidRequest
from psd.rim.calls import CallGuard, Frame, checked, frame_parser, message_parser
from psd.rim.strangers import CALLS_MAX, Strangers
from psd.rim.vector_plane import VectorPlane
from psd.v1 import vectors_pb2

_DESCRIPTOR = vectors_pb2.DESCRIPTOR.services_by_name["VectorService"]
SERVICE = _DESCRIPTOR.full_name


class VectorService:
    """The calls for the vectors of one shard, over gRPC."""

    def __init__(self, guard: CallGuard, plane: VectorPlane) -> None:
        self._guard = guard
        self._plane = plane
        self._strangers = Strangers(CALLS_MAX)

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """A handler for the methods."""
        unary, answer, plane = self._guard.unary, vectors_pb2.VectorAnswer.SerializeToString, self._plane
        frame, change = frame_parser(vectors_pb2.VectorFrame), vectors_pb2.VectorChange
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Run": grpc.unary_unary_rpc_method_handler(unary(self.run), frame, answer),
                "RunFrames": grpc.stream_unary_rpc_method_handler(unary(self.run_frames), frame, answer),
                "Create": grpc.unary_unary_rpc_method_handler(unary(_only(plane.create)), message_parser(change), answer),
                "Drop": grpc.unary_unary_rpc_method_handler(unary(_only(plane.drop)), message_parser(change), answer),
                "List": grpc.unary_unary_rpc_method_handler(
                    unary(_only(plane.list)),
                    message_parser(vectors_pb2.VectorListRequest),
                    vectors_pb2.VectorListReply.SerializeToString,
                ),
                "Fetch": grpc.unary_stream_rpc_method_handler(
                    self._guard.stream(self.fetch), message_parser(vectors_pb2.VectorFetch)
                ),
            },
        )

    def run(self, request: Frame, context: grpc.ServicerContext) -> vectors_pb2.VectorAnswer:
        del context
        return self._plane.run(_batch_of(request), request.payload, "grpc")

    def run_frames(self, requests: Iterator[Any], context: grpc.ServicerContext) -> vectors_pb2.VectorAnswer:
        incoming = self._strangers.first_of(requests, context.cancel)
        first = next(incoming, None)
        if first is None:
            raise InvalidRequest("batch: the stream ended without a frame")
        frame: Frame = checked(first)
        batch = _batch_of(frame)
        payload, at = self._plane.room(batch.payload_bytes), 0
        while True:
            part = frame.payload
            if len(part) > len(payload) - at:
                raise InvalidRequest(f"payload: is longer than payload_bytes, {len(payload)}")
            payload[at : at + len(part)] = part
            at += len(part)
            following = next(incoming, None)
            if following is None:
                break
            frame = checked(following)
            if frame.head.HasField("batch"):
                raise InvalidRequest("batch: stands on a frame that is not the first")
        if at != len(payload):
            raise InvalidRequest(f"payload: has {at} bytes, payload_bytes is {len(payload)}")
        return self._plane.run(batch, payload, "grpc")

    def fetch(self, request: vectors_pb2.VectorFetch, context: grpc.ServicerContext) -> Iterator[bytes]:
        del context
        with self._plane.fetch(request) as numbers:
            for at in range(0, len(numbers), frames.FRAME_BYTES_MAX):
                yield frames.join(b"", numbers[at : at + frames.FRAME_BYTES_MAX])


def _only(call: Callable[[Any], Any]) -> Callable[[Any, grpc.ServicerContext], Any]:
    """A call of the plane as gRPC's method, which has a context, too."""
    return lambda request, _: call(request)


def _batch_of(frame: Frame) -> vectors_pb2.VectorBatch:
    if not frame.head.HasField("batch"):
        raise InvalidRequest("batch: the first frame must have it")
    batch: vectors_pb2.VectorBatch = frame.head.batch
    return batch
