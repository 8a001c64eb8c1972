"""Makes the messages of one worker's pushes and pulls: the caller, its clock, and what else shards must know; before, looks for
NaN and infinity in a gradient.

Must not know when messages are sent, or what becomes of them; or what rides on a push (riders.py).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

import psd_core
from psd.contract.errors import InvalidRequest, NonFiniteGradient
from psd.contract.jobspec import JobSpec
from psd.contract.layout import Block
from psd.contract.verdicts import clip_scale
from psd.v1 import control_pb2, data_pb2
from psd_client.lanes.flat import FlatBuffers
from psd_client.lanes.held import HeldParameters
from psd_client.lanes.transport import Call, GradientPart, Lane
from psd_client.worker.exchange.gradient_encoder import GradientEncoder
from psd_client.worker.exchange.riders import Riders
from psd_client.worker.exchange.row_traffic import RowTraffic
from psd_client.worker.exchange.sent_push import SentPush, WorkerGradient
from psd_client.worker.exchange.verdict_search import VerdictSearch
from psd_client.worker.rows import RowGradients
from psd_client.worker.session.session import Session

logger = logging.getLogger("psd_client")

ASKED_BYTES_MIN = 1 << 20
"""Bytes of a push from which, before it is sent again, its shard is asked what it has. A smaller one is sent as quickly."""


def check_skip(spec: JobSpec) -> None:
    """Raise InvalidRequest if a round is to be skipped, and the job skips none."""
    if spec.nan_policy != "skip":
        raise InvalidRequest(f'skip: the job was declared with nan_policy="{spec.nan_policy}", not "skip"')


def is_finite(
    gradients: FlatBuffers,
    present: NDArray[np.bool_] | None,
    rows: RowGradients,
    rank: int,
    clock: int,
    *,
    is_expected: bool,
) -> bool:
    """Zero the tensors that are not present; False if a gradient is not finite, of which the log tells unless it is expected.

    Spaces in which nothing is present are left alone: they are not sent. Where the job allows such gradients, all are finite.

    Raises:
        NonFiniteGradient: a gradient is not finite, and the job's nan_policy is "refuse".
    """
    if present is not None:
        gradients.zero_absent(present)
    policy = gradients.layout.spec.nan_policy
    if policy == "allow":
        return True
    tensor = gradients.first_nonfinite(present)
    row = rows.first_nonfinite() if tensor is None and not rows.is_empty else None
    if tensor is None and row is None:
        return True
    name = repr(tensor) if row is None else f"id {row[1]} of table {row[0]!r}"
    if policy == "refuse":
        raise NonFiniteGradient(
            f"worker {rank}: the gradient of {name} at step {clock} holds NaN or infinity; nothing was sent",
            rank=rank,
            clock=clock,
            **({"tensor": tensor} if row is None else {"table": row[0], "id": row[1]}),
        )
    if not is_expected:
        what = "the gradient of %s at step %d holds NaN or infinity; the round is skipped"
        logger.warning("psd: worker %d: " + what, rank, name, clock)
    return False


class DataRequests:
    """Makes the messages of one worker.

    Args:
        gradients: the buffers that pushes send.
        riders: what rides on pushes. verdicts: None if the job's rounds have no verdicts.
        encoder: None if gradients are sent as they are. held: None if parameters do not come as differences.
    """

    def __init__(
        self,
        session: Session,
        gradients: FlatBuffers,
        riders: Riders,
        verdicts: VerdictSearch | None,
        encoder: GradientEncoder | None = None,
        held: HeldParameters | None = None,
    ) -> None:
        self._session = session
        self._gradients = gradients
        self._layout = gradients.layout
        self._has_rounds = gradients.layout.spec.consistency.has_rounds
        self._riders = riders
        self._verdicts = verdicts
        self._encoder = encoder
        self._held = held
        (self._rows,) = riders.of(RowTraffic)

    def push(self, gradient: WorkerGradient, weight: float, rows: RowGradients) -> SentPush:
        """The next push, with what riders write for all shards. The worker has looked for NaN and infinity, where it could."""
        session, spec, present = self._session, self._layout.spec, gradient.present
        header = data_pb2.PushHeader(
            clock=session.clock,
            weight=weight,
            layout_digest=self._layout.digest,
            scalars=session.orders.scaled(gradient.scalars, spec.groups, session.clock),
            is_finite=gradient.feed is None and spec.nan_policy != "allow",
        )
        if spec.clip_norm and not self._has_rounds and weight:
            squares = psd_core.total_squares((self._gradients.squares(present), rows.squares()))
            norm = math.inf if squares is None else psd_core.square_root(squares)
            header.scale = clip_scale(spec.clip_norm, norm)
        sent = SentPush(
            session.number,
            header,
            present,
            rows,
            gradient.skip,
            gradient.feed,
            gradient.versions_read,
            gradient.part,
            gradient.spare,
            gradient.put,
        )
        for write in self._riders.write:
            write(sent)
        return sent

    def part(self, lane: Lane, call: Call, sent: SentPush, blocks: Sequence[Block], received: Sequence[int]) -> GradientPart:
        """The part of a push for one shard, which is asked what it has already if a large one was begun before.

        Args:
            blocks: the shard's trained blocks. received: versions of all blocks, by index.
        """
        shard, versions = lane.shard, []
        if not self._has_rounds:
            read = received if sent.versions_read is None else sent.versions_read
            versions = [read[block.index] for block in blocks]
            tables_block = self._layout.tables_block(shard)
            if tables_block is not None:
                versions.append(self._rows.versions_read.get(shard, received[tables_block]))
        part = sent.gradient_part(shard, self._session.caller(shard), blocks, self._gradients, versions)
        if self._encoder is not None:
            part.encoding = self._encoder.push
        if self._held is not None:
            self._held.say(shard, part.header)
        for write_to in self._riders.write_to:
            write_to(shard, part.header)
        if sent.begun >> shard & 1 and lane.transport != "shm":
            part.already = self._already(lane, call, part)
        sent.begun |= 1 << shard
        return part

    def _already(self, lane: Lane, call: Call, part: GradientPart) -> frozenset[int]:
        """The blocks of a large push that its shard has."""
        header, nbytes = part.header, {block.index: block.pushed_nbytes for block in part.blocks}
        if sum(nbytes.values()) < ASKED_BYTES_MIN:
            return frozenset()
        request = control_pb2.CountedRequest(
            caller=header.caller, layout_digest=header.layout_digest, session=header.session, clock=header.clock
        )
        found = frozenset(lane.ask("Counted", request, control_pb2.CountedReply, call).blocks)
        if found:
            logger.info(
                "psd: worker %d: the push of step %d had broken off; shard %d has %.1f of its %.1f MiB, and gets the rest",
                header.caller.rank,
                header.clock,
                lane.shard,
                sum([nbytes[index] for index in found]) / (1 << 20),
                sum(nbytes.values()) / (1 << 20),
            )
        return found

    def commit(self, shard: int, sent: SentPush, *, without_waiting: bool) -> control_pb2.CommitRequest:
        """Exact aggregation: the message that tells shard 0 that all shards have a push."""
        return control_pb2.CommitRequest(
            caller=self._session.caller(shard),
            clock=sent.header.clock,
            without_waiting=without_waiting,
            skip=sent.skip,
            put=sent.put,
            spare_s=max(0.0, sent.spare.until - time.monotonic()) if sent.spare is not None else 0.0,
        )

    def pull(self, shard: int, blocks: Sequence[Block] | None = None) -> data_pb2.PullRequest:
        """A pull of these blocks of a shard and of its tables' block; None: of all its blocks."""
        wanted = [block.index for block in blocks or ()]
        tables_block = self._layout.tables_block(shard)
        if blocks is not None and tables_block is not None:
            wanted.append(tables_block)
        request = data_pb2.PullRequest(
            caller=self._session.caller(shard),
            clock=self._session.clock,
            layout_digest=self._layout.digest,
            blocks=wanted,
            decisions=self._session.decisions,
            verdict=self._verdicts.verdict if self._verdicts is not None else None,
        )
        if self._held is not None:
            self._held.say(shard, request)
        return request
