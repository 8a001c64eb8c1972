"""One picture of a job from the answers of its shards: as text for people, as JSON for programs.

Pure functions on psd.v1 messages. Knows neither how they were fetched and merged nor where the text goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message

from psd.cli.terminal import make_printable
from psd.contract.orders import orders_text
from psd.contract.printable import printable
from psd.v1 import control_pb2 as pb
from psd.watch.merging import Answer, job_clock, merged_waits, merged_workers, problems
from psd.watch.words import aligned, count_text, duration, shard_state, size, wait_text, worker_state

_NAMES_64_BIT = frozenset({"incarnation", "session"})


# -- JSON --


def as_json(answers: Sequence[Answer]) -> dict[str, Any]:
    """The object that psdctl status --help documents; later versions add keys and never change them."""
    replies = [answer.reply for answer in answers if answer.reply is not None]
    workers = merged_workers(replies)
    return {
        "servers": [answer.server for answer in answers],
        "shards": [
            {
                "server": answer.server,
                "error": None if answer.reply else {"code": answer.error_code, "message": answer.error_message},
                "status": None if answer.reply is None else _fields(answer.reply),
            }
            for answer in answers
        ],
        "workers": [_fields(worker) for worker in workers],
        "waits": [{**_fields(merged.wait), "shards": list(merged.shards)} for merged in merged_waits(replies)],
        "problems": problems(answers),
        "clock": job_clock(workers),
    }


def _fields(message: Message) -> dict[str, Any]:
    """All fields by name, zeros too, so that a program never has to ask whether a key is there."""
    return {field.name: _value(field, getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


def _value(field: Any, value: Any) -> Any:  # a FieldDescriptor, of which there are two unrelated classes
    if field.message_type is not None:
        return _fields(value) if isinstance(value, Message) else [_fields(item) for item in value]
    if field.enum_type is not None:
        return _enum_name(field.enum_type, value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return list(value)
    return str(value) if field.name in _NAMES_64_BIT else value


def _enum_name(enum: EnumDescriptor, number: int) -> str:
    known = enum.values_by_number.get(number)
    return known.name if known else str(number)


# -- text --


def as_text(answers: Sequence[Answer]) -> str:
    """Tables for people, without a final line end. What peers have named is made printable."""
    answers = [_printable(answer) for answer in answers]
    replies = [answer.reply for answer in answers if answer.reply is not None]
    workers = merged_workers(replies)
    waits = merged_waits(replies)
    clock = job_clock(workers)
    orders = [order for reply in replies for order in orders_text(reply.learning_rates, reply.ends_at, clock)]
    parts = ["\n".join([_job_line(replies, clock), *(f"order: {order}" for order in orders)]), _shard_table(answers)]
    if workers:
        parts.append(_worker_table(workers))
    if waits:
        parts.append("\n".join(wait_text(merged.wait) for merged in waits))
    if replies:
        parts.append(_traffic_table(replies))
    if any(reply.tables for reply in replies):
        parts.append(_tables_table(replies))
    if any(reply.HasField("vectors") for reply in replies):
        parts.append(_vectors_line(replies))
    if any(reply.ages for reply in replies):
        parts.append(_age_table(replies))
    if stored := [reply for reply in replies if reply.checkpoint_dir]:
        parts.append(_checkpoint_table(stored))
    if trouble := problems(answers):
        parts.append("\n".join(f"problem: {text}" for text in trouble))
    return "\n\n".join(parts)


def _printable(answer: Answer) -> Answer:
    reply = None
    if answer.reply is not None:
        reply = pb.StatusReply()
        reply.CopyFrom(answer.reply)
        make_printable(reply)
    return Answer(answer.server, reply, answer.error_code, printable(answer.error_message))


def _job_line(replies: Sequence[pb.StatusReply], clock: int) -> str:
    if not replies:
        return "no shard answered"
    declared = [reply for reply in replies if reply.consistency]
    run_id = next((reply.run_id for reply in replies if reply.run_id), "")
    if not declared:
        return f"run {run_id or '-'}: nothing declared yet"
    job = declared[0]
    quorum = f", quorum {job.quorum}" if 0 < job.quorum < job.world_size else ""
    restored = f", gone on from checkpoint {job.restored_from}" if job.restored_from else ""
    tables = f"{count_text(len(job.tables), 'table')}, " if job.tables else ""
    return (
        f"run {run_id}: {job.consistency}, {job.reduction}, {count_text(job.world_size, 'worker')}{quorum}, clock {clock}, "
        f"{count_text(job.tensor_count, 'tensor')}, {tables}"
        f"{size(sum(reply.parameter_bytes for reply in replies))} parameters, "
        f"{size(sum(reply.slot_bytes for reply in replies))} slots{restored}"
    )


def _shard_table(answers: Sequence[Answer]) -> str:
    rows: list[tuple[str, ...]] = [("SHARD", "ADDRESS", "STATE", "UP", "BLOCKS", "PARAMETERS", "SLOTS", "VERSION")]
    for index, answer in enumerate(answers):
        reply = answer.reply
        if reply is None:
            rows.append((f"{index}/{len(answers)}", answer.server, "no answer", *["-"] * 5))
            continue
        version = f"{reply.version_min}" if reply.block_count else "-"
        if reply.version_max != reply.version_min:
            version += f"..{reply.version_max}"
        rows.append(
            (
                f"{reply.shard_index}/{reply.shard_count}",
                reply.address or answer.server,
                ", ".join(filter(None, shard_state(reply))),
                duration(reply.uptime_s),
                f"{reply.block_count}",
                size(reply.parameter_bytes),
                size(reply.slot_bytes),
                version,
            )
        )
    return table(rows, left={0, 1, 2})


def _worker_table(workers: Sequence[pb.WorkerStatus]) -> str:
    rows = [("WORKER", "STATE", "CLOCK", "LAST SEEN", "PROCESS", "TRANSPORT")]
    for worker in workers:
        seen = "never" if worker.last_seen_s < 0 else f"{duration(worker.last_seen_s)} ago"
        process = f"{worker.host}:{worker.pid}" if worker.pid else "-"
        rows.append((f"{worker.rank}", worker_state(worker), f"{worker.clock}", seen, process, worker.transport or "-"))
    return table(rows, left={0, 1, 4, 5})


def _traffic_table(replies: Sequence[pb.StatusReply]) -> str:
    rows = [("SHARD", "PUSHES", "LATE", "DUPLICATE", "REFUSED", "PULLS", "UPDATES", "RECEIVED", "SENT")]
    rows += [
        (
            f"{reply.shard_index}/{reply.shard_count}",
            f"{reply.pushes_accepted}",
            f"{reply.pushes_late}",
            f"{reply.pushes_duplicate}",
            f"{reply.requests_refused}",
            f"{reply.pulls}",
            f"{reply.rounds}",
            size(reply.bytes_received),
            size(reply.bytes_sent),
        )
        for reply in replies
    ]
    return table(rows, left={0})


TABLE_COLUMNS = ("rows", "bytes", "reads", "hits", "created", "evicted", "expired", "removed", "refused", "unadmitted")
"""Fields of TableStatus that are shown."""


def _tables_table(replies: Sequence[pb.StatusReply]) -> str:
    """Tables of the job, each with its numbers on all shards together."""
    sums: dict[str, dict[str, int]] = {}
    for status in (status for reply in replies for status in reply.tables):
        total = sums.setdefault(status.name, dict.fromkeys(TABLE_COLUMNS, 0))
        for column in TABLE_COLUMNS:
            total[column] += getattr(status, column)
    rows = [("TABLE", *(column.upper() for column in TABLE_COLUMNS))]
    for name, total in sums.items():
        cells = (size(count) if column == "bytes" else f"{count}" for column, count in total.items())
        rows.append((name, *cells))
    return table(rows, left={0})


def _vectors_line(replies: Sequence[pb.StatusReply]) -> str:
    """The vectors, and what the shards have run: every shard runs every batch."""
    most = max(replies, key=lambda reply: reply.vectors.batches).vectors
    repeated = sum(reply.vectors.repeated for reply in replies)
    return (
        f"vectors: {max(reply.vectors.number for reply in replies)}, {size(sum(reply.vectors.bytes for reply in replies))}, "
        f"{most.batches} batches of {most.operations} operations, {repeated} answered again"
    )


def _age_table(replies: Sequence[pb.StatusReply]) -> str:
    """Numbers of gradients by the age at which they were applied; see StatusReply.ages."""
    columns = max(len(reply.ages) for reply in replies)
    names = [f"{index}" if index < 3 else f"{(1 << index - 2) + 1}-{1 << index - 1}" for index in range(columns)]
    rows = [("SHARD", "AGE", *names)]
    for reply in replies:
        counts = [f"{count}" for count in reply.ages] + ["0"] * (columns - len(reply.ages))
        rows.append((f"{reply.shard_index}/{reply.shard_count}", "", *counts))
    return table(rows, left={0, 1})


def _checkpoint_table(replies: Sequence[pb.StatusReply]) -> str:
    """Each shard's part of its last checkpoint; below it the last errors, each once for all shards that report it."""
    rows = [("SHARD", "CHECKPOINTS IN", "LAST", "AGE", "SIZE", "TOOK")]
    errors: dict[str, list[str]] = {}
    for reply in replies:
        shard = f"{reply.shard_index}/{reply.shard_count}"
        last = ("none yet", "-", "-", "-")
        if reply.checkpoint_last:
            age, took = duration(reply.checkpoint_age_s), duration(reply.checkpoint_took_s)
            last = (reply.checkpoint_last, age, size(reply.checkpoint_bytes), took)
        rows.append((shard, reply.checkpoint_dir, *last))
        if reply.checkpoint_error:
            errors.setdefault(reply.checkpoint_error, []).append(shard)
    lines = [f"checkpoint error of shard {', '.join(shards)}: {error}" for error, shards in errors.items()]
    return "\n".join([table(rows, left={0, 1, 2}), *lines])


def table(rows: Sequence[tuple[str, ...]], left: set[int]) -> str:
    """Rows in aligned columns, the first one being the headings; `left` are the columns of words."""
    return "\n".join(aligned(rows, [index in left for index in range(len(rows[0]))]))
