"""The riders on a worker's pushes: each thing beside the gradient that is told to the shards, or heard in a reply, is one.

A push in progress calls them in the order of `riders_of`. A new one is a class here, or in a module of its own, a line in that
function, and a field of PushHeader or PushReply; its mirror on the shards is a rider of psd/state/desks/transfers.py. Must not
know when a push is sent, or sent again.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TypeVar

import psd_core
from psd.contract.jobspec import JobSpec
from psd.contract.layout import Layout
from psd.contract.rows import TableRows
from psd.contract.verdicts import members_mask
from psd.v1 import control_pb2, data_pb2
from psd_client.lanes.flat import FlatBuffers
from psd_client.worker.exchange.sent_push import SentPush
from psd_client.worker.session.session import Session

logger = logging.getLogger("psd_client")

LOOKED_AT_BYTES = 64 << 20
"""Most bytes of the gradient that are hashed: that takes a tenth of a second, once."""

COUNTS = (
    "pushes",
    "blocks_counted",
    "blocks_duplicate",
    "blocks_late",
    "blocks_staged",
    "pushes_dropped",
    "pushes_overruled",
    "rounds_skipped",
    "rows_pushed",
    "rows_pulled",
)
"""Names of the totals in PushCounts."""


RiderT = TypeVar("RiderT", bound="Rider")


class Rider:
    """Rides on each push of one worker. A method that a rider does not define does nothing."""

    def before_push(self) -> None:
        """Prepare for a push that is about to be made; may call the shards."""

    def write(self, sent: SentPush) -> None:
        """Add to the header of a new push what is the same for all shards. Called once for a push, however often it is sent."""

    def write_to(self, shard: int, header: data_pb2.PushHeader) -> None:
        """Add to one shard's header. Called each time that the push leaves for it; from a thread of its own."""

    def hear(self, sent: SentPush) -> None:
        """Take what the replies say, once all shards have the push. The worker's clock has moved on."""

    def forget(self) -> None:
        """Forget what went with the parameters: the job has gone back to a checkpoint, whose parameters are there now."""


class Riders:
    """All riders of a worker, in their order.

    Attributes:
        prepare, write, write_to, hear, forget: that method of each rider that has something to do then.
    """

    def __init__(self, *riders: Rider) -> None:
        self._all = riders
        self.prepare = [rider.before_push for rider in riders if type(rider).before_push is not Rider.before_push]
        self.write = [rider.write for rider in riders if type(rider).write is not Rider.write]
        self.write_to = [rider.write_to for rider in riders if type(rider).write_to is not Rider.write_to]
        self.hear = [rider.hear for rider in riders if type(rider).hear is not Rider.hear]
        self.forget = [rider.forget for rider in riders if type(rider).forget is not Rider.forget]

    def of(self, kind: type[RiderT]) -> list[RiderT]:
        """Those of a class."""
        return [rider for rider in self._all if isinstance(rider, kind)]


class OrderRider(Rider):
    """Hears an operator's orders from shard 0. DataRequests scales the learning rates of a push by them."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def hear(self, sent: SentPush) -> None:
        """Take over shard 0's present orders."""
        if 0 in sent.replies:
            self._session.orders.hear(sent.replies[0].orders)


class DecisionRider(Rider):
    """Exact aggregation: carries shard 0's decisions on rounds to all shards."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def write(self, sent: SentPush) -> None:
        """Write the latest decisions."""
        if self._session.decisions:
            sent.header.decisions.extend(self._session.decisions)


class CutRider(Rider):
    """Carries the cuts that shards name to all shards; without rounds, also the worker's positions in them."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._written: dict[int, Sequence[data_pb2.Cut]] = {}  # by shard, in the last header

    def write_to(self, shard: int, header: data_pb2.PushHeader) -> None:
        """Write the present cuts: a push that is sent again may say more about them."""
        cuts = self._session.cuts
        if cuts.are_named:
            self._written[shard] = cuts.carried()
            header.cuts.extend(self._written[shard])

    def hear(self, sent: SentPush) -> None:
        """Note the cuts that each shard names. The push has ended, so positions can be chosen again."""
        self._session.hear_cuts(sent.replies)
        if self._session.cuts.are_named:
            self._session.cuts.set_told([self._written.get(shard) for shard in sent.replies])
        if self._session.cuts.is_unready:
            self._session.cuts.set_ready(True)


class ClientStateRider(Rider):
    """Carries the state that the program saves for itself to the shard that keeps it.

    Args:
        keeper: the shard that keeps it (Layout.client_state_shard).

    Attributes:
        state: the state to send with the next push; empty: nothing new.
    """

    def __init__(self, keeper: int) -> None:
        self._keeper = keeper
        self._sent = b""
        self.state = b""

    def write(self, sent: SentPush) -> None:
        """Attach the state to this push, also for when it is sent again."""
        chosen = None if sent.spare is None else sent.spare.client_state
        self._sent = self.state if chosen is None else chosen

    def write_to(self, shard: int, header: data_pb2.PushHeader) -> None:
        """Write the state into the header for the shard that keeps it."""
        if self._sent and shard == self._keeper:
            header.client_state = self._sent

    def hear(self, _sent: SentPush) -> None:
        """Note that the shard has the state."""
        if self.state is self._sent:  # else the program has set the state for the next push already
            self.state = b""


