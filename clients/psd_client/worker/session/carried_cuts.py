"""Cuts that a worker has heard of from the shards, and carries to all of them; and its own position in those without rounds.

A shard names cuts in each of its replies; what its last reply has named is carried with every push and heartbeat. Where shards
wait for positions (data.proto: Cut), the worker says that it has heard of the cut from all of them. When shard 0 says that all
workers have, it chooses: the clock after the push that it is in the midst of, or else that of its next one. So a push that
begins later has the position with it, and one that began before is in the cut. Thread-safe: pushes and heartbeats share it.
Must not know how messages travel.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from psd.contract.config import CUTS_MAX
from psd.v1 import data_pb2


class CarriedCuts:
    """The cuts of one worker.

    Args:
        shard_count: from how many shards one must have been heard of.

    Attributes:
        lock: under which `pushing` is changed: before a push's header is made, and when it has ended.
        pushing: the clock of a push that a shard may still lack, or may lose before its round has closed.
        are_named: shards have named some.
        is_unready: no position is chosen: the call that sends a push has failed, and the program may take its time; or it
            sets parameters.
    """

    def __init__(self, shard_count: int) -> None:
        self._shard_count = shard_count
        self.lock = threading.Lock()
        self._session = 0
        self._named: dict[int, dict[str, data_pb2.Cut]] = {}  # by shard, what its last reply has named
        self._positions: dict[str, tuple[int, int]] = {}  # with the cut's order, as shard 0 has said it with its word to choose
        self._passed_over: set[int] = set()  # shards whose last reply may have asked for a position in vain
        self._carried: Sequence[data_pb2.Cut] | None = ()  # None: to be made anew
        self.pushing: int | None = None
        self.is_unready = self.are_named = False

    def set_ready(self, is_ready: bool) -> None:
        """Set `is_unready`. What shards have named is heard again once the worker is ready."""
        with self.lock:
            self.is_unready, self._carried = not is_ready, None
            if is_ready:
                self._passed_over = set(self._named)

    @property
    def is_held_to(self) -> bool:
        """True if shards still wait for what is before the position that this worker has chosen."""
        with self.lock:
            return any(cut.waits and cut.id in self._positions for cuts in self._named.values() for cut in cuts.values())

    def begin(self, session: int) -> None:
        """Forget what was heard as another session. 0: there is none for now, and nothing is heard."""
        with self.lock:
            self._session = session
            self._named, self._positions, self._carried = {}, {}, ()
            self.are_named = False

    def forget(self, shard: int) -> None:
        """Forget what a shard has named that was restarted: what another life of it knew is of no use to this one."""
        with self.lock:
            self._named.pop(shard, None)
            self._carried, self.are_named = None, bool(self._named)

    def hear(
        self, shard: int, cuts: Sequence[data_pb2.Cut], clock: int, session: int | None = None, *, by_heartbeat: bool = False
    ) -> bool:
        """Note what a shard's reply names; True if the shards are to hear of that soon.

        Args:
            clock: steps that the worker has finished.
            session: to which the shard has replied, if that is not certain to be the present one.
            by_heartbeat: there may be no push soon to carry a cut that is new.
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
            self.are_named = True
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
        """The cuts for which shards wait, and whether all do; or in vain."""
        ids = {cut.id for cuts in self._named.values() for cut in cuts.values() if cut.waits}
        waits = {(cut_id, "all" if self._all_wait(cut_id) else "some") for cut_id in ids}
        return waits | {(cut_id, "in vain") for cut_id in self._ids() if self._is_given_up(cut_id)}

    def _is_given_up(self, cut_id: str) -> bool:
        """True if some shard cannot have the cut, or waits for a position for which shard 0 asks no more."""
        by_shard = {shard: cuts[cut_id] for shard, cuts in self._named.items() if cut_id in cuts}
        if any(cut.given_up for cut in by_shard.values()):
            return True
        is_asked = 0 not in by_shard or by_shard[0].waits or by_shard[0].is_read or cut_id in self._positions
        return not is_asked and any(cut.waits for cut in by_shard.values())

    def _all_wait(self, cut_id: str) -> bool:
        waiting = [cuts[cut_id].waits for cuts in self._named.values() if cut_id in cuts]
        return len(waiting) == self._shard_count and all(waiting)

    @property
    def is_awaited(self) -> bool:
        """True if shards wait for positions."""
        with self.lock:
            return any(cut.waits for cuts in self._named.values() for cut in cuts.values())

    def carried(self) -> Sequence[data_pb2.Cut]:
        """The cuts as all shards are to be told of them."""
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
