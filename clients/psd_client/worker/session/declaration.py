"""A worker's declaration to all shards: the job, and the initial values that the worker can provide.

Shard 0 is asked first, because it chooses the worker that initializes. It gets the values last, so that if it has them, all
shards have. Must not know how a session is made, or what becomes of it.
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
        is_provided: True if the job's values are this worker's.
        clock: the clock at which it takes part.
        client_state: the state that a worker of this rank has saved for itself.
    """

    is_provided: bool
    clock: int
    client_state: bytes


class JobDeclaration:
    """One worker's declaration of a job.

    Args:
        values: the initial parameters, if the job has none yet.
        caller: returns the caller of a request to a shard.
        timeout_s: how long to wait for the worker that initializes.
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
            is_first: True if this worker has not seen the job with values before.

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
            # Shard 0 last: if it has its values, all shards have.
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
        """Find out why `shard` has refused this worker's initial values: returns if another worker was chosen since, or the job
        goes on.

        Raises:
            StateLost: this worker is still the chosen one, so the shard's values are of a job of which shard 0 lost its part.
            SessionFenced: this worker's session has ended.
        """
        (reply,) = self._shards.run(self._declare_at, self._timeout_s, self._shards.lanes[:1])
        if reply.choice == choice:
            raise StateLost(
                f"shard {shard} at {self._shards.lanes[shard].address} holds the parameters of this job, and shard 0 has lost "
                "its part of them; the job cannot go on",
                shard=0,
            )
