"""Loads: all workers set the job's parameters together; who does, and who waits for it. On shard 0.

When all have come, the one of the lowest rank is chosen; the others wait until it has set the parameters on all shards. If its
session ends before, another one that waits is chosen. Guarded by the shard's lock. Must not know parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from psd.contract.errors import BarrierTimeout, InvalidRequest
from psd.state import locks
from psd.state.tickets import Ticket

DIGEST_BYTES = 16


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

    def settle(self) -> None:
        """Choose who sets the values, if all have come."""
        if not self._arrived or self._setter is not None:
            return
        self._is_gathered = self._is_gathered or not self.missing()
        if self._is_gathered:
            self._setter = min(self._arrived)
            self._arrived[self._setter][0].resolve(True)

    def on_set(self, rank: int) -> None:
        """Let the others go on: the values are there."""
        if self._setter != rank:
            return  # the call came again
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
