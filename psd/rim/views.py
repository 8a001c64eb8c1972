"""The shard's view of itself: its numbers (listed in psd/contract/facts.py), and the messages of Status and Heartbeat."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import psd
from psd.contract import facts
from psd.contract.fact import Fact
from psd.contract.printable import printable
from psd.contract.roster import Absence
from psd.rim.checkpointer import CheckpointProgress
from psd.state.counts import DATA_CALLS, GRPC_CALLS, Counters, total
from psd.state.desks.status import ShardStatus
from psd.state.readers import KnownReader
from psd.state.shard import Shard
from psd.state.tables.block import TableCounts
from psd.state.tickets import Ticket
from psd.state.workers.membership import Worker
from psd.v1 import control_pb2

MISSING_MAX = 64
"""Most workers named in one Wait; a round may lack a thousand, and the message should stay small."""

_CALLS = (*DATA_CALLS, *GRPC_CALLS)


def process_numbers() -> dict[str, float]:
    """This process's use of the machine."""
    return {"cpu_s": time.process_time(), "memory_bytes": resident_bytes()}


def reader_totals(known: Sequence[KnownReader], sent_bytes: int, age_s: Callable[[float], float]) -> dict[str, float]:
    """All readers of a shard, or a relay. sent_bytes: to all of them. age_s: returns the seconds since a moment."""
    begun = [reader.fetching_since for reader in known if reader.fetching_since is not None]
    fetch_s = age_s(min(begun)) if begun else 0.0
    return {"readers_seen": len(known), "reader_sent_bytes": sent_bytes, "reader_fetch_s": fetch_s}


def shard_numbers(shard: Shard, now: ShardStatus, progress: CheckpointProgress | None) -> dict[str, float]:
    """The shard's numbers, by their names in the catalogue; without those that do not exist yet."""
    job, last = now.job, None
    closed_at = None if job is None else job.round_closed_at
    if progress is not None and progress.last:
        last = {
            "age_s": shard.age_s(progress.last_at),
            "timestamp_s": progress.last_wall,
            "bytes": progress.last_bytes,
            "took_s": progress.last_took_s,
        }
    return numbers_of(
        facts.SHARD,
        {
            "status": now,
            "counters": now.counters,
            "process": process_numbers(),
            "job": job,
            "trained": job if job is not None and job.trained_count else None,
            "arena": job.arena if job is not None else None,
            "readers": reader_totals(now.known_readers, now.reader_sent_bytes, shard.age_s),
            "rounds": None if closed_at is None else {"version_age_s": shard.age_s(closed_at)},
            "vectors": shard.vectors.status(),
            "checkpoints": progress,
            "checkpoint": last,
        },
    )


def worker_numbers(shard: Shard, worker: Worker) -> dict[str, float]:
    """A worker's numbers, as this shard knows it; it was last seen -1 s ago if never."""
    last_seen_s = max(0.0, shard.age_s(worker.last_seen)) if worker.last_seen >= 0 else -1.0
    holders = {"worker": worker, "seen": {"last_seen_s": last_seen_s}, "learner": shard.learner(worker.rank)}
    return numbers_of(facts.WORKER, holders)


def reader_status(reader: KnownReader, age_s: Callable[[float], float]) -> control_pb2.ReaderStatus:
    """One reader as this shard, or this relay, knows it. age_s: returns the seconds since a moment."""
    seen = {
        "age_s": age_s(reader.got_at) if reader.version is not None else None,
        "fetch_s": reader.fetch_s if reader.fetching_since is None else age_s(reader.fetching_since),
        "last_seen_s": age_s(reader.seen_at),
    }
    is_fetching = reader.fetching_since is not None
    is_waiting = reader.open_calls > 0 and not is_fetching
    reply = control_pb2.ReaderStatus(
        id=reader.id, name=reader.name, is_waiting=is_waiting, is_fetching=is_fetching, transport=reader.lane
    )
    facts.write(reply, numbers_of(facts.READER, {"reader": reader, "seen": seen}))
    return reply


def table_numbers(counts: TableCounts) -> dict[str, float]:
    """A table's numbers."""
    return numbers_of(facts.TABLE, {"table": counts})


