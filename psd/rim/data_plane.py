"""The data plane without its transport: pushes, pulls and both at once, as steps over blocks.

Each carrier (gRPC in data_service.py, sockets in bulk_connection.py) receives frames, of which sent_frames.py makes a header
and `PushedBlock`s, and sends the resulting `PulledBlock`s. Waits happen here, through the carrier's Waiter. Must not know
frames, messages on the wire, or sockets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from itertools import zip_longest
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psd.contract.errors import CutMissed, InvalidRequest, WaitTimeout
from psd.contract.rows import TableRows, parts_of
from psd.rim.calls import Waiter, wait_s
from psd.rim.pace import Caller
from psd.state.aggregation.block import BlockState
from psd.state.aggregation.outgoing import payload_of, write_rounded
from psd.state.aggregation.trained import Trained
from psd.state.cuts.snapshots import Done, Snapshot
from psd.state.desks.exchange import tables_of
from psd.state.desks.transfers import Found, Pull, Push
from psd.state.kept_versions import KeptVersions, Told
from psd.state.readers import KnownReader, Readers
from psd.state.shard import Shard
from psd.state.tables.block import TablesBlock
from psd.v1 import data_pb2

LENT_BYTES_MIN = 64 << 10
"""Bytes from which a round may read a gradient in the caller's memory; a smaller one is counted at once, which is cheaper."""

SHARED_BLOCKS_MIN = 3
"""Blocks of a shard from which a call passes by those at which another one is at work; with fewer, to look costs more."""

_NO_VALUES: NDArray[Any] = np.empty(0, np.float32)


