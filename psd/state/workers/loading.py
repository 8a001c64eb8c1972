"""Loads: all workers set the job's parameters together (load_parameters); one of them sends the values. On shard 0.

When all workers have come, the one of the lowest rank is chosen; the others wait until it has set the parameters on all shards.
If its session ends before that, another one that waits is chosen. The program of a restarted worker repeats its loads at this
clock; so the shard remembers, for this life, which loads were made, and in which order. Guarded by the shard's lock. Must not
know parameters.
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
"""Most loads of one kind at one clock that are remembered."""

Moment: TypeAlias = tuple[int, bytes, int]
"""Timeline, layout and clock of a load."""


def stamp_of(digest: bytes, clock: int) -> int:
    """A number that identifies one load of a job with rounds; never 0."""
    found = hashlib.blake2b(digest + clock.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(found, "little") | 1


@locks.guarded_by(locks.Level.SHARD)
class Loads:
    """The load that is under way in a job, and the loads that were made.

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
        self._set: dict[str, tuple[Moment, list[int]]] = {}  # by kind, the moment of the last load, and all stamps at it
        self._seen: dict[tuple[str, int], tuple[int, int, int]] = {}  # by kind and rank: session, last call, loads so far

    def on_arrive(self, ticket: Ticket, seq: int, digest: bytes) -> None:
        """Register a worker that loads. Its ticket resolves with True if it must send the values, with False once they are set.

        Args:
            digest: digest of its values.

        Raises:
            InvalidRequest: it has other values than the workers that wait.
        """
        if self._told.get(ticket.rank) == (ticket.session, seq):
            ticket.resolve(False)
            return
        if self._setter == ticket.rank and self._arrived[ticket.rank][1] != seq:
            self.on_session_end(ticket.rank)  # it has given up the call for which it was chosen
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
        """True if this load was made at that moment without this session, and follows the loads that the session knows of."""
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
        """Choose the worker that sends the values, if all workers have come."""
        if not self._arrived or self._setter is not None:
            return
        self._is_gathered = self._is_gathered or not self.missing()
        if self._is_gathered:
            self._setter = min(self._arrived)
            self._arrived[self._setter][0].resolve(True)

    def on_set(self, rank: int, kind: str, moment: Moment, stamp: int) -> None:
        """Note that this worker has set the values, and let all go on."""
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
        """Take back the arrival of a ticket whose wait ended before the values were set."""
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
        """Mask of the workers that the load waits for: those that have not come, or the chosen one."""
        if self._setter is not None:
            return 1 << self._setter
        return self._waited() & ~sum(1 << rank for rank in self._arrived)
