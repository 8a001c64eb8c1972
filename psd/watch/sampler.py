"""Looks at a job, one look after the other, and makes of each a `JobSnapshot`; remembers the past. The one place that turns
messages into what is shown.

Must not know terminals or browsers. Not thread-safe: looks are taken by one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from psd.contract.orders import orders_text
from psd.contract.printable import printable
from psd.v1 import control_pb2 as pb
from psd.watch.diagnosis import diagnosed
from psd.watch.events import events_between
from psd.watch.history import History
from psd.watch.merging import Answer, job_clock, merged_waits, merged_workers, problems, reason
from psd.watch.rates import Rates
from psd.watch.snapshot import (
    WAIT_S,
    CallTimes,
    CheckpointSnapshot,
    CurvePoint,
    Event,
    JobSnapshot,
    ShardSnapshot,
    TableTotals,
    WorkerSnapshot,
)
from psd.watch.words import shard_state, wait_text, waits_text, worker_state

MEASURED_S = 1.0
"""Seconds between the two looks of a picture that is shown once: rates need two."""

RATE_S = 10.0
"""Seconds over which rates are measured."""

ANSWER_S = 1.5
"""Seconds that a look waits for a shard, by default."""

ANSWERS_MAX = 64
"""Answers with points of curves that are read in one look; the rest is for the next."""

_IN_ROUNDS = (pb.WAIT_KIND_ROUND, pb.WAIT_KIND_EARLIER_ROUND, pb.WAIT_KIND_STALENESS)


class Asks(Protocol):
    """Asks the shards; see psd/watch/asking.py: Asker."""

    def ask(self, timeout_s: float) -> list[Answer]:
        """Return the answers, in the order of the shards."""
        ...

    def curves(self, after: int, timeout_s: float) -> pb.CurvesReply | None:
        """Return shard 0's answer; None if there is none."""
        ...


