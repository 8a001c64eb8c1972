"""Synchronous rounds: who counts, when they close, and what comes out, with injected time and hand-computed numbers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from shard_driver import Driver, job_spec

from psd.contract.errors import InvalidRequest, InvalidTensor, NonFiniteGradient, ScalarsDisagree
from psd.state.tickets import Ticket, WaitKind


def test_a_round_closes_with_the_last_worker_and_applies_the_mean():
    """lr 1, gradients 2 and 4: the parameters become -3 once both are there, not before."""
    driver = Driver()
    a, b = driver.start()

    driver.push(a, 0, 2.0)
    assert driver.values() == [0.0] * 3
    reply = driver.push(b, 0, 4.0)

    assert driver.values() == [-3.0] * 3
    assert (reply.clock, reply.blocks_counted, driver.version()) == (1, 1, 1)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_mean_is_weighted_by_samples(order):
    """Weights 1, 2, 5 and gradients 8, 4, 0.8: the mean is (8 + 8 + 4) / 8, whoever closes the round."""
    driver = Driver(job_spec(3))
    seats = driver.start()

    for rank in order:
        driver.push(seats[rank], 0, [8.0, 4.0, 0.8][rank], weight=[1.0, 2.0, 5.0][rank])

    assert driver.values() == pytest.approx([-2.5] * 3, rel=1e-15)


def test_sum_adds_whatever_the_weights():
    """Under sum the weight only tells zero from non-zero."""
    driver = Driver(job_spec(3, reduction="sum"))
    seats = driver.start()

    for seat, weight in zip(seats, (3.0, 0.0, 0.5), strict=True):
        driver.push(seat, 0, 2.0, weight=weight)

    assert driver.values() == [-4.0] * 3


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("last", [0, 1])
def test_weight_zero_takes_part_and_adds_nothing(reduction, last):
    """A worker without samples completes the round, and the others' mean or sum is theirs alone, whoever comes last."""
    driver = Driver(job_spec(2, reduction=reduction))
    seats = driver.start()
    order = seats if last else seats[::-1]

    for seat in order:
        driver.push(seat, 0, 6.0, weight=0.0 if seat.rank == 1 else 3.0)

    assert driver.values() == [-6.0] * 3


def test_a_round_of_zero_weights_closes_without_an_update():
    """If nobody has samples the round passes and nothing is stepped."""
    driver = Driver(job_spec(2, flags=("momentum",)))
    seats = driver.start(value=1.0)
    before = driver.core.job.blocks[0].pin()

    for seat in seats:
        driver.push(seat, 0, 6.0, weight=0.0)

    after = driver.core.job.blocks[0]._page
    assert (before.version, after.version) == (0, 1)
    assert after.parameter.tolist() == before.parameter.tolist()
    assert after.slots[0].tolist() == before.slots[0].tolist()
    assert after.steps.tolist() == [0]


def test_a_tensor_that_nobody_touched_is_unstepped_and_its_momentum_untouched():
    """Of two tensors in one block, only the touched one moves, in parameters, slot and step count; those that lack it count as
    zero with their weight."""
    spec = job_spec(2, flags=("momentum",))
    spec = type(spec)(2, (*spec.tensors, type(spec.tensors[0])("u", (2,), "float64")), spec.groups)
    driver = Driver(spec)
    a, b = driver.start()
    momentum = (1.0, 0.5, 0.0, 0.0)

    for clock in range(2):
        driver.push(a, clock, [4.0, 4.0, 4.0, 0.0, 0.0], present=b"\x01", scalars=momentum)
        driver.push(b, clock, None, present=b"\x00", scalars=momentum)

    page = driver.core.job.blocks[0]._page
    assert page.parameter.tolist() == [-2.0 - 3.0] * 3 + [0.0] * 2
    assert page.slots[0].tolist() == [3.0] * 3 + [0.0] * 2
    assert page.steps.tolist() == [2, 0]


