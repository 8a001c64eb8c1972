"""Takes one `JobSnapshot` of a job after the other (each is called a look), and keeps their history. The only module that turns
messages into what is shown.

Must not know terminals or browsers. Not thread-safe: one thread takes all looks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from psd.contract import facts
from psd.contract.fact import Fact
from psd.contract.orders import orders_text
from psd.contract.printable import printable
from psd.v1 import control_pb2 as pb
from psd.watch.diagnosis import diagnosed
from psd.watch.events import events_between
from psd.watch.history import History
from psd.watch.merging import (
    Answer,
    MergedWait,
    job_clock,
    merged_readers,
    merged_waits,
    merged_workers,
    problems,
    reason,
)
from psd.watch.rates import Rates
from psd.watch.snapshot import (
    WAIT_S,
    CallTimes,
    CurvePoint,
    Event,
    JobSnapshot,
    Numbers,
    OrderedRate,
    ReaderSnapshot,
    RelaySnapshot,
    ShardSnapshot,
    TableTotals,
    WaitSnapshot,
    WorkerSnapshot,
)
from psd.watch.words import shard_state, wait_kind, wait_text, waits_text, worker_state

MEASURED_S = 1.0
"""Seconds between the two looks of `measure`: rates need two."""

RATE_S = 10.0
"""Seconds over which rates are measured."""

LEFT_RATE_S = 120.0
"""Seconds over which the speed is measured from which the time left follows: it should not jump from look to look."""

SAID_RATIO = 1.5
"""Programs say how many samples a push has if there are at least so many to a step; else each push counts as one."""

ANSWER_S = 1.5
"""Seconds that a look waits for a shard, by default."""

STUCK_S = 30.0
"""Seconds that a transfer to a reader may take; after that the reader is stuck. One that asks for nothing for as long, while
there is a newer version, is behind."""

ANSWERS_MAX = 64
"""Answers with points of curves that one look reads at most; the next look reads the rest."""

_IN_ROUNDS = (pb.WAIT_KIND_ROUND, pb.WAIT_KIND_EARLIER_ROUND, pb.WAIT_KIND_STALENESS)


class Asks(Protocol):
    """The calls to the shards that a sampler needs; psd/watch/asking.py has them."""

    def ask(self, timeout_s: float) -> list[Answer]:
        """Return the answers, in the order of the shards."""
        ...

    def curves(self, after: int, timeout_s: float) -> pb.CurvesReply | None:
        """Return the scalars that shard 0 reports after this point; None if it does not answer."""
        ...


class Sampler:
    """Observes a job.

    Args:
        asker: asks the shards.
        clock: returns monotonic seconds. wall: returns seconds since 1970. answer_s: seconds that a look waits for a shard.
        has_curves: True to ask for the scalars that workers log, too.

    Attributes:
        history: the history of all looks so far. now: the latest snapshot; None before the first look.
        answers: the answers from which it was made. points: points of curves that the last look has found, with the curves'
            names.
        has_gone_back: True if older points were dropped for these, because the job has gone back.
    """

    def __init__(
        self,
        asker: Asks,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        answer_s: float = ANSWER_S,
        *,
        has_curves: bool = True,
    ) -> None:
        self.history = History()
        self.now: JobSnapshot | None = None
        self.answers: list[Answer] = []
        self.points: list[tuple[str, CurvePoint]] = []
        self.has_gone_back = False
        self._asker = asker
        self._answer_s = answer_s
        self._has_curves = has_curves
        self._clock = clock
        self._wall = wall
        self._rates = Rates(RATE_S)
        self._progress = Rates(LEFT_RATE_S)
        self._events: list[Event] = []
        self._points_of = 0  # the incarnation of shard 0 that counts points,
        self._points_read = 0  # and the number of the last one read

    def look(self) -> JobSnapshot:
        """Ask all shards once; return a snapshot of the job."""
        self.answers = self._asker.ask(self._answer_s)
        before, now = self.now, self._snapshot(self.answers)
        self._events = events_between(before, now)
        self.history.add(now if before is not None else None, self._events)
        if before is not None and _has_gone_back(before, now):
            self.history.go_back()
        self.points = self._new_points() if self._has_curves and self.answers[0].reply is not None else []
        self.has_gone_back = sum(self.history.add_point(name, point) for name, point in self.points) > 0  # all are added
        self.now = now
        return now

    def measure(self) -> JobSnapshot:
        """Look twice, some time apart, so that rates are known; return the second snapshot."""
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
            numbers = _without_rates(self.now)
            numbers.pop("time_left_s", None)
            now = replace(self.now, at=self._wall(), shards=shards, waits=(), waiting=(), problems=found, numbers=numbers)
            return diagnosed(now)
        job = next((reply for reply in replies if reply.consistency), pb.StatusReply())
        merged = merged_workers(replies)
        waits = merged_waits(replies)
        clock = job_clock(merged)
        foremost = max((worker.clock for worker in merged), default=0)
        workers = tuple(self._worker(worker, [each.wait for each in waits], foremost) for worker in merged)
        sums = ("parameter_bytes", "slot_bytes", "received_bytes_per_s", "sent_bytes_per_s")
        ends_at = max((reply.ends_at for reply in replies), default=0)
        version = _version(shards)
        total = ends_at or max((reply.total for reply in replies), default=0)
        now = JobSnapshot(
            at=self._wall(),
            has_rates=self.now is not None,
            run_id=printable(next((reply.run_id for reply in replies if reply.run_id), "")),
            state="",
            headline="",
            limit="",
            slow=(),
            consistency=printable(job.consistency),
            reduction=printable(job.reduction),
            aggregation=printable(job.aggregation),
            compression=printable(job.compression),
            restored_from=printable(job.restored_from),
            numbers={
                "clock": clock,
                "steps_per_s": self._rates.of("clock", self._clock(), clock),
                "worker_steps_per_s": sum(worker.steps_per_s for worker in workers),
                "world_size": job.world_size or max((reply.world_size for reply in replies), default=0),
                "quorum": job.quorum,
                "timeline": max((reply.timeline for reply in replies), default=0),
                **version,
                **{name: sum(getattr(shard, name) for shard in shards) for name in sums},
                **_samples(workers),
                **self._end(clock, total),
            },
            shards=shards,
            workers=workers,
            tables=_tables(replies),
            waits=tuple(map(_wait, waits)),
            waiting=tuple(map(printable, waits_text([each.wait for each in waits if each.wait.waited_s >= WAIT_S]))),
            orders=self._orders(answers[0].reply, clock),
            learning_rates=tuple(OrderedRate(rate.clock, rate.scale) for reply in replies[:1] for rate in reply.learning_rates),
            ends_at=ends_at,
            problems=found,
            readers=tuple(self._reader(reader, version.get("version")) for reader in merged_readers(replies)),
        )
        return diagnosed(now)

    def _reader(self, reader: pb.ReaderStatus, version: float | None) -> ReaderSnapshot:
        """version: the job's; None: not known."""
        numbers = facts.read(reader, facts.READER)
        numbers |= self._grown(("reader", reader.id), facts.READER, numbers)
        if version is not None and "version" in numbers:
            numbers["behind"] = max(0, version - numbers["version"])
            numbers["lag_s"] = numbers.get("age_s", 0.0) if numbers["behind"] else 0.0
        is_stuck = reader.is_fetching and numbers.get("fetch_s", 0.0) > STUCK_S
        state = "stuck" if is_stuck else "fetching" if reader.is_fetching else "waiting" if reader.is_waiting else "idle"
        if state == "idle" and min(numbers.get("lag_s", 0.0), numbers.get("last_seen_s", 0.0)) > STUCK_S:
            state = "behind"
        name, transport = printable(reader.name) or "-", printable(reader.transport)
        return ReaderSnapshot(f"{reader.id:014x}", name, state, transport, numbers)

    def _end(self, clock: int, total: int) -> dict[str, float]:
        """The numbers that follow from where the job ends; none if that is not known. total: 0: not known."""
        per_s = self._progress.of("clock", self._clock(), clock)
        if not total:
            return {}
        left = {"time_left_s": max(0, total - clock) / per_s} if per_s > 0 else {}
        return {"total_steps": total, **left}

    def _shard(self, index: int, answer: Answer) -> ShardSnapshot:
        reply, before = answer.reply, self.now.shards[index] if self.now is not None else None
        if reply is None:
            self._rates.forget("shard", index)
            known = before or ShardSnapshot(index, printable(answer.server), "no answer", {})
            error = printable(reason(answer))
            return replace(known, state="no answer", detail="", error=error, numbers=_without_rates(known), calls=())
        incarnation = f"{reply.incarnation:016x}"
        if before is not None and before.incarnation != incarnation:
            self._rates.forget("shard", index)
        live = sum(worker.state == pb.WORKER_STATE_LIVE for worker in reply.workers)
        calls = tuple(self._calls(index, call) for call in reply.calls)
        # The shards count a call when it has ended; a wait may be as long as all that is looked at.
        in_calls_s = sum(call.seconds for call in reply.calls) + sum(wait.waited_s for wait in reply.waits)
        in_calls_per_s = self._rates.of(("shard", index, "in calls"), self._clock(), in_calls_s, slack=1.0)
        numbers = facts.read(reply, facts.SHARD)
        numbers |= self._grown(("shard", index), facts.SHARD, numbers)
        numbers["in_calls_share"] = min(1.0, in_calls_per_s / live) if live else 0.0
        numbers["latency_s"] = max((call.mean_s for call in calls), default=0.0)
        state, detail = shard_state(reply)
        return ShardSnapshot(
            index=index,
            address=printable(reply.address or answer.server),
            state=state,
            numbers=numbers,
            detail=detail,
            incarnation=incarnation,
            psd_version=printable(reply.version),
            state_dir=printable(reply.state_dir),
            checkpoint_dir=printable(reply.checkpoint_dir),
            checkpoint_last=printable(reply.checkpoint_last),
            checkpoint_error=printable(reply.checkpoint_error),
            calls=calls,
            ages=tuple(reply.ages),
            relay=_relay(reply.relay) if reply.HasField("relay") else None,
        )

    def _orders(self, first: pb.StatusReply | None, clock: int) -> tuple[str, ...]:
        """Orders that shard 0 reports, in words; if it does not answer, those of the last snapshot."""
        if first is None:
            return self.now.orders if self.now is not None else ()
        return tuple(orders_text(first.learning_rates, first.ends_at, clock))

    def _grown(self, of: tuple[Any, ...], rows: Sequence[Fact], numbers: dict[str, float]) -> dict[str, float]:
        """The rates of those numbers that have one, by name of the rate."""
        now = self._clock()
        return {
            fact.name: self._rates.of((*of, fact.name), now, numbers[fact.rate_of], 1.0 if fact.unit == "share" else 0.0)
            for fact in rows
            if fact.rate_of in numbers
        }

    def _calls(self, shard: int, call: pb.CallStatus) -> CallTimes:
        of, now = ("shard", shard, call.call), self._clock()
        per_s = self._rates.of((*of, "count"), now, call.count)
        seconds_per_s = self._rates.of((*of, "seconds"), now, call.seconds)
        return CallTimes(printable(call.call), call.count, per_s, seconds_per_s / per_s if per_s else 0.0)

    def _worker(self, worker: pb.WorkerStatus, waits: Sequence[pb.Wait], foremost: int) -> WorkerSnapshot:
        rank = worker.rank
        open_s = max((w.waited_s for w in waits if w.kind in _IN_ROUNDS and _is_missing(rank, w)), default=0.0)
        numbers = facts.read(worker, facts.WORKER)
        numbers["awaited_s"] = numbers.get("awaited_s", 0) + open_s  # the shards count a wait when it has ended
        numbers |= self._grown(("worker", rank), facts.WORKER, numbers)
        numbers["awaited_share"] = min(1.0, numbers["awaited_share"])
        numbers["behind"] = foremost - worker.clock
        own = [wait for wait in waits if wait.rank == rank and wait.waited_s >= WAIT_S]
        return WorkerSnapshot(
            rank=rank,
            state="failed" if worker.failed and worker.state == pb.WORKER_STATE_EXPIRED else worker_state(worker),
            host=printable(worker.host),
            pid=worker.pid,
            session=f"{worker.session:016x}",
            transport=printable(worker.transport),
            numbers=numbers,
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
                    continue  # the number that was sent belongs to another incarnation: ask again from 0
            self._points_read = reply.latest
            now = self._wall()
            for curve in reply.curves:
                columns = zip(curve.steps, curve.values, curve.ago_s, strict=False)
                name = printable(curve.name)
                found += [(name, CurvePoint(curve.rank, step, value, now - ago_s)) for step, value, ago_s in columns]
            if not reply.more:
                break
        return found


def _version(shards: Sequence[ShardSnapshot]) -> dict[str, float]:
    """The version that all shards have, and its age, if they are known."""
    known = [shard.numbers for shard in shards if "version_min" in shard.numbers]
    ages = [numbers["version_age_s"] for numbers in known if "version_age_s" in numbers]
    found: dict[str, float] = {"version": min(numbers["version_min"] for numbers in known)} if known else {}
    return {**found, "version_age_s": min(ages)} if ages else found


def _relay(relay: pb.RelayStatus) -> RelaySnapshot:
    return RelaySnapshot(
        of=printable(relay.of),
        problem=printable(relay.problem),
        numbers={
            **({"version": relay.version, "age_s": relay.age_s} if relay.HasField("version") else {}),
            "behind": max(0, relay.newest - relay.version),
            "heard_s": relay.heard_s,
            "readers": relay.readers,
            "versions": relay.versions,
        },
    )


def _has_gone_back(before: JobSnapshot, now: JobSnapshot) -> bool:
    """True if the job may repeat steps: it has gone back, or is another job."""
    (old, new) = (max((worker.clock for worker in each.workers), default=0) for each in (before, now))
    return (now.run_id, now.timeline) != (before.run_id, before.timeline) or new < old


def _samples(workers: Sequence[WorkerSnapshot]) -> dict[str, float]:
    """The rate of samples, if programs say how many they have."""
    per_s = sum(worker.samples_per_s for worker in workers)
    return {"samples_per_s": per_s} if per_s >= SAID_RATIO * sum(worker.steps_per_s for worker in workers) > 0 else {}


def _is_missing(rank: int, wait: pb.Wait) -> bool:
    return any(missing.rank == rank for missing in wait.missing)


def _without_rates(known: Numbers) -> dict[str, float]:
    """The last known numbers of something that does not answer any more, with all rates 0."""
    return {name: 0.0 if known.catalogue[name].kind == "rate" else value for name, value in known.numbers.items()}


def _wait(merged: MergedWait) -> WaitSnapshot:
    wait = merged.wait
    return WaitSnapshot(
        rank=wait.rank,
        kind=wait_kind(wait),
        name=printable(wait.name),
        clock=wait.clock,
        waited_s=wait.waited_s,
        missing=tuple(worker.rank for worker in wait.missing),
        shards=merged.shards,
        text=printable(wait_text(wait)),
    )


def _tables(replies: Sequence[pb.StatusReply]) -> tuple[TableTotals, ...]:
    sums: dict[str, dict[str, float]] = {}
    for table in (table for reply in replies for table in reply.tables):
        total = sums.setdefault(printable(table.name), {})
        for name, value in facts.read(table, facts.TABLE).items():
            total[name] = total.get(name, 0) + value
    return tuple(TableTotals(name, total) for name, total in sums.items())