class Sampler:
    """A job under observation.

    Args:
        asker: asks the shards.
        clock: monotonic seconds. wall: seconds since 1970. answer_s: how long a look waits for a shard.

    Attributes:
        history: of all looks so far. now: the last look; None before the first.
        answers: what the last look is made of. points: that it has found, with the names of their curves.
        has_gone_back: with these points others were dropped, which the job has left by going back.
    """

    def __init__(
        self,
        asker: Asks,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        answer_s: float = ANSWER_S,
    ) -> None:
        self.history = History()
        self.now: JobSnapshot | None = None
        self.answers: list[Answer] = []
        self.points: list[tuple[str, CurvePoint]] = []
        self.has_gone_back = False
        self._asker = asker
        self._answer_s = answer_s
        self._clock = clock
        self._wall = wall
        self._rates = Rates(RATE_S)
        self._events: list[Event] = []
        self._points_of = 0  # the incarnation of shard 0 that counts points,
        self._points_read = 0  # and the number of the last one read

    def look(self) -> JobSnapshot:
        """Ask all shards once; the job as it is now."""
        self.answers = self._asker.ask(self._answer_s)
        before, now = self.now, self._snapshot(self.answers)
        self._events = events_between(before, now)
        self.history.add(now if before is not None else None, self._events)
        if before is not None and _has_gone_back(before, now):
            self.history.go_back()
        self.points = self._new_points() if self.answers[0].reply is not None else []
        self.has_gone_back = sum(self.history.add_point(name, point) for name, point in self.points) > 0  # all are added
        self.now = now
        return now

    def measure(self) -> JobSnapshot:
        """Look twice, with time in between; the second look."""
        self.look()
        time.sleep(MEASURED_S)
        return self.look()

    @property
    def events(self) -> Sequence[Event]:
        """Events that the last look has found."""
        return self._events

    def _snapshot(self, answers: Sequence[Answer]) -> JobSnapshot:
        replies = [answer.reply for answer in answers if answer.reply is not None]
        shards = tuple(self._shard(index, answer) for index, answer in enumerate(answers))
        found = tuple(map(printable, problems(answers)))
        if not replies and self.now is not None:
            found = () if self.now.state == "finished" else found
            return diagnosed(replace(self.now, at=self._wall(), shards=shards, waits=(), problems=found, steps_per_s=0.0))
        job = next((reply for reply in replies if reply.consistency), pb.StatusReply())
        merged = merged_workers(replies)
        waits = [each.wait for each in merged_waits(replies)]
        clock = job_clock(merged)
        foremost = max((worker.clock for worker in merged), default=0)
        workers = tuple(self._worker(worker, waits, foremost) for worker in merged)
        now = JobSnapshot(
            at=self._wall(),
            run_id=printable(next((reply.run_id for reply in replies if reply.run_id), "")),
            state="",
            headline="",
            limit="",
            slow=(),
            consistency=printable(job.consistency),
            reduction=printable(job.reduction),
            aggregation=printable(job.aggregation),
            world_size=job.world_size or max((reply.world_size for reply in replies), default=0),
            quorum=job.quorum,
            timeline=max((reply.timeline for reply in replies), default=0),
            restored_from=printable(job.restored_from),
            clock=clock,
            steps_per_s=self._rates.of("clock", self._clock(), clock),
            worker_steps_per_s=sum(worker.steps_per_s for worker in workers),
            parameter_bytes=sum(shard.parameter_bytes for shard in shards),
            slot_bytes=sum(shard.slot_bytes for shard in shards),
            received_per_s=sum(shard.received_per_s for shard in shards),
            sent_per_s=sum(shard.sent_per_s for shard in shards),
            shards=shards,
            workers=workers,
            tables=_tables(replies),
            waits=tuple(map(printable, waits_text([wait for wait in waits if wait.waited_s >= WAIT_S]))),
            orders=self._orders(answers[0].reply, clock),
            checkpoint=shards[0].checkpoint,
            problems=found,
        )
        return diagnosed(now)

    def _shard(self, index: int, answer: Answer) -> ShardSnapshot:
        reply, before = answer.reply, self.now.shards[index] if self.now is not None else None
        if reply is None:
            self._rates.forget("shard", index)
            known = before or ShardSnapshot(index, answer.server, "no answer")
            return replace(
                known,
                state="no answer",
                detail="",
                error=printable(reason(answer)),
                cpu_share=0.0,
                rounds_per_s=0.0,
                received_per_s=0.0,
                sent_per_s=0.0,
                in_calls_share=0.0,
                calls=(),
            )
        incarnation = f"{reply.incarnation:016x}"
        if before is not None and before.incarnation != incarnation:
            self._rates.forget("shard", index)
        live = sum(worker.state == pb.WORKER_STATE_LIVE for worker in reply.workers)
        calls = tuple(self._calls(index, call) for call in reply.calls)
        # The shards count a call when it has ended; a wait may be as long as all that is looked at.
        in_calls_s = sum(call.seconds for call in reply.calls) + sum(wait.waited_s for wait in reply.waits)
        in_calls_per_s = self._rates.of(("shard", index, "in calls"), self._clock(), in_calls_s, slack=1.0)
        state, detail = shard_state(reply)
        return ShardSnapshot(
            index=index,
            address=printable(reply.address or answer.server),
            state=state,
            detail=detail,
            incarnation=incarnation,
            restarts=reply.restarts,
            uptime_s=reply.uptime_s,
            tensors=reply.tensor_count,
            blocks=reply.block_count,
            tables=len(reply.tables),
            parameter_bytes=reply.parameter_bytes,
            slot_bytes=reply.slot_bytes,
            table_bytes=sum(table.bytes for table in reply.tables),
            memory_bytes=reply.memory_bytes,
            cpu_s=reply.cpu_s,
            cpu_share=self._rate(index, "cpu", reply.cpu_s),
            rounds=reply.version_max,
            updates=reply.rounds,
            rounds_per_s=self._rate(index, "rounds", reply.version_max),
            pushes_accepted=reply.pushes_accepted,
            pushes_late=reply.pushes_late,
            pushes_duplicate=reply.pushes_duplicate,
            requests_refused=reply.requests_refused,
            pulls=reply.pulls,
            bytes_received=reply.bytes_received,
            bytes_sent=reply.bytes_sent,
            received_per_s=self._rate(index, "received", reply.bytes_received),
            sent_per_s=self._rate(index, "sent", reply.bytes_sent),
            in_calls_share=min(1.0, in_calls_per_s / live) if live else 0.0,
            calls=calls,
            ages=tuple(reply.ages),
            checkpoint=_checkpoint(reply),
        )

    def _orders(self, first: pb.StatusReply | None, clock: int) -> tuple[str, ...]:
        """Orders that shard 0 has, in words; if it does not answer, those that it had."""
        if first is None:
            return self.now.orders if self.now is not None else ()
        return tuple(orders_text(first.learning_rates, first.ends_at, clock))

    def _rate(self, shard: int, name: str, value: float) -> float:
        return self._rates.of(("shard", shard, name), self._clock(), value)

    def _calls(self, shard: int, call: pb.CallStatus) -> CallTimes:
        per_s = self._rate(shard, f"{call.call} calls", call.count)
        seconds_per_s = self._rate(shard, f"{call.call} seconds", call.seconds)
        return CallTimes(printable(call.call), call.count, per_s, seconds_per_s / per_s if per_s else 0.0)

    def _worker(self, worker: pb.WorkerStatus, waits: Sequence[pb.Wait], foremost: int) -> WorkerSnapshot:
        now, rank = self._clock(), worker.rank
        open_s = max((w.waited_s for w in waits if w.kind in _IN_ROUNDS and _is_missing(rank, w)), default=0.0)
        awaited_s = worker.awaited_s + open_s  # the shards count a wait when it has ended
        share = self._rates.of(("worker", rank, "awaited"), now, awaited_s, slack=1.0)
        own = [wait for wait in waits if wait.rank == rank and wait.waited_s >= WAIT_S]
        return WorkerSnapshot(
            rank=rank,
            state="failed" if worker.failed and worker.state == pb.WORKER_STATE_EXPIRED else worker_state(worker),
            host=printable(worker.host),
            pid=worker.pid,
            lane=printable(worker.transport),
            clock=worker.clock,
            steps_per_s=self._rates.of(("worker", rank, "clock"), now, worker.clock),
            behind=foremost - worker.clock,
            awaited_s=awaited_s,
            awaited_share=min(1.0, share),
            last_seen_s=worker.last_seen_s,
            waits=printable(wait_text(max(own, key=lambda wait: wait.waited_s))) if own else "",
        )

    def _new_points(self) -> list[tuple[str, CurvePoint]]:
        """Points that workers have reported since the last look."""
        found: list[tuple[str, CurvePoint]] = []
        for _ in range(ANSWERS_MAX):
            reply = self._asker.curves(self._points_read, self._answer_s)
            if reply is None:
                break
            if reply.incarnation != self._points_of:
                self._points_of, is_other = reply.incarnation, self._points_read > 0
                self._points_read = 0
                if is_other:
                    continue  # what was asked for was another one's count
            self._points_read = reply.latest
            now = self._wall()
            for curve in reply.curves:
                columns = zip(curve.steps, curve.values, curve.ago_s, strict=False)
                name = printable(curve.name)
                found += [(name, CurvePoint(curve.rank, step, value, now - ago_s)) for step, value, ago_s in columns]
            if not reply.more:
                break
        return found