def test_a_worker_without_a_gradient_in_the_block_weighs_in_the_mean_whenever_it_comes():
    """Gradient 6 of weight 1 beside two workers of weight 1 and 2 with nothing in the block: 6 / 4, in every order."""
    for order in itertools.permutations(range(3)):
        driver = Driver(job_spec(3))
        seats = driver.start()
        for rank in order:
            if rank == 0:
                driver.push(seats[0], 0, 6.0)
            else:
                driver.push(seats[rank], 0, None, present=b"\x00", weight=float(rank))
        assert driver.values() == [-1.5] * 3, order


def test_a_push_that_is_sent_again_counts_once():
    """The same (rank, session, clock) again is a duplicate, before and after its round has closed."""
    driver = Driver()
    a, b = driver.start()

    replies = [
        driver.push(a, 0, 2.0),
        driver.push(a, 0, 2.0),
        driver.push(b, 0, 4.0),
        driver.push(b, 0, 4.0),
        driver.push(a, 0, 2.0),
    ]

    assert [r.blocks_counted for r in replies] == [1, 0, 1, 0, 0]
    assert [r.blocks_duplicate for r in replies] == [0, 1, 0, 1, 1]
    assert driver.values() == [-3.0] * 3
    assert driver.core.counters.pushes_duplicate == 3


def test_a_worker_that_pushes_twice_does_not_close_a_round_alone():
    """Rounds count workers, not messages; a quorum of two is not one worker twice."""
    driver = Driver(job_spec(3, quorum=2))
    a, b, _c = driver.start()

    driver.push(a, 0, 2.0)
    driver.push(a, 0, 2.0)
    assert driver.version() == 0
    driver.push(b, 0, 4.0)

    assert driver.version() == 1


def test_with_a_quorum_the_late_gradient_is_dropped_and_counted():
    """Quorum 2 of 3: the third comes late, is dropped, is told where to go on, and is counted as late."""
    driver = Driver(job_spec(3, quorum=2))
    a, b, c = driver.start()

    for clock in range(3):
        driver.push(a, clock, 1.0)
        driver.push(b, clock, 1.0)
    reply = driver.push(c, 0, 100.0)

    assert (reply.blocks_late, reply.clock) == (1, 3)
    assert driver.values() == [-3.0] * 3
    assert driver.core.counters.pushes_late == 1


def test_a_push_for_a_round_that_is_not_open_waits_for_it():
    """A worker that is ahead waits, for the one that it lacks, until the earlier round has closed."""
    driver = Driver()
    a, b = driver.start()
    driver.push(a, 0, 2.0)
    push = driver.begin_push(a, 1)

    ticket = driver.push_block(push, 0, 8.0)

    assert isinstance(ticket, Ticket)
    assert ticket.kind is WaitKind.EARLIER_ROUND
    assert [w.rank for w in driver.shard.missing_for(ticket)] == [1]
    driver.push(b, 0, 2.0)
    assert ticket.future.result(0) is None
    assert driver.push_block(push, 0, 8.0) is None


def test_a_pull_waits_until_its_round_has_closed():
    """In sync mode a worker that has pushed step 0 reads version 1, and sees meanwhile whom it waits for."""
    driver = Driver(job_spec(3))
    a, b, c = driver.start()
    driver.push(a, 0, 3.0)
    ticket = driver.pull(a, 1)[0]

    driver.push(b, 0, 3.0)
    assert [w.rank for w in driver.shard.missing_for(ticket)] == [2]
    assert [t.kind for t in driver.heartbeat(a, 1)] == [WaitKind.ROUND]
    driver.push(c, 0, 3.0)

    assert ticket.future.result(0) is None
    assert driver.pull(a, 1)[0].tolist() == [-3.0] * 3
    assert driver.heartbeat(a, 1) == []


