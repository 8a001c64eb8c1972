"""The shard's view of itself: the messages of Status and Heartbeat, built from its state."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from pathlib import Path

import psd
from psd.contract.printable import printable
from psd.contract.roster import Absence
from psd.rim.checkpointer import CheckpointProgress
from psd.state.counts import DATA_CALLS, GRPC_CALLS, Counters, total
from psd.state.shard import Shard
from psd.state.tickets import Ticket
from psd.state.workers.membership import Worker
from psd.v1 import control_pb2

MISSING_MAX = 64
"""Workers named in one Wait; a round may lack a thousand, and the message should stay small."""

_CALLS = (*DATA_CALLS, *GRPC_CALLS)

COUNTERS = (
    "pushes_accepted",
    "pushes_duplicate",
    "pushes_late",
    "requests_refused",
    "pulls",
    "bytes_received",
    "bytes_sent",
)
"""Counters of psd/state/counts.py that StatusReply has."""


def worker_status(shard: Shard, worker: Worker) -> control_pb2.WorkerStatus:
    """One worker as this shard knows it."""
    return control_pb2.WorkerStatus(
        rank=worker.rank,
        state=worker.state.value,  # type: ignore[arg-type]
        clock=worker.clock,
        last_seen_s=max(0.0, shard.age_s(worker.last_seen)) if worker.last_seen >= 0 else -1.0,
        host=worker.host,
        pid=worker.pid,
        session=worker.session,
        transport=worker.transport,
        failed=worker.has_failed,
        awaited_s=worker.awaited_s,
    )


def heartbeat_reply(shard: Shard, waits: list[Ticket]) -> control_pb2.HeartbeatReply:
    """The reply to a heartbeat: the worker's waits, cuts to be carried and, from shard 0, who is not waited for any more."""
    reply = control_pb2.HeartbeatReply(waits=[wait_status(shard, ticket) for ticket in waits], cuts=shard.cuts.latest())
    if shard.config.shard_index == 0:
        ranks = {Absence.FAILED: reply.failed, Absence.SILENT: reply.silent, Absence.FINISHED: reply.finished}
        for rank, why in shard.absent.items():
            ranks[why].append(rank)
    return reply


def wait_status(shard: Shard, ticket: Ticket) -> control_pb2.Wait:
    """One open wait, and the workers that it is for."""
    return control_pb2.Wait(
        rank=ticket.rank,
        kind=ticket.kind.value,  # type: ignore[arg-type]
        name=ticket.name,
        clock=ticket.clock,
        waited_s=shard.age_s(ticket.since),
        missing=[worker_status(shard, w) for w in shard.missing_for(ticket)[:MISSING_MAX]],
    )


def call_statuses(counters: Counters) -> Iterator[control_pb2.CallStatus]:
    """The calls in which workers spend time, each kind over all lanes."""
    found = {call: total([lane.calls[call] for lane in counters.lanes.values() if call in lane.calls]) for call in _CALLS}
    for call, together in {**found, "barrier": counters.barriers}.items():
        yield control_pb2.CallStatus(call=call, count=sum(together.counts), seconds=together.total)


def resident_bytes() -> int:
    """Memory of this process; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def shard_status(shard: Shard, address: str, progress: CheckpointProgress | None) -> control_pb2.StatusReply:
    """Status of this shard, as psdctl shows it. `progress`: of its checkpoints, if it takes any."""
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
        uptime_s=now.uptime_s,
        version=psd.__version__,
        waits=[wait_status(shard, ticket) for ticket in now.waits],
        world_size=len(now.workers),
        min_clock=now.min_clock,
        workers=[worker_status(shard, worker) for worker in now.workers],
        **{name: getattr(now.counters, name) for name in COUNTERS},
        cpu_s=time.process_time(),
        memory_bytes=resident_bytes(),
        restarts=now.restarts,
        calls=call_statuses(now.counters),
    )
    if job is not None:
        reply.parameter_bytes = job.parameter_bytes
        reply.slot_bytes = job.slot_bytes
        reply.block_count = job.block_count
        reply.tensor_count = len(job.spec.tensors)
        reply.version_min = job.version_min
        reply.version_max = job.version_max
        reply.rounds = job.updates
        reply.consistency = str(job.spec.consistency)
        reply.reduction = job.spec.reduction
        reply.quorum = job.spec.quorum
        reply.aggregation = job.spec.aggregation
        reply.timeline = now.timeline
        reply.restored_from = now.restored_from
        reply.arena_bytes = job.arena.used_bytes
        reply.ages.extend(job.ages)
        if job.tables is not None:
            reply.tables.extend(control_pb2.TableStatus(**counts._asdict()) for counts in job.tables.counts)
        reply.state_dir = printable(str(now.directory))
    vectors = shard.vectors.status()
    if vectors.number:
        reply.vectors.CopyFrom(control_pb2.VectorStatus(**vectors._asdict()))
    if now.orders is not None:
        reply.learning_rates.extend(now.orders.learning_rates)
        reply.ends_at = now.orders.ends_at
    if progress is not None:
        reply.checkpoint_dir = printable(progress.location)  # the name of a file may be no text
        reply.checkpoint_last = progress.last
        reply.checkpoint_age_s = shard.age_s(progress.last_at) if progress.last else 0.0
        reply.checkpoint_bytes = progress.last_bytes
        reply.checkpoint_took_s = progress.last_took_s
        reply.checkpoint_error = printable(progress.error)
    return reply
