"""The data plane of one worker: pushes, pulls and push_pulls of whole flat buffers, over all shards that hold trained blocks.

Invariants. A push is named by (rank, session, clock); the clock moves only when every shard has the push, so a push that failed
on the way and is called again is the same push. With rounds, the shards keep a gradient in memory until its round has closed;
until then this side keeps it, too, and sends it again to a shard that was killed and came back. Nothing is sent unless all of
it is valid. Static blocks are never pushed, and pulled only once, by `pull_all`. Must not know names of parameters, optimizers
or gRPC.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from psd.contract.errors import InvalidRequest, NonFiniteGradient, SessionFenced
from psd.contract.layout import Block, Layout
from psd.contract.verdicts import clip_scale, members_mask
from psd.v1 import control_pb2, data_pb2, job_pb2
from psd_client.feed import Feed
from psd_client.flat import FlatBuffers, share_memory
from psd_client.sent_push import SentPush
from psd_client.session import Session
from psd_client.settlement import Settlement
from psd_client.shards import Shards, transfer_s
from psd_client.transport import Call, GradientPart, Lane, Share

logger = logging.getLogger("psd_client")

CUTS_MAX = 8
COUNTS = ("pushes", "blocks_counted", "blocks_duplicate", "blocks_late", "pushes_dropped", "rounds_skipped")


class Exchange:
    """Moves gradients out and parameters in.

    Args:
        sharing: for the shards that can see this process's memory.

    Attributes:
        gradients: what the next push sends; after `push` to be written only when `confirm` has returned.
        parameters: what the last pull brought; undefined after one that failed.
        client_state: goes to shard 0 with the next push.
        is_skipped: the round of the last push changed nothing, because somebody's gradient was not finite; without rounds, this
            worker's. Known after the pull.
        counts: pushes, blocks_counted, blocks_duplicate, blocks_late, pushes_dropped, rounds_skipped.
    """

    def __init__(
        self,
        rank: int,
        wait_timeout_s: float,
        session: Session,
        shards: Shards,
        layout: Layout,
        sharing: Sequence[Share] = (),
    ) -> None:
        self._rank = rank
        self._session = session
        self._shards = shards
        self._layout = layout
        self._blocks: list[list[Block]] = [
            [block for block in layout.blocks_of(lane.shard) if block.trained] for lane in shards.lanes
        ]
        self._lanes = [lane for lane in shards.lanes if self._blocks[lane.shard]]
        self._has_static = any(not block.trained for block in layout.blocks)
        self._has_rounds = layout.spec.consistency.mode == "sync"
        self._is_exact = layout.spec.aggregation == "exact"
        self._timeout_s = wait_timeout_s + transfer_s(layout, shards.lanes)
        self._sent: SentPush | None = None
        self._settlement: Settlement | None = None
        if layout.spec.has_verdicts:
            self._settlement = Settlement(session, shards, self._lanes, self._timeout_s, self._push_again)
        self.is_skipped = False
        self.client_state = b""
        segment = share_memory(layout) if sharing else None
        self.gradients = FlatBuffers(layout, segment=segment, of_gradients=True)
        self.parameters = FlatBuffers(layout, segment=segment)
        if segment is not None:
            for share in sharing:
                share(self.gradients, self.parameters)
        self.counts = dict.fromkeys(COUNTS, 0)

    # -- operations ----------------------------------------------------------------------------------------------------

    def pull_all(self) -> None:
        """Fetch every block, static ones too."""
        self._session.while_fenced(self._pull_all)

    def _pull_all(self) -> None:
        self._session.await_decisions(self._timeout_s)
        if self._settlement is not None:
            self._settlement.settle()

        def pull_at(lane: Lane, call: Call) -> None:
            lane.pull(self._pull_request(lane, ()), self._layout.blocks_of(lane.shard), self.parameters, call)

        lanes = [lane for lane in self._shards.lanes if self._layout.blocks_of(lane.shard)]
        self._shards.run(pull_at, self._timeout_s, lanes)
        if self._settlement is not None:
            self._settlement.on_told()

    def go_back(self) -> None:
        """Go on from the checkpoint to which the job has gone back."""
        self._session.go_back(self._begin_again)

    def _begin_again(self) -> None:
        self._sent = None
        if self._settlement is not None:
            self._settlement.forget()
        self.pull_all()

    def pull(self) -> None:
        """Fetch the trained blocks, at the worker's clock."""
        self._session.while_fenced(lambda: self._pull(self._lanes))

    def confirm(self) -> None:
        """Wait until the round of the last push has closed, so that its gradients are no longer needed; free after a pull."""
        if self.is_unconfirmed:
            self._session.while_fenced(lambda: self._pull(self._lanes, versions_only=True))

    def push(
        self,
        scalars: Sequence[Sequence[float]],
        weight: float,
        present: NDArray[np.bool_] | None,
        *,
        skip: bool = False,
    ) -> None:
        """Send the gradients; returns when every shard has them. The push before must be confirmed.

        skip: they are not finite, and the job's policy is to skip the round then.
        """
        sent = self._begin(scalars, weight, present, skip=skip)
        try:
            self._on_pushed(sent, self._push(sent))
            if self._is_exact:
                self._commit(sent, without_waiting=True)
        except SessionFenced as error:
            self._drop(error, sent)

    def push_pull(
        self,
        scalars: Sequence[Sequence[float]],
        weight: float,
        present: NDArray[np.bool_] | None,
        *,
        skip: bool = False,
        feed: Feed | None = None,
        versions_read: Sequence[int] | None = None,
    ) -> None:
        """Send the gradients and fetch the parameters of the clock after them. skip: as in `push`.

        feed: gives the blocks, and which tensors have a gradient; the shards look for NaN. versions_read: see SentPush.
        """
        sent = self._begin(scalars, weight, present, skip=skip, feed=feed)
        sent.versions_read = versions_read
        try:
            if self._is_exact:
                self._push_commit_pull(sent)
                return
            replies = self._shards.run_bulk(
                lambda lane, call: lane.push_pull(self._part(lane, sent), self.parameters, call),
                self._timeout_s,
                self._lanes,
            )
        except SessionFenced as error:
            self._drop(error, sent)
            self.pull()
            return
        self._on_pushed(sent, replies)
        # Late at one shard and in time at another: there the answer is older than the clock at which this worker goes on.
        behind = [lane for lane, reply in zip(self._lanes, replies, strict=True) if reply.clock < self._session.clock]
        if behind:
            self._session.while_fenced(lambda: self._pull(behind))

    # -- inner ---------------------------------------------------------------------------------------------------------

    def _begin(
        self,
        scalars: Sequence[Sequence[float]],
        weight: float,
        present: NDArray[np.bool_] | None,
        *,
        skip: bool,
        feed: Feed | None = None,
    ) -> SentPush:
        """The next push; raises for anything that must not be sent."""
        self._session.while_fenced(lambda: self._session.await_decisions(self._timeout_s))
        settlement = self._settlement
        if settlement is not None and settlement.settled < settlement.latest < self._session.clock:
            # Whoever made that round may be gone before all shards had its verdict; nobody could push the next one.
            self._session.while_fenced(lambda: self._pull(self._lanes, versions_only=True))
        spec = self._layout.spec
        if skip and spec.nan_policy != "skip":
            raise InvalidRequest(f'skip: the job was declared with nan_policy="{spec.nan_policy}", not "skip"')
        if not (math.isfinite(weight) and weight >= 0):
            raise InvalidRequest(f"weight: must be finite and at least 0, got {weight}")
        tensor_name = self._check(present) if feed is None else None
        if tensor_name is not None and not skip:
            what, clock = "the gradient of %r at step %d holds NaN or infinity; the round is skipped", self._session.clock
            logger.warning("psd: worker %d: " + what, self._rank, tensor_name, clock)
        if skip or tensor_name is not None:
            skip = True
            weight, present = 0.0, np.zeros(len(self._layout.spec.tensors), np.bool_)
        header = self._header(scalars, weight, is_finite=feed is None and spec.nan_policy != "allow")
        self.is_skipped = skip and not self._has_rounds
        self.counts["rounds_skipped"] += self.is_skipped
        return SentPush(self._session.number, header, self.client_state, present, skip, feed)

    def _push(self, sent: SentPush) -> list[data_pb2.PushReply]:
        def push_at(lane: Lane, call: Call) -> data_pb2.PushReply:
            incarnation = self._session.incarnation(lane.shard)
            reply = lane.push(self._part(lane, sent), call)
            sent.incarnations[lane.shard] = incarnation
            return reply

        replies = self._shards.run_bulk(push_at, self._timeout_s, self._lanes)
        if self._has_rounds:
            self._sent = sent
        return replies

    @property
    def is_unconfirmed(self) -> bool:
        """True if the round of the last push may still be open."""
        return self._unconfirmed is not None

    @property
    def _unconfirmed(self) -> SentPush | None:
        """The last push, if its round may still be open."""
        return self._sent if self._sent is not None and self._sent.session == self._session.number else None

    def _push_commit_pull(self, sent: SentPush) -> None:
        replies = self._push(sent)
        try:
            self._session.clock = sent.header.clock + 1
            self._pull(self._lanes)
        except BaseException as error:
            self._session.clock = sent.header.clock  # the same call may be made again, and is then the same push
            if isinstance(error, SessionFenced):  # not any more
                self._count(sent, replies)
            raise
        self._count(sent, replies)

    def _push_again(self, lane: Lane, call: Call) -> None:
        """Send the last push to a shard that has lost it: it was killed before the round had closed."""
        sent = self._unconfirmed
        if sent is None or lane.shard not in sent.incarnations:
            return
        incarnation = self._session.incarnation(lane.shard)
        if sent.incarnations[lane.shard] != incarnation:
            lane.push(self._part(lane, sent), call)
            sent.incarnations[lane.shard] = incarnation

    def _commit(self, sent: SentPush, *, without_waiting: bool) -> None:
        """Exact aggregation: tell shard 0 that all shards have a push; learn what was decided."""

        def commit_at(lane: Lane, call: Call) -> control_pb2.CommitReply:
            self._push_again(lane, call)
            request = control_pb2.CommitRequest(
                caller=self._session.caller(lane.shard),
                clock=sent.header.clock,
                without_waiting=without_waiting,
                skip=sent.skip,
            )
            return lane.commit(request, call)

        (reply,) = self._shards.run(commit_at, self._timeout_s, self._shards.lanes[:1])
        self._session.decisions = list(reply.decisions)
        if self._settlement is not None:
            self._settlement.on_commit(sent.header.clock, reply)
        if not without_waiting:
            self._session.clock = max(self._session.clock, reply.clock)

    def _pull(self, lanes: Sequence[Lane], *, versions_only: bool = False) -> None:
        sent = self._unconfirmed
        if self._is_exact and sent is not None:
            self._commit(sent, without_waiting=False)
        self._session.await_decisions(self._timeout_s)
        if self._settlement is not None:
            self._settlement.settle()

        def pull_at(lane: Lane, call: Call) -> None:
            self._push_again(lane, call)
            blocks = self._blocks[lane.shard]
            request = self._pull_request(lane, blocks if self._has_static else ())
            request.versions_only = versions_only
            lane.pull(request, blocks, self.parameters, call)

        self._shards.run_bulk(pull_at, self._timeout_s, lanes)
        if lanes is self._lanes:
            last, self._sent = self._sent, None  # of a session that has ended, too
            if self._settlement is not None:
                self._settlement.on_told()
            if self._is_exact and last is not None:
                self._on_closed(last.header.clock)

    def _on_closed(self, clock: int) -> None:
        """The round of a push has closed: note whether it was skipped."""
        decision = next((d for d in self._session.decisions if d.round == clock), None)
        is_overflow = self._settlement is not None and self._settlement.skips(clock)
        self.is_skipped = is_overflow or (decision is not None and not any(decision.members))
        self.counts["rounds_skipped"] += self.is_skipped
        if is_overflow:
            logger.warning("psd: worker %d: step %d was skipped: a norm over all workers is not finite", self._rank, clock)

    def _check(self, present: NDArray[np.bool_] | None) -> str | None:
        """The first tensor whose gradient is why the round is to be skipped, if any; raises for what must not be sent."""
        if present is not None:
            for tensor in np.flatnonzero(~present).tolist():
                self.gradients.views[tensor][...] = 0
        policy = self._layout.spec.nan_policy
        tensor_name = self.gradients.first_nonfinite() if policy != "allow" else None
        if tensor_name is not None and policy == "refuse":
            clock = self._session.clock
            raise NonFiniteGradient(
                f"worker {self._rank}: the gradient of {tensor_name!r} at step {clock} holds NaN or infinity; nothing was sent",
                rank=self._rank,
                tensor=tensor_name,
                clock=clock,
            )
        return tensor_name

    def _header(self, scalars: Sequence[Sequence[float]], weight: float, *, is_finite: bool) -> data_pb2.PushHeader:
        """The header of the next push, without its caller. is_finite: see `_check`."""
        header = data_pb2.PushHeader(
            clock=self._session.clock,
            weight=weight,
            layout_digest=self._layout.digest,
            scalars=[data_pb2.GroupScalars(values=values) for values in scalars],
            decisions=self._session.decisions,
            cuts=self._session.cuts,
            is_finite=is_finite,
        )
        clip_norm = self._layout.spec.clip_norm
        if clip_norm and not self._has_rounds and weight:
            header.scale = clip_scale(clip_norm, self.gradients.norm())
        return header

    def _part(self, lane: Lane, sent: SentPush) -> GradientPart:
        blocks = self._blocks[lane.shard]
        read = self.parameters.versions if sent.versions_read is None else sent.versions_read
        versions = () if self._has_rounds else [read[block.index] for block in blocks]
        return sent.part(lane.shard, self._session.caller(lane.shard), blocks, self.gradients, versions)

    def _pull_request(self, lane: Lane, blocks: Sequence[Block]) -> data_pb2.PullRequest:
        return data_pb2.PullRequest(
            caller=self._session.caller(lane.shard),
            clock=self._session.clock,
            layout_digest=self._layout.digest,
            blocks=[block.index for block in blocks],
            decisions=self._session.decisions,
            verdict=self._settlement.verdict if self._settlement is not None else None,
        )

    def _on_pushed(self, sent: SentPush, replies: Sequence[data_pb2.PushReply]) -> None:
        """Every shard has the push: go on at the largest clock, which lies beyond the next one where it came late."""
        self._session.clock = max(self._session.clock + 1, *(reply.clock for reply in replies), 0)
        self._count(sent, replies)

    def _count(self, sent: SentPush, replies: Sequence[data_pb2.PushReply]) -> None:
        self._session.cuts = list({cut.id: cut for reply in replies for cut in reply.cuts}.values())[-CUTS_MAX:]
        if self.client_state is sent.client_state:  # else it is the next push's, which is being computed
            self.client_state = b""
        self.counts["pushes"] += 1
        for reply in replies:
            self.counts["blocks_counted"] += reply.blocks_counted
            self.counts["blocks_duplicate"] += reply.blocks_duplicate
            self.counts["blocks_late"] += reply.blocks_late

    def _drop(self, error: SessionFenced, sent: SentPush) -> None:
        """The session ended during a push: it belonged to that session, and is not sent again by the next one."""
        heard = self._session.decisions
        self._sent = None
        self._session.rejoin(error)
        self._sent = sent  # for the next pull, which finds out what became of its round
        if self._is_exact and self._is_committed(sent.header.clock, [*heard, *self._session.decisions]):
            return
        self.counts["pushes_dropped"] += 1
        logger.warning(
            "psd: worker %d: the gradient of step %d %s, because the worker's lease ran out before all shards had answered",
            self._rank,
            sent.header.clock,
            "was dropped" if self._is_exact else "may have been dropped",
        )

    def _is_committed(self, clock: int, decisions: Sequence[job_pb2.Decision]) -> bool:
        """True if a round has, or will have, the gradient of the session before, or nobody's; this one begins after it."""
        for decision in decisions:
            if decision.round == clock:
                members = members_mask(decision.members)
                return not members or bool(members >> self._rank & 1)
        return self._session.clock == clock + 1
