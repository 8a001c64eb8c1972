"""The heartbeat, a thread of each client: renews the worker's lease, and lets waiting.py explain long waits.

Every third of the lease it sends a heartbeat to all shards at once, with the worker's clock. A shard that does not answer is
logged once per outage; that is never fatal, because an operation that needs the shard has its own retries and raises the error.
While a session is being made, the shards that know it already get its heartbeats: another shard may be away for longer than a
lease. Must not change the session: if it is fenced, an operation joins again, not this thread, which only lets the session
resume at a shard that was restarted. Shard 0's answers also say which workers nobody waits for any more. Heartbeats carry cuts
from shard to shard, as pushes do, for workers that push nothing.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from psd.contract.errors import PsdError, SessionFenced, ShardRestarted, ShardUnavailable
from psd.contract.roster import Absence, Roster
from psd.v1 import control_pb2
from psd_client.lanes.progress import progress_of
from psd_client.lanes.shards import RETRIED
from psd_client.lanes.transport import Call, Cancelled, Lane, Scope
from psd_client.lanes.waiting import ShardHealth, WaitReporter
from psd_client.worker.session.membership import JobMembership
from psd_client.worker.session.session import Session

logger = logging.getLogger("psd_client")

BEATS_PER_LEASE = 3
HEARTBEAT_TIMEOUT_MAX_S = 5.0
AFTER_DEFECT_S = 1.0
WAITING_BEAT_S = 3.0
"""Longest time between two heartbeats while an operation takes long."""
ANSWER_S = 2.5
"""Seconds that a shard may take to answer a heartbeat; with a short lease, half the time to the next one."""
LONG_TRANSFER_S = 1.0
"""Seconds after which the shard hears how far a call is that moves much."""
REPORT_S = 0.7
"""The same limit when a wait must be explained, within six seconds of its beginning."""
CUT_BEAT_S = 0.05
"""Seconds between two heartbeats while shards wait for workers' positions in a cut: so workers soon hear when to choose."""
NEWS_BEAT_S = 1.0
"""Longest time between two heartbeats in a job without rounds: by them a worker in a long step hears that shards wait for its
position."""
CUT_WORKERS = 32
"""Most workers for which these two hold. With more, the times grow in proportion, so that shards answer no more heartbeats."""