def _has_gone_back(before: JobSnapshot, now: JobSnapshot) -> bool:
    """True if a job may train steps again: it has gone back, or is another one."""
    (old, new) = (max((worker.clock for worker in each.workers), default=0) for each in (before, now))
    return (now.run_id, now.timeline) != (before.run_id, before.timeline) or new < old


def _is_missing(rank: int, wait: pb.Wait) -> bool:
    return any(missing.rank == rank for missing in wait.missing)


def _checkpoint(reply: pb.StatusReply) -> CheckpointSnapshot | None:
    if not reply.checkpoint_dir:
        return None
    return CheckpointSnapshot(
        name=printable(reply.checkpoint_last),
        age_s=reply.checkpoint_age_s,
        bytes=reply.checkpoint_bytes,
        took_s=reply.checkpoint_took_s,
        error=printable(reply.checkpoint_error),
    )


def _tables(replies: Sequence[pb.StatusReply]) -> tuple[TableTotals, ...]:
    sums: dict[str, list[int]] = {}
    for table in (table for reply in replies for table in reply.tables):
        total = sums.setdefault(printable(table.name), [0, 0, 0, 0])
        for index, value in enumerate((table.rows, table.bytes, table.reads, table.hits)):
            total[index] += value
    return tuple(TableTotals(name, *total) for name, total in sums.items())
