"""Combines the answers of a job's shards.

Pure functions on psd.v1 messages. If shards report different states of a worker, the worst one counts, because that is what the
user needs to see. Of its clocks the largest one counts, because a shard learns of a step only from a push, and a shard without
blocks gets none. Must not know how the answers were fetched, nor how they are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from psd.v1 import control_pb2 as pb

_WORST_FIRST = (
    pb.WORKER_STATE_EXPIRED,
    pb.WORKER_STATE_ABSENT,
    pb.WORKER_STATE_LIVE,
    pb.WORKER_STATE_FINISHED,
    pb.WORKER_STATE_UNSPECIFIED,
)


_OF_READERS: dict[str, Callable[[list[float]], float]] = {
    "version": min,
    "age_s": min,
    "reads": max,
    "sent_bytes": sum,
    "fetch_s": max,
    "last_seen_s": min,
    "relayed_readers": max,
}
"""Functions by which the numbers of a reader at several shards become one."""


@dataclass(frozen=True)
class Answer:
    """The answer from one address: a reply, or the name and the text of an error."""

    server: str
    reply: pb.StatusReply | None
    error_code: str = ""
    error_message: str = ""


@dataclass(frozen=True)
class MergedWait:
    """A wait of one worker; several shards may report it."""

    wait: pb.Wait
    shards: tuple[int, ...]


def reason(answer: Answer) -> str:
    """The reason why a shard has not answered, without gRPC's long report of its attempts to connect."""
    message = answer.error_message
    return f"{answer.error_code}, {message.rpartition(': ')[2] if message.startswith('failed to connect') else message}"


def problems(answers: Sequence[Answer]) -> list[str]:
    """Reasons why the answers are incomplete or do not fit together; empty if all shards of one job have answered."""
    silent = [f"{answer.server} did not answer: {reason(answer)}" for answer in answers if answer.reply is None]
    lost = [f"{a.server}: {a.reply.relay.problem}" for a in answers if a.reply is not None and a.reply.relay.problem]
    return silent + misfits(answers) + lost


def misfits(answers: Sequence[Answer]) -> list[str]:
    """Problems with shards that have answered, but are not the shards of one job in their order."""
    found = []
    replies = [(a.server, a.reply) for a in answers if a.reply is not None]
    for index, answer in enumerate(answers):
        reply = answer.reply
        is_shard = reply is not None and not reply.HasField("relay")  # a relay stands for all shards
        if reply is not None and is_shard and (reply.shard_index, reply.shard_count) != (index, len(answers)):
            found.append(
                f"{answer.server} is shard {reply.shard_index}/{reply.shard_count}, but was given as {index}/{len(answers)}"
            )
    runs = {reply.run_id: server for server, reply in replies if reply.run_id}
    if len(runs) > 1:
        found.append("the shards serve different runs: " + ", ".join(f"{server} {run!r}" for run, server in runs.items()))
    return found


def merged_workers(replies: Iterable[pb.StatusReply]) -> list[pb.WorkerStatus]:
    """Each worker once, by rank: the worst state, the largest clock, the longest silence, all its lanes."""
    merged: dict[int, pb.WorkerStatus] = {}
    for reply in replies:
        for worker in reply.workers:
            other = merged.get(worker.rank)
            if other is None:
                merged[worker.rank] = pb.WorkerStatus()
                merged[worker.rank].CopyFrom(worker)
                continue
            other.state = min(other.state, worker.state, key=_WORST_FIRST.index)
            other.clock = max(other.clock, worker.clock)
            never = other.last_seen_s < 0 or worker.last_seen_s < 0
            other.last_seen_s = -1.0 if never else max(other.last_seen_s, worker.last_seen_s)
            other.host, other.pid = other.host or worker.host, other.pid or worker.pid
            other.session = max(other.session, worker.session)
            for name, value in worker.numbers.items():
                other.numbers[name] = max(other.numbers[name], value)
            other.failed = other.failed or worker.failed
            other.transport = _transports(other.transport, worker.transport)
    return [merged[rank] for rank in sorted(merged)]


def merged_readers(replies: Iterable[pb.StatusReply]) -> list[pb.ReaderStatus]:
    """Each reader once, in the order in which they came: the smallest version, the latest news, the sum of the bytes."""
    merged: dict[int, pb.ReaderStatus] = {}
    for reader in (reader for reply in replies for reader in reply.readers):
        other = merged.get(reader.id)
        if other is None:
            merged[reader.id] = pb.ReaderStatus()
            merged[reader.id].CopyFrom(reader)
            continue
        other.is_waiting, other.is_fetching = other.is_waiting or reader.is_waiting, other.is_fetching or reader.is_fetching
        other.transport = _transports(other.transport, reader.transport)
        for name, combined in _OF_READERS.items():
            if name in reader.numbers:
                known = [other.numbers[name]] if name in other.numbers else []
                other.numbers[name] = combined([*known, reader.numbers[name]])
    return list(merged.values())


def _transports(merged: str, other: str) -> str:
    """The different ones, in the order in which they came."""
    return ", ".join(dict.fromkeys(filter(None, (*merged.split(", "), other))))


def job_clock(workers: Sequence[pb.WorkerStatus]) -> int:
    """Clock of the slowest live worker; if none lives, how far the job has got. workers: the merged ones."""
    live = [worker.clock for worker in workers if worker.state == pb.WORKER_STATE_LIVE]
    return min(live) if live else max((worker.clock for worker in workers), default=0)


def merged_waits(replies: Iterable[pb.StatusReply]) -> list[MergedWait]:
    """Each wait once, by rank, with the shards that report it and the workers that are missing on any of them."""
    waits: dict[tuple[int, int, str, int], pb.Wait] = {}
    shards: dict[tuple[int, int, str, int], list[int]] = {}
    for reply in replies:
        for wait in reply.waits:
            key = (wait.rank, wait.kind, wait.name, wait.clock)
            merged = waits.setdefault(key, pb.Wait(rank=wait.rank, kind=wait.kind, name=wait.name, clock=wait.clock))
            merged.waited_s = max(merged.waited_s, wait.waited_s)
            ranks = {worker.rank for worker in merged.missing}
            merged.missing.extend(worker for worker in wait.missing if worker.rank not in ranks)
            shards.setdefault(key, []).append(reply.shard_index)
    return [MergedWait(waits[key], tuple(shards[key])) for key in sorted(waits)]
