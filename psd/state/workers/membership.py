"""Membership: ranks, sessions, leases, clocks. Pure decisions on values; the time is passed in.

A worker is *waited for* while it is absent (has not joined yet) or live. It is *expired* when its lease ran out, and *finished*
when it has left; nobody waits for either. ServerConfig.on_worker_failure says what happens if a worker's program fails: the
worker expires at once; or its lease runs out, as if it had been killed; or all sessions end, and all workers are waited for as
at the start. Sets of ranks are integers used as bit masks, so that "have all contributed?" is two machine operations.

`clock` is the number of steps that a worker has finished as far as this shard knows; `floor` is the first round in which it
takes part: earlier rounds do not wait for it. The floor moves only when a worker joins or skips rounds, not in normal running.

Changed only under the shard's lock, except a worker's `last_seen` and `awaited_s` (see docs/design/life-of-a-push.md: Locks),
and by the steps of an armed rank (psd_core/steps.py), which are revoked before anything changes that they rely on.
`waited_in`, `live_in`, `taking_part`, `is_void` and sessions may be read without it. Must not know blocks, tickets or messages.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from psd.contract.errors import InvalidRequest, PsdError, SessionFenced, WorkerFailed
from psd.contract.roster import Absence
from psd.state import locks
from psd_core.steps import RankPlace, Ranks

CLOCK_SKIP_MAX = 1024
"""Steps by which a request's clock may be ahead of the clock that the shard knows. Shards drift apart by one or two rounds; a
clock that is further ahead comes from a broken client, and believing it would exclude that worker from every round."""


TICK_S_MAX = 1.0


def tick_s(lease_s: float) -> float:
    """Seconds from one `Membership.on_tick`, which checks the leases, to the next."""
    return min(TICK_S_MAX, lease_s / 4)


class WorkerState(enum.IntEnum):
    """State of a worker. Values are those of psd.v1.WorkerState."""

    ABSENT = 1
    LIVE = 2
    EXPIRED = 3
    FINISHED = 4


@dataclass(slots=True)
class Worker(RankPlace):
    """One rank, and the worker that has it now. Its clock, last_seen, awaited_s and samples lie where steps see them, too.

    Attributes:
        last_seen: when the shard last heard of it, in the membership's time; negative: never.
        has_pushed: True if the current session has pushed.
        connection: as in JoinRequest; 0 if not known. connected_since: the first session of that connection.
        has_failed: the current session's program has ended with an error.
        is_leaving: it leaves when the round of its last push has closed.
        kicked: the connection whose session an operator has ended; it cannot come back.
        transport: the lane that it says it uses to this shard.
        awaited_s: seconds that others have waited for it: with rounds, from the first gradient of each round to this worker's;
            without, the time for which the staleness bound held others back because of it.
        samples: weights of its pushes together, but for those that were only repeated.
        transfer_left_bytes, transfer_bytes_per_s: as in HeartbeatRequest, as it has last said; 0 between calls.
    """

    rank: int
    state: WorkerState = WorkerState.ABSENT
    session: int = 0
    floor: int = 0
    host: str = ""
    pid: int = 0
    connection: int = 0
    connected_since: int = 0
    has_pushed: bool = False
    has_failed: bool = False
    is_leaving: bool = False
    kicked: int = 0
    transport: str = ""
    transfer_left_bytes: int = 0
    transfer_bytes_per_s: float = 0.0

    def __copy__(self) -> Worker:
        """A copy of the present state, which no step changes."""
        found = Worker(**{name: getattr(self, name) for name in _PLAIN})
        found.clock, found.last_seen, found.awaited_s, found.samples = self.clock, self.last_seen, self.awaited_s, self.samples
        return found

    @property
    def transfer_time_left_s(self) -> float:
        """Seconds that the bulk call will still take, at its speed so far; 0 if that is not known."""
        return self.transfer_left_bytes / self.transfer_bytes_per_s if self.transfer_bytes_per_s else 0.0

    @property
    def is_waited_for(self) -> bool:
        """True if rounds, barriers and the staleness bound wait for the worker."""
        return self.state in (WorkerState.ABSENT, WorkerState.LIVE)

    @property
    def absence(self) -> Absence:
        """The reason why the worker is not waited for."""
        if self.state is WorkerState.FINISHED:
            return Absence.FINISHED
        return Absence.FAILED if self.has_failed else Absence.SILENT

    @property
    def is_awaited_back(self) -> bool:
        """True if the worker was live before the job went back to a checkpoint, and has not joined again."""
        return self.state is WorkerState.ABSENT and self.last_seen >= 0

    def on_heard(self, host: str, pid: int, connection: int) -> None:
        """Note the host and process that the worker of the current session states."""
        if not connection or connection != self.connection:
            self.connection, self.connected_since = connection, self.session
        self.host, self.pid = host, pid

    def kicked_out(self) -> SessionFenced:
        """The error for calls of a worker that was kicked."""
        return SessionFenced(f"worker {self.rank} was ended by an operator (psdctl kick)", cause="kicked", rank=self.rank)

    def replaced(self, session: int) -> SessionFenced:
        """The error for calls of an earlier session of the rank. If that was this worker's own, it may join again."""
        what = f"session {session} of worker {self.rank} has ended: "
        if session >= self.connected_since:
            return SessionFenced(f"{what}its worker has joined again", cause="expired", rank=self.rank)
        what += "the rank joined again"
        if self.host:
            what += f" from {self.host} (process {self.pid}); are two workers started with the same rank?"
        return SessionFenced(what, cause="superseded", rank=self.rank)