class Attendance(Rider):
    """Says since when one worker is in the job without a gap, which decides whether its scalars hold; hears if they do not.

    The shards use the scalars of the worker that has been there longest (psd/state/aggregation/agreement.py). A worker that was
    started again, or has fallen behind, may have a learning-rate schedule that lags: this way it changes no other worker's
    update, and causes no error.

    Args:
        counts: totals, in which `pushes_overruled` counts the rounds in which other scalars were used than this worker's.
    """

    def __init__(self, rank: int, spec: JobSpec, counts: dict[str, int]) -> None:
        self._rank = rank
        self._groups = spec.groups
        self._since = 0
        self._last: tuple[int, int] | None = None  # session and clock of the last push
        self._round_told = -1
        self._said: set[tuple[int, int, int]] = set()
        self._counts = counts

    def write(self, sent: SentPush) -> None:
        """Write the clock since which this process has pushed at every step. It is 0 only if that is since the job's start."""
        sent.header.since = self.since(sent.session, sent.header.clock)

    def since(self, session: int, clock: int) -> int:
        """The clock since which this process has pushed at every step, as of the push of that name, which is to be sent now."""
        if self._last is None or clock not in (self._last[1], self._last[1] + 1):
            self._since = clock
        if self._last is not None and self._last[0] != session:
            # Something went wrong between the two sessions, and the program's schedule may not know it. If it differs from that
            # of workers that were there all the time, it must give way, and not be refused: so this is never 0.
            self._since = max(1, self._since)
        self._last = session, clock
        return self._since

    def hear(self, sent: SentPush) -> None:
        """Log the shards' notices about this worker's scalars; each once, until the worker joins or falls behind again."""
        for reply in sent.replies.values():
            if not reply.HasField("overruled"):
                continue
            told = reply.overruled
            if told.round != self._round_told:
                self._round_told = told.round
                self._counts["pushes_overruled"] += 1
            if (self._since, told.group, told.scalar) in self._said:
                continue
            self._said.add((self._since, told.group, told.scalar))
            logger.warning(
                "psd: worker %d: in step %d its %s of group %d, %r, gives way to worker %d's, %r, which has been in the job "
                "for longer. A schedule that begins anew with its process is behind the job's clock: see "
                "psd_client.torch.scheduler, and docs/resuming.md",
                self._rank,
                told.round,
                self._groups[told.group].info.scalars[told.scalar],
                told.group,
                told.own,
                told.rank,
                told.held,
            )


