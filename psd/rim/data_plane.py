"""The data plane apart from its transport: pushes, pulls and both at once, as steps over blocks.

Each carrier (gRPC in data_service.py, sockets in bulk_connection.py) turns what it receives into a header and `PushedBlock`s,
and the `PulledBlock`s that come out into what it sends. Waits happen here, through the carrier's Waiter. Must not know frames,
messages on the wire, or sockets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

from numpy.typing import NDArray

from psd.rim.calls import Waiter
from psd.state.aggregation.block import BlockState
from psd.state.shard import Shard
from psd.state.transfers import Found, Pull, Push
from psd.v1 import data_pb2


class PushedBlock(NamedTuple):
    """One block of a push, or of initial values.

    Attributes:
        present: as in PushFrame.
        payload: read until the next block is asked for; if `is_lent`, until the call has ended.
        is_followed: the next block is here already: what rounds have for the caller may wait until it is counted, too.
    """

    block: int
    present: bytes
    payload: memoryview
    is_lent: bool = False
    is_followed: bool = False


class PulledBlock:
    """One block for the caller. Its page is pinned until `release`, which whoever gets the answer calls.

    Attributes:
        block: index. version: updates applied. values: (n,) the parameters, unchanged until `release`.
    """

    __slots__ = ("_page", "_state", "block", "version")

    def __init__(self, state: BlockState, found: Found) -> None:
        self._state = state
        self.version, self._page = found
        self.block = state.plan.index

    @property
    def values(self) -> NDArray[Any]:
        """The block's parameters."""
        values: NDArray[Any] = self._page.parameter
        return values

    @property
    def nbytes(self) -> int:
        """Bytes of `values`."""
        return self._state.plan.nbytes

    def release(self) -> None:
        """Give the page back. Once."""
        self._state.unpin(self._page)


class DataPlane:
    """The data plane of one shard for one lane, to which it attributes its counts. Its methods run in the carrier's threads.

    Attributes:
        counts: of the lane.
    """

    def __init__(self, shard: Shard, lane: str) -> None:
        self.counts = shard.lane_counts(lane)
        self._now = shard.now
        self._exchange = shard.exchange
        self._admission = shard.admission

    def initialize(self, head: data_pb2.InitializeFrame, blocks: Iterator[PushedBlock]) -> Generator[data_pb2.InitializeReply]:
        """See DataService.Initialize: the reply."""
        init = self._admission.begin_initialize(head.caller, head.layout_digest, head.choice)
        try:
            for block in blocks:
                self._admission.initialize_block(init, block.block, block.payload)
                self.counts.count_bytes(received=block.payload.nbytes)
            yield data_pb2.InitializeReply(accepted=self._admission.end_initialize(init))
        finally:
            init.give_back()

    def push(self, header: data_pb2.PushHeader, blocks: Iterator[PushedBlock], waiter: Waiter) -> Generator[data_pb2.PushReply]:
        """See DataService.Push: the push's reply."""
        began = self._now()
        push = self._begin(header, waiter)
        for block in self._arriving(push, blocks):
            # Nothing is lent: who only pushes does not wait for the round.
            while (ticket := self._exchange.push_block(push, block.block, block.present, block.payload)) is not None:
                waiter.wait(ticket)
        reply = self._exchange.end_push(push)
        self.counts.count_call("push", self._now() - began)
        yield reply

    def pull(self, request: data_pb2.PullRequest, waiter: Waiter) -> Generator[PulledBlock]:
        """See DataService.Pull."""
        began = self._now()
        pull, blocks = self._exchange.begin_pull(request)
        self._pass_gate(pull, pull.clock, waiter)
        for block in blocks:
            while not isinstance(found := self._exchange.read(block, pull), tuple):
                waiter.wait(found)
            yield PulledBlock(block, found)
        self.counts.count_call("pull", self._now() - began)

    def push_pull(
        self, header: data_pb2.PushHeader, blocks: Iterator[PushedBlock], waiter: Waiter
    ) -> Generator[PulledBlock | data_pb2.PushReply]:
        """See DataService.PushPull: the blocks as they become ready, and last the push's reply.

        A block is answered once the push has covered it: what a worker reads contains its own gradient. What is there first
        leaves first.
        """
        began = self._now()
        push = self._begin(header, waiter)
        pull = self._exchange.begin_answer(push)
        pending: deque[BlockState] = deque()
        try:
            for index, present, payload, is_lent, is_followed in self._arriving(push, blocks):
                covered = len(push.covered)
                while (ticket := self._exchange.push_block(push, index, present, payload, is_lent=is_lent)) is not None:
                    waiter.wait(ticket)
                if len(push.covered) > covered:
                    pending.append(push.job.block(index))
                if is_followed and pull.has_rounds:
                    continue
                while pending and (found := self._exchange.peek(pending[0], pull)) is not None:
                    yield PulledBlock(pending.popleft(), found)
            reply = self._exchange.end_push(push)
            if pending:
                self._pass_gate(pull, pull.clock, waiter)
            for block in pending:
                while not isinstance(read := self._exchange.read(block, pull), tuple):
                    waiter.wait(read)
                yield PulledBlock(block, read)
        finally:
            push.loan.end()
        self.counts.count_call("push_pull", self._now() - began)
        yield reply

    def _begin(self, header: data_pb2.PushHeader, waiter: Waiter) -> Push:
        push = self._exchange.begin_push(header)
        self._pass_gate(push, push.clock, waiter)
        return push

    def _arriving(self, push: Push, blocks: Iterator[PushedBlock]) -> Iterator[PushedBlock]:
        """The blocks of a push, each counted when the next one is asked for."""
        for block in blocks:
            self._exchange.check_arrival(push)
            yield block
            self.counts.count_bytes(received=block.payload.nbytes)

    def _pass_gate(self, call: Push | Pull, clock: int, waiter: Waiter) -> None:
        while (ticket := self._exchange.gate(call, clock)) is not None:
            waiter.wait(ticket)
