"""The meaning of a snapshot, in words: whether the job trains, what limits it, who is slow, which readers lag.

Pure functions on snapshots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from psd.watch.snapshot import JobSnapshot, ReaderSnapshot, WorkerSnapshot
from psd.watch.words import count_text, duration, ranks_text

SLOW_SHARE = 0.1
"""A worker is slow if others wait for it for more than this part of the time,"""

SLOW_RATE = 0.7
"""or makes fewer than this part of the median worker's steps, where workers do not keep step;"""

CALLS_SHARE = 0.5
"""and calls to the shards are the limit if workers spend more than this part of their time in them."""

_LAGGING = ("stuck", "behind")
"""States of readers that need attention, the worst first."""

_LIVE = "live"
_GONE = ("finished", "expired", "failed")


def diagnosed(now: JobSnapshot) -> JobSnapshot:
    """The snapshot, with its state, headline, limit and slow workers filled in."""
    state, headline = _state(now)
    lagging = tuple(map(_lag, sorted(filter(is_lagging, now.readers), key=lag_order)))
    now = replace(now, state=state, headline=headline, slow=_slow(now.workers), lagging=lagging)
    return replace(now, limit=_limit(now) if state in ("training", "waiting") else "")


def _state(now: JobSnapshot) -> tuple[str, str]:
    silent = [shard.index for shard in now.shards if shard.state == "no answer"]
    workers = now.workers
    live = [worker for worker in workers if worker.state == _LIVE]
    if workers and all(worker.state == "finished" for worker in workers):  # then the shards end, too
        return "finished", f"Finished at step {now.clock}"
    if len(silent) == len(now.shards):
        known = f": the job has ended, or they are away; last seen at step {now.clock}"
        return "unreachable", f"No shard answers{known if workers else ''}"
    if silent:
        return "waiting", f"{_noun('Shard', silent)} {'does' if len(silent) == 1 else 'do'} not answer"
    relays = [shard.relay for shard in now.shards if shard.relay is not None]
    if relays and not now.consistency:
        versions = [relay.version for relay in relays if "version" in relay.numbers]
        return "looking", f"A relay, at version {max(versions)}" if versions else "A relay that has no version yet"
    if not now.consistency:
        return "starting", "Nothing is declared yet"
    if any(worker.steps_per_s > 0 for worker in live):
        return "training", f"Training, step {now.clock}"
    if workers and all(worker.state in _GONE for worker in workers):
        return "stalled", "No worker is left"
    if now.waiting:
        return "waiting", "Waiting"
    if not any(worker.clock for worker in workers):
        return "starting", "No step is made yet"
    if not now.has_rates:
        return "looking", f"At step {now.clock}"
    return "stalled", f"No step for some time, at step {now.clock}"


def is_lagging(reader: ReaderSnapshot) -> bool:
    """True of a reader that needs attention."""
    return reader.state in _LAGGING


def lag_order(reader: ReaderSnapshot) -> tuple[int, int, str]:
    """Place of a reader in the order in which those that lag most come first: what to sort by."""
    rank = _LAGGING.index(reader.state) if is_lagging(reader) else len(_LAGGING)
    return rank, -reader.behind, reader.name


def _lag(reader: ReaderSnapshot) -> str:
    behind = f"{count_text(reader.behind, 'version')} behind"
    serves = f"; {count_text(reader.relayed_readers, 'reader')} read through it" if reader.relayed_readers else ""
    if reader.state == "stuck":
        return (
            f"reader {reader.name} is stuck: a transfer to it has taken {duration(reader.fetch_s)}, and it is {behind}{serves}"
        )
    return f"reader {reader.name} is {behind}, and has not asked for {duration(reader.last_seen_s)}{serves}"


def _slow(workers: Sequence[WorkerSnapshot]) -> tuple[int, ...]:
    live = [worker for worker in workers if worker.state == _LIVE]
    if len(live) < 2:
        return ()
    usual = median(worker.steps_per_s for worker in live)
    return tuple(
        worker.rank
        for worker in sorted(live, key=lambda worker: -worker.awaited_share)
        if worker.awaited_share > SLOW_SHARE or worker.steps_per_s < SLOW_RATE * usual
    )


def _limit(now: JobSnapshot) -> str:
    silent = [shard.index for shard in now.shards if shard.state == "no answer"]
    if silent:
        return f"Workers wait until {_noun('shard', silent)} {'is' if len(silent) == 1 else 'are'} back"
    by_rank = {worker.rank: worker for worker in now.workers}
    if now.slow:
        worst = by_rank[now.slow[0]]
        if worst.awaited_share > SLOW_SHARE:
            return f"Others wait for worker {worst.rank} {worst.awaited_share:.0%} of the time"
        return f"{_noun('Worker', now.slow)} {'is' if len(now.slow) == 1 else 'are'} slower than the others"
    if now.state == "waiting" and now.waiting:
        return now.waiting[0][0].upper() + now.waiting[0][1:]
    busiest = max(now.shards, key=lambda shard: shard.in_calls_share)
    if busiest.in_calls_share > CALLS_SHARE:
        return f"Workers spend {busiest.in_calls_share:.0%} of their time in calls, most of it at shard {busiest.index}"
    return f"The workers' own computing: they spend {busiest.in_calls_share:.0%} of their time in calls"


def _noun(noun: str, numbers: Sequence[int]) -> str:
    return f"{noun} {numbers[0]}" if len(numbers) == 1 else f"{noun}s {ranks_text(numbers)}"
