"""Armed steps as a stranger sees them: raw sockets and structures, right and wrong ones. No psd_client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from raw_steps import CASE, LANES, REVOKED, Again, Done, StepWorker, armed

from psd.contract.errors import PsdError
from psd.contract.wire import PREFIX, Disconnected, Kind
from psd.v1 import bulk_pb2


@pytest.mark.parametrize("mode", ["async", "sync", "ssp"])
@pytest.mark.parametrize("lane", LANES)
def test_steps_do_what_pushes_do(start: Callable[..., StepWorker], mode: str, lane: str) -> None:
    """Over each lane and in each mode: counts, versions and parameters are those of push_pull."""
    worker = start(lane=lane, mode=mode)
    found = worker.push_pull((1, 2), 0)
    assert found == Done(1, 2, 0, [1, 1], [[-1.0] * 3, [-2.0] * 3])
    assert worker.offer is not None

    for clock in range(1, 6):
        assert worker.step((1, 2), clock) == Done(
            clock + 1, 2, 0, [clock + 1] * 2, [[-1.0 - clock] * 3, [-2.0 - 2 * clock] * 3]
        )

    assert worker.push_pull((1, 2), 6).parameters == [[-7.0] * 3, [-14.0] * 3], "and pushes what steps do"


def test_a_step_that_comes_again_counts_once(start: Callable[..., StepWorker]) -> None:
    """As a step and as a push."""
    worker = armed(start, mode="async")
    first = worker.step((1, 2), 1)

    assert worker.step((1, 2), 1) == Done(2, 0, 2, [2, 2], first.parameters)
    assert worker.push_pull((1, 2), 1) == Done(2, 0, 2, [2, 2], first.parameters)


def test_nothing_is_offered_to_who_does_not_ask(start: Callable[..., StepWorker]) -> None:
    """Old workers see no difference."""
    worker = start(mode="async")

    worker.push_pull((1, 2), 0, wants=False)

    assert worker.offer is None


def test_nothing_is_offered_by_a_shard_that_never_arms(start: Callable[..., StepWorker]) -> None:
    """--never-armed takes all pushes the long way."""
    worker = start(mode="async", config={"never_armed": True})

    worker.push_pull((1, 2), 0)

    assert worker.offer is None


@pytest.mark.parametrize("fields", [{"part": 1}, {"held": [0, 0]}, {"norms": [1.0]}], ids=str)
def test_nothing_is_offered_after_a_push_with_what_steps_do_not_have(
    start: Callable[..., StepWorker], fields: dict[str, Any]
) -> None:
    """Such a worker's next push mostly has it, too."""
    worker = start(mode="async")

    if "held" in fields:
        with pytest.raises(PsdError):
            worker.push_pull((1, 2), 0, **fields)
    else:
        worker.push_pull((1, 2), 0, **fields)

    assert worker.offer is None


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ({"epoch": 0}, REVOKED),
        ({"epoch": 1}, REVOKED),
        ({"session": 0}, CASE),
        ({"session": (1 << 64) - 1}, CASE),
        ({"flags": 4}, CASE),
        ({"place": 1}, CASE),
        ({"weight": float("nan")}, CASE),
        ({"weight": -1.0}, CASE),
        ({"weight": 1e16}, CASE),
        ({"since": 3}, CASE),
        ({"scalars": (-1.0, 0, 0, 0)}, CASE),
        ({"scalars": (float("nan"), 0, 0, 0)}, CASE),
        ({"scalars": (1e39, 0, 0, 0)}, CASE),
        ({"scalars": (1.0, 0.5, 0, 0)}, CASE),  # without the flag "momentum"
        ({"versions": (1, 7)}, CASE),
    ],
    ids=str,
)
def test_what_a_step_may_not_say_is_left_to_the_long_way(
    start: Callable[..., StepWorker], named: dict[str, Any], reason: int
) -> None:
    """And that goes on as if nothing had been."""
    worker = armed(start, mode="async")

    assert worker.step((1, 1), 1, **named) == Again(reason)

    is_half = "versions" in named  # the first block has counted it, which the push made in its place says itself
    assert worker.push_pull((1, 1), 1) == Done(2, 2, 0, [2, 2], [[-2.0] * 3, [-2.0] * 3])
    assert worker.offer is None or reason == REVOKED or is_half, "the next offer waits for a push more"
    status = start.shard.status().counters  # type: ignore[attr-defined]
    assert (status.pushes_accepted, status.pushes_duplicate) == (2, 0)