class Heartbeats:
    """Decides in `step` what is due now; the thread only calls it and sleeps as long as it says."""

    def __init__(
        self,
        rank: int,
        session: Session,
        lanes: Sequence[Lane],
        health: ShardHealth,
        reporter: WaitReporter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank = rank
        self._session = session
        self._lanes = lanes
        self._health = health
        self._reporter = reporter
        self._clock = clock
        self._next_beat = clock()
        self._resumed_at: dict[int, float] = {}
        self._roster = Roster()
        self._logged: dict[int, str] = {}  # what was last logged of a shard in its present outage
        self._wake = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None
        session.memberships.on_joining = self.wake
        session.on_cuts = self.soon

    def step(self) -> float:
        """Send and report what is due; return the seconds until the next `step`."""
        membership = self._session.memberships.latest
        due_in_s = self._reporter.due_in_s()
        is_due = due_in_s is not None and due_in_s <= 0
        waits: list[control_pb2.Wait] = []
        if membership is not None and (is_due or self._clock() >= self._next_beat):
            interval_s = membership.lease_s / BEATS_PER_LEASE
            most_s = WAITING_BEAT_S if self._reporter.is_overdue else interval_s
            if self._session.is_cut_by_positions:
                most_s = min(most_s, NEWS_BEAT_S * self._more_workers)
            self._next_beat = self._clock() + min(interval_s, most_s)
            timeout_s = min(interval_s, max(interval_s / 2, 1.0), ANSWER_S)
            waits = self._beat(membership, min(timeout_s, REPORT_S) if is_due else timeout_s)
        if is_due:
            is_joining = membership is None or membership.is_joining
            self._reporter.report(waits, self._health.silent(is_joining=is_joining), self._health.asked(self._progress))
        # If an operation begins during the sleep, it must be reported on in report_after_s at the earliest.
        pauses = [self._reporter.report_after_s]
        if membership is not None:
            pauses.append(self._next_beat - self._clock())
        due_in_s = self._reporter.due_in_s()
        if due_in_s is not None:
            pauses.append(due_in_s)
        return max(min(pauses), 0.01)

    def _progress(self, shard: int, seconds: float) -> str:
        return str(progress_of(self._lanes[shard].traffic, seconds))

    def _beat(self, membership: JobMembership, timeout_s: float) -> list[control_pb2.Wait]:
        """Send heartbeats at once to all shards that know the session; return the waits that they report for this worker."""
        began = self._clock()
        # The clock of a session is known only when all shards have let it in.
        clock = 0 if membership.is_joining else self._session.reported_clock
        leaving = self._session.is_leaving
        cuts = () if membership.is_joining else self._session.cuts.carried()
        pending = []
        try:
            for lane in self._lanes:
                if not membership.incarnations[lane.shard]:
                    continue
                moved = progress_of(lane.traffic, self._health.asked_s(lane.shard))
                is_long = moved.left_bytes > 0 and moved.seconds >= LONG_TRANSFER_S
                request = control_pb2.HeartbeatRequest(
                    caller=membership.caller(lane.shard),
                    clock=clock,
                    leaving=leaving,
                    transport=lane.transport,
                    cuts=cuts,
                    transfer_left_bytes=moved.left_bytes if is_long else 0,
                    transfer_bytes_per_s=moved.bytes_per_s if is_long else 0.0,
                )
                pending.append((lane, lane.begin_heartbeat(request, timeout_s)))
        except Cancelled:
            return []
        waits: list[control_pb2.Wait] = []
        has_news = False
        restarted: dict[Lane, ShardRestarted] = {}
        for lane, reply in pending:
            try:
                answer = reply()
                waits += answer.waits
                has_news |= self._session.cuts.hear(
                    lane.shard, answer.cuts, lambda: self._session.clock, membership.session, by_heartbeat=True
                )
                if lane.shard == 0:
                    self._on_roster(answer)
            except Cancelled:
                pass
            except ShardRestarted as error:
                restarted[lane] = error
            except PsdError as error:
                self._on_error(lane, error, membership, began)
            else:
                self._on_answer(lane)
        self._resume(restarted, self._clock() + timeout_s)
        for lane in restarted:
            self._session.cuts.forget(lane.shard)
        if has_news:
            self.soon()
        elif self._session.cuts.is_awaited:
            self._next_beat = min(self._next_beat, self._clock() + CUT_BEAT_S * self._more_workers)
        return waits

    @property
    def _more_workers(self) -> float:
        return max(1.0, self._session.world_size / CUT_WORKERS)

    def soon(self) -> None:
        """Send heartbeats now, because the shards must hear news of a cut."""
        self._next_beat = self._clock()
        self._wake.set()

    def _on_answer(self, lane: Lane) -> None:
        self._health.answered(lane.shard)
        if self._logged.pop(lane.shard, None) is not None:
            logger.info("psd: worker %d: shard %d at %s answers again", self._rank, lane.shard, lane.address)

    def _on_roster(self, answer: control_pb2.HeartbeatReply) -> None:
        """Log which workers are not waited for any more, or are again; at most one line for each heartbeat."""
        absent = dict.fromkeys(answer.failed, Absence.FAILED) | dict.fromkeys(answer.silent, Absence.SILENT)
        news = self._roster.news(absent | dict.fromkeys(answer.finished, Absence.FINISHED), self._session.world_size)
        if news:
            level = logging.INFO if self._roster.is_usual else logging.WARNING
            logger.log(level, "psd: worker %d: %s", self._rank, news)

    def _on_error(self, lane: Lane, error: PsdError, membership: JobMembership, began: float) -> None:
        if self._stopped:
            return
        if isinstance(error, ShardUnavailable):
            self._health.failed(lane.shard, began)
        elif isinstance(error, SessionFenced) and (error.detail.get("cause") == "expired" or not self._is_latest(membership)):
            return  # the next operation joins again, or one has done so meanwhile
        kind = "unreachable" if isinstance(error, RETRIED) else error.reason
        if self._logged.get(lane.shard) != kind:
            self._logged[lane.shard] = kind
            does = "does not answer" if isinstance(error, ShardUnavailable) else "rejects"
            place = (self._rank, lane.shard, lane.address)
            logger.warning("psd: worker %d: shard %d at %s %s its heartbeat: %s", *place, does, error)

    def _is_latest(self, membership: JobMembership) -> bool:
        latest = self._session.memberships.latest
        return latest is not None and latest.session == membership.session

    def _resume(self, restarted: Mapping[Lane, ShardRestarted], until: float) -> None:
        """Resume the session at restarted shards, because no operation may call them, and the lease there must be renewed.

        One of them may be away again, and all others must hear the next heartbeat in time: so this ends then, and the shards
        that are left come first the next time.
        """
        for lane in sorted(restarted, key=lambda lane: self._resumed_at.get(lane.shard, -math.inf)):
            now = self._clock()
            if self._stopped or now >= until:
                return
            self._resumed_at[lane.shard] = now
            try:
                self._session.resume(lane, Call(until - now, Scope()), restarted[lane])
            except (PsdError, Cancelled) as refusal:
                logger.debug("psd: worker %d: shard %d: %s", self._rank, lane.shard, refusal)  # the next operation raises it

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name=f"psd-heartbeat-{self._rank}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Run the next step now, because the worker has joined."""
        self._wake.set()

    def stop(self) -> None:
        """Stop sending. Does not wait for the thread; call `join` for that once the lanes are closed."""
        self._stopped = True
        self._wake.set()

    def join(self) -> None:
        """Wait for the thread to end, unless this is that thread (which may collect the garbage that ends a client)."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=HEARTBEAT_TIMEOUT_MAX_S)

    def _run(self) -> None:
        while not self._stopped:
            try:
                pause_s = self.step()
            except Exception:  # without this thread every lease would run out
                logger.exception("psd: worker %d: a heartbeat failed because of a defect", self._rank)
                pause_s = AFTER_DEFECT_S
            self._wake.wait(pause_s)
            self._wake.clear()
