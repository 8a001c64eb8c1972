"""The waits for a version of a block: callers wait by tickets, cuts by functions that take what the cut needs.

Used under the block's lock. Must not know pages' contents, rounds or workers.
"""

from __future__ import annotations

from collections.abc import Callable

from psd.contract.errors import PsdError
from psd.state import locks
from psd.state.tickets import Ticket

Take = Callable[[], None]


@locks.guarded_by(locks.Level.BLOCK)
class VersionWaits:
    """The waits of one block."""

    def __init__(self) -> None:
        self._tickets: dict[int, list[Ticket]] = {}
        self._takes: dict[int, dict[object, Take]] = {}

    def add(self, version: int, ticket: Ticket) -> None:
        """Resolve a ticket when the block reaches the version."""
        waiters = self._tickets.setdefault(version, [])
        # Waits that have timed out are removed here, so that they do not pile up.
        waiters[:] = [t for t in waiters if not t.future.done()] + [ticket]

    def add_take(self, version: int, whose: object, take: Take) -> None:
        """Call `take` when the block reaches the version."""
        self._takes.setdefault(version, {})[whose] = take

    def drop_take(self, version: int, whose: object) -> None:
        """Cancel a wait that `add_take` began, if there is one."""
        takes = self._takes.get(version, {})
        takes.pop(whose, None)
        if not takes:
            self._takes.pop(version, None)

    def reached(self, version: int) -> None:
        """End the waits for a version that the block has reached."""
        for take in self._takes.pop(version, {}).values():
            take()
        self.within_reach(version)

    def passed(self, version: int) -> None:
        """End the callers' waits for a version that the block has passed without having it. Cuts of it do not come about."""
        self._takes.pop(version, None)
        self.within_reach(version)

    def within_reach(self, version: int) -> None:
        """Resolve the callers' tickets for this version; cuts go on waiting until the block has reached it."""
        for ticket in self._tickets.pop(version, ()):
            ticket.resolve()

    def up_to(self, version: int) -> None:
        """End the waits for a version that somebody else has had the block reach, and for those before."""
        for reached in sorted({*self._tickets, *self._takes}):
            if reached <= version:
                self.reached(reached)

    @property
    def has_tickets(self) -> bool:
        """True if callers may wait."""
        return bool(self._tickets)

    def fail(self, error: PsdError) -> None:
        """End all callers' waits with this error."""
        for tickets in self._tickets.values():
            for ticket in tickets:
                ticket.fail(error)
