"""Initial values: which worker provides them, and who waits for them.

Shard 0 chooses the first worker that declares; the others wait there. The chosen worker initializes the shards 1 to N - 1 first
and shard 0 last, so that if shard 0 has values, all shards have. If the worker dies before that, the next one that waits is
chosen, and its values replace those that the dead one left on the other shards: nobody has read them yet. Once a shard has
values that anybody could have read, nothing overwrites them.

Every choice has a number, larger than all before it. The other shards cannot know who was chosen last, because leases run out
there at another time; they take the values of the largest number, so that a worker that was chosen earlier and is late changes
nothing. The number is at least the worker's session, so that it grows over restarts of shard 0, too.

Guarded by the shard's lock.
"""

from __future__ import annotations

from psd.contract.errors import InvalidRequest
from psd.state import locks
from psd.state.life import Life, LifeCycle
from psd.state.tickets import Ticket
from psd.state.workers.membership import Worker


@locks.guarded_by(locks.Level.SHARD, but=("has",))
class InitialValues:
    """The state of a shard's initial values.

    Attributes:
        chosen: the worker that provides them (shard 0 only, until they are there).
        choice: the number of the last choice (shard 0), or of the one whose values the shard has; 0: none.
    """

    def __init__(self, life: LifeCycle, *, chooses: bool) -> None:
        self._life = life
        self.chosen: Worker | None = None
        self.choice = 0
        self._chooses = chooses
        self._waiting: list[Ticket] = []

    def on_declare(self, worker: Worker) -> int:
        """The number of the choice if this worker is to provide the values, else 0."""
        if self._life.has_values or not self._chooses:
            return 0
        if self.chosen is None:
            self._choose(worker)
        return self.choice if self.chosen is worker else 0

    def _choose(self, worker: Worker) -> None:
        self.chosen = worker
        self.choice = max(self.choice + 1, worker.session)

    def wait(self, ticket: Ticket) -> None:
        """Resolve the ticket with 0 when the values are there, or with the number of the choice if its worker is chosen."""
        self._waiting = [t for t in self._waiting if not t.future.done()]
        self._waiting.append(ticket)

    def missing(self) -> int:
        """Mask of the worker that provides the values, for which the others wait."""
        return 0 if self.chosen is None else 1 << self.chosen.rank

    def on_gone(self, rank: int, workers: list[Worker]) -> None:
        """Choose another worker if the rank whose session has ended was the chosen one."""
        if self._life.has_values or self.chosen is None or self.chosen.rank != rank:
            return
        self.chosen = None
        while self._waiting:
            ticket = self._waiting.pop(0)
            if not ticket.future.done() and ticket.rank != rank:
                self._choose(workers[ticket.rank])
                ticket.resolve(self.choice)
                return

    def accepts(self, worker: Worker, choice: int) -> bool:
        """True if this worker's values are wanted, False if the shard has its values already.

        Raises:
            InvalidRequest: another worker was chosen to provide them, or this one under another number.
        """
        if not self._chooses:
            if choice < 1:
                raise InvalidRequest("choice: must be the number that shard 0 gave to the worker that it chose, got 0")
            return not self._life.has_values or (choice > self.choice and self._life.now is Life.UNREAD)
        if self._life.has_values:
            return False
        if self.chosen is not worker:
            other = "none" if self.chosen is None else f"worker {self.chosen.rank}"
            raise InvalidRequest(f"caller: worker {worker.rank} was not chosen to initialize the job; {other} was")
        if choice != self.choice:
            raise InvalidRequest(f"choice: worker {worker.rank} was chosen under the number {self.choice}, got {choice}")
        return True

    def has(self, choice: int) -> bool:
        """True if the shard's values are those of this choice."""
        return self._life.has_values and self.choice == choice

    def on_set(self, choice: int) -> None:
        """Note that the shard has the values of this choice."""
        self.choice, self.chosen = choice, None
        waiting, self._waiting = self._waiting, []
        for ticket in waiting:
            ticket.resolve(0)
