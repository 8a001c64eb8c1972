"""The catalogue of the numbers that operators see: each has one row here, and one name everywhere.

A row has a number's name, kind and meaning, its place in a shard, its metric, its heading, and the tables in which it is a
column. From the rows are made: what a shard sends (`numbers` in proto/psd/v1/control.proto), its metrics, the tables of psdctl
status and top, every --json, the dashboard, and docs/reference/numbers.md. So a new number needs code that counts it, and a
row here.

Names are those of the field, and of a worker's connection if it has the number, too: clock (steps that a worker has finished),
version (updates of a block), rank, transport, received and sent. A name ends with its unit: `_bytes`, `_s` (seconds), `_share`
(1 is the whole), `_per_s`; without one it is a count. A heading has some words of the name; a metric has all, and Prometheus'
endings `_seconds` and `_total`.

Must not know shards, messages' services, or how anything is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from psd.contract.fact import Fact


def write(message: Any, numbers: Mapping[str, float]) -> None:
    """Put numbers into a message: into the field of the same name if there is one, else into `numbers`."""
    for name, value in numbers.items():
        if name in message.DESCRIPTOR.fields_by_name:
            setattr(message, name, value)
        else:
            message.numbers[name] = value


def read(message: Any, facts: Iterable[Fact]) -> dict[str, float]:
    """The numbers of `facts` that a message has, by name."""
    found = {}
    for fact in facts:
        if fact.name in message.DESCRIPTOR.fields_by_name:
            found[fact.name] = fact.of(getattr(message, fact.name))
        elif fact.name in message.numbers:
            found[fact.name] = fact.of(message.numbers[fact.name])
    return found


def by_name(facts: Sequence[Fact]) -> dict[str, Fact]:
    """Rows by their names."""
    return {fact.name: fact for fact in facts}


JOB = (
    Fact("clock", "now", "Clock of the slowest live worker: the job's step."),
    Fact("steps_per_s", "rate", "Growth of the job's clock.", rate_of="clock"),
    Fact("worker_steps_per_s", "rate", "Steps of all workers together."),
    Fact("samples_per_s", "rate", "Samples of all workers together; not known where no program says how many it has."),
    Fact("total_steps", "now", "Clock at which the job ends: by order, else as workers say by ps.log(total=...)."),
    Fact("time_left_s", "now", "Time until then, at the speed of the last two minutes."),
    Fact("world_size", "now", "Workers that the job is made for."),
    Fact("quorum", "now", "Workers whose gradients complete a round; 0: all."),
    Fact("timeline", "now", "How often the job has gone back to a checkpoint."),
    Fact("version", "now", "Newest version that all shards have; not known where nothing is trained."),
    Fact("version_age_s", "now", "Time since the last shard had it; without rounds not known."),
    Fact("parameter_bytes", "now", "Size of the parameters on all shards.", heading="parameters"),
    Fact("slot_bytes", "now", "Size of the state of the update rules on all shards.", heading="slots"),
    Fact("received_bytes_per_s", "rate", "Payload that all shards receive."),
    Fact("sent_bytes_per_s", "rate", "Payload that all shards send."),
)
"""Numbers of the whole job, computed from those of its shards and workers."""

SHARD = (
    Fact("uptime_s", "now", "Age of the shard's process.", "status", weight=40, table="shards"),
    Fact("updates_per_s", "rate", "Updates of blocks.", rate_of="updates", weight=90),
    Fact("latency_s", "rate", "Mean time of the slowest kind of call, waits for other workers included.", weight=85),
    Fact("cpu_share", "rate", "Processor cores in use: 200% are two.", heading="CPU", rate_of="cpu_s", weight=80),
    Fact("cpu_s", "total", "Processor time.", "process", "process_cpu_seconds_total", heading="CPU"),
    Fact(
        "memory_bytes", "now", "Memory of the process, with the arena.", "process", "process_resident_memory_bytes", weight=75
    ),
    Fact("received_bytes_per_s", "rate", "Payload received.", rate_of="received_bytes", weight=70),
    Fact("sent_bytes_per_s", "rate", "Payload sent.", rate_of="sent_bytes", weight=65),
    Fact("blocks", "now", "Blocks of the shard.", "job.block_count", weight=28, table="shards"),
    Fact(
        "parameter_bytes",
        "now",
        "Size of the shard's parameters.",
        "job",
        "psd_parameter_bytes",
        heading="parameters",
        weight=60,
        table="shards",
    ),
    Fact(
        "slot_bytes",
        "now",
        "Size of the state of its update rules.",
        "job",
        "psd_slot_bytes",
        heading="slots",
        weight=35,
        table="shards",
    ),
    Fact("tensors", "now", "Tensors of the job.", "job.tensor_count", weight=30),
    Fact("version_min", "now", "Updates of the block that lags furthest behind.", "trained", "psd_version_min"),
    Fact(
        "version_max",
        "now",
        "Updates of the block that is furthest ahead.",
        "trained",
        "psd_version_max",
        heading="version",
        weight=50,
        table="shards",
    ),
    Fact(
        "version_age_s",
        "now",
        "Time since a round of a block was closed; without rounds not known.",
        "rounds",
        "psd_version_age_seconds",
    ),
    Fact(
        "readers_seen", "now", "Readers that have asked for parameters in the last ten minutes.", "readers", "psd_readers_seen"
    ),
    Fact("reader_sent_bytes", "total", "Bytes sent to readers.", "readers", "psd_reader_sent_bytes_total"),
    Fact(
        "reader_fetch_s",
        "now",
        "Time for which the longest of the transfers to readers that are in progress takes already; 0: there is none.",
        "readers",
        "psd_reader_fetch_seconds",
    ),
    Fact("min_clock", "now", "Clock of the slowest live worker, as far as the shard knows.", "status"),
    Fact(
        "pushes_accepted",
        "total",
        "Pushes of which at least one block was counted.",
        "counters",
        'psd_pushes_total{result="accepted"}',
        heading="pushes accepted",
        table="traffic",
    ),
    Fact(
        "pushes_duplicate",
        "total",
        "Pushes of which every block had been counted before.",
        "counters",
        'psd_pushes_total{result="duplicate"}',
        heading="duplicate",
        table="traffic",
    ),
    Fact(
        "pushes_late",
        "total",
        "Pushes that came too late for their round: no block was counted, and at least one dropped.",
        "counters",
        'psd_pushes_total{result="late"}',
        heading="late",
        table="traffic",
    ),
    Fact("pulls", "total", "Pulls that were begun.", "counters", "psd_pulls_total", table="traffic"),
    Fact("updates", "total", "Updates, summed over the shard's blocks.", "job", "psd_updates_total", table="traffic"),
    Fact(
        "received_bytes",
        "total",
        "Payload received: gradients, initial values.",
        "counters",
        "psd_received_bytes_total{transport}",
        table="traffic",
    ),
    Fact("sent_bytes", "total", "Payload sent: parameters.", "counters", "psd_sent_bytes_total{transport}", table="traffic"),
    Fact(
        "saved_bytes",
        "total",
        "Payload that was neither received nor sent, since it was compressed.",
        "counters",
        "psd_saved_bytes_total{transport}",
        table="traffic",
    ),
    Fact(
        "requests_refused",
        "total",
        "Requests that ended in an error of the caller's; psd_request_errors_total has every error by its reason.",
        "counters",
        heading="refused",
        weight=20,
        table="traffic",
    ),
    Fact("in_calls_share", "rate", "Part of a worker's time that it spends in calls at this shard."),
    Fact("restarts", "total", "Processes that have gone on with this arena.", "status", "psd_shard_restarts_total"),
    Fact("timeline", "now", "How often the job has gone back to a checkpoint.", "status", "psd_timeline"),
    Fact("open_rounds", "now", "Blocks with gradients of a round that has not closed.", "job", "psd_open_rounds"),
    Fact("barriers_opened", "total", "Openings of barriers.", "status", "psd_barriers_opened_total"),
    Fact("leases_expired", "total", "Workers that were silent for too long.", "counters", "psd_worker_leases_expired_total"),
    Fact("sessions", "total", "Joins of workers, of those that came back, too.", "counters", "psd_worker_sessions_total"),
    Fact("arena_used_bytes", "now", "Memory used by the arena.", "arena.used_bytes", "psd_arena_used_bytes"),
    Fact("arena_spare_bytes", "now", "Free pages in the arena.", "arena.spare_bytes", "psd_arena_spare_bytes"),
    Fact(
        "arena_pinned_bytes",
        "now",
        "Pages being written, and old versions that readers hold.",
        "arena.held_bytes",
        "psd_arena_pinned_bytes",
    ),
    Fact("vectors", "now", "Server-side vectors.", "vectors.number", "psd_vectors", table="vectors"),
    Fact("vector_bytes", "now", "Size of the shard's part of them.", "vectors.bytes", "psd_vector_bytes", table="vectors"),
    Fact(
        "vector_batches",
        "total",
        "Batches of operations on vectors that were run.",
        "vectors.batches",
        'psd_vector_batches_total{result="run"}',
        table="vectors",
    ),
    Fact(
        "vector_batches_repeated",
        "total",
        "Batches that came again, and were only answered.",
        "vectors.repeated",
        'psd_vector_batches_total{result="repeated"}',
        table="vectors",
    ),
    Fact(
        "vector_operations",
        "total",
        "Operations of the batches that were run.",
        "vectors.operations",
        "psd_vector_operations_total",
        table="vectors",
    ),
    Fact(
        "checkpoints", "total", "Checkpoints of which it has stored its part.", "checkpoints.written", "psd_checkpoints_total"
    ),
    Fact(
        "checkpoint_failures", "total", "Checkpoints that failed here.", "checkpoints.failed", "psd_checkpoint_failures_total"
    ),
    Fact("checkpoint_age_s", "now", "Time since the last part was stored.", "checkpoint.age_s", table="checkpoints"),
    Fact(
        "checkpoint_timestamp_s",
        "now",
        "When that was, in seconds since 1970.",
        "checkpoint.timestamp_s",
        "psd_checkpoint_timestamp_seconds",
    ),
    Fact("checkpoint_bytes", "now", "Size of the last part.", "checkpoint.bytes", "psd_checkpoint_bytes", table="checkpoints"),
    Fact(
        "checkpoint_took_s",
        "now",
        "Time that it took to store it.",
        "checkpoint.took_s",
        "psd_checkpoint_took_seconds",
        table="checkpoints",
    ),
)
"""Numbers of one shard, since its process began. It omits those that do not exist yet, such as the age of a checkpoint before
the first."""

WORKER = (
    Fact("clock", "now", "Steps that the worker has finished.", "worker", "psd_worker_clock{rank}", weight=90, table="workers"),
    Fact("steps_per_s", "rate", "Growth of its clock.", rate_of="clock", weight=85),
    Fact("behind", "now", "Steps behind the foremost worker.", weight=70, table="workers"),
    Fact(
        "samples",
        "total",
        "Samples behind its gradients, as the program says by batch_size= or weight=; a push without counts as one.",
        "worker",
        "psd_worker_samples_total{rank}",
    ),
    Fact("samples_per_s", "rate", "Growth of its samples.", rate_of="samples"),
    Fact("awaited_share", "rate", "Part of the time that others have waited for it.", rate_of="awaited_s", weight=80),
    Fact(
        "awaited_s",
        "total",
        "How long others have waited for it: in rounds, after their first gradient; else, while it held them at the bound.",
        "worker",
        "psd_worker_awaited_seconds_total{rank}",
        table="workers",
    ),
    Fact(
        "last_seen_s",
        "now",
        "Time since the worker was last heard from; below 0: never.",
        "seen",
        "psd_worker_last_seen_seconds{rank}",
        weight=75,
        table="workers",
    ),
    Fact(
        "transfer_left_bytes",
        "now",
        "What its present call to the shard has yet to send and to receive, as of its last heartbeat.",
        "worker",
        weight=54,
        table="workers",
    ),
    Fact("transfer_bytes_per_s", "rate", "Speed of that call so far, in both directions together.", "worker", weight=53),
    Fact("transfer_time_left_s", "now", "Time that it will still take at this speed.", "worker", weight=52, table="workers"),
    Fact(
        "local_steps",
        "now",
        "Local steps of a learner, as of its last exchange.",
        "learner.note.steps",
        "psd_learner_local_steps{rank}",
        weight=68,
        table="learners",
    ),
    Fact(
        "tokens",
        "now",
        "Samples or tokens from which it has learned, by then.",
        "learner.note.tokens",
        "psd_learner_tokens{rank}",
        weight=66,
        table="learners",
    ),
    Fact(
        "local_step_s",
        "now",
        "Time that one of its steps takes.",
        "learner.note.step_s",
        "psd_learner_local_step_seconds{rank}",
        weight=64,
        table="learners",
    ),
    Fact(
        "base_age",
        "now",
        "Exchanges of the job between the parameters that its last difference is from, and that difference.",
        "learner",
        "psd_learner_base_age{rank}",
        weight=62,
        table="learners",
    ),
    Fact(
        "merge_percent",
        "now",
        "Part of its difference in the last merge that has it, by weight; 100 is the whole.",
        "learner",
        "psd_learner_merge_percent{rank}",
        weight=58,
        table="learners",
    ),
    Fact(
        "merge_cosine_percent",
        "now",
        "How far the directions of that merge agreed, by the mean cosine of two: 0 if they are orthogonal. By direction alone.",
        "learner",
        "psd_learner_merge_cosine_percent{rank}",
        weight=57,
        table="learners",
    ),
    Fact(
        "rounds_missed",
        "total",
        "Rounds that were decided without its difference, since it first sent one.",
        "learner",
        "psd_learner_rounds_missed_total{rank}",
        weight=56,
        table="learners",
    ),
)
"""Numbers of one worker; those of a learner are known by shard 0. If shards differ, the largest is taken: a shard without
blocks is told of no steps."""

TABLE = (
    Fact("rows", "now", "Rows.", "table", "psd_table_rows{table}"),
    Fact("bytes", "now", "Size of the rows, with slots and index.", "table", "psd_table_bytes{table}"),
    Fact("reads", "total", "Rows that were asked for.", "table", "psd_table_reads_total{table}"),
    Fact("hits", "total", "Rows that were asked for and there: not computed.", "table", "psd_table_hits_total{table}"),
    Fact("created", "total", "Rows that were created.", "table", "psd_table_rows_created_total{table}"),
    Fact(
        "evicted",
        "total",
        "Rows that were removed because others needed their place.",
        "table",
        'psd_table_rows_removed_total{table, reason="evicted"}',
    ),
    Fact(
        "expired",
        "total",
        "Rows that were removed because nobody had used them for so long.",
        "table",
        'psd_table_rows_removed_total{table, reason="expired"}',
    ),
    Fact(
        "removed",
        "total",
        "Rows that were removed on request.",
        "table",
        'psd_table_rows_removed_total{table, reason="removed"}',
    ),
    Fact(
        "refused",
        "total",
        "Gradients for new rows that were dropped, since there was no place.",
        "table",
        'psd_table_gradients_dropped_total{table, reason="refused"}',
    ),
    Fact(
        "unadmitted",
        "total",
        "Gradients that were dropped, since their ids had not been seen often enough.",
        "table",
        'psd_table_gradients_dropped_total{table, reason="unadmitted"}',
    ),
)
"""Numbers of one table: on one shard in metrics, on all shards together elsewhere. Counted since the table was made; reads and
hits since the process began."""

READER = (
    Fact(
        "version",
        "now",
        "Version of the parameters that it was sent last; where shards differ, the smallest.",
        "reader",
        weight=90,
    ),
    Fact("behind", "now", "Versions that have come since.", weight=85),
    Fact("lag_s", "now", "Time since it was sent its version, if there is a newer one.", weight=80),
    Fact("age_s", "now", "Time since it was sent its version.", "seen"),
    Fact("reads", "total", "Versions that it was sent.", "reader", weight=60),
    Fact("sent_bytes", "total", "Bytes that it was sent.", "reader", weight=70),
    Fact("sent_bytes_per_s", "rate", "Bytes that it is sent.", rate_of="sent_bytes", weight=65),
    Fact(
        "fetch_s", "now", "Time that the transfer to it takes, or the last one took; of the slowest shard.", "seen", weight=75
    ),
    Fact("last_seen_s", "now", "Time since it asked for something, or had its answer.", "seen", weight=72),
    Fact("relayed_readers", "now", "Readers that it serves in turn; only of a relay.", "reader", heading="relayed", weight=62),
)
"""Numbers of one reader. Counted for as long as it is remembered. Readers have no metrics each: they choose their names."""

RELAY = (
    Fact("version", "now", "Version that it has.", "relay"),
    Fact("behind", "now", "Newer versions that its servers have told of.", "relay", "psd_relay_behind"),
    Fact("age_s", "now", "Time for which it has had its version.", "relay", "psd_relay_age_seconds"),
    Fact("heard_s", "now", "Time since its servers last answered; below 0: never.", "relay", "psd_relay_heard_seconds"),
    Fact("readers", "now", "Readers that wait for a version, or fetch one.", "relay", "psd_relay_readers"),
    Fact("versions", "total", "Versions that it has fetched.", "relay", "psd_relay_versions_total"),
)
"""Numbers of a relay, beside those that it has as a shard has them. In metrics its shard is called "relay"."""

CATALOGUE: dict[str, Sequence[Fact]] = {
    "job": JOB,
    "shard": SHARD,
    "worker": WORKER,
    "table": TABLE,
    "reader": READER,
    "relay": RELAY,
}
