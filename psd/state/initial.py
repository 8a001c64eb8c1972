"""Initial values: who provides them, and who waits for them.

Shard 0 chooses the first worker that declares; the others wait there. The chosen worker initializes the shards 1 to N - 1 first
and shard 0 last, so that "shard 0 has them" means that all have. If it dies before, the next one that waits is chosen, and its
values replace what the dead one left on the other shards: nobody has read those yet. Once a shard has values that anybody could
have read, nothing overwrites them.

Guarded by the shard's lock.
"""

from __future__ import annotations

from psd.contract.errors import InvalidRequest
from psd.state.membership import Worker
from psd.state.tickets import Ticket


class InitialValues:
    """The state of a shard's initial values.

    Attributes:
        is_set: the shard has values.
        is_read: somebody may have read them, or built on them; then they are final.
        chosen: the worker that provides them (shard 0 only, until they are there).
    """

    def __init__(self, *, chooses: bool) -> None:
        self.is_set = False
        self.is_read = False
        self.chosen: Worker | None = None
        self._chooses = chooses
        self._sessions: set[int] = set()  # that have provided values
        self._begun = 0
        self._taken = 0
        self._waiting: list[Ticket] = []

    def on_declare(self, worker: Worker) -> bool:
        """True if this worker is to provide the values."""
        if self.is_set or not self._chooses:
            return False
        if self.chosen is None:
            self.chosen = worker
        return self.chosen is worker

    def on_recovered(self) -> None:
        """The shard has come back with the job's values; they are final."""
        self.is_set = self.is_read = True

    def wait(self, ticket: Ticket) -> None:
        """Resolve the ticket with False when the values are there, or with True when its worker is chosen."""
        self._waiting = [t for t in self._waiting if not t.future.done()]
        self._waiting.append(ticket)

    def missing(self) -> int:
        """Mask of the worker that all wait for."""
        return 0 if self.chosen is None else 1 << self.chosen.rank

    def on_gone(self, rank: int, workers: list[Worker]) -> None:
        """Choose another worker if the chosen one's session has ended."""
        if self.is_set or self.chosen is None or self.chosen.rank != rank:
            return
        self.chosen = None
        while self._waiting:
            ticket = self._waiting.pop(0)
            if not ticket.future.done() and ticket.rank != rank:
                self.chosen = workers[ticket.rank]
                ticket.resolve(True)
                return

    def begin(self) -> int:
        """A number for values that begin to arrive. Those that began later win: theirs is the worker that was chosen later."""
        self._begun += 1
        return self._begun

    def accepts(self, worker: Worker, begun: int) -> bool:
        """True if this worker's values are to be taken, False if the shard has its values already.

        Raises:
            InvalidRequest: another worker was chosen to provide them.
        """
        if self._chooses:
            if not self.is_set and self.chosen is not worker:
                other = "none" if self.chosen is None else f"worker {self.chosen.rank}"
                raise InvalidRequest(f"caller: worker {worker.rank} was not chosen to initialize the job; {other} was")
            return not self.is_set
        return not self.is_set or not (self.is_read or worker.session in self._sessions or begun < self._taken)

    def on_set(self, worker: Worker, begun: int) -> None:
        """Note that the shard has the values of this worker."""
        self.is_set = True
        self._sessions.add(worker.session)
        self._taken = begun
        self.chosen = None
        waiting, self._waiting = self._waiting, []
        for ticket in waiting:
            ticket.resolve(False)
