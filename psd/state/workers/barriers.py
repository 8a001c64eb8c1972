"""Named barriers: rendezvous of all workers that are in the job, who may bring numbers to be reduced. Held by shard 0.

An arrival is (name, generation, worker). The shard counts generations: a barrier's generation opens when every worker that is
waited for has arrived, and the next arrival starts the next one. The number that the worker gives its call (`seq`) makes a
repeated arrival harmless, even after the barrier has opened: a worker makes its calls one after the other, and the shard keeps
the last one that was answered, with the answer. The numbers of a worker whose session ends before the barrier opens go with its
arrival. Guarded by the shard's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from psd.contract.errors import BarrierTimeout, InvalidRequest, PsdError
from psd.contract.printable import is_printable
from psd.state import locks
from psd.state.tickets import Ticket
from psd.state.workers.reducing import NOTHING, Brought, difference, reduced
from psd.v1 import control_pb2, storage_pb2

NAMES_MAX = 4096
"""Most barrier names that are remembered; the one used least recently is forgotten first, if nobody waits there. Only the
generation in its replies then starts at 0 again."""


class _Call(NamedTuple):
    """A session, the number of its last call that was answered, and that answer."""

    session: int
    seq: int
    reply: control_pb2.BarrierReply


class _Arrival(NamedTuple):
    """The session that has begun a call, the number of the call, the ticket that waits for its end, and what it has brought."""

    begun_as: int
    seq: int
    ticket: Ticket
    brought: Brought


@dataclass
class _Barrier:
    generation: int = 0
    arrived: dict[int, _Arrival] = field(default_factory=dict)  # by rank


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

    def on_arrive(self, begun_as: int, seq: int, ticket: Ticket, brought: Brought = NOTHING) -> None:
        """Register a worker at the barrier that its ticket names. When all have arrived, that resolves with the reply.

        It fails with InvalidRequest if those who wait there have brought numbers of other names; the worker has not arrived
        then.

        Args:
            begun_as: the session that began the call, and gave it its number `seq`.
        """
        name = ticket.name
        last = self._opened.get(ticket.rank)
        if last is not None and (last.session, last.seq) == (begun_as, seq):
            ticket.resolve(last.reply)
            return
        barrier = self._barriers.pop(name, None) or _Barrier()
        self._barriers[name] = barrier  # the most recently used name stands last
        other = next((rank for rank in barrier.arrived if rank != ticket.rank), None)  # all others have the same names
        if other is not None and (wrong := difference(brought, ticket.rank, barrier.arrived[other].brought, other)):
            ticket.fail(InvalidRequest(wrong))
            return
        replaced = barrier.arrived.get(ticket.rank)
        barrier.arrived[ticket.rank] = _Arrival(begun_as, seq, ticket, brought)
        if replaced is not None:
            replaced.ticket.fail(BarrierTimeout(f"barrier {name!r}: worker {ticket.rank} sent the call again", missing=[]))
        try:
            self._open_if_complete(barrier)
        except PsdError as error:  # this worker gets the error, as if it had not come; the others go on waiting for it
            del barrier.arrived[ticket.rank]
            ticket.fail(error)
        self._forget_old_names()

    def on_withdraw(self, ticket: Ticket) -> None:
        """Take back the arrival of a ticket whose wait ended before the barrier opened."""
        barrier = self._barriers.get(ticket.name)
        arrival = barrier.arrived.get(ticket.rank) if barrier is not None else None
        if barrier is not None and arrival is not None and arrival.ticket is ticket:
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
                    for arrival in arrived.values():
                        arrival.ticket.fail(error)

    def missing(self, name: str) -> int:
        """Mask of the workers that a barrier still waits for."""
        barrier = self._barriers.get(name)
        arrived = 0 if barrier is None else sum(1 << rank for rank in list(barrier.arrived))
        return self._waited() & ~arrived

    def _open_if_complete(self, barrier: _Barrier) -> None:
        if self._waited() & ~sum(1 << rank for rank in barrier.arrived):
            return
        reply = control_pb2.BarrierReply(generation=barrier.generation)
        arrivals = [barrier.arrived[rank] for rank in sorted(barrier.arrived)]
        if arrivals[0].brought.how:
            reply.numbers.extend(reduced([arrival.brought for arrival in arrivals]))
            reply.workers = len(arrivals)
        opened = dict(self._opened)
        for rank, arrival in barrier.arrived.items():
            opened[rank] = _Call(arrival.begun_as, arrival.seq, reply)
        # Before anybody goes on: if the shard dies now, a worker whose answer is lost must not wait for those that got theirs.
        self._save(_to_stored(opened).SerializeToString())
        self._opened = opened
        self.opened_count += 1
        barrier.arrived = {}
        barrier.generation += 1
        for arrival in arrivals:
            arrival.ticket.resolve(reply)

    def restore(self, saved: bytes) -> None:
        """Take over the state that an earlier process of this shard saved."""
        opened, stored = dict(self._opened), storage_pb2.StoredBarriers.FromString(saved)
        for call in stored.opened:
            reply = control_pb2.BarrierReply(generation=call.generation)
            opened[call.rank] = _Call(call.session, call.seq, stored.answers[call.answer - 1] if call.answer else reply)
        self._opened = opened

    def _forget_old_names(self) -> None:
        if len(self._barriers) > NAMES_MAX:
            for name, barrier in list(self._barriers.items()):
                if not barrier.arrived:
                    del self._barriers[name]
                    return


def _to_stored(opened: Mapping[int, _Call]) -> storage_pb2.StoredBarriers:
    stored = storage_pb2.StoredBarriers()
    places: dict[int, int] = {}  # of answers, by the identity of the reply
    for rank, (session, seq, reply) in opened.items():
        if reply.numbers and id(reply) not in places:
            stored.answers.append(reply)
            places[id(reply)] = len(stored.answers)
        stored.opened.add(rank=rank, session=session, seq=seq, generation=reply.generation, answer=places.get(id(reply), 0))
    return stored
