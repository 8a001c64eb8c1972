"""Texts about a job for people: waits as sentences, sizes and times in units. Must not know where they are shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from psd.v1 import control_pb2 as pb

GAP = 2
"""Blanks between two columns."""


def wait_text(wait: pb.Wait) -> str:
    """A sentence that says who waits, where and for whom."""
    return f"worker {wait.rank} waits {_wait_for(wait)}; so far {duration(wait.waited_s)}"


def waits_text(waits: Sequence[pb.Wait]) -> list[str]:
    """Sentences like those of `wait_text`, one for all workers that wait for the same."""
    groups: dict[tuple[object, ...], list[pb.Wait]] = {}
    for wait in waits:
        missing = tuple(sorted(worker.rank for worker in wait.missing))
        groups.setdefault((wait.kind, wait.name, wait.clock, missing), []).append(wait)
    return [_together(group) for group in groups.values()]


def _together(waits: Sequence[pb.Wait]) -> str:
    if len(waits) == 1:
        return wait_text(waits[0])
    longest = max(wait.waited_s for wait in waits)
    return f"workers {ranks_text([wait.rank for wait in waits])} wait {_wait_for(waits[0])}; so far {duration(longest)}"


def rate(per_s: float) -> str:
    """A rate, with only the significant digits."""
    return "-" if per_s == 0 else f"{per_s:.0f}" if per_s >= 100 else f"{per_s:.1f}" if per_s >= 1 else f"{per_s:.2g}"


def count_text(count: int, noun: str) -> str:
    """A count of something: 1 worker, 3 workers."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks in their order, neighbours together: 0-3, 7."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def _wait_for(wait: pb.Wait) -> str:
    what = {
        pb.WAIT_KIND_ROUND: f"in round {wait.clock}",
        pb.WAIT_KIND_EARLIER_ROUND: f"to push, until round {wait.clock} has closed,",
        pb.WAIT_KIND_STALENESS: f"at step {wait.clock}, for the staleness bound,",
        pb.WAIT_KIND_BARRIER: f"in barrier {wait.name!r}",
        pb.WAIT_KIND_INITIAL_VALUES: "for the initial values",
        pb.WAIT_KIND_CUT: f"to push at step {wait.clock}, until a checkpoint or a reader has got what was pushed before,",
    }.get(wait.kind, "")
    missing = ", ".join(_missing_text(worker) for worker in wait.missing) or "nobody in particular"
    return f"{what} for {missing}"


def _missing_text(worker: pb.WorkerStatus) -> str:
    if worker.last_seen_s < 0:
        return f"worker {worker.rank} (has not joined)"
    return f"worker {worker.rank} (last seen {duration(worker.last_seen_s)} ago, at step {worker.clock})"


def shard_state(reply: pb.StatusReply) -> tuple[str, str]:
    """The shard's state in a word; and the phase of its life cycle, if that says more."""
    state = pb.ShardState.Name(reply.state).removeprefix("SHARD_STATE_").lower()
    life = pb.LifeCycle.Name(reply.life).removeprefix("LIFE_CYCLE_").lower() if reply.life else state
    return state, "" if life == state else life


def worker_state(worker: pb.WorkerStatus) -> str:
    """The worker's state in a word."""
    return pb.WorkerState.Name(worker.state).removeprefix("WORKER_STATE_").lower()


def wait_kind(wait: pb.Wait) -> str:
    """The kind of a wait in a word."""
    return pb.WaitKind.Name(wait.kind).removeprefix("WAIT_KIND_").lower()


def aligned(rows: Sequence[Sequence[str]], is_left: Sequence[bool]) -> list[str]:
    """Rows as lines of aligned columns; the first row has the headings. is_left: True for columns of words."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        (" " * GAP)
        .join(cell.ljust(width) if left else cell.rjust(width) for cell, width, left in zip(row, widths, is_left, strict=True))
        .rstrip()
        for row in rows
    ]


def progress_text(clock: int, total: int, left_s: float | None) -> str:
    """The job's progress: 42% of 1000 steps, 3 min 20 s left. left_s: None: not known."""
    left = f", {duration(left_s)} left" if left_s is not None else ""
    return f"{min(1.0, clock / total):.0%} of {total} steps{left}"


def size(count: float) -> str:
    """Bytes for people: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"


def duration(seconds: float) -> str:
    """A time for people: 0.4 s, 12 s, 3 min 20 s, 5 h 7 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
