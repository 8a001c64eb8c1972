"""What a shard counts: latencies in buckets, errors by kind, how long rounds are open, and for whom."""

from __future__ import annotations

from pathlib import Path

import pytest
from shard_driver import Driver, job_spec

from psd.contract.errors import InvalidRequest, InvalidTensor, Overloaded, SessionFenced, WaitTimeout
from psd.rim.views import worker_numbers
from psd.state.counts import SECONDS, Counters, Histogram, LaneCounts
from psd.v1 import control_pb2


@pytest.mark.parametrize(
    ("value", "bucket"), [(0.0, 0), (SECONDS[0], 0), (0.0011, 1), (SECONDS[-1], len(SECONDS) - 1), (61.0, len(SECONDS))]
)
def test_a_bucket_holds_what_is_at_most_its_bound(value: float, bucket: int) -> None:
    """As Prometheus' `le` has it; what is above all bounds is counted, too."""
    histogram = Histogram()

    histogram.observe(value)

    assert [index for index, count in enumerate(histogram.counts) if count] == [bucket]
    assert histogram.total == value


def test_a_copy_does_not_change_with_the_original() -> None:
    """A scrape sees one instant."""
    counts = LaneCounts("tcp")
    counts.count_call("push", 1.0)
    before = counts.copy()

    counts.count_call("push", 1.0)
    counts.count_bytes(received=1, sent=2)

    assert (before.calls["push"].total, before.received_bytes, before.sent_bytes) == (1.0, 0, 0)


def test_errors_are_counted_by_reason_and_refusals_are_the_callers_own() -> None:
    """What the caller did wrong is a refusal; a fence, a wait and a limit are other things."""
    counters = Counters()
    for error in (InvalidTensor("x"), InvalidTensor("y"), Overloaded("x"), WaitTimeout("x"), SessionFenced("x")):
        counters.count_error(error)

    assert counters.errors["InvalidTensor", "INVALID_ARGUMENT"] == 2
    assert counters.errors["Overloaded", "RESOURCE_EXHAUSTED"] == 1
    assert sum(counters.errors.values()) == 5
    assert counters.requests_refused == 2 + (SessionFenced.code == "FAILED_PRECONDITION")


@pytest.mark.parametrize("aggregation", ["fast", "exact"])
def test_a_straggler_is_waited_for_from_the_rounds_first_gradient_to_its_own(aggregation: str) -> None:
    """Worker 1 comes 1 s after the first one, worker 2 5 s after it; that is whom the others waited for, and how long."""
    driver = Driver(job_spec(3, blocks=2, aggregation=aggregation))
    for after, seat in zip((0.0, 1.0, 4.0), driver.start(), strict=True):
        driver.time.value += after
        driver.push(seat, 0, 1.0)
    job = driver.core.declared()
    if aggregation == "exact":
        job.participant.follow([(0, 0b111)])

    assert [worker.awaited_s for worker in driver.core.members.workers] == [0.0, 1.0, 5.0]
    assert (job.round_times.total, sum(job.round_times.counts)) == (10.0, 2)
    assert job.open_rounds == 0


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_samples_behind_a_push_are_counted_once(mode: str) -> None:
    """Also if it comes again because its answer was lost."""
    driver = Driver(job_spec(2, blocks=2, mode=mode))
    first, second = driver.start()

    driver.push(first, 0, 1.0, weight=32.0)
    driver.push(second, 0, 1.0, weight=0.5)
    driver.push(first, 0, 1.0, weight=32.0)
    driver.push(first, 1, 1.0, weight=32.0)

    assert [worker.samples for worker in driver.core.members.workers] == [64.0, 0.5]


def test_a_worker_that_is_given_up_was_waited_for_until_then() -> None:
    """The round closes without it when its lease has run out, and it is charged with the time; one that had left is not."""
    driver = Driver(job_spec(3), lease_s=10.0)
    pushing, leaving, silent = driver.start()
    driver.leave(leaving)
    driver.shard.tick()
    driver.push(pushing, 0, 1.0)
    assert driver.core.declared().open_rounds == 1

    driver.expire(silent, keep=[pushing])

    workers = driver.core.members.workers
    assert [worker.awaited_s for worker in workers] == [0.0, 0.0, pytest.approx(11.0)]
    assert driver.core.counters.leases_expired == 1
    assert driver.core.declared().open_rounds == 0


def test_the_staleness_bound_charges_the_one_that_held_others_back() -> None:
    """Worker 0 is 2 steps ahead and waits at the gate for 3 s, until worker 1 has finished a step."""
    driver = Driver(job_spec(2, mode="ssp:1"))
    ahead, behind = driver.start()
    driver.push(ahead, 0, 1.0)
    driver.push(ahead, 1, 1.0)
    ticket = driver.shard.exchange.gate(driver.begin_push(ahead, 2), 2)
    assert ticket is not None
    driver.time.value += 3.0

    driver.push(behind, 0, 1.0)

    assert ticket.future.done()
    assert [worker.awaited_s for worker in driver.core.members.workers] == [0.0, 3.0]


def test_a_worker_says_how_far_its_transfer_is_until_it_comes_anew() -> None:
    """Nothing is known of the process that has its rank next."""
    driver = Driver()
    seat, _ = driver.start()

    def told() -> list[float]:
        found = worker_numbers(driver.shard, driver.worker(0))
        return [found[f"transfer_{name}"] for name in ("left_bytes", "bytes_per_s", "time_left_s")]

    moving = control_pb2.HeartbeatRequest(caller=seat.caller, transfer_left_bytes=6_000_000, transfer_bytes_per_s=1.5e6)
    driver.shard.admission.heartbeat(moving)
    assert told() == [6_000_000, 1.5e6, 4.0]
    driver.join(0)

    assert told() == [0, 0.0, 0.0]


@pytest.mark.parametrize("speed", [-1.0, float("nan"), float("inf")])
def test_a_speed_that_no_transfer_has_is_refused(speed: float) -> None:
    """The message names the field."""
    driver = Driver()
    seat, _ = driver.start()

    with pytest.raises(InvalidRequest, match="transfer_bytes_per_s: must be finite and >= 0"):
        driver.shard.admission.heartbeat(control_pb2.HeartbeatRequest(caller=seat.caller, transfer_bytes_per_s=speed))


def test_sessions_and_barriers_are_counted() -> None:
    """A rank that joins again is another session; a barrier that opens is one, however many are in it."""
    driver = Driver(job_spec(2))
    first, _ = driver.start()
    second = driver.join(1)

    driver.arrive(first)
    assert driver.core.barriers.opened_count == 0
    driver.arrive(second)

    assert driver.core.barriers.opened_count == 1
    assert driver.core.counters.sessions == 3


def test_a_shard_that_goes_on_with_an_arena_counts_that_as_a_restart(tmp_path: Path) -> None:
    """The number is in the arena, so that it survives the process that counted."""
    driver = Driver(job_spec(1), state_dir=str(tmp_path / "state"), run_id="r")
    (seat,) = driver.start()

    driver.restart(seat)
    driver.restart(seat)

    assert driver.core.declared().arena.word("restarts") == 2
