"""One push: its name and content, the shards' replies, and whether a repeated call means it.

Must not know when it is sent, nor how it travels.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

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
from psd_client.worker.rows import RowGradients, is_same_rows

_PASSING = (ShardUnavailable, WaitTimeout, Overloaded, Draining, OutOfSpace)
"""Errors of psd after which the very same push may succeed."""

logger = logging.getLogger("psd_client")

DIGEST_BYTES_MAX = 1 << 30
"""Limit of gradients that are compared after Ctrl-C: a second's work. Larger ones are given up."""


@dataclass
class SentPush:
    """A push. With rounds it is kept until its round is known to have closed.

    Attributes:
        session: as which it was begun; its name is (rank, session, header.clock), whoever sends it again.
        header: without its caller, and what riders write for each shard.
        present: which tensors have a gradient; None: all. skip: the gradient is not finite, and is not in it.
        rows: gradients of rows of tables.
        feed: gives the blocks, if they are still being computed. versions_read: by block, of the parameters that the gradients
            were computed from; None: of those that were received last.
        incarnations: by shard, of those that have it. replies: by shard, the last one.
        is_finished: all shards have it, with exact aggregation shard 0 knows that, and the worker's clock has moved on.
        is_decided: exact aggregation: it is known which workers its round is made of.
        staged_are: what staged blocks count as, a field of PushReply; empty: as nothing, because the round was skipped.
        error: what the call that sends it has failed with.
    """

    session: int
    header: data_pb2.PushHeader
    present: NDArray[np.bool_] | None
    rows: RowGradients
    skip: bool
    feed: Feed | None
    versions_read: Sequence[int] | None = None
    incarnations: dict[int, int] = field(default_factory=dict)
    replies: dict[int, data_pb2.PushReply] = field(default_factory=dict)
    is_finished: bool = False
    is_decided: bool = False
    staged_are: str = "blocks_staged"
    error: BaseException | None = None
    _left: dict[int, bytes] | None = None  # after a failure: what the blocks held that had left

    def part(
        self, shard: int, caller: job_pb2.Caller, blocks: Sequence[Block], buffers: FlatBuffers, versions: Sequence[int]
    ) -> GradientPart:
        """The part of one shard. `versions`: of its blocks, that this worker has read; where there are no rounds."""
        own = data_pb2.PushHeader()
        own.CopyFrom(self.header)
        own.caller.CopyFrom(caller)
        own.session = self.session
        if versions:
            own.versions.extend(versions)
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
        """Gradients of rows, by shard; empty: none on any."""
        return self.feed.tables if self.feed is not None else self.rows.by_shard

    @property
    def is_superseded(self) -> bool:
        """True if its call has failed because another process has this worker's rank."""
        return isinstance(self.error, SessionFenced) and self.error.detail.get("cause") != "expired"

    @property
    def may_be_completed(self) -> bool:
        """True if the push itself was not refused, and is whole, so that the same numbers, sent again, complete it."""
        if isinstance(self.error, SessionFenced):
            is_passing = not self.is_superseded
        else:  # what is not psd's refuses nothing: Ctrl-C, or what the program's own signal handler has raised
            is_passing = isinstance(self.error, _PASSING) or not isinstance(self.error, PsdError)
        return is_passing and (self.feed is None or self.feed.is_finished)

    def on_failure(self, error: BaseException, blocks: Sequence[Block], buffers: FlatBuffers) -> None:
        """Note the failure of its call, and what has left, so that the next call can tell whether it means this push."""
        self.error = error
        if isinstance(error, Exception) or sum(block.gradient_nbytes for block in blocks) <= DIGEST_BYTES_MAX:
            self._left = dict(self._digests(blocks, buffers, self.feed, self.present))

    def is_same(
        self,
        scalars: Sequence[data_pb2.GroupScalars],
        weight: float,
        tables: Sequence[Sequence[TableRows]],
        *,
        skip: bool,
    ) -> bool:
        """True if a call made after a failed one may be the same call, as far as its arguments tell; see `is_unchanged`,
        too."""
        mine = list(self.header.scalars), self.header.weight, self.skip
        return mine == (list(scalars), weight, skip) and is_same_rows(self.tables, tables)

    def is_unchanged(self, blocks: Sequence[Block], buffers: FlatBuffers, present: NDArray[np.bool_] | None) -> bool:
        """True if the buffers still hold the parts of this push that have left."""
        if self._left is None:
            return False
        left = [block for block in blocks if block.index in self._left]
        return self._left == dict(self._digests(left, buffers, None, present))

    def warn_given_up(self, rank: int, of: int) -> None:
        """Tell the user that another gradient has taken this one's place, after its call had failed."""
        logger.warning(
            "psd: worker %d: gave up the push of step %d, which failed (%s); at least %d of %d blocks have counted it",
            rank,
            self.header.clock,
            "" if self.error is None else error_text(self.error),
            sum(reply.blocks_counted + reply.blocks_duplicate for reply in self.replies.values()),
            of,
        )

    def warn_expired(self, rank: int, late: int, of: int) -> None:
        """Tell the user that blocks have closed their round without this gradient, because it came late."""
        logger.warning(
            "psd: worker %d: the gradient of step %d came too late for its round in %d of %d blocks, because the worker's "
            "lease had run out",
            rank,
            self.header.clock,
            late,
            of,
        )

    def warn_closed(self, rank: int, shard: int, late: int) -> None:
        """Tell the user that a shard that was killed has closed the round without this gradient."""
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
            digest = hashlib.blake2b(buffers.block(block.index).data, digest_size=16)
            digest.update(b"" if mask is None or mask.all() else np.packbits(mask).tobytes())
            yield block.index, digest.digest()