@pytest.mark.parametrize(("mode", "clock"), [("async", 2), ("async", 1 << 63), ("sync", 0), ("sync", 2), ("ssp", 5)])
def test_early_and_late_steps_are_left_to_the_long_way(start: Callable[..., StepWorker], mode: str, clock: int) -> None:
    """Waits and errors are Python's."""
    worker = armed(start, mode=mode)

    assert worker.step((1, 1), clock) == Again(CASE)
    assert worker.push_pull((1, 1), 1).counted == 2


def test_scalars_weights_and_what_is_present_are_each_steps_own(start: Callable[..., StepWorker]) -> None:
    """They are in each message, and count as in a push."""
    worker = armed(start, mode="async")

    assert worker.step((1, 1), 1, scalars=(0.5, 0, 0, 0)).parameters == [[-1.5] * 3] * 2
    assert worker.step((1, 1), 2, weight=0.0) == Done(3, 2, 0, [3, 3], [[-1.5] * 3] * 2)
    assert worker.step((1, 1), 3, present=(b"\1", b"\0")) == Done(4, 2, 0, [4, 4], [[-2.5] * 3, [-1.5] * 3])
    assert start.shard.status().workers[0].samples == 3.0  # type: ignore[attr-defined]


def test_an_epoch_is_of_one_connection_and_one_offer(start: Callable[..., StepWorker]) -> None:
    """Another connection of the same worker, and another offer, are others."""
    worker = armed(start, mode="async")
    offer = worker.offer
    worker.push_pull((1, 1), 1)
    assert worker.offer.epoch != offer.epoch
    worker.offer = offer
    assert worker.step((1, 1), 2) == Again(REVOKED)

    worker.push_pull((1, 1), 2)
    offer, before = worker.offer, worker.stream
    worker.open()
    before.close()
    worker.offer = offer
    assert worker.step((1, 1), 3) == Again(REVOKED), "nothing was offered on this connection"
    assert worker.push_pull((1, 1), 3).counted == 2


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize(("front", "payload"), [(-8, 0), (8, 0), (0, 8), (0, -8), (1 << 31, 0), (0, 1 << 40)])
def test_a_step_of_another_size_ends_the_connection(
    start: Callable[..., StepWorker], lane: str, front: int, payload: int
) -> None:
    """The two sides no longer agree on where a message begins; the next connection is as good as ever."""
    worker = armed(start, mode="async", lane=lane)
    head_bytes, nbytes = worker.offer.head_bytes + front, worker.offer.gradient_bytes + payload
    if nbytes < 0:
        pytest.skip("it has no payload")

    worker.stream.socket.sendall(PREFIX.pack(Kind.STEP, head_bytes, nbytes))

    with pytest.raises(PsdError, match="step: has another size than was offered"):
        worker.end_step()
    with pytest.raises(Disconnected):
        worker.stream.receive()
    worker.stream.close()
    worker.open()
    assert worker.push_pull((1, 1), 1).counted == 2


def test_a_step_that_was_never_offered_is_answered_again(start: Callable[..., StepWorker]) -> None:
    """It is read over, and the connection goes on."""
    worker = start(mode="async")

    worker.stream.send(Kind.STEP, b"x" * 48, b"y" * 100_000)

    worker.offer = bulk_pb2.StepOffer()
    assert worker.end_step() == Again(REVOKED)
    assert worker.push_pull((1, 1), 0).counted == 2
    worker.stream.socket.sendall(PREFIX.pack(Kind.STEP, 4, 1 << 40))


def test_a_step_may_come_in_pieces_and_with_the_next_message(start: Callable[..., StepWorker]) -> None:
    """Where a message ends its size says, not the network."""
    worker = armed(start, mode="async")
    whole = worker.packed((1, 1), 1) + worker.packed((1, 1), 2)

    for at in range(0, len(whole), 7):
        worker.stream.socket.sendall(whole[at : at + 7])

    assert worker.end_step() == Done(2, 2, 0, [2, 2], [[-2.0] * 3] * 2)
    assert worker.end_step() == Done(3, 2, 0, [3, 3], [[-3.0] * 3] * 2)
    worker.begin_step((1, 1), 3)
    worker.begin_call((1, 1), 4)
    assert worker.end_step() == Done(4, 2, 0, [4, 4], [[-4.0] * 3] * 2)
    assert worker.end_call() == Done(5, 2, 0, [5, 5], [[-5.0] * 3] * 2)
