"""Tickets: the waits of callers for other workers.

State methods never block: where a caller must wait they return a Ticket, whose future they later resolve (or fail, when the
shard drains or the caller's session ends). The rim blocks on the future, in the caller's own thread; `Waiting` keeps the open
tickets, so that heartbeats and status can say who waits for whom.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

from psd.contract.errors import PsdError
from psd.state import locks


class WaitKind(enum.Enum):
    """The kind of event that a caller waits for. Values are those of psd.v1.WaitKind."""

    ROUND = 1
    EARLIER_ROUND = 2
    STALENESS = 3
    BARRIER = 4
    INITIAL_VALUES = 5
    CUT = 6


@dataclass(eq=False)
class Ticket:
    """The wait of one caller.

    Attributes:
        since: when the wait began, in the shard's monotonic seconds.
        missing: returns the mask of the workers that it waits for; takes no lock but the shard's.
        name: of a barrier; else empty.
        due_in: returns the seconds after which the wait can be ended by SettlementDesk.decide_due; None: not known yet.
        future: resolved when the wait is over; its result depends on the kind.
    """

    rank: int
    session: int
    kind: WaitKind
    clock: int
    since: float
    missing: Callable[[], int]
    name: str = ""
    due_in: Callable[[], float | None] = lambda: None
    future: Future[Any] = field(default_factory=Future)

    def resolve(self, value: Any = None) -> None:
        """End the wait; does nothing if it has ended."""
        with contextlib.suppress(InvalidStateError):
            self.future.set_result(value)

    def fail(self, error: PsdError) -> None:
        """End the wait with an error; does nothing if it has ended."""
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(error)


class Waiting:
    """The open tickets of a shard. Thread-safe, and never calls out while it holds its lock."""

    def __init__(self) -> None:
        self._lock = locks.new(locks.Level.LEAF)
        self._tickets: dict[int, Ticket] = {}
        self._refusal: PsdError | None = None

    def add(self, ticket: Ticket) -> Ticket:
        """Keep a ticket until its future is done. If the shard drains, the ticket fails at once."""
        with self._lock:
            self._tickets[id(ticket)] = ticket
            refusal = self._refusal
        ticket.future.add_done_callback(lambda _: self._forget(ticket))
        if refusal is not None:
            ticket.fail(refusal)
        return ticket

    def _forget(self, ticket: Ticket) -> None:
        with self._lock:
            self._tickets.pop(id(ticket), None)

    def open(self, rank: int | None = None) -> list[Ticket]:
        """The open tickets, of one rank or of all, oldest first."""
        with self._lock:
            tickets = list(self._tickets.values())
        return [t for t in tickets if rank is None or t.rank == rank]

    def refuse(self, error: PsdError) -> None:
        """Fail all open tickets and every later one."""
        with self._lock:
            self._refusal = error
        for ticket in self.open():
            ticket.fail(error)