class FirstGradient(Rider):
    """Compares the first gradient of one worker with the others', by digest: if two have the same bits, both train on the same
    samples, without an error, and the job learns no faster than one process.

    Args:
        gradients: the buffers that still hold it when its push has ended.
    """

    def __init__(self, rank: int, gradients: FlatBuffers) -> None:
        self._rank = rank
        self._gradients = gradients
        self._is_awaited = True
        self._digest = b""

    @property
    def is_over(self) -> bool:
        """True if no later push carries a digest."""
        return not (self._is_awaited or self._digest)

    def write(self, sent: SentPush) -> None:
        """Write the digest into the second push, unless the gradient was zero; write nothing into others."""
        if self._digest:
            sent.header.first_gradient, self._digest = self._digest, b""

    def hear(self, sent: SentPush) -> None:
        """Hash the gradient, rows of tables included, if this was the first push. Warn if shards have seen the same one."""
        if self._is_awaited:
            self._is_awaited = False
            self._look(sent.tables)
        replies = sent.replies.values()
        same = [reply.same_gradient_as for reply in replies if reply.HasField("same_gradient_as")]
        if same:
            logger.warning(
                "psd: worker %d: its first gradient has the same bits as worker %d's. If both train on the same samples, the "
                "job learns no faster than one process: give each worker its own, by its rank and world_size",
                self._rank,
                same[0],
            )

    def _look(self, tables: Iterable[Sequence[TableRows]]) -> None:
        digest, left, is_zero = hashlib.blake2b(digest_size=16), LOOKED_AT_BYTES, True
        for space in self._gradients.spaces:
            seen = space[: left // space.itemsize]
            digest.update(seen.data)
            is_zero = is_zero and not seen.any()
            left -= seen.nbytes
        for _, ids, values in chain.from_iterable(tables):
            digest.update(ids.data)
            digest.update(values.data)
            is_zero = is_zero and not values.any()
        self._digest = b"" if is_zero else digest.digest()


class Norms(Rider):
    """The norms of one worker's gradients.

    Args:
        gradients: the buffers that hold the gradient of the push that is being made.
    """

    def __init__(self, gradients: FlatBuffers) -> None:
        self._gradients = gradients
        self._tensors = gradients.layout.spec.directed_tensors

    def write(self, sent: SentPush) -> None:
        """Write the norm of each tensor; 0 for one without a gradient."""
        is_there = sent.present
        sent.header.norms.extend(
            self._norm(tensor) if is_there is None or is_there[tensor] else 0.0 for tensor in self._tensors
        )

    def _norm(self, tensor: int) -> float:
        total = psd_core.square_sum(self._gradients.views[tensor].reshape(-1))
        return psd_core.square_root(total) if total is not None else 0.0


class RoundGone(Exception):
    """A gradient is not sent: its part's round was over before its call was made.

    Attributes:
        clock: of that round.
    """

    def __init__(self, clock: int) -> None:
        super().__init__(clock)
        self.clock = clock


class PushCounts(Rider):
    """Totals by name, for ParameterServer.stats.

    Attributes:
        totals: the present totals.
    """

    def __init__(self) -> None:
        self.totals = dict.fromkeys(COUNTS, 0)
        self._lock = threading.Lock()

    def on_reply(self, sent: SentPush, shard: int, reply: data_pb2.PushReply) -> None:
        """Note a shard's reply to a push, in place of the shard's earlier reply. Any thread may call this.

        A shard that was killed, and gets the push again, says that it has staged it, although the decision is known here.
        """
        known = reply
        if reply.blocks_staged and sent.staged_are != "blocks_staged":
            known = data_pb2.PushReply()
            known.CopyFrom(reply)
            known.blocks_staged = 0
            if sent.staged_are:
                setattr(known, sent.staged_are, getattr(known, sent.staged_are) + reply.blocks_staged)
        with self._lock:
            before = sent.replies.get(shard)
            sent.replies[shard] = known
            if before is not None:
                self._add(before, -1)
            self._add(known, 1)

    def hear(self, sent: SentPush) -> None:
        """Count a push that all shards have."""
        self.totals["pushes"] += 1
        self.totals["rows_pushed"] += sum([len(rows.ids) for shard in sent.tables for rows in shard])

    def on_commit(self, sent: SentPush, rank: int, reply: control_pb2.CommitReply, nan_policy: str) -> bool | None:
        """Exact aggregation: note what was decided on a push's round. True if it was skipped; None if that is not known."""
        decision = next((d for d in reply.decisions if d.round == sent.header.clock), None)
        if decision is None:
            if reply.is_left_out:  # so long ago that the decision is no longer kept
                self.on_decision(sent, is_member=False, is_skipped=False)
            return None
        members = members_mask(decision.members)
        # Without that policy, a round has no members if all workers had gone beyond it: then this gradient came too late.
        is_skipped = not members and nan_policy == "skip"
        self.on_decision(sent, is_member=bool(members >> rank & 1), is_skipped=is_skipped)
        self.totals["rounds_skipped"] += is_skipped
        return is_skipped

    def on_skipped_norm(self, rank: int, clock: int) -> None:
        """Count, and tell of, a round that was skipped because of a norm over all workers."""
        self.totals["rounds_skipped"] += 1
        logger.warning("psd: worker %d: step %d was skipped: a norm over all workers is not finite", rank, clock)

    def on_decision(self, sent: SentPush, *, is_member: bool, is_skipped: bool) -> None:
        """Exact aggregation: count the staged blocks of a push as counted or as late; as neither if the round was skipped."""
        sent.is_decided = True
        sent.staged_are = "" if is_skipped else "blocks_counted" if is_member else "blocks_late"
        for shard, reply in list(sent.replies.items()):
            self.on_reply(sent, shard, reply)

    def on_gone(self, rank: int, clock: int, blocks: int) -> None:
        """Count, and tell of, a gradient that was not sent: its round was over before it was made."""
        self.totals["blocks_late"] += blocks
        what = "the gradient of step %d came too late for its round, because the worker has joined again; it does not count"
        logger.warning("psd: worker %d: " + what, rank, clock)

    def _add(self, reply: data_pb2.PushReply, sign: int) -> None:
        self.totals["blocks_counted"] += sign * reply.blocks_counted
        self.totals["blocks_duplicate"] += sign * reply.blocks_duplicate
        self.totals["blocks_late"] += sign * reply.blocks_late
        self.totals["blocks_staged"] += sign * reply.blocks_staged


def riders_of(
    rank: int, session: Session, layout: Layout, gradients: FlatBuffers, counts: dict[str, int], *others: Rider
) -> Riders:
    """All that ride on the pushes of one worker.

    Args:
        counts: see Attendance. others: those that the exchange knows, too.
    """
    return Riders(
        OrderRider(session),
        CutRider(session),
        *([DecisionRider(session)] if layout.spec.aggregation == "exact" else []),
        Attendance(rank, layout.spec, counts),
        *([Norms(gradients)] if layout.spec.directed_tensors else []),
        *([FirstGradient(rank, gradients)] if layout.spec.world_size > 1 else []),
        *others,
    )
