"""Named barriers: rendezvous of all workers that are in the job. Held by shard 0.

An arrival is (name, generation, worker). The shard counts generations: a barrier's generation opens when every worker that is
waited for has arrived, and the next arrival starts the next one. The number that the worker gives its call (`seq`) makes a
repeated arrival harmless, even after the barrier has opened: a worker makes its calls one after the other, and the shard keeps
the last one that was answered. Guarded by the shard's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from psd.contract.errors import BarrierTimeout, InvalidRequest, PsdError
from psd.contract.printable import is_printable
from psd.state import locks
from psd.state.tickets import Ticket
from psd.v1 import storage_pb2

NAMES_MAX = 4096
"""Most barrier names that are remembered; the one used least recently is forgotten first, if nobody waits there. Only the
generation in its replies then starts at 0 again."""

_Call = tuple[int, int, int]
"""A session, the number of its last call that was answered, and the generation in that answer."""


@dataclass
class _Barrier:
    generation: int = 0
    arrived: dict[int, tuple[int, int, Ticket]] = field(default_factory=dict)  # rank -> begun_as, seq, ticket


@locks.guarded_by(locks.Level.SHARD, but=("restore",))
class Barriers:
    """All barriers of a job.

    Args:
        waited: asks the membership for the mask of workers that must arrive.
        save: stores the state that `restore` takes after the shard's process has died; raises PsdError if it cannot.

    Attributes:
        opened_count: how often a barrier has opened since the shard started.
    """

    def __init__(self, waited: Callable[[], int], save: Callable[[bytes], None]) -> None:
        self.opened_count = 0
        self._waited = waited
        self._save = save
        self._barriers: dict[str, _Barrier] = {}
        self._opened: Mapping[int, _Call] = {}  # by rank

    @staticmethod
    def check(name: str, seq: int, name_bytes_max: int) -> None:
        """Raise InvalidRequest if the name is empty, too long or not printable, or the number of the call is 0."""
        if not 1 <= len(name.encode()) <= name_bytes_max:
            raise InvalidRequest(
                f"name: a barrier's name must have 1 to {name_bytes_max} bytes (the shard's --max-name-bytes), got "
                f"{len(name.encode())}"
            )
        if not is_printable(name):
            raise InvalidRequest(f"name: {name!r} has control characters")
        if seq < 1:
            raise InvalidRequest(f"seq: must be at least 1, got {seq}")

    def on_arrive(self, begun_as: int, seq: int, ticket: Ticket) -> None:
        """Register a worker at the barrier that its ticket names. When all have arrived, that resolves with the generation.

        Args:
            begun_as: the session that began the call, and gave it its number `seq`.
        """
        name = ticket.name
        session, answered, generation = self._opened.get(ticket.rank, (0, 0, 0))
        if (session, answered) == (begun_as, seq):
            ticket.resolve(generation)
            return
        barrier = self._barriers.pop(name, None) or _Barrier()
        self._barriers[name] = barrier  # the most recently used name stands last
        replaced = barrier.arrived.get(ticket.rank)
        barrier.arrived[ticket.rank] = (begun_as, seq, ticket)
        if replaced is not None:
            replaced[2].fail(BarrierTimeout(f"barrier {name!r}: worker {ticket.rank} sent the call again", missing=[]))
        try:
            self._open_if_complete(barrier)
        except PsdError as error:  # this worker gets the error, as if it had not come; the others go on waiting for it
            del barrier.arrived[ticket.rank]
            ticket.fail(error)
        self._forget_old_names()

    def on_withdraw(self, ticket: Ticket) -> None:
        """Take back the arrival of a ticket whose wait ended before the barrier opened."""
        barrier = self._barriers.get(ticket.name)
        if barrier is not None and barrier.arrived.get(ticket.rank, (0, 0, None))[2] is ticket:
            del barrier.arrived[ticket.rank]

    def on_session_end(self, rank: int) -> None:
        """Take back all arrivals of a rank whose session has ended."""
        for barrier in self._barriers.values():
            barrier.arrived.pop(rank, None)

    def on_members_changed(self) -> None:
        """Open the barriers that are complete now that somebody has left or expired."""
        for barrier in list(self._barriers.values()):
            if barrier.arrived:
                try:
                    self._open_if_complete(barrier)
                except PsdError as error:  # the change of members stands; those that wait get the error, and may come again
                    arrived, barrier.arrived = barrier.arrived, {}
                    for _, _, ticket in arrived.values():
                        ticket.fail(error)

    def missing(self, name: str) -> int:
        """Mask of the workers that a barrier still waits for."""
        barrier = self._barriers.get(name)
        arrived = 0 if barrier is None else sum(1 << rank for rank in list(barrier.arrived))
        return self._waited() & ~arrived

    def _open_if_complete(self, barrier: _Barrier) -> None:
        if self._waited() & ~sum(1 << rank for rank in barrier.arrived):
            return
        opened = dict(self._opened)
        for rank, (session, seq, _) in barrier.arrived.items():
            opened[rank] = (session, seq, barrier.generation)
        # Before anybody goes on: if the shard dies now, a worker whose answer is lost must not wait for those that got theirs.
        self._save(_to_stored(opened).SerializeToString())
        self._opened = opened
        self.opened_count += 1
        arrived, barrier.arrived = barrier.arrived, {}
        generation, barrier.generation = barrier.generation, barrier.generation + 1
        for _, _, ticket in arrived.values():
            ticket.resolve(generation)

    def restore(self, saved: bytes) -> None:
        """Take over the state that an earlier process of this shard saved."""
        opened = dict(self._opened)
        for call in storage_pb2.StoredBarriers.FromString(saved).opened:
            opened[call.rank] = (call.session, call.seq, call.generation)
        self._opened = opened

    def _forget_old_names(self) -> None:
        if len(self._barriers) > NAMES_MAX:
            for name, barrier in list(self._barriers.items()):
                if not barrier.arrived:
                    del self._barriers[name]
                    return


def _to_stored(opened: Mapping[int, _Call]) -> storage_pb2.StoredBarriers:
    stored = storage_pb2.StoredBarriers()
    for rank, (session, seq, generation) in opened.items():
        stored.opened.add(rank=rank, session=session, seq=seq, generation=generation)
    return stored
