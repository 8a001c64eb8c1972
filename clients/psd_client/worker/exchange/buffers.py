"""Buffers of one worker, such as BatchNorm's running statistics, and when they are stored on the shards.

They are sent by a call of their own, and not at each step: before the push that reaches a cut, before the worker leaves, and
every REFRESH_S for readers. The shards say which worker's buffers they want. If nobody pushes to a shard, this call also tells
it of cuts and of the clock. Must not know frameworks or gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from psd.contract.layout import Block, Layout
from psd.v1 import data_pb2
from psd_client.lanes.flat import FlatBuffers
from psd_client.lanes.shards import Shards
from psd_client.lanes.transport import Call, Lane
from psd_client.worker.exchange.riders import Rider
from psd_client.worker.exchange.sent_push import SentPush
from psd_client.worker.session.session import Session

REFRESH_S = 10.0

REQUEST_BYTES_MAX = 4 << 20


class BufferKeeper(Rider):
    """Stores one worker's buffers.

    Args:
        values: the memory into which `fill` writes them. times_gone_back: returns how often the job has gone back to a
            checkpoint; `values` then hold the checkpoint's buffers, which the program must take over before it stores its own.

    Attributes:
        has_use: True if shards may want something of it with a push: the job has buffers, or shards to which nobody pushes.
        fill: writes the present buffers. Called with that number: if the program has not gone back so often yet, it writes
            nothing, because `values` hold the checkpoint's. None: the program computes no buffers.
    """

    def __init__(
        self,
        session: Session,
        shards: Shards,
        layout: Layout,
        values: FlatBuffers,
        timeout_s: float,
        times_gone_back: Callable[[], int],
    ) -> None:
        self._session = session
        self._shards = shards
        self._values = values
        self._timeout_s = timeout_s
        self._digest = layout.digest
        self._blocks: dict[int, list[Block]] = {
            lane.shard: [b for b in layout.blocks_of(lane.shard) if layout.spec.groups[b.group].is_of_buffers]
            for lane in shards.lanes
        }
        untrained = layout.untrained_shards
        self._lanes = [lane for lane in shards.lanes if self._blocks[lane.shard] or lane.shard in untrained]
        self.has_use = len(self._lanes) > 0
        self._not_pushed_to = [
            lane
            for lane in shards.lanes
            if not layout.spec.tables and not any(block.trained for block in layout.blocks_of(lane.shard))
        ]
        self._has_rounds = layout.spec.consistency.mode == "sync"
        self.fill: Callable[[int], None] | None = None
        self._times_gone_back = times_gone_back
        self._is_wanted = False
        self._brought: set[str] = set()
        self._stored_s = session.now()
        self._clock = session.clock

    def hear(self, sent: SentPush) -> None:
        """Learn whether the shards want this worker's buffers."""
        self._is_wanted = any(reply.wants_buffers for reply in sent.replies.values())

    @property
    def is_due(self) -> bool:
        """True if buffers are to be sent before the next push, whatever it reaches."""
        return self._is_wanted and self.fill is not None and self._session.now() - self._stored_s >= REFRESH_S

    def before_push(self) -> None:
        """Send the buffers if the next push reaches a cut, or if they were not sent for REFRESH_S."""
        if not self._is_wanted:
            return
        cuts = self._due(self._session.clock + 1)
        if cuts or self.is_due:
            self._store(self._lanes, cuts)

    def before_leaving(self) -> None:
        """Send the buffers of the last step. Shards to which nobody pushes, which may have vectors, learn that it is done."""
        if self._session.clock == self._clock:
            return
        lanes = [*self._lanes] if self._is_wanted else []
        lanes += [lane for lane in self._not_pushed_to if lane not in lanes]
        self._store(lanes, self._due(self._session.clock) if self._is_wanted else [])

    def _due(self, step: int) -> list[data_pb2.Cut]:
        """The cuts for which no buffers were sent yet; with rounds, only those at this step or before."""
        cuts = (cut for cut in self._session.cuts.carried() if cut.id not in self._brought)
        return [cut for cut in cuts if cut.step <= step or not self._has_rounds]

    def _store(self, lanes: list[Lane], cuts: list[data_pb2.Cut]) -> None:
        if not lanes:
            return
        if self.fill is not None and self._is_wanted:
            self.fill(self._times_gone_back())

        def store_at(lane: Lane, call: Call) -> None:
            for blocks, is_last in in_requests(self._blocks[lane.shard] if self._is_wanted else []):
                request = data_pb2.BuffersRequest(
                    caller=self._session.caller(lane.shard),
                    layout_digest=self._digest,
                    clock=self._session.reported_clock,
                    cuts=cuts if is_last else (),
                )
                for block in blocks:
                    request.buffers.add(block=block.index, payload=self._values.block(block.index).tobytes())
                lane.store_buffers(request, call)

        for attempt in self._session.attempts():
            with attempt:
                self._shards.run(store_at, self._timeout_s, lanes)
        self._brought = {cut.id for cut in self._session.cuts.carried() if cut.id in self._brought} | {cut.id for cut in cuts}
        self._stored_s, self._clock = self._session.now(), self._session.clock


def in_requests(blocks: list[Block]) -> Iterator[tuple[list[Block], bool]]:
    """The blocks in portions of some MiB, each with whether it is the last. There is at least one portion, perhaps empty."""
    portion: list[Block] = []
    for block in blocks:
        if portion and sum(b.nbytes for b in portion) + block.nbytes > REQUEST_BYTES_MAX:
            yield portion, False
            portion = []
        portion.append(block)
    yield portion, True
