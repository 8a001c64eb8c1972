"""Sentences about workers and waits, the same in workers' logs, in errors and in psdctl."""

from __future__ import annotations

from psd.v1 import control_pb2

_NAMED_MAX = 5


def describe_worker(worker: control_pb2.WorkerStatus) -> str:
    """A worker in words, such as "worker 3, last seen 12 s ago, at step 40"."""
    if worker.last_seen_s < 0:
        return f"worker {worker.rank}, which has not joined yet"
    if worker.failed:
        return f"worker {worker.rank}, which failed {worker.last_seen_s:.0f} s ago, at step {worker.clock}"
    return f"worker {worker.rank}, last seen {worker.last_seen_s:.0f} s ago, at step {worker.clock}"


def describe_workers(workers: list[control_pb2.WorkerStatus]) -> str:
    """Several workers in words: the first few by name, the others as a number."""
    words = "; ".join(describe_worker(w) for w in workers[:_NAMED_MAX])
    more = len(workers) - _NAMED_MAX
    return words + (f"; and {more} more" if more > 0 else "") if words else "nobody any more"


def describe_wait(wait: control_pb2.Wait) -> str:
    """A wait in words, such as "step 41: waiting for worker 3, last seen 12 s ago, at step 40"."""
    missing = describe_workers(list(wait.missing))
    match wait.kind:
        case control_pb2.WAIT_KIND_BARRIER:
            return f"barrier {wait.name!r}: waiting for {missing}"
        case control_pb2.WAIT_KIND_INITIAL_VALUES:
            return f"waiting for the initial values from {missing}"
        case control_pb2.WAIT_KIND_STALENESS:
            return f"step {wait.clock}: too far ahead of the slowest; waiting for {missing}"
        case control_pb2.WAIT_KIND_CUT:
            return f"step {wait.clock}: a checkpoint, or a reader, is about to get what has been pushed; waiting for {missing}"
        case control_pb2.WAIT_KIND_EARLIER_ROUND:
            return f"step {wait.clock + 1}: step {wait.clock} is not complete; waiting for {missing}"
        case _:
            return f"step {wait.clock}: waiting for {missing}"
