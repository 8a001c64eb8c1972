"""Events between two snapshots of a job: joins, departures, restarts, checkpoints, refused requests.

Pure functions on snapshots. Something that began and ended between two snapshots is not noticed. Events before the first
snapshot are reported, with their own time, if they have left traces in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from psd.watch.snapshot import Event, JobSnapshot, ShardSnapshot, WorkerSnapshot
from psd.watch.words import count_text


def events_between(before: JobSnapshot | None, now: JobSnapshot) -> list[Event]:
    """Events between two snapshots; for a first snapshot, the events of which it has traces."""
    if before is None:
        return sorted(_traces(now), key=lambda event: event.at)
    return [Event(now.at, kind, level, text, _step_of(text, now)) for kind, level, text in _events(before, now)]


def _traces(now: JobSnapshot) -> Iterator[Event]:
    first = now.shards[0]
    for shard in now.shards:
        if shard.state == "no answer":
            yield Event(now.at, "lost", "error", _lost(shard), now.clock)
        elif shard.restarts:
            yield Event(now.at - shard.uptime_s, "restart", "warning", f"shard {shard.index} has restarted", now.clock)
        if shard.checkpoint_error:
            yield Event(now.at, "checkpoint", "error", _not_stored(shard), now.clock)
    for worker in now.workers:
        if worker.state in ("expired", "failed"):
            at = now.at - max(0.0, worker.last_seen_s)
            yield Event(at, "lost", "error", _gone(worker), worker.clock)
    if first.checkpoint_last:
        text = f"checkpoint {first.checkpoint_last}"
        yield Event(now.at - first.checkpoint_age_s, "checkpoint", "info", text, _step_of(text, now))


def _events(before: JobSnapshot, now: JobSnapshot) -> Iterator[tuple[str, str, str]]:
    if now.run_id and before.run_id and now.run_id != before.run_id:
        yield "run", "warning", f"another run: {now.run_id}"
    if now.timeline > before.timeline and before.run_id:
        yield "restart", "warning", f"the job went back to checkpoint {now.restored_from or 'of an earlier time'}"
    for old, new in zip(before.shards, now.shards, strict=True):
        yield from _of_shard(old, new, is_finished=now.state == "finished")
    known = {worker.rank: worker for worker in before.workers}
    for worker in now.workers:
        yield from _of_worker(known.get(worker.rank), worker)
    if before.state != now.state and now.state == "finished":
        yield "run", "info", f"all workers have left, at step {now.clock}"
    for order in now.orders:
        if order not in before.orders:
            yield "order", "warning", f"an operator's order: {order}"
    yield from _of_checkpoints(before, now)


def _of_shard(old: ShardSnapshot, new: ShardSnapshot, *, is_finished: bool) -> Iterator[tuple[str, str, str]]:
    if new.state == "no answer":
        if old.state != "no answer" and is_finished:
            yield "leave", "info", f"shard {new.index} has ended"
        elif old.state != "no answer":
            yield "lost", "error", _lost(new)
        return
    if old.incarnation and new.incarnation != old.incarnation:
        yield "restart", "warning", f"shard {new.index} has restarted"
    elif old.state == "no answer":
        yield "state", "info", f"shard {new.index} answers"
    elif old.state != new.state:
        yield "state", "warning" if new.state == "draining" else "info", f"shard {new.index} is {new.state}"
    refused = new.requests_refused - old.requests_refused
    if refused > 0 and old.state != "no answer":
        yield "refused", "warning", f"shard {new.index} refused {count_text(refused, 'request')}"


def _of_worker(old: WorkerSnapshot | None, new: WorkerSnapshot) -> Iterator[tuple[str, str, str]]:
    was = old.state if old is not None else "absent"
    if was == new.state:
        if old is not None and new.state == "live" and (old.host, old.pid) != (new.host, new.pid):
            yield "join", "info", f"worker {new.rank} is another process now: {new.host}:{new.pid}"
    elif new.state == "live":
        yield "join", "info", f"worker {new.rank} {'joined' if was == 'absent' else 'is back'}, at step {new.clock}"
    elif new.state == "finished":
        yield "leave", "info", f"worker {new.rank} has finished, at step {new.clock}"
    elif new.state in ("expired", "failed"):
        yield "lost", "error", _gone(new)


def _of_checkpoints(before: JobSnapshot, now: JobSnapshot) -> Iterator[tuple[str, str, str]]:
    name = now.shards[0].checkpoint_last
    if name and name != before.shards[0].checkpoint_last:
        yield "checkpoint", "info", f"checkpoint {name}"
    for old, new in zip(before.shards, now.shards, strict=True):
        if new.checkpoint_error and new.checkpoint_error != old.checkpoint_error:
            yield "checkpoint", "error", _not_stored(new)


def _step_of(text: str, now: JobSnapshot) -> int:
    """The step at which an event happened: that in the name of a checkpoint; for other events, the current one."""
    found = re.match(r"checkpoint .*step-(\d{1,15})", text)
    return int(found[1]) if found else now.clock


def _lost(shard: ShardSnapshot) -> str:
    return f"shard {shard.index} at {shard.address} does not answer"


def _gone(worker: WorkerSnapshot) -> str:
    why = "failed" if worker.state == "failed" else "was silent for too long"
    return f"worker {worker.rank} {why}, at step {worker.clock}"


def _not_stored(shard: ShardSnapshot) -> str:
    return f"shard {shard.index}: checkpoint: {shard.checkpoint_error}"
