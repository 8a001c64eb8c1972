"""Loads: all workers set the job's parameters together; who does, and who waits for it. On shard 0.

When all have come, the one of the lowest rank is chosen; the others wait until it has set the parameters on all shards. If its
session ends before, another one that waits is chosen. A worker that was restarted makes again what its program has loaded at
this clock: what was set is known, in its order, in this life of the shard. Guarded by the shard's lock. Must not know
parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeAlias

from psd.contract.errors import BarrierTimeout, InvalidRequest
from psd.state import locks
from psd.state.tickets import Ticket

DIGEST_BYTES = 16

KNOWN_MAX = 64
"""Loads of a kind at one clock that are known to have been made."""

Moment: TypeAlias = tuple[int, bytes, int]
"""Timeline, layout and clock of a load."""


def stamp_of(digest: bytes, clock: int) -> int:
    """A number that stands for one load of a job with rounds; never 0."""
    found = hashlib.blake2b(digest + clock.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(found, "little") | 1


@locks.guarded_by(locks.Level.SHARD)
class Loads:
    """The load of a job that is under way.

    Args:
        waited: asks the membership for the mask of workers that must come.
    """

    def __init__(self, waited: Callable[[], int]) -> None:
        self._waited = waited
        self._digest = b""
        self._arrived: dict[int, tuple[Ticket, int]] = {}  # by rank, with the number of the call
        self._is_gathered = False
        self._setter: int | None = None
        self._told: dict[int, tuple[int, int]] = {}  # by rank, session and number of the last call that has ended
        self._set: dict[str, tuple[Moment, list[int]]] = {}  # by kind, the last moment of a load, and the stamps of those at it
        self._seen: dict[tuple[str, int], tuple[int, int, int]] = {}  # by kind and rank: session, last call, how many

    def on_arrive(self, ticket: Ticket, seq: int, digest: bytes) -> None:
        """Enter a worker. Its ticket resolves with True if it is to set the values, with False when they are set.

        Raises:
            InvalidRequest: it has other values than those that wait.
        """
        if self._told.get(ticket.rank) == (ticket.session, seq):
            ticket.resolve(False)
            return
        if self._setter == ticket.rank and self._arrived[ticket.rank][1] != seq:
            self.on_session_end(ticket.rank)  # it has given up what it was chosen for
        others = [rank for rank in self._arrived if rank != ticket.rank]
        if others and digest != self._digest:
            raise InvalidRequest(f"digest: worker {ticket.rank} was given other values to load than worker {others[0]}")
        self._digest = digest
        replaced = self._arrived.get(ticket.rank)
        self._arrived[ticket.rank] = ticket, seq
        if replaced is not None:
            replaced[0].fail(BarrierTimeout(f"load: worker {ticket.rank} sent the call again", missing=[]))
        if self._setter == ticket.rank:
            ticket.resolve(True)
        self.settle()

    def was_set(self, rank: int, session: int, seq: int, kind: str, moment: Moment, stamp: int) -> bool:
        """True if this was loaded at that moment before the session took part in any, and is the session's next one."""
        last, stamps = self._set.get(kind, (moment, []))
        if last != moment:
            return False
        known, last_seq, count = self._seen.get((kind, rank), (session, 0, 0))
        if known != session:
            last_seq, count = 0, 0
        if known == session and last_seq == seq and count:
            return stamps[count - 1 : count] == [stamp]
        if stamp not in stamps[count:]:
            return False
        self._seen[kind, rank] = session, seq, stamps.index(stamp, count) + 1
        return True

    def settle(self) -> None:
        """Choose who sets the values, if all have come."""
        if not self._arrived or self._setter is not None:
            return
        self._is_gathered = self._is_gathered or not self.missing()
        if self._is_gathered:
            self._setter = min(self._arrived)
            self._arrived[self._setter][0].resolve(True)

    def on_set(self, rank: int, kind: str, moment: Moment, stamp: int) -> None:
        """Let the others go on: the values are there."""
        if self._setter != rank:
            return  # the call came again
        last, stamps = self._set.get(kind, (moment, []))
        self._set[kind] = moment, [*(stamps if last == moment else []), stamp][:KNOWN_MAX]
        for other, (ticket, seq) in self._arrived.items():
            self._seen[kind, other] = ticket.session, seq, len(self._set[kind][1])
        arrived, self._arrived = self._arrived, {}
        self._is_gathered, self._setter = False, None
        for other, (ticket, seq) in arrived.items():
            self._told[other] = ticket.session, seq
            ticket.resolve(False)

    def on_withdraw(self, ticket: Ticket) -> None:
        """Take back the arrival of a ticket that ended otherwise."""
        if self._arrived.get(ticket.rank, (None, 0))[0] is ticket:
            self.on_session_end(ticket.rank)

    def on_session_end(self, rank: int) -> None:
        """Take back the rank's arrival, and choose another worker if it was the chosen one."""
        self._arrived.pop(rank, None)
        if self._setter == rank:
            self._setter = None
        self._is_gathered = self._is_gathered and bool(self._arrived)
        self.settle()

    def missing(self) -> int:
        """Mask of the workers that the others wait for."""
        if self._setter is not None:
            return 1 << self._setter
        return self._waited() & ~sum(1 << rank for rank in self._arrived)