_PLAIN = tuple(each.name for each in fields(Worker))

_UNGUARDED = (
    "waited_in",
    "live_in",
    "taking_part",
    "is_void",
    "is_settled",
    "session_of",
    "worker",
    "check_session",
    "ended",
    "restore",
)


@locks.guarded_by(locks.Level.SHARD, but=_UNGUARDED)
class Membership:
    """The workers of one job on one shard.

    Args:
        clock: the clock at which all workers begin.
        on_failure: ServerConfig.on_worker_failure.
        starting: ranks whose processes a launcher is starting again, with the time since when; their leases do not run out.

    Attributes:
        at_barriers: mask of the workers that barriers wait for.
        absent: for each rank that nobody waits for any more, the reason.
        whole_since: the time when all workers had joined for the first time, and the foremost clock then; None before.
        ranks: what steps know of the workers. Whatever changes who is waited for, sessions or floors, revokes them.
        is_armed: some rank has been armed: clocks change by themselves.
    """

    def __init__(
        self,
        world_size: int,
        lease_s: float,
        clock: int = 0,
        on_failure: str = "wait",
        starting: dict[int, float] | None = None,
    ) -> None:
        self.ranks, self.is_armed = Ranks(world_size), False
        self.workers = [Worker(rank, floor=clock) for rank in range(world_size)]
        for worker in self.workers:
            worker.lie_in(self.ranks, worker.rank)
            worker.clock = clock
        self.lease_s = lease_s
        self._on_failure = on_failure
        self._starting = {} if starting is None else starting
        self._failed: Worker | None = None  # the worker whose failure has ended all sessions
        self._last_tick: float | None = None
        self.whole_since: tuple[float, int] | None = None
        self._min_clock: int | None = None
        self._is_min_clock_known = False
        self._save: Callable[[Worker], None] | None = None
        self._refresh()

    def keep(self, save: Callable[[Worker], None]) -> None:
        """Call `save` for every worker now, and again for each worker that changes."""
        self._save = save
        for worker in self.workers:
            save(worker)

    def _changed(self, worker: Worker) -> None:
        if self._save is not None:
            self._save(worker)

    def _refresh(self) -> None:
        self.ranks.revoke()
        waited = [w for w in self.workers if w.is_waited_for]
        mask = sum(1 << w.rank for w in waited)
        self.at_barriers = sum(1 << w.rank for w in waited if not w.is_leaving)
        self._is_min_clock_known = False
        self.absent = {w.rank: w.absence for w in self.workers if not w.is_waited_for}
        # One assignment, so that blocks can read it without the shard's lock and never see half of a change.
        self._waited = (mask, max((w.floor for w in waited), default=0), min((w.floor for w in waited), default=None))
        self._live = sum(1 << w.rank for w in waited if w.state is WorkerState.LIVE)

    # -- questions ---------------------------------------------------------------------------------------------------

    def waited_in(self, round_: int) -> int:
        """Mask of the workers that round `round_` waits for."""
        mask, floor_max, _ = self._waited
        if round_ >= floor_max:
            return mask
        return sum(1 << w.rank for w in self.workers if w.is_waited_for and w.floor <= round_)

    @property
    def waited(self) -> int:
        """Mask of the workers that are waited for, in whatever round they begin: the bound looks at their clocks."""
        return self._waited[0]

    def is_settled(self, round_: int) -> bool:
        """True if `round_`, and all later ones, wait for the same workers, unless something happens to one."""
        return round_ >= self._waited[1]

    def live_in(self, round_: int) -> int:
        """Mask of the workers that are there, and do not begin after round `round_`."""
        return self._live & self.waited_in(round_)

    def taking_part(self) -> int:
        """Number of the workers that are waited for."""
        return self._waited[0].bit_count()

    def is_void(self, round_: int) -> bool:
        """True if nobody takes part in `round_`: all workers that are waited for begin after it, and there is at least one."""
        floor_min = self._waited[2]
        return floor_min is not None and round_ < floor_min

    def min_clock(self) -> int | None:
        """Clock of the slowest worker that is waited for; None if there is none."""
        if not self._is_min_clock_known or self.is_armed:
            self._min_clock = min((w.clock for w in self.workers if w.is_waited_for), default=None)
            self._is_min_clock_known = True
        return self._min_clock

    def slower_than(self, clock: int) -> int:
        """Mask of the workers that are waited for and have finished fewer than `clock` steps."""
        return sum(1 << w.rank for w in self.workers if w.is_waited_for and w.clock < clock)

    def in_mask(self, mask: int) -> list[Worker]:
        """The workers of a mask, by rank."""
        return [w for w in self.workers if mask >> w.rank & 1]

    def worker(self, rank: int) -> Worker:
        """The worker of a rank; InvalidRequest if there is none."""
        if rank >= len(self.workers):
            raise InvalidRequest(f"rank: {rank} is not below world_size {len(self.workers)}")
        return self.workers[rank]

    def session_of(self, rank: int) -> int:
        """The latest session of a rank, live or ended. Takes no lock."""
        return self.workers[rank].session

    def check_session(self, rank: int, session: int) -> Worker:
        """The worker of a rank, if `session` is its live session; else SessionFenced or WorkerFailed says why it is not."""
        worker = self.worker(rank)
        if worker.state is WorkerState.LIVE and worker.session == session:
            return worker
        if worker.session > session:
            raise worker.replaced(session)
        if worker.session != session:
            raise SessionFenced(f"session {session} of worker {rank} never joined this shard", cause="expired", rank=rank)
        raise self.ended(worker)

    def ended(self, worker: Worker) -> PsdError:
        """The error that tells why a worker's latest session has ended."""
        if worker.state is WorkerState.ABSENT:
            failed = self._failed
            who = "another worker" if failed is None else f"worker {failed.rank}"
            what = "has failed" if failed is None or failed.has_failed else "has been silent for longer than its lease"
            return WorkerFailed(
                f"{who} {what}, and the shards were told to end the job then (--on-worker-failure end)",
                rank=None if failed is None else failed.rank,
            )
        if worker.kicked and worker.kicked == worker.connection:
            return worker.kicked_out()
        why = "it has left" if worker.state is WorkerState.FINISHED else f"its lease of {self.lease_s:g} s ran out"
        what = f"session {worker.session} of worker {worker.rank} has ended: {why}"
        return SessionFenced(what, cause="expired", rank=worker.rank)

    def trained(self) -> tuple[int, float]:
        """Steps that the foremost worker has made since all had joined, and seconds that this took."""
        since, clock = self.whole_since or (0.0, 0)
        if self.whole_since is None:
            return 0, 0.0
        return max(w.clock for w in self.workers) - clock, max(0.0, max(w.last_seen for w in self.workers) - since)

    # -- events; True means that the set of workers that others wait for has changed -------------------------------------

    def on_join(self, rank: int, session: int, *, host: str = "", pid: int = 0, connection: int = 0, now: float) -> Worker:
        """Register a session; SessionFenced if the rank has had a later one. Only renews the lease if it is registered already.

        `on_enter` saves a new session, together with its clock: a shard that dies before that has never seen it.
        """
        worker = self.worker(rank)
        if session < worker.session:
            self.check_session(rank, session)
        if session != worker.session:
            self._starting.pop(rank, None)
            worker.session = session
            worker.on_heard(host, pid, connection)
            worker.state, worker.has_pushed, worker.is_leaving, worker.has_failed = WorkerState.LIVE, False, False, False
            worker.transfer_left_bytes, worker.transfer_bytes_per_s = 0, 0.0
        self.on_seen(worker, now)
        self._refresh()
        if self.whole_since is None and all(w.session for w in self.workers):
            self.whole_since = now, max(w.clock for w in self.workers)
        return worker

    def on_leaving(self, worker: Worker) -> bool:
        """Note that a worker will do nothing more; True if that is news."""
        is_news, worker.is_leaving = not worker.is_leaving, True
        self._refresh()
        return is_news

    def on_return(self, worker: Worker, *, host: str, pid: int, connection: int, now: float) -> None:
        """Note that a live session has found this shard again after the shard's process was replaced."""
        worker.on_heard(host, pid, connection)
        self.on_seen(worker, now)

    def restore(self, rank: int, *, state: WorkerState, session: int, clock: int, floor: int, now: float) -> None:
        """Restore a worker as an earlier process of this shard knew it; its lease begins anew."""
        worker = self.workers[rank]
        worker.state, worker.session, worker.clock, worker.floor = state, session, clock, floor
        worker.connected_since = session
        worker.has_pushed = floor < clock
        if session and state is not WorkerState.ABSENT:
            self.on_seen(worker, now)
        self._refresh()

    def on_enter(self, worker: Worker, clock: int) -> None:
        """Let a worker that joined take part from `clock` on."""
        worker.clock = worker.floor = clock
        self._refresh()
        self._changed(worker)

    def on_restore(self, clock: int) -> None:
        """Let everybody take part from `clock` on, including those that have already joined."""
        for worker in self.workers:
            worker.clock = worker.floor = clock
        self._refresh()

    def on_gone_back(self, states: Sequence[int], now: float) -> None:
        """Take over the states, by rank, that workers had before the job went back. Live ones have a lease to come back in."""
        for worker, state in zip(self.workers, states, strict=False):
            if worker.state is not WorkerState.ABSENT:
                continue
            if state in (WorkerState.EXPIRED, WorkerState.FINISHED):
                worker.state = WorkerState(state)
                self._changed(worker)
            elif state == WorkerState.LIVE:
                self.on_seen(worker, now)
        self._refresh()

    def on_heard_again(self, rank: int, now: float) -> None:
        """Note a sign of life of a worker that has yet to come back."""
        worker = self.worker(rank)
        if worker.is_awaited_back:
            self.on_seen(worker, now)

    def on_seen(self, worker: Worker, now: float) -> None:
        """Renew a worker's lease."""
        worker.last_seen = now
        if self._last_tick is None:
            self._last_tick = now  # leases run from now on, and the shard may be suspended before the first tick

    def check_clock(self, worker: Worker, clock: int, known: int) -> None:
        """Raise InvalidRequest if `clock` is further ahead of `known` than shards can drift apart."""
        limit = max(worker.clock, known) + CLOCK_SKIP_MAX
        if clock > limit:
            raise InvalidRequest(
                f"clock: {clock} of worker {worker.rank} is beyond {limit}; it has finished {worker.clock} steps here"
            )

    def on_clock(self, worker: Worker, clock: int) -> bool:
        """Note that a worker says it has finished `clock` steps: rounds that it skipped do not wait for it. False if known."""
        if clock <= worker.clock:
            return False
        worker.clock = worker.floor = clock
        self._refresh()
        self._changed(worker)
        return True

    def on_step(self, worker: Worker, clock: int) -> None:
        """Note that the worker has finished `clock` steps, its push for the last of them being counted on this shard."""
        if worker.clock == self._min_clock:
            self._is_min_clock_known = False
        worker.clock = max(worker.clock, clock)
        self._changed(worker)

    def on_leave(self, worker: Worker, *, failed: bool) -> list[Worker]:
        """End a worker's session; return all workers whose session this ends: none if the worker failed and keeps its lease."""
        if worker.state is not WorkerState.LIVE:
            return []
        worker.has_failed = failed
        if failed:
            return [] if self._on_failure == "wait" else self._fail([worker])
        worker.state = WorkerState.FINISHED
        self._refresh()
        self._changed(worker)
        return [worker]

    def on_kick(self, worker: Worker) -> None:
        """End a worker's session because an operator wants it; other sessions go on."""
        worker.state, worker.has_failed, worker.kicked = WorkerState.EXPIRED, True, worker.connection
        self._refresh()
        self._changed(worker)

    def _fail(self, failed: list[Worker]) -> list[Worker]:
        """End the sessions of workers that have failed or are silent; if the job is to end then, those of all others, too."""
        ended = failed
        if self._on_failure == "end" and failed:
            self._failed = failed[0]
            ended = failed + [w for w in self.workers if w.state is WorkerState.LIVE and w not in failed]
        for worker in ended:
            if self._on_failure == "end":
                worker.state, worker.last_seen = WorkerState.ABSENT, -1.0
            else:
                worker.state = WorkerState.EXPIRED
        if ended:
            self._refresh()  # first, so that no step of theirs saves them as live again
        for worker in ended:
            self._changed(worker)
        return ended

    def on_tick(self, now: float) -> list[Worker]:
        """Expire leases; return the workers whose session this ends. To be called every `tick_s`.

        A shard that was itself stopped (suspended, or starved of CPU) has heard nobody for that time, but the workers were not
        silent. So the time by which this call comes late, however little, is added to every lease.
        """
        late_s = 0.0 if self._last_tick is None else now - self._last_tick - tick_s(self.lease_s)
        self._last_tick = now
        if late_s > 0:
            for worker in self.workers:
                if worker.last_seen >= 0:
                    worker.last_seen = min(now, worker.last_seen + late_s)
            for rank, since in self._starting.items():  # else a dead worker, seen later and later, would be taken for heard
                self._starting[rank] = min(now, since + late_s)
        # A worker heard more than a lease after the notice is the new process, which had joined before the notice came.
        for rank in [rank for rank, since in self._starting.items() if self.workers[rank].last_seen > since + self.lease_s]:
            del self._starting[rank]
        leased = [w for w in self.workers if w.state is WorkerState.LIVE or w.is_awaited_back]
        leased = [w for w in leased if w.rank not in self._starting]
        return self._fail([w for w in leased if now - w.last_seen > self.lease_s])

    def all_done(self, now: float, patience_s: float) -> bool:
        """True if every worker has left, or has expired and been silent for `patience_s`, and at least one has left."""
        gone = all(
            w.state is WorkerState.FINISHED or (w.state is WorkerState.EXPIRED and now - w.last_seen > patience_s)
            for w in self.workers
        )
        return gone and any(w.state is WorkerState.FINISHED for w in self.workers)
