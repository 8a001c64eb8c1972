"""The calls for server-side vectors without their transport: batches, changes, lists and fetches.

Each carrier (gRPC in vector_service.py, sockets in bulk_connection.py) brings the request and the payload, and sends the
answer. Must not know frames, messages on the wire, or what operations do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np

from psd.contract.errors import InvalidRequest
from psd.contract.vectors import spec_message
from psd.rim.vector_gate import VectorGate
from psd.state.cuts.snapshots import check_cuts
from psd.state.shard import Shard
from psd.v1 import vectors_pb2


class VectorPlane:
    """The calls for the vectors of one shard. Its methods run in the carriers' threads.

    Args:
        reading: counts a fetching call, or refuses it; see DataService.reading. gate: the gate for batches.
    """

    def __init__(self, shard: Shard, reading: Callable[[str], AbstractContextManager[None]], gate: VectorGate) -> None:
        self._shard = shard
        self._reading = reading
        self._gate = gate

    def room(self, nbytes: int) -> memoryview:
        """Memory for a batch's payload; raises InvalidRequest if the shard does not take so much."""
        self._shard.vectors.check_payload(nbytes)
        return np.empty(nbytes, np.uint8).data

    def run(self, batch: vectors_pb2.VectorBatch, payload: memoryview, lane: str) -> vectors_pb2.VectorAnswer:
        """Run a batch that a lane has brought. The payload is used until the call returns.

        Raises:
            InvalidRequest: the payload has not as many bytes as the batch says.
        """
        if batch.payload_bytes != len(payload):
            raise InvalidRequest(f"payload: has {len(payload)} bytes, payload_bytes is {batch.payload_bytes}")
        check_cuts(batch.cuts)
        with self._shard.counted("batch", lane), self._passing(batch):
            found = self._shard.vectors.run(batch, payload)
        return self._answer(batch, found)

    def create(self, request: vectors_pb2.VectorChange) -> vectors_pb2.VectorAnswer:
        """Make a vector."""
        check_cuts(request.cuts)
        with self._passing(request):
            self._shard.vectors.create(request)
        return self._answer(request)

    def drop(self, request: vectors_pb2.VectorChange) -> vectors_pb2.VectorAnswer:
        """Remove a vector."""
        check_cuts(request.cuts)
        with self._passing(request):
            self._shard.vectors.drop(request)
        return self._answer(request)

    def list(self, request: vectors_pb2.VectorListRequest) -> vectors_pb2.VectorListReply:
        """Name the vectors, and the users' functions."""
        vectors = self._shard.vectors
        specs = [spec_message(spec) for spec in vectors.all(request)]
        return vectors_pb2.VectorListReply(vectors=specs, functions=vectors.functions)

    @contextmanager
    def fetch(self, request: vectors_pb2.VectorFetch) -> Iterator[memoryview]:
        """A context with the numbers that are asked for; while it is open, the call counts as one that fetches."""
        with self._reading("Fetch"):
            yield self._shard.vectors.fetch(request).data.cast("B")

    def _passing(self, named: vectors_pb2.VectorBatch | vectors_pb2.VectorChange) -> AbstractContextManager[None]:
        return self._gate.passing(named.session or named.caller.session, named.seq)

    def _answer(
        self, request: vectors_pb2.VectorBatch | vectors_pb2.VectorChange, found: bytes = b""
    ) -> vectors_pb2.VectorAnswer:
        """The answer to a batch or a change. The request brings cuts, and the answer sends them, as with a push."""
        if request.cuts:
            self._shard.learn(request.caller, request.cuts)
        self._shard.schedule.announce_due()
        return vectors_pb2.VectorAnswer(found=found, cuts=self._shard.cuts.latest())
