"""Cuts of which shards have told a worker, and which it carries to all shards; without rounds, also its position in each cut.

A shard names cuts in each of its replies; every push and heartbeat carries the cuts that its last reply has named. If shards
wait for positions (data.proto: Cut), the worker tells them when it has heard of the cut from all of them. When shard 0 says
that all workers have done so, the worker chooses its position: the clock after the push that is under way, or else the clock of
its next push. So a push that begins later states the position, and one that began before is in the cut. Thread-safe: pushes and
heartbeats share it. Must not know how messages travel.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from psd.contract.config import CUTS_MAX
from psd.v1 import data_pb2


class CarriedCuts:
    """The cuts of one worker.

    Args:
        shard_count: number of shards; the worker must hear of a cut from all of them.

    Attributes:
        lock: guards changes of `pushing`, which is set before a push's header is made, and cleared when the push has ended.
        pushing: the clock of a push that a shard may still lack, or may lose before its round has closed.
        are_named: True if the last replies of shards name cuts.
        is_unready: True while no position is chosen, because the call that sends a push has failed, and the program may take
            its time; or because it sets parameters.
    """

    def __init__(self, shard_count: int) -> None:
        self._shard_count = shard_count
        self.lock = threading.Lock()
        self._session = 0
        self._named: dict[int, dict[str, data_pb2.Cut]] = {}  # by shard, what its last reply has named
        self._positions: dict[str, tuple[int, int]] = {}  # with the cut's order, which shard 0 stated when it said to choose
        self._passed_over: set[int] = set()  # shards that may have asked for a position when the worker was not ready
        self._carried: Sequence[data_pb2.Cut] | None = ()  # None: to be made anew
        self._last_told: Sequence[data_pb2.Cut] | None = None  # by the last push, if all shards the same
        self.pushing: int | None = None
        self.is_unready = self.are_named = False

    def set_ready(self, is_ready: bool) -> None:
        """Set `is_unready`. Once the worker is ready, it responds again to what shards have named."""
        with self.lock:
            self.is_unready, self._carried = not is_ready, None
            if is_ready:
                self._passed_over = set(self._named)

    @property
    def is_held_to(self) -> bool:
        """True if shards still wait for pushes before a position that this worker has chosen."""
        with self.lock:
            return any(cut.waits and cut.id in self._positions for cuts in self._named.values() for cut in cuts.values())

    def begin(self, session: int) -> None:
        """Forget what was heard in an earlier session. session: the new one; 0: there is none yet, and replies are ignored."""
        with self.lock:
            self._session = session
            self._named, self._positions, self._carried = {}, {}, ()
            self.are_named = False

    def forget(self, shard: int) -> None:
        """Forget the cuts that a shard has named, because it was restarted: its new incarnation does not know them."""
        with self.lock:
            self._named.pop(shard, None)
            self._carried, self.are_named = None, any(self._named.values())

    def hear(
        self, shard: int, cuts: Sequence[data_pb2.Cut], clock: int, session: int | None = None, *, by_heartbeat: bool = False
    ) -> bool:
        """Note the cuts that a shard's reply names. True if the shards must hear news from this worker soon.

        Args:
            clock: number of steps that the worker has finished.
            session: the session to which the shard has replied; None: the present one.
            by_heartbeat: True if a heartbeat has brought the reply: no push may come soon that would carry a new cut.
        """
        if not cuts and not self.are_named:
            return False
        with self.lock:
            named = {cut.id: cut for cut in cuts}
            is_known = self._named.get(shard, {}) == named and shard not in self._passed_over
            if is_known or not self._session or session not in (None, self._session):
                return False
            self._passed_over.discard(shard)
            before, known = self._awaited(), self._ids()
            self._named[shard], self._carried = named, None
            self.are_named = any(self._named.values())
            is_new = by_heartbeat and not named.keys() <= known
            after = self._awaited()
            has_chosen = False
            for cut in named.values():
                if cut.ready and cut.waits and cut.id not in self._positions and not self.is_unready:
                    position = clock if self.pushing is None else max(clock, self.pushing + 1)
                    self._positions[cut.id] = position, cut.order
                    has_chosen = True
            if has_chosen:
                still = self._ids()
                self._positions = {cut_id: at for cut_id, at in self._positions.items() if cut_id in still}
            return has_chosen or is_new or not after <= before

    def _ids(self) -> set[str]:
        return {cut_id for cuts in self._named.values() for cut_id in cuts}

    def _awaited(self) -> set[tuple[str, str]]:
        """The cuts for which shards wait, each with "all" or "some" of them, or "in vain" if the cut is given up."""
        ids = {cut.id for cuts in self._named.values() for cut in cuts.values() if cut.waits}
        waits = {(cut_id, "all" if self._all_wait(cut_id) else "some") for cut_id in ids}
        return waits | {(cut_id, "in vain") for cut_id in self._ids() if self._is_given_up(cut_id)}

    def _is_given_up(self, cut_id: str) -> bool:
        """True if some shard cannot take the cut, or waits for a position for which shard 0 no longer asks."""
        by_shard = {shard: cuts[cut_id] for shard, cuts in self._named.items() if cut_id in cuts}
        if any(cut.given_up for cut in by_shard.values()):
            return True
        is_asked = 0 not in by_shard or by_shard[0].waits or by_shard[0].is_read or cut_id in self._positions
        return not is_asked and any(cut.waits for cut in by_shard.values())

    def _all_wait(self, cut_id: str) -> bool:
        waiting = [cuts[cut_id].waits for cuts in self._named.values() if cut_id in cuts]
        return len(waiting) == self._shard_count and all(waiting)

    def set_told(self, told: Iterable[Sequence[data_pb2.Cut] | None]) -> None:
        """Note what the push that has ended has told each shard, as `carried` gave it."""
        carried = self._carried
        self._last_told = carried if all(each is carried for each in told) else None

    @property
    def are_told(self) -> bool:
        """True if the last push has told all shards of the cuts, and nothing has changed since."""
        carried = self._carried
        return carried is not None and carried is self._last_told

    @property
    def is_awaited(self) -> bool:
        """True if shards wait for positions."""
        with self.lock:
            return any(cut.waits for cuts in self._named.values() for cut in cuts.values())

    def carried(self) -> Sequence[data_pb2.Cut]:
        """The cuts, in the form in which this worker tells all shards of them."""
        carried = self._carried
        if carried is not None:
            return carried
        with self.lock:
            found = {cut.id: cut for cuts in self._named.values() for cut in cuts.values()}
            self._carried = [self._told(cut) for cut in list(found.values())[-CUTS_MAX:]]
            return self._carried

    def _told(self, cut: data_pb2.Cut) -> data_pb2.Cut:
        told = data_pb2.Cut()
        told.CopyFrom(cut)
        told.ClearField("waits")
        told.ClearField("ready")
        told.given_up = self._is_given_up(cut.id)
        chosen = self._positions.get(cut.id)
        if chosen is not None:
            told.position, told.order = chosen
        elif self._all_wait(cut.id) and not self.is_unready:
            told.ready = True
        return told
