"""A worker's declaration to all shards: the job, and the initial values that it would provide.

Shard 0 comes first, because it chooses the worker that initializes, and has its values last, so that when it has them all have.
Must not know how a session is made, nor what becomes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from psd.contract.errors import LayoutMismatch, StateLost
from psd.contract.jobspec import JobSpec
from psd.v1 import control_pb2, data_pb2, job_pb2
from psd_client.lanes.flat import FlatBuffers
from psd_client.lanes.shards import Shards, transfer_s
from psd_client.lanes.transport import Call, Lane


@dataclass(frozen=True)
class Declared:
    """The shards' answer to a declaration.

    Attributes:
        is_provided: the values are this worker's.
        clock: at which it takes part.
        client_state: what a worker of this rank had saved for itself.
    """

    is_provided: bool
    clock: int
    client_state: bytes


class JobDeclaration:
    """One job, as one worker declares it.

    Args:
        values: its parameters, if it has none yet.
        caller: who asks, by shard.
        timeout_s: for waiting for the worker that initializes.
    """

    def __init__(
        self,
        spec: JobSpec,
        values: FlatBuffers,
        shards: Shards,
        caller: Callable[[int], job_pb2.Caller],
        timeout_s: float,
    ) -> None:
        self.spec = spec
        self._message = spec.to_message()
        self._values = values
        self._shards = shards
        self._caller = caller
        self._timeout_s = timeout_s

    def make(self, *, is_first: bool) -> Declared:
        """Agree on the job, and provide the initial values if it has none yet.

        Args:
            is_first: this worker has not found the job to have values before.

        Raises:
            StateLost: a shard has lost its part of a job that has begun.
        """
        lanes = self._shards.lanes
        while True:
            replies = self._shards.run(self._declare_at, self._timeout_s, lanes[:1])
            replies += self._shards.run(self._declare_at, self._timeout_s, lanes[1:])
            choice = replies[0].choice
            if not choice:
                self._check_begun(replies)
                is_provided = False
                break
            if not is_first:
                raise StateLost(f"shard 0 at {lanes[0].address} has come back without the parameters that it held", shard=0)
            # Shard 0 last: when it has its values, so have all.
            accepted = self._initialize(lanes[1:], choice)
            if all(accepted):
                is_provided = all(self._initialize(lanes[:1], choice))
                break
            self._check_still_chosen(choice, accepted.index(False) + 1)
        state = replies[self._values.layout.client_state_shard].client_state
        return Declared(is_provided, max(reply.clock for reply in replies), state)

    def _declare_at(self, lane: Lane, call: Call) -> control_pb2.DeclareReply:
        reply = lane.declare(control_pb2.DeclareRequest(caller=self._caller(lane.shard), spec=self._message), call)
        if not self.spec.is_empty and reply.layout_digest != self._values.layout.digest:
            raise LayoutMismatch(
                f"shard {lane.shard} at {lane.address} cuts the parameters into other blocks than this worker: "
                "their versions of psd differ",
                shard=lane.shard,
            )
        return reply

    def _check_begun(self, replies: Sequence[control_pb2.DeclareReply]) -> None:
        for lane, reply in zip(self._shards.lanes, replies, strict=True):
            if not reply.initialized:
                raise StateLost(
                    f"shard {lane.shard} at {lane.address} has no parameters, but the job has begun: it came back without what "
                    "it held",
                    shard=lane.shard,
                )

    def _initialize(self, lanes: Sequence[Lane], choice: int) -> list[bool]:
        layout = self._values.layout

        def initialize_at(lane: Lane, call: Call) -> bool:
            first = data_pb2.InitializeFrame(caller=self._caller(lane.shard), layout_digest=layout.digest, choice=choice)
            return lane.initialize(first, layout.blocks_of(lane.shard), self._values, call)

        return self._shards.run(initialize_at, self._timeout_s + transfer_s(layout, lanes), lanes)

    def _check_still_chosen(self, choice: int, shard: int) -> None:
        """Check, after `shard` has refused this worker's initial values, that it has its successor's, or those of a job that
        goes on.

        Raises:
            StateLost: this worker is still the one whose values count, so the shard's belong to a job that shard 0 has lost.
            SessionFenced: it is not.
        """
        (reply,) = self._shards.run(self._declare_at, self._timeout_s, self._shards.lanes[:1])
        if reply.choice == choice:
            raise StateLost(
                f"shard {shard} at {self._shards.lanes[shard].address} holds the parameters of this job, and shard 0 has lost "
                "its part of them; the job cannot go on",
                shard=0,
            )
