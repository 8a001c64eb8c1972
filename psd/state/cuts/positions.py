"""The workers' positions in one cut of a job without rounds, as one shard knows them. The algorithm is that of Chandy and
Lamport 1985, where workers mark everything that they send.

A worker's position is the clock of its first push that the cut does not have. A shard's part is whole when the shard knows the
position of every live worker, and has counted all pushes before it; pushes beyond it are held until then. A position belongs to
a session: a worker that joins anew chooses again. Must not know pages, messages or locks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from psd.state.pages import Counted
from psd.state.tickets import Ticket
from psd.state.workers.membership import Worker, WorkerState

HOLD_S_MAX = 3.0
"""Most seconds for which a push is held for a cut; then that cut is given up."""


@dataclass(eq=False)
class Positions:
    """Positions of one cut on one shard.

    Attributes:
        since: when the cut was begun. is_read: a reader wants the cut. held_since: when the first push was held for it.
        is_ready: shard 0 has said that workers must choose. order: the cut's order, which shard 0 gave it then (Cut.order).
        heard: (rank, session) of workers that have heard of it from all shards. tickets: those of the pushes that are held.
        is_taken: this shard's part is taken, and no push is held for it any more. found: what was found then: by rank, the
            positions of live workers, and the clocks of those that have left. Other workers are not agreed upon: of them the
            cut has what has counted.
    """

    since: float
    is_read: bool = False
    held_since: float | None = None
    is_ready: bool = False
    order: int = 0
    heard: set[tuple[int, int]] = field(default_factory=set)
    tickets: list[Ticket] = field(default_factory=list)
    is_taken: bool = False
    found: dict[int, int] = field(default_factory=dict)
    _chosen: dict[int, tuple[int, int]] = field(default_factory=dict)  # by rank: session and position

    def hear(self, rank: int, session: int, position: int | None, *, is_ready: bool, order: int = 0) -> bool:
        """Note what a worker says; True if that is news."""
        news = False
        self.order = max(self.order, order)
        if is_ready and (rank, session) not in self.heard:
            self.heard.add((rank, session))
            news = True
        if position is not None and self._chosen.get(rank, (0, 0))[0] < session:
            self._chosen[rank] = session, position
            news = True
        return news

    def of(self, rank: int, session: int) -> int | None:
        """The position of a worker in this session; None if it is not known."""
        chosen = self._chosen.get(rank)
        return chosen[1] if chosen is not None and chosen[0] == session else None

    def holds(self, rank: int, session: int, clock: int) -> bool:
        """True if a push of this clock must wait until the cut is taken."""
        position = self.of(rank, session)
        return not self.is_taken and position is not None and clock >= position

    def needs(self, rank: int, session: int, clock: int) -> bool:
        """True if the cut still needs a push of this clock."""
        position = self.of(rank, session)
        return not self.is_taken and position is not None and clock < position

    @property
    def digest(self) -> int:
        """A digest of `found`, of 48 bits; never 0."""
        text = ",".join(f"{rank}:{position}" for rank, position in sorted(self.found.items()))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little") or 1

    def have_all_heard(self, workers: Iterable[Worker]) -> bool:
        """True if every live worker has heard of the cut from all shards. A worker that is alone need not: it is held for
        nobody, and tells the shards."""
        live = [(w.rank, w.session) for w in workers if w.state is WorkerState.LIVE]
        return self.heard.issuperset(live) or (len(live) == 1 and not self.is_read)

    def lacking(self, workers: Iterable[Worker], *, by_clock: bool) -> int:
        """Mask of the live workers whose position is not known or, with `by_clock`, not reached yet."""
        mask = 0
        for worker in workers:
            if worker.state is WorkerState.LIVE:
                position = self.of(worker.rank, worker.session)
                if position is None or (by_clock and worker.clock < position):
                    mask |= 1 << worker.rank
        return mask

    def agreed(self, workers: Iterable[Worker]) -> dict[int, int]:
        """Positions by rank of the workers that are in the cut. Call it only when no worker is lacking."""
        agreed = {}
        for worker in workers:
            position = self.of(worker.rank, worker.session) if worker.state is WorkerState.LIVE else None
            if position is not None:
                agreed[worker.rank] = position
            elif worker.state is WorkerState.FINISHED:
                agreed[worker.rank] = worker.clock
        return agreed

    def beyond(self, workers: Iterable[Worker], counted: Sequence[Counted]) -> str:
        """The reason why pages that count these last pushes are beyond the cut; empty if they are not. A shard that comes back
        may hear of a cut that others took long ago."""
        for worker in workers:
            position = self.of(worker.rank, worker.session)
            if position is not None and (worker.clock > position or counted[worker.rank] > (worker.session, position)):
                return f"worker {worker.rank} is at step {worker.clock}, beyond the cut's {position}"
        return ""

    def step(self, workers: Iterable[Worker], default: int, *, has_bound: bool) -> int:
        """The step of the cut, which all workers that are in the job have finished. It is the same on all shards."""
        live = [self.found[w.rank] for w in workers if w.state is WorkerState.LIVE]
        if has_bound:  # absent workers may still come, and begin where the bound waits for them
            live += [w.clock for w in workers if w.state is WorkerState.ABSENT]
        return min(live) if live else max(self.found.values(), default=default)
