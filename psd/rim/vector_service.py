"""VectorService: runs batches on server-side vectors, and sends their values, over gRPC.

One function per RPC. Payloads that exceed a message are sent in frames. Must not know what operations do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import grpc
import numpy as np

from psd.contract import frames
from psd.contract.errors import InvalidRequest
from psd.contract.vectors import spec_message
from psd.rim.calls import CallGuard, Frame, checked, frame_parser, message_parser
from psd.rim.strangers import CALLS_MAX, Strangers
from psd.rim.vector_gate import VectorGate
from psd.state.cuts.snapshots import check_cuts
from psd.state.shard import Shard
from psd.v1 import vectors_pb2

_DESCRIPTOR = vectors_pb2.DESCRIPTOR.services_by_name["VectorService"]
SERVICE = _DESCRIPTOR.full_name


class VectorService:
    """The calls for the vectors of one shard.

    Args:
        gate: the gate for batches. reading: counts a fetching call, or refuses it; see DataService.reading.
    """

    def __init__(
        self, shard: Shard, guard: CallGuard, reading: Callable[[str], AbstractContextManager[None]], gate: VectorGate
    ) -> None:
        self._gate = gate
        self._shard = shard
        self._guard = guard
        self._reading = reading
        self._strangers = Strangers(CALLS_MAX)

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """A handler for the methods."""
        unary, answer = self._guard.unary, vectors_pb2.VectorAnswer.SerializeToString
        frame, change = frame_parser(vectors_pb2.VectorFrame), vectors_pb2.VectorChange
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Run": grpc.unary_unary_rpc_method_handler(unary(self.run), frame, answer),
                "RunFrames": grpc.stream_unary_rpc_method_handler(unary(self.run_frames), frame, answer),
                "Create": grpc.unary_unary_rpc_method_handler(unary(self.create), message_parser(change), answer),
                "Drop": grpc.unary_unary_rpc_method_handler(unary(self.drop), message_parser(change), answer),
                "List": grpc.unary_unary_rpc_method_handler(
                    unary(self.list),
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
        batch = _batch_of(request)
        if batch.payload_bytes != len(request.payload):
            raise InvalidRequest(f"payload: has {len(request.payload)} bytes, payload_bytes is {batch.payload_bytes}")
        return self._run(batch, request.payload)

    def run_frames(self, requests: Iterator[Any], context: grpc.ServicerContext) -> vectors_pb2.VectorAnswer:
        incoming = self._strangers.first_of(requests, context.cancel)
        first = next(incoming, None)
        if first is None:
            raise InvalidRequest("batch: the stream ended without a frame")
        frame: Frame = checked(first)
        batch = _batch_of(frame)
        self._shard.vectors.check_payload(batch.payload_bytes)
        payload, at = np.empty(batch.payload_bytes, np.uint8).data, 0
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
        return self._run(batch, payload)

    def _run(self, batch: vectors_pb2.VectorBatch, payload: memoryview) -> vectors_pb2.VectorAnswer:
        check_cuts(batch.cuts)
        with self._shard.counted("batch"), self._passing(batch):
            found = self._shard.vectors.run(batch, payload)
        return self._answer(batch, found)

    def _answer(
        self, request: vectors_pb2.VectorBatch | vectors_pb2.VectorChange, found: bytes = b""
    ) -> vectors_pb2.VectorAnswer:
        """The answer to a batch or a change. The request brings cuts, and the answer sends them, as with a push."""
        if request.cuts:
            self._shard.learn(request.caller, request.cuts)
        self._shard.schedule.announce_due()
        return vectors_pb2.VectorAnswer(found=found, cuts=self._shard.cuts.latest())

    def _passing(self, named: vectors_pb2.VectorBatch | vectors_pb2.VectorChange) -> AbstractContextManager[None]:
        return self._gate.passing(named.session or named.caller.session, named.seq)

    def create(self, request: vectors_pb2.VectorChange, context: grpc.ServicerContext) -> vectors_pb2.VectorAnswer:
        del context
        check_cuts(request.cuts)
        with self._passing(request):
            self._shard.vectors.create(request)
        return self._answer(request)

    def drop(self, request: vectors_pb2.VectorChange, context: grpc.ServicerContext) -> vectors_pb2.VectorAnswer:
        del context
        check_cuts(request.cuts)
        with self._passing(request):
            self._shard.vectors.drop(request)
        return self._answer(request)

    def list(self, request: vectors_pb2.VectorListRequest, context: grpc.ServicerContext) -> vectors_pb2.VectorListReply:
        del context
        vectors = self._shard.vectors
        specs = [spec_message(spec) for spec in vectors.all(request)]
        return vectors_pb2.VectorListReply(vectors=specs, functions=vectors.functions)

    def fetch(self, request: vectors_pb2.VectorFetch, context: grpc.ServicerContext) -> Iterator[bytes]:
        del context
        with self._reading("Fetch"):
            numbers = self._shard.vectors.fetch(request).data.cast("B")
            for at in range(0, len(numbers), frames.FRAME_BYTES_MAX):
                yield frames.join(b"", numbers[at : at + frames.FRAME_BYTES_MAX])


def _batch_of(frame: Frame) -> vectors_pb2.VectorBatch:
    if not frame.head.HasField("batch"):
        raise InvalidRequest("batch: the first frame must have it")
    batch: vectors_pb2.VectorBatch = frame.head.batch
    return batch