class PushedBlock(NamedTuple):
    """One block of a push, or of initial values.

    Attributes:
        present: as in PushFrame.
        payload: used until the next block is asked for; if `is_lent`, perhaps until the call has ended.
        is_followed: True if the next block is here already: answers may wait until it is counted, too.
        rows: for the tables' block: the parts of the payload. more: True if another one has further rows of the push.
        memory: memory with the values of each part, if the payload has only ids; used as long as the payload.
        already: as in PushFrame.
    """

    block: int
    present: bytes
    payload: memoryview
    is_lent: bool = False
    is_followed: bool = False
    rows: Sequence[data_pb2.RowsPart] = ()
    more: bool = False
    memory: Sequence[memoryview] = ()
    already: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all values and ids."""
        return self.payload.nbytes + (sum([numbers.nbytes for numbers in self.memory]) if self.memory else 0)


RowsAsked: TypeAlias = tuple[Sequence[data_pb2.RowsPart], memoryview, Sequence[memoryview]]
"""A frame of a request for rows: its parts; its payload, the ids, which is used until the next frame is asked for; and the
memory for the values of each part, empty if they are sent in messages."""

RowsFrames: TypeAlias = Iterator[RowsAsked]


class PulledRows(NamedTuple):
    """Rows for the caller: the answer to one frame of its request.

    Attributes:
        version: updates applied to the tables' block. is_there: True if the values are in the caller's memory already.
    """

    rows: list[TableRows]
    version: int
    is_there: bool

    def head(self) -> bytes:
        """The message of the answer, without its numbers."""
        return data_pb2.RowsFrame(rows=parts_of(self.rows), version=self.version).SerializeToString()


class PulledBlock:
    """One block for the caller. Its page is pinned until the receiver of the answer calls `release`.

    The tables' block has no page: the answer has only its version.

    Attributes:
        block: index. version: updates applied. values: (n,) the parameters, or a slot, unchanged until `release`.
        steps: with a slot: steps that each segment has made. codec: form in which the values travel; "": as they are.
        difference: what travels in their place, encoded, because the worker holds an earlier version; else None.

    Args:
        slot: number of a slot, in place of the parameters.
        held: the version that the worker holds, where it pulls differences; None: none.
    """

    __slots__ = ("_held", "_page", "_state", "block", "codec", "difference", "steps", "values", "version")

    def __init__(self, state: Trained, found: Found, slot: int = 0, codec: str = "", held: int | None = None) -> None:
        self._state = state
        self.codec = codec
        self.difference: NDArray[Any] | None = None
        self._held = 0
        self.version: int = found[0]
        self._page: Any = found[1]
        self.block = state.index
        self.values: NDArray[Any] = _NO_VALUES
        self.steps: list[int] = []
        if self._page is not None:
            self.values = self._page.slots[slot - 1] if slot else self._page.parameter
            self.steps = self._page.steps.tolist() if slot else []
            if self._page.extra and isinstance(state, BlockState) and codec == state.pull_codec:
                (self.values,), self.codec = self._page.extra, ""
                if held is not None:
                    self.difference, self._held = state.shown.difference_for(held, self.version), held

    def head(self, in_plane: int = 0) -> bytes:
        """The message of the answer, without its numbers. in_plane: as in PullFrame."""
        message = data_pb2.PullFrame(block=self.block, version=self.version, steps=self.steps, in_plane=in_plane)
        if self.difference is not None:
            message.base = self._held + 1
        return message.SerializeToString()

    @property
    def nbytes(self) -> int:
        """Bytes of `values`."""
        return self.values.nbytes

    @property
    def region(self) -> Any:
        """The place of the values in a plane, where another process can read them; None: in none, or not in the form in which
        they travel."""
        page = self._page
        if page is None or self.codec or self.values is not page.parameter:
            return None
        return page.region if page.base is None else page.base.region

    def payload(self) -> NDArray[Any]:
        """The numbers that travel, in their form."""
        if self.difference is not None:
            return self.difference
        return payload_of(self.values, self.codec)

    def write_to(self, target: NDArray[Any]) -> None:
        """Write values that have a codec, as the receiver of the payload would have them, into memory of the worker."""
        write_rounded(self.values, self.codec, target)

    def release(self) -> None:
        """Release the page. Call it once."""
        if self._page is not None and isinstance(self._state, BlockState):
            self._state.unpin(self._page)


class ReadBlock(PulledBlock):
    """One block for a reader.

    Attributes:
        positions, content: as in PullFrame. told: what is sent in place of the values; None: they are.
        sent_bytes: those that went to the reader. kept: takes the page over from `release`; None: it is given back.

    Args:
        readers: told by `release` what went to which one.
    """

    __slots__ = ("_reader", "_readers", "content", "kept", "positions", "sent_bytes", "told")

    def __init__(
        self, state: BlockState, found: Found, codec: str, content: int, positions: int, readers: Readers, reader: KnownReader
    ) -> None:
        super().__init__(state, found, codec=state.plan.read_codec(codec))
        self.content, self.positions = content, positions
        self.told: Told | None = None
        self.kept: KeptVersions | None = None
        self.sent_bytes = 0
        self._readers, self._reader = readers, reader

    @override
    def head(self, in_plane: int = 0) -> bytes:
        assert not in_plane, "readers map no planes"
        return data_pb2.PullFrame(
            block=self.block,
            version=self.version,
            positions=self.positions,
            content=self.content,
            delta_check=self.told.check if self.told is not None else 0,
        ).SerializeToString()

    @override
    def payload(self) -> NDArray[Any]:
        payload = super().payload() if self.told is None else self.told.delta
        self.sent_bytes = payload.nbytes
        return payload

    @override
    def write_to(self, target: NDArray[Any]) -> None:
        super().write_to(target)
        self.sent_bytes = self.nbytes

    @override
    def release(self) -> None:
        if self.kept is None:
            super().release()
        else:
            self.kept.keep(self.block, self.content, self.values, super().release)
        self._readers.sent(self._reader, self.sent_bytes)


def saved_by(push: Push, block: PushedBlock) -> int:
    """The bytes that the codec of a block has saved."""
    state = push.job.trained(block.block)
    plan = state.plan if isinstance(state, BlockState) else None
    return plan.gradient_nbytes - plan.pushed_nbytes if plan is not None and block.payload.nbytes else 0


def _first_free(pending: deque[Trained]) -> Trained:
    """Bring a block at which no other call is at work to the front, if there is one: so calls that wait for a round share its
    updates. Returns the front."""
    for _ in range(len(pending)):
        if not pending[0].is_busy:
            break
        pending.rotate(-1)
    return pending[0]


class DataPlane:
    """The data plane of one shard for one lane. Its methods run in the carrier's threads.

    Attributes:
        counts: the lane's counts.
    """

    def __init__(self, shard: Shard, lane: str) -> None:
        self.counts = shard.lane_counts(lane)
        self._shard = shard
        self._lane = lane
        self._now = shard.now
        self._exchange = shard.exchange
        self._admission = shard.admission

    def initialize(self, head: data_pb2.InitializeFrame, blocks: Iterator[PushedBlock]) -> Generator[data_pb2.InitializeReply]:
        """Store initial values; yields the reply."""
        init = self._admission.begin_initialize(head.caller, head.layout_digest, head.choice)
        try:
            for block in blocks:
                self._admission.initialize_block(init, block.block, block.payload)
                self.counts.count_bytes(received=block.payload.nbytes)
            yield data_pb2.InitializeReply(accepted=self._admission.end_initialize(init))
        finally:
            init.give_back()

    def push(self, header: data_pb2.PushHeader, blocks: Iterator[PushedBlock], waiter: Waiter) -> Generator[data_pb2.PushReply]:
        """Count a push; yields its reply."""
        began = self._now()
        push = self._begin(header, waiter)
        for block in blocks:
            if not block.more:
                self._exchange.check_arrival(push)
            # No memory is lent: a worker that only pushes does not wait for the round.
            while (
                ticket := self._exchange.push_block(
                    push,
                    block.block,
                    block.present,
                    block.payload,
                    rows=block.rows,
                    memory=block.memory,
                    more=block.more,
                    already=block.already,
                )
            ) is not None:
                waiter.wait(ticket)
            self.counts.count_bytes(received=block.nbytes, saved=saved_by(push, block) if push.job.spec.compression.push else 0)
        reply = self._exchange.end_push(push)
        self.counts.count_call("push", self._now() - began)
        yield reply

    def pull(self, request: data_pb2.PullRequest, waiter: Waiter) -> Generator[PulledBlock]:
        """Yield the blocks in the request, as they become ready."""
        began = self._now()
        pull, blocks = self._exchange.begin_pull(request)
        self._pass_gate(pull, pull.clock, waiter)
        for block in blocks:
            while not isinstance(found := self._exchange.read(block, pull), tuple):
                waiter.wait(found)
            yield PulledBlock(block, found, request.slot, "" if request.slot else block.pull_codec, pull.held.get(block.index))
        self.counts.count_call("pull", self._now() - began)

    def pull_rows(
        self, request: data_pb2.PullRequest, frames: RowsFrames, waiter: Waiter, *, counts_no_use: bool
    ) -> Generator[PulledRows]:
        """Yield an answer to each frame, in order.

        Args:
            counts_no_use: do not mark the rows as used.
        """
        began = self._now()
        pull, tables = self._exchange.begin_pull_rows(request)
        self._pass_gate(pull, pull.clock, waiter)
        while not isinstance(found := self._exchange.read(tables, pull), tuple):
            waiter.wait(found)
        yield from self._rows(tables, frames, is_use=not counts_no_use)
        self.counts.count_call("pull", self._now() - began)

    def read_rows(self, request: data_pb2.ReadRequest, frames: RowsFrames) -> Generator[PulledRows]:
        """Do as `pull_rows`, for a reader: without waiting, and without marking the rows as used."""
        with self._shard.readers.fetching("ReadRows"):
            yield from self._rows(self._exchange.begin_read_rows(request), frames, is_use=False)

    def read(self, request: data_pb2.ReadRequest, caller: Caller, *, is_whole: bool = False) -> Generator[ReadBlock]:
        """Yield the blocks of a reader's cut, once all are there.

        Args:
            is_whole: send all of each block, whatever the reader has.
        """
        if request.or_newer:
            raise CutMissed("or_newer: this is a shard; only a relay chooses the version")
        shard = self._shard
        done: Done = SimpleQueue()
        readers = shard.readers
        with readers.fetching("Read"), readers.asked_by(request, self._lane) as reader:
            snapshot = shard.begin_read(request, done)
            try:
                self._await(snapshot, done, caller)
                positions = snapshot.positions.digest if snapshot.positions is not None else 0
                kept = snapshot.job.kept
                readers.begin_sending(reader)
                for index, held in zip_longest(request.blocks or list(snapshot.pages), request.held):
                    page = snapshot.pages.pop(index)
                    found, content = (page.version, page), page.content
                    block = ReadBlock(snapshot.job.blocks[index], found, request.codec, content, positions, readers, reader)
                    try:
                        if held is not None and not is_whole:  # the reader comes again and again
                            block.told = kept.told(index, held, content, block.values, block.codec)
                            block.kept = kept
                    except BaseException:
                        block.release()
                        raise
                    yield block
                readers.has(reader, request.cut.step)
            finally:
                shard.cuts.abandon(snapshot)

    def _await(self, snapshot: Snapshot, done: Done, caller: Caller) -> None:
        """Wait until a snapshot is complete; raise if it is not in time, or cannot be."""
        cut = snapshot.cut
        if not caller.add_callback(lambda: done.put(None)):
            done.put(None)
        try:
            is_done = done.get(timeout=wait_s(caller)) is not None
        except Empty:
            raise WaitTimeout(f"cut: the blocks have not reached step {cut.step} in time", missing=[]) from None
        if not is_done:
            raise InvalidRequest("the reader hung up")
        if snapshot.why_missed:
            self._shard.check_draining()
            raise CutMissed(f"cut.step: cut {cut.id} at step {cut.step}: {snapshot.why_missed}")

    def _rows(self, tables: TablesBlock, frames: RowsFrames, *, is_use: bool) -> Generator[PulledRows]:
        asked = 0
        for parts, payload, memory in frames:
            version = tables.version
            rows = self._exchange.read_rows(tables, parts, payload, asked, memory, is_use=is_use)
            asked += sum([len(part.ids) for part in rows])
            self.counts.count_bytes(received=payload.nbytes, sent=sum([part.values.nbytes for part in rows]))
            yield PulledRows(rows, version, bool(memory))

    def push_pull(
        self, header: data_pb2.PushHeader, blocks: Iterator[PushedBlock], waiter: Waiter, ahead: RowsAsked | None = None
    ) -> Generator[PulledBlock | PulledRows | data_pb2.PushReply]:
        """Yield the blocks as they become ready, then the rows that are asked for ahead, last the push's reply.

        A block is answered once the push has covered it: what a worker reads contains its own gradient. Blocks that are ready
        first come first. A push of one part of the job is answered with that part's blocks, and the tables'. With rounds the
        reply comes when the round has closed in the others, too: until then a shard that is killed has to have the push again.
        """
        began = self._now()
        push = self._begin(header, waiter)
        pull = self._exchange.begin_answer(push)
        answered = {*header.answered, push.job.tables_index} if header.part else None
        if ahead is not None:
            tables = tables_of(push.job)
            parts, ids, memory = ahead
            rows = tables.checks.rows(parts, ids, 0, has_values=False, memory=memory)
        are_many = push.job.block_count >= SHARED_BLOCKS_MIN
        pending: deque[Trained] = deque()
        unanswered: list[Trained] = []
        try:
            for block in blocks:
                if not block.more:
                    self._exchange.check_arrival(push)
                covered = len(push.covered)
                while (
                    ticket := self._exchange.push_block(
                        push,
                        block.block,
                        block.present,
                        block.payload,
                        is_lent=block.is_lent,
                        rows=block.rows,
                        memory=block.memory,
                        more=block.more,
                        already=block.already,
                    )
                ) is not None:
                    waiter.wait(ticket)
                self.counts.count_bytes(
                    received=block.nbytes, saved=saved_by(push, block) if push.job.spec.compression.push else 0
                )
                if len(push.covered) > covered:
                    if answered is None or block.block in answered:
                        pending.append(push.job.trained(block.block))
                    elif pull.has_rounds:
                        unanswered.append(push.job.trained(block.block))
                if block.is_followed and pull.has_rounds:
                    continue
                while pending and (
                    (found := self._exchange.peek(_first_free(pending) if are_many else pending[0], pull)) is not None
                ):
                    first = pending.popleft()
                    yield PulledBlock(first, found, 0, first.pull_codec, pull.held.get(first.index))
            reply = self._exchange.end_push(push)
            if pending:
                self._pass_gate(pull, pull.clock, waiter)
            while pending:
                state = _first_free(pending) if are_many else pending[0]
                read = self._exchange.read(state, pull)
                if not isinstance(read, tuple):
                    waiter.wait(read)
                    continue  # perhaps another block is free now
                pending.popleft()
                yield PulledBlock(state, read, 0, state.pull_codec, pull.held.get(state.index))
            for state in unanswered:
                while not isinstance(read := self._exchange.read(state, pull), tuple):
                    waiter.wait(read)
                PulledBlock(state, read).release()
            if ahead is not None:
                version = tables.version
                self._exchange.fill_rows(tables, rows, is_use=True)
                self.counts.count_bytes(received=ids.nbytes, sent=sum([part.values.nbytes for part in rows]))
                yield PulledRows(rows, version, bool(memory))
        finally:
            push.loan.end()
        self.counts.count_call("push_pull", self._now() - began)
        yield reply

    def _begin(self, header: data_pb2.PushHeader, waiter: Waiter) -> Push:
        push = self._exchange.begin_push(header)
        self._pass_gate(push, push.clock, waiter)
        while (ticket := self._exchange.hold(push)) is not None:
            waiter.wait(ticket)
        return push

    def _pass_gate(self, call: Push | Pull, clock: int, waiter: Waiter) -> None:
        while call.job.policy.has_bound and (ticket := self._exchange.gate(call, clock)) is not None:
            waiter.wait(ticket)
