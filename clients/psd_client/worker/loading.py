"""Parameters that the program loads in the midst of a job, on all workers at once.

Shard 0 has all workers wait until all have called, and chooses the one that sends the values to the shards; the others go on
when it has. Must not know frameworks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from psd.contract.errors import NonFiniteGradient
from psd.contract.layout import Block
from psd.v1 import control_pb2, data_pb2
from psd_client.lanes.flat import FlatBuffers
from psd_client.lanes.shards import Shards
from psd_client.lanes.transport import Call, Lane
from psd_client.worker.buffers import in_requests
from psd_client.worker.session import Session


class ParameterLoad:
    """Loads the parameters of one job for one worker.

    Args:
        parameters: the worker's. wait_s: for the other workers. timeout_s: for that, and for the data.
    """

    def __init__(
        self, rank: int, session: Session, shards: Shards, parameters: FlatBuffers, wait_s: float, timeout_s: float
    ) -> None:
        self._rank = rank
        self._session = session
        self._shards = shards
        self._parameters = parameters
        self._wait_s = wait_s
        self._timeout_s = timeout_s
        self._seq = 0
        layout = parameters.layout
        self._blocks: dict[int, list[Block]] = {
            lane.shard: [b for b in layout.blocks_of(lane.shard) if not layout.spec.groups[b.group].is_of_buffers]
            for lane in shards.lanes
        }

    def run(self, write: Callable[[FlatBuffers], None]) -> None:
        """Have the shards hold what `write` writes. The last push must be confirmed; the parameters are to be fetched then.

        Raises:
            NonFiniteGradient: a value is NaN or infinite; nothing was set.
            InvalidRequest: another worker was given other values; nothing was set.
            BarrierTimeout: not all workers have called this within the wait timeout.
        """
        write(self._parameters)
        tensor = self._parameters.first_nonfinite()
        if tensor is not None:
            text = f"worker {self._rank}: the value of {tensor!r} holds NaN or infinity; nothing was set"
            raise NonFiniteGradient(text, rank=self._rank, tensor=tensor)
        digest = self._digest()
        self._session.catch_up()
        self._seq += 1
        for attempt in self._session.attempts():
            with attempt:
                if self._ask(digest, self._wait_s).sets:
                    lanes = [lane for lane in self._shards.lanes if self._blocks[lane.shard]]
                    self._shards.run(self._set_at, self._timeout_s, lanes)
                    self._ask(digest, self._timeout_s, is_set=True)

    def _digest(self) -> bytes:
        digest = hashlib.blake2b(digest_size=16)
        for blocks in self._blocks.values():
            for block in blocks:
                digest.update(self._parameters.block(block.index).data)
        return digest.digest()

    def _ask(self, digest: bytes, timeout_s: float, *, is_set: bool = False) -> control_pb2.LoadReply:
        def load_at(lane: Lane, call: Call) -> control_pb2.LoadReply:
            caller, clock = self._session.caller(lane.shard), self._session.clock
            return lane.load(
                control_pb2.LoadRequest(caller=caller, digest=digest, clock=clock, seq=self._seq, is_set=is_set), call
            )

        (reply,) = self._shards.run(load_at, timeout_s, self._shards.lanes[:1])
        return reply

    def _set_at(self, lane: Lane, call: Call) -> None:
        for blocks, _ in in_requests(self._blocks[lane.shard]):
            request = data_pb2.ParametersRequest(
                caller=self._session.caller(lane.shard),
                layout_digest=self._parameters.layout.digest,
                clock=self._session.clock,
                seq=self._seq,
            )
            for block in blocks:
                request.parameters.add(block=block.index, payload=self._parameters.block(block.index).tobytes())
            lane.set_parameters(request, call)