@pytest.mark.parametrize("end", ["leave", "fail", "expire"])
def test_a_round_completes_without_a_worker_that_has_gone(end):
    """Leaving, failing and expiring settle the open round; its mean is over those who contributed."""
    driver = Driver(job_spec(3))
    a, b, c = driver.start()
    driver.push(a, 0, 2.0)
    driver.push(b, 0, 4.0)

    if end == "expire":
        driver.expire(c, keep=[a, b])
    else:
        driver.leave(c, failed=end == "fail")

    assert driver.values() == [-3.0] * 3
    assert driver.core.counters.requests_refused == 0


def test_workers_that_disagree_within_a_round_are_named_with_both_values():
    """Different learning rates in one round are refused, naming both workers, the scalar and the values."""
    driver = Driver()
    a, b = driver.start()
    driver.push(a, 0, 1.0)
    before = driver.fingerprint()

    with pytest.raises(ScalarsDisagree, match=r"scalars\[0\]\.lr: in round 0 worker 1 says 0\.5, worker 0 said 1;") as caught:
        driver.begin_push(b, 0, scalars=(0.5, 0.0, 0.0, 0.0))

    assert caught.value.detail["ranks"] == [0, 1]
    assert driver.fingerprint() == before
    driver.push(b, 0, 1.0)
    driver.push(a, 1, 1.0, scalars=(0.5, 0.0, 0.0, 0.0))
    driver.push(b, 1, 1.0, scalars=(0.5, 0.0, 0.0, 0.0))
    assert driver.values() == [-1.5] * 3


def test_a_refused_push_does_not_speak_for_its_round():
    """The scalars of a push none of whose blocks was valid bind nobody, not even its own worker."""
    driver = Driver()
    a, b = driver.start()
    push = driver.begin_push(a, 0, scalars=(0.25, 0.0, 0.0, 0.0))
    with pytest.raises(NonFiniteGradient):
        driver.push_block(push, 0, np.nan)

    driver.push(b, 0, 1.0)
    driver.push(a, 0, 1.0)

    assert driver.values() == [-1.0] * 3


def test_a_dead_workers_scalars_bind_nobody_unless_they_were_counted():
    """Scalars of a worker that is gone are forgotten with it, except where its gradient is part of the round."""
    driver = Driver(job_spec(2, blocks=2))
    a, b = driver.start()
    push = driver.begin_push(a, 1, scalars=(0.25, 0.0, 0.0, 0.0))
    assert driver.push_block(push, 0, 1.0) is not None, "round 1 is not open"
    driver.leave(a, failed=True)

    driver.push(b, 0, 1.0)
    driver.push(b, 1, 1.0)

    assert driver.version() == 2


def test_a_late_push_with_other_scalars_is_late_and_not_refused():
    """A backup worker whose round has closed is dropped quietly, whatever its learning rate is by now."""
    driver = Driver(job_spec(2, quorum=1))
    a, b = driver.start()
    driver.push(a, 0, 1.0)

    assert driver.push(b, 0, 1.0, scalars=(9.0, 0.0, 0.0, 0.0)).blocks_late == 1


def test_a_refused_push_does_not_move_its_worker_past_open_rounds():
    """A header with a later clock and a bad block closes no round without its worker."""
    driver = Driver()
    a, b = driver.start()
    driver.push(b, 0, 4.0)
    before = driver.fingerprint()

    push = driver.begin_push(a, 5)
    with pytest.raises(InvalidTensor):
        driver.shard.exchange.push_block(push, 0, b"", memoryview(b"odd"))

    assert driver.fingerprint() == before
    driver.push(a, 0, 2.0)
    assert driver.values() == [-3.0] * 3


def test_a_push_must_cover_every_block_and_is_completed_by_sending_it_again():
    """A push that ends early is refused by the missing block; what was counted stays, and the same push again completes it."""
    driver = Driver(job_spec(1, blocks=3))
    (a,) = driver.start()
    push = driver.begin_push(a, 0)
    driver.push_block(push, 0, 1.0)
    driver.push_block(push, 2, 1.0)

    with pytest.raises(InvalidRequest, match="block: 1 is missing"):
        driver.shard.exchange.end_push(push)
    reply = driver.push(a, 0, 1.0)

    assert (reply.blocks_counted, reply.blocks_duplicate) == (1, 2)
    assert [driver.version(b) for b in range(3)] == [1, 1, 1]


