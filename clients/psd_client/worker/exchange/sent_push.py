"""One push: its name and content, the shards' replies, and whether a call that is made again means this push.

Must not know when it is sent, or how it travels.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from psd.contract.errors import (
    Draining,
    OutOfSpace,
    Overloaded,
    PsdError,
    SessionFenced,
    ShardUnavailable,
    WaitTimeout,
    error_text,
)
from psd.contract.layout import Block
from psd.contract.rows import TableRows
from psd.v1 import data_pb2, job_pb2
from psd_client.lanes.flat import FlatBuffers
from psd_client.lanes.overlap_feed import Feed
from psd_client.lanes.transport import GradientPart
from psd_client.worker.rows import Gradients, RowGradients, is_same_rows

_PASSING = (ShardUnavailable, WaitTimeout, Overloaded, Draining, OutOfSpace)
"""Errors of psd after which the same push may succeed."""

logger = logging.getLogger("psd_client")

DIGEST_BYTES_MAX = 1 << 30
"""Most bytes of gradients that are hashed after Ctrl-C, which takes a second. A push with more is given up."""


class JobPart(NamedTuple):
    """A part of a job whose gradients are pushed without those of other parts, in rounds of its own.

    Attributes:
        number: from 1; the same on all workers. groups: indices of its groups in the job.
    """

    number: int
    groups: frozenset[int]


@dataclass(slots=True)
class Spare:
    """The time for which a worker goes on without the round of a push.

    Attributes:
        until: monotonic seconds; before, the round may wait for others, if the job has a grace. chosen_at: the clock by which
            the worker has chosen the part that it pushes.
        client_state: the program's state as of then, to go with the push; None: as of when the push is made.
        decided_at, ended_at: when the round was decided, and when the exchange had ended, in monotonic seconds; 0: not yet.
    """

    until: float
    chosen_at: int
    client_state: bytes | None = None
    decided_at: float = 0.0
    ended_at: float = 0.0


class WorkerGradient(NamedTuple):
    """A gradient to push: what lies in the worker's gradient buffers, and what goes with it.

    Attributes:
        scalars: the rule's, for each group, in the order of the rule's list. weight: number of samples behind the gradient.
        present: (tensors,) bool, which tensors have a gradient; None: all. rows: gradients of rows of tables, by table.
        skip: it is not finite, and the job's policy is to skip the round then.
        feed: provides blocks, rows and `present` while they are still being computed; the shards then check for NaN.
        versions_read, part, spare, put: as in SentPush.
    """

    scalars: Sequence[Sequence[float]]
    weight: float = 1
    present: NDArray[np.bool_] | None = None
    rows: Gradients | None = None
    skip: bool = False
    feed: Feed | None = None
    versions_read: Sequence[int] | None = None
    part: JobPart | None = None
    spare: Spare | None = None
    put: bytes = b""


@dataclass
class SentPush:
    """A push. With rounds it is kept until its round is known to have closed.

    Attributes:
        session: the session that began it. Its name is (rank, session, header.clock), even if a later session sends it again.
        header: the header, without its caller and what riders write for each shard.
        present: which tensors have a gradient; None: all. skip: the gradient is not finite, and is left out.
        rows: gradients of rows of tables. part: the part of the job that it is of; None: the job has no parts.
        feed: provides the blocks, if they are still being computed.
        versions_read: by block, the version from which the gradients were computed; None: the version received last.
        spare: of a learner, until when it needs no answer; None: it waits.
        put: as in CommitRequest.
        begun: mask of the shards to which it was sent, perhaps not whole.
        incarnations: by shard, the incarnation that has the push. replies: by shard, its last reply.
        is_finished: all shards have it; with exact aggregation shard 0 knows that; and the worker's clock has moved on.
        is_decided: exact aggregation: this worker knows the members of the round.
        staged_are: the field of PushReply by which staged blocks are counted; empty: by none, because the round was skipped.
        error: the error with which the program's call has failed.
    """

    session: int
    header: data_pb2.PushHeader
    present: NDArray[np.bool_] | None
    rows: RowGradients
    skip: bool
    feed: Feed | None
    versions_read: Sequence[int] | None = None
    part: JobPart | None = None
    spare: Spare | None = None
    put: bytes = b""
    begun: int = 0
    incarnations: dict[int, int] = field(default_factory=dict)
    replies: dict[int, data_pb2.PushReply] = field(default_factory=dict)
    is_finished: bool = False
    is_decided: bool = False
    staged_are: str = "blocks_staged"
    error: BaseException | None = None
    _left: dict[int, bytes] | None = None  # after a failure: digests of the blocks that were sent

    def gradient_part(
        self, shard: int, caller: job_pb2.Caller, blocks: Sequence[Block], buffers: FlatBuffers, versions: Sequence[int]
    ) -> GradientPart:
        """The part of one shard. `versions`: without rounds, the versions of its blocks that this worker has read."""
        own = data_pb2.PushHeader()
        own.CopyFrom(self.header)
        own.caller.CopyFrom(caller)
        own.session = self.session
        if versions:
            own.versions.extend(versions)
        if self.part is not None:
            own.part = self.part.number
            own.answered.extend(block.index for block in blocks if block.group in self.part.groups)
        tables = self.tables
        return GradientPart(
            blocks,
            buffers,
            self.present,
            self.feed,
            buffers.layout.tables_block(shard),
            tables[shard] if tables else (),
            header=own,
        )

    @property
    def tables(self) -> Sequence[Sequence[TableRows]]:
        """Gradients of rows, by shard; empty if no shard has any."""
        return self.feed.tables if self.feed is not None else self.rows.by_shard

    @property
    def is_superseded(self) -> bool:
        """True if its call has failed because another process has this worker's rank."""
        return isinstance(self.error, SessionFenced) and self.error.detail.get("cause") != "expired"

    @property
    def may_be_completed(self) -> bool:
        """True if no shard has refused the push, and it is whole, so that sending the same numbers again can complete it."""
        if isinstance(self.error, SessionFenced):
            is_passing = not self.is_superseded
        else:  # errors of others are no refusal: Ctrl-C, or what the program's own signal handler has raised
            is_passing = isinstance(self.error, _PASSING) or not isinstance(self.error, PsdError)
        return is_passing and (self.feed is None or self.feed.is_finished)

    def on_failure(self, error: BaseException, blocks: Sequence[Block], buffers: FlatBuffers) -> None:
        """Note that the program's call has failed, and what was sent, so that the next call can tell if it means this push."""
        self.error = error
        if isinstance(error, Exception) or sum(block.gradient_nbytes for block in blocks) <= DIGEST_BYTES_MAX:
            self._left = dict(self._digests(blocks, buffers, self.feed, self.present))

    def is_same(
        self,
        scalars: Sequence[data_pb2.GroupScalars],
        weight: float,
        gradient: WorkerGradient,
        tables: Sequence[Sequence[TableRows]],
    ) -> bool:
        """True if a call after a failed one has the same arguments, and may mean this push. Also ask `is_unchanged`."""
        mine = list(self.header.scalars), self.header.weight, self.skip, self.part
        theirs = list(scalars), weight, gradient.skip, gradient.part
        return mine == theirs and is_same_rows(self.tables, tables)

    def is_unchanged(self, blocks: Sequence[Block], buffers: FlatBuffers, present: NDArray[np.bool_] | None) -> bool:
        """True if the buffers still hold the blocks of this push that were sent."""
        if self._left is None:
            return False
        left = [block for block in blocks if block.index in self._left]
        return self._left == dict(self._digests(left, buffers, None, present))

    def warn_given_up(self, rank: int, of: int) -> None:
        """Warn that another gradient has taken this one's place, after its call had failed."""
        logger.warning(
            "psd: worker %d: gave up the push of step %d, which failed (%s); at least %d of %d blocks have counted it",
            rank,
            self.header.clock,
            "" if self.error is None else error_text(self.error),
            sum(reply.blocks_counted + reply.blocks_duplicate for reply in self.replies.values()),
            of,
        )

    def warn_expired(self, rank: int, late: int, of: int) -> None:
        """Warn that blocks have closed their round without this gradient, because it came late."""
        logger.warning(
            "psd: worker %d: the gradient of step %d came too late for its round in %d of %d blocks, because the worker's "
            "lease had run out",
            rank,
            self.header.clock,
            late,
            of,
        )

    def warn_closed(self, rank: int, shard: int, late: int) -> None:
        """Warn that a shard that was killed has closed the round without this gradient."""
        logger.warning(
            "psd: worker %d: shard %d was killed, and %d of its blocks have closed the round of step %d without this "
            "worker's gradient",
            rank,
            shard,
            late,
            self.header.clock,
        )

    @staticmethod
    def _digests(
        blocks: Sequence[Block], buffers: FlatBuffers, feed: Feed | None, present: NDArray[np.bool_] | None
    ) -> Iterator[tuple[int, bytes]]:
        outgoing = feed.given() if feed is not None else None
        for block in blocks:
            if outgoing is not None and block.index not in outgoing:
                continue
            mask = outgoing[block.index] if outgoing is not None else None
            if outgoing is None and present is not None:
                mask = present[block.segment_tensors]
            is_empty = mask is not None and not mask.any()
            digest = hashlib.blake2b(b"" if is_empty else buffers.block(block.index).data, digest_size=16)
            digest.update(b"" if mask is None or mask.all() else np.packbits(mask).tobytes())
            yield block.index, digest.digest()