def numbers_of(rows: Sequence[Fact], holders: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of these rows by name, from the holders that their sources name, which have them as attributes or by name;
    without those that are not known."""
    found = {}
    for fact in rows:
        name, _, source = fact.source.partition(".")
        holder = holders.get(name)
        if holder is not None:
            source = source or fact.name
            value = holder[source] if isinstance(holder, Mapping) else attrgetter(source)(holder)
            if value is not None:
                found[fact.name] = value
    return found


def worker_status(shard: Shard, worker: Worker) -> control_pb2.WorkerStatus:
    """One worker as this shard knows it."""
    reply = control_pb2.WorkerStatus(
        rank=worker.rank,
        state=worker.state.value,  # type: ignore[arg-type]
        host=worker.host,
        pid=worker.pid,
        session=worker.session,
        transport=worker.transport,
        failed=worker.has_failed,
    )
    facts.write(reply, worker_numbers(shard, worker))
    return reply


def heartbeat_reply(shard: Shard, waits: list[Ticket]) -> control_pb2.HeartbeatReply:
    """The reply to a heartbeat: the worker's waits, cuts to carry and, from shard 0, the workers no longer waited for."""
    reply = control_pb2.HeartbeatReply(waits=[wait_status(shard, ticket) for ticket in waits], cuts=shard.cuts.latest())
    if shard.config.shard_index == 0:
        ranks = {Absence.FAILED: reply.failed, Absence.SILENT: reply.silent, Absence.FINISHED: reply.finished}
        for rank, why in shard.absent.items():
            ranks[why].append(rank)
    return reply


def wait_status(shard: Shard, ticket: Ticket) -> control_pb2.Wait:
    """One open wait, and the missing workers."""
    return control_pb2.Wait(
        rank=ticket.rank,
        kind=ticket.kind.value,  # type: ignore[arg-type]
        name=ticket.name,
        clock=ticket.clock,
        waited_s=shard.age_s(ticket.since),
        missing=[worker_status(shard, w) for w in shard.missing_for(ticket)[:MISSING_MAX]],
    )


def call_statuses(counters: Counters) -> Iterator[control_pb2.CallStatus]:
    """The calls in which workers spend time, by kind, over all lanes."""
    found = {call: total([lane.calls[call] for lane in counters.lanes.values() if call in lane.calls]) for call in _CALLS}
    for call, together in {**found, "barrier": counters.barriers}.items():
        yield control_pb2.CallStatus(call=call, count=sum(together.counts), seconds=together.total)


def resident_bytes() -> int:
    """Memory of this process in bytes; 0 if the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def shard_status(shard: Shard, address: str, progress: CheckpointProgress | None) -> control_pb2.StatusReply:
    """Status of this shard, for psdctl. `progress`: that of its checkpoints, if it takes any."""
    now = shard.status()
    job = now.job
    reply = control_pb2.StatusReply(
        shard_index=shard.config.shard_index,
        shard_count=shard.config.shard_count,
        state=now.state.value,  # type: ignore[arg-type]
        life=now.life.value,  # type: ignore[arg-type]
        run_id=now.run_id,
        incarnation=now.incarnation,
        address=address,
        version=psd.__version__,
        waits=[wait_status(shard, ticket) for ticket in now.waits],
        world_size=len(now.workers),
        workers=[worker_status(shard, worker) for worker in now.workers],
        calls=call_statuses(now.counters),
        readers=[reader_status(reader, shard.age_s) for reader in now.known_readers],
    )
    facts.write(reply, shard_numbers(shard, now, progress))
    if job is not None:
        reply.consistency = str(job.spec.consistency)
        reply.reduction = job.spec.reduction
        reply.quorum = job.spec.quorum
        reply.aggregation = job.spec.aggregation
        reply.compression = str(job.spec.compression)
        reply.restored_from = now.restored_from
        reply.ages.extend(job.ages)
        if job.tables is not None:
            for counts in job.tables.counts:
                facts.write(reply.tables.add(name=counts.name), table_numbers(counts))
        reply.state_dir = printable(str(now.directory))
    if now.orders is not None:
        reply.learning_rates.extend(now.orders.learning_rates)
        reply.ends_at = now.orders.ends_at
    reply.total = now.total
    if progress is not None:
        reply.checkpoint_dir = printable(progress.location)  # a file's name may not be valid text
        reply.checkpoint_last = progress.last
        reply.checkpoint_error = printable(progress.error)
    return reply