def test_a_block_twice_in_one_push_is_counted_once():
    """The second copy of a block in one push is ignored."""
    driver = Driver(job_spec(1, mode="async"))
    (a,) = driver.start()
    push = driver.begin_push(a, 0)

    driver.push_block(push, 0, 1.0)
    driver.push_block(push, 0, 1.0)

    assert driver.shard.exchange.end_push(push).blocks_counted == 1
    assert driver.values() == [-1.0] * 3


@pytest.mark.usefixtures("no_small_blocks")
def test_an_update_that_fails_for_want_of_memory_is_as_if_never_pushed():
    """If no page can be had, the push fails, and the same push again is counted, in every mode and position."""
    for spec in (job_spec(1), job_spec(1, mode="async"), job_spec(2)):
        driver = Driver(spec)
        seats = driver.start()
        arena = driver.core.job.arena
        real = {name: getattr(arena, name) for name in ("spare", "lend_accumulator")}

        def out_of_memory(*_):
            raise MemoryError

        for seat in seats:
            for name in real:
                setattr(arena, name, out_of_memory)
            with pytest.raises(MemoryError):
                driver.push(seat, 0, 2.0)
            for name, method in real.items():
                setattr(arena, name, method)
            assert driver.push(seat, 0, 2.0).blocks_counted == 1
        assert driver.values() == [-2.0] * 3


@pytest.mark.parametrize("spec", [job_spec(1), job_spec(1, mode="async"), job_spec(2)])
def test_a_small_block_that_has_no_memory_for_an_update_is_as_it_was(spec, monkeypatch):
    """Its first update needs a place to go to; the push that cannot have one fails, and the same push again is counted."""
    driver = Driver(spec)
    seats = driver.start()
    for seat in seats[:-1]:
        driver.push(seat, 0, 2.0)

    def out_of_memory(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(driver.core.job.arena._blocks.pool, "take", out_of_memory)
        with pytest.raises(MemoryError):
            driver.push(seats[-1], 0, 2.0)
    assert driver.values() == [0.0] * 3

    assert driver.push(seats[-1], 0, 2.0).blocks_counted == 1
    assert driver.values() == [-2.0] * 3


@pytest.mark.parametrize(
    ("weight", "ok"),
    [(0.0, True), (1e-9, True), (1e15, True), (1e-10, False), (1e39, False), (-1.0, False), (np.nan, False), (np.inf, False)],
)
def test_weights_that_would_make_a_mean_not_finite_are_refused(weight, ok):
    """Weights in range give a finite mean in float32, and the others are refused by name."""
    driver = Driver(job_spec(2, dtype="float32"))
    seats = driver.start()

    if not ok:
        with pytest.raises(InvalidRequest, match="weight"):
            driver.begin_push(seats[0], 0, weight=weight)
        return
    for seat in seats:
        driver.push(seat, 0, 2.0, weight=weight)

    assert driver.values() == pytest.approx([-2.0 if weight else 0.0] * 3, rel=1e-6)


@pytest.mark.parametrize(
    ("scalars", "name"),
    [
        ((np.nan, 0, 0, 0), "lr"),
        ((1e300, 0, 0, 0), "lr"),
        ((-1.0, 0, 0, 0), "lr"),
        ((1.0, 0.9, 0, 0), "momentum"),
        ((1.0, 0, np.inf, 0), "dampening"),
        ((1.0, 0, 0, -1), "weight_decay"),
        ((1.0, 0, 0), "values"),
    ],
)
def test_scalars_out_of_range_are_refused_by_name(scalars, name):
    """Each scalar that cannot be applied is refused with its group and name."""
    driver = Driver(job_spec(1))
    (a,) = driver.start()

    with pytest.raises(InvalidRequest, match=rf"scalars\[0\]\.{name}"):
        driver.begin_push(a, 0, scalars=scalars)
