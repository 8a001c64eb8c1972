"""Choices of a program after an error: call again, call with another gradient, pull, or leave the rank to a successor."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from client_faults import Thread, connect_faulty, expire, in_threads, until

from psd.contract.errors import (
    Draining,
    InternalError,
    InvalidTensor,
    NonFiniteGradient,
    OutOfSpace,
    Overloaded,
    PartsDisagree,
    PermissionDenied,
    PsdError,
    RuleFailed,
    ScalarsDisagree,
    SessionFenced,
    ShardUnavailable,
    Unauthenticated,
    WaitTimeout,
)
from psd_client import SGD, ParameterServer, connect
from psd_client.lanes.overlap_feed import Feed

Start = Callable[..., Any]

SIZE = 20_000  # two blocks on two shards
SCALARS = [[1.0, 0.0, 0.0, 0.0]]


def declare(ps: ParameterServer, **options: Any) -> dict[str, Any]:
    return ps.declare({"w": np.zeros(SIZE, np.float32)}, SGD(lr=1.0), reduce="sum", **options)


def gradient(value: float) -> dict[str, Any]:
    return {"w": np.full(SIZE, value, np.float32)}


def everywhere(params: dict[str, Any]) -> set[float]:
    return set(params["w"].tolist())


def pair(servers: str, **options: Any) -> tuple[ParameterServer, Any, ParameterServer]:
    """Worker 0, behind faults, and worker 1."""
    ps, faults = connect_faulty(servers, 0, 2, retry_timeout_s=0)
    peer = connect(servers, 1, 2)
    in_threads(lambda: declare(ps, **options), lambda: declare(peer, **options))
    return ps, faults, peer


@pytest.mark.parametrize("aggregation", ["fast", "exact"])
@pytest.mark.parametrize("call", ["push_pull", "push"])
def test_call_after_a_wait_timeout_when_made_again_then_counts_once(
    cluster: Start, impatient: Any, call: str, aggregation: str
) -> None:
    """The other worker is slow. The program was told that it may call again; its clock does not run ahead."""
    ps, _, peer = pair(cluster(2).servers, aggregation=aggregation)
    with ps, peer:
        ps.push(gradient(1))  # a push waits for the round before, a push_pull for its own
        for _ in range(2):
            with impatient(), pytest.raises(WaitTimeout):
                getattr(ps, call)(gradient(10))
        peer.push(gradient(100))
        pushing = Thread(lambda: peer.push_pull(gradient(1000)))
        again = getattr(ps, call)(gradient(10))
        assert everywhere(pushing.result()) == {-1111}
        assert again is None or everywhere(again) == {-1111}
        assert (ps.clock, peer.clock) == (2, 2)
        stats = ps.stats()
    assert (stats["pushes"], stats["pushes_dropped"], stats["blocks_late"]) == (2, 0, 0)


@pytest.mark.parametrize("call", ["push_pull", "push"])
def test_call_after_a_lost_commit_when_made_again_then_counts_once(cluster: Start, call: str) -> None:
    """Exact aggregation: all shards have the push, and shard 0 cannot be told."""
    ps, faults, peer = pair(cluster(2).servers, aggregation="exact")
    with ps, peer:
        faults.fail("commit", shard=0, error=ShardUnavailable("cut"))
        with pytest.raises(ShardUnavailable):
            getattr(ps, call)(gradient(1))
        assert ps.clock == 0

        other = Thread(lambda: peer.push_pull(gradient(10)))
        getattr(ps, call)(gradient(1))

        assert everywhere(other.result()) == {-11}
        assert everywhere(ps.pull()) == {-11}
        assert (ps.clock, ps.stats()["pushes"]) == (1, 1)


def test_push_pull_whose_pull_has_failed_when_made_again_then_only_pulls(cluster: Start) -> None:
    """The push had been counted, and the round had closed: the same call is not the next step."""
    for aggregation in ("fast", "exact"):
        ps, faults = connect_faulty(cluster(2).servers, retry_timeout_s=0)
        with ps:
            declare(ps, aggregation=aggregation)
            method = "push_pull" if aggregation == "fast" else "pull"
            faults.lose_reply(method, shard=1)
            with pytest.raises(ShardUnavailable):
                ps.push_pull(gradient(1))

            assert everywhere(ps.push_pull(gradient(1))) == {-1}
            assert everywhere(ps.push_pull(gradient(1))) == {-2}, "and after it has succeeded, it is"


@pytest.mark.parametrize("aggregation", ["fast", "exact"])
def test_call_with_another_gradient_after_a_wait_timeout_then_both_count_once(
    cluster: Start, impatient: Any, aggregation: str
) -> None:
    """The first one is completed before the other leaves; no block takes the one for the other."""
    ps, _, peer = pair(cluster(2).servers, aggregation=aggregation)
    with ps, peer:
        with impatient(), pytest.raises(WaitTimeout):
            ps.push_pull(gradient(1))
        peer.push(gradient(10))
        ps.push(gradient(100))
        assert everywhere(peer.push_pull(gradient(1000))) == {-1111}
        assert everywhere(ps.pull()) == {-1111}
        assert (ps.stats()["pushes"], ps.stats()["pushes_dropped"]) == (2, 0)


@pytest.mark.parametrize("aggregation", ["fast", "exact"])
def test_push_that_one_shard_has_when_another_gradient_follows_then_neither_is_mixed(cluster: Start, aggregation: str) -> None:
    """One shard could not be reached; the program goes on with its next gradient."""
    ps, faults, peer = pair(cluster(2).servers, aggregation=aggregation)
    with ps, peer:
        faults.fail("push", shard=1, error=ShardUnavailable("cut"))
        with pytest.raises(ShardUnavailable):
            ps.push(gradient(1))
        peer.push(gradient(10))
        ps.push(gradient(100))
        assert everywhere(peer.push_pull(gradient(1000))) == {-1111}


def failed_flat_push(c: Any, aggregation: str, error: BaseException | None = None) -> tuple[ParameterServer, ParameterServer]:
    """Two workers, after the first one's flat push_pull has reached shard 0 alone; its gradient is overwritten now."""
    ps, faults, peer = pair(c.servers, aggregation=aggregation)

    def fail() -> None:
        until(lambda: c.shards[0].shard._core.declared().open_rounds > 0)
        raise error or ShardUnavailable("cut")

    faults.run_before("push_pull" if aggregation == "fast" else "push", shard=1, action=fail)
    ps._worker.gradients.views[0][...] = 1
    with pytest.raises(ShardUnavailable if error is None else type(error)):
        ps._worker.push_pull_flat(SCALARS)
    ps._worker.gradients.views[0][...] = 10
    return ps, peer


@pytest.mark.parametrize(("error", "said"), [(None, "cut"), (KeyboardInterrupt(), "KeyboardInterrupt")])
def test_flat_push_that_has_failed_when_its_gradient_is_gone_then_what_has_counted_stands(
    cluster: Start, caplog: pytest.LogCaptureFixture, error: BaseException | None, said: str
) -> None:
    """Faces of frameworks write the next gradient over the last one, which cannot be sent again then. Fast aggregation cannot
    take back what it has added: the next gradient goes into the next round, and the worker says what became of the other."""
    ps, peer = failed_flat_push(cluster(2), "fast", error)
    with ps, peer:
        peer.push(gradient(100))
        pushing = Thread(lambda: peer.push_pull(gradient(1000)))
        ps._worker.push_pull_flat(SCALARS)

        assert everywhere(pushing.result()) == {-1111, -1110}
        assert (ps.clock, ps.stats()["pushes"], ps.stats()["pushes_dropped"]) == (2, 1, 1)
    assert re.search(rf"gave up the push of step 0, which failed \((.*: )?{said}\)", caplog.text)


def test_flat_push_that_has_failed_when_its_gradient_is_gone_and_aggregation_is_exact_then_counts_nowhere(
    cluster: Start,
) -> None:
    ps, peer = failed_flat_push(cluster(2), "exact")
    with ps, peer:
        pushing = Thread(lambda: peer.push_pull(gradient(100)))
        ps._worker.push_pull_flat(SCALARS)

        assert everywhere(pushing.result()) == {-110}
        assert (ps.clock, ps.stats()["pushes"], ps.stats()["pushes_dropped"]) == (1, 1, 1)


@pytest.mark.parametrize("error", [ShardUnavailable, WaitTimeout, Overloaded, Draining, OutOfSpace, TimeoutError])
def test_pull_after_a_push_that_has_failed_then_completes_it(cluster: Start, error: type[Exception]) -> None:
    """TimeoutError stands for what a program's own signal handler raises in the middle of a call."""
    for aggregation in ("fast", "exact"):
        ps, faults = connect_faulty(cluster(2).servers, retry_timeout_s=0)
        with ps:
            declare(ps, aggregation=aggregation)
            faults.fail("push", shard=1, error=error("cut"))
            with pytest.raises((PsdError, TimeoutError), match="cut"):
                ps.push(gradient(1))

            assert everywhere(ps.pull()) == {-1}
            assert (ps.clock, ps.stats()["pushes"]) == (1, 1)
            assert everywhere(ps.push_pull(gradient(1))) == {-2}, "after a pull the same gradient is the next step's"


@pytest.mark.parametrize(
    "error",
    [
        NonFiniteGradient,
        InvalidTensor,
        ScalarsDisagree,
        PartsDisagree,
        RuleFailed,
        InternalError,
        Unauthenticated,
        PermissionDenied,
    ],
)
def test_pull_after_a_push_that_was_refused_then_is_not_refused(cluster: Start, error: type[PsdError]) -> None:
    """What cannot be completed is given up."""
    ps, faults = connect_faulty(cluster(2).servers)
    with ps:
        declare(ps)
        faults.fail("push", shard=1, error=error("refused"))
        with pytest.raises(error, match="refused"):
            ps.push(gradient(1))

        ps.pull()
        before = ps.push_pull(gradient(0))["w"]
        assert set((before - ps.push_pull(gradient(1))["w"]).tolist()) == {1.0}
        assert ps.stats()["pushes_dropped"] == 1


def test_call_after_another_process_has_taken_the_rank_then_does_not_take_it_back(cluster: Start) -> None:
    """With the same gradient or another one: two processes must not throw each other out for ever."""
    c = cluster(2)
    first = connect(c.servers, 0, 1)
    declare(first)
    second = connect(c.servers, 0, 1)
    for call in (lambda: first.push(gradient(1)), lambda: first.push(gradient(2)), first.pull):
        with pytest.raises(SessionFenced, match="joined again"):
            call()
    declare(second)
    assert everywhere(second.push_pull(gradient(1))) == {-1}
    first.close()
    second.close()


@pytest.mark.parametrize("aggregation", ["fast", "exact"])
def test_push_that_was_acknowledged_when_a_successor_pushes_too_then_both_count(cluster: Start, aggregation: str) -> None:
    """The worker ends after a push, in the middle of the round, and another process takes its rank."""
    c = cluster(2)
    with connect(c.servers, 1, 2) as peer:
        dying = connect(c.servers, 0, 2)
        in_threads(lambda: declare(dying, aggregation=aggregation), lambda: declare(peer, aggregation=aggregation))
        dying.push(gradient(1))
        assert dying._worker._ended.acquire(blocking=False)  # it dies without a word

        with connect(c.servers, 0, 2) as successor:
            declaring = Thread(lambda: declare(successor, aggregation=aggregation))
            peer.push(gradient(10))
            assert everywhere(declaring.result()) == {-11}
            pushing = Thread(lambda: peer.push_pull(gradient(100)))
            assert everywhere(successor.push_pull(gradient(1000))) == {-1111}
            assert everywhere(pushing.result()) == {-1111}
            assert (successor.clock, successor.stats()["blocks_duplicate"]) == (2, 0)


def test_stats_with_a_quorum_and_exact_aggregation_then_say_what_counted(cluster: Start) -> None:
    """Two workers, quorum 1: of each round's two pushes one is applied, and the other worker is told."""
    servers = cluster(2).servers
    workers = [connect(servers, rank, 2) for rank in range(2)]
    in_threads(*(lambda ps=ps: declare(ps, aggregation="exact", quorum=1) for ps in workers))

    def train(ps: ParameterServer) -> dict[str, Any]:
        for _ in range(20):
            params = ps.push_pull(gradient(1))
        return params

    in_threads(*(lambda ps=ps: train(ps) for ps in workers))
    params = workers[0].pull()
    counted = [ps.stats()["blocks_counted"] + ps.stats()["blocks_duplicate"] for ps in workers]
    late = [ps.stats()["blocks_late"] for ps in workers]
    assert everywhere(params) == {-sum(counted) / 2}
    assert [a + b for a, b in zip(counted, late, strict=True)] == [40, 40]
    assert [ps.stats()["blocks_staged"] for ps in workers] == [0, 0]
    for ps in workers:
        ps.close()


@pytest.mark.parametrize("strike", ["before", "after"])
@pytest.mark.parametrize("rounds", [1, 30])
def test_stats_when_the_others_went_far_ahead_during_a_commit_then_say_what_counted(
    cluster: Start, strike: str, rounds: int
) -> None:
    """The decision is kept for some rounds only; the worker hears all the same whether its gradient is in one."""
    servers = cluster(2).servers
    ps, faults = connect_faulty(servers, 0, 2)
    with ps, connect(servers, 1, 2) as other:
        in_threads(*(lambda each=each: declare(each, aggregation="exact", quorum=1) for each in (ps, other)))

        def train() -> None:
            for _ in range(rounds):
                other.push_pull(gradient(0))

        if strike == "after":
            faults.lose_reply("commit", shard=0, after=train)
        else:
            faults.run_before("commit", shard=0, action=train)

        ps.push(gradient(2))
        counted = everywhere(ps.pull()) == {-2}

    assert counted is (strike == "after")
    assert [ps.stats()[name] for name in ("blocks_counted", "blocks_late", "blocks_staged")] == (
        [2, 0, 0] if counted else [0, 2, 0]
    )


def test_fed_push_that_has_failed_when_fed_again_then_goes_on_if_the_gradient_is_the_same(cluster: Start) -> None:
    """With overlap the gradient is only known when back-propagation ends: nothing leaves before it is compared."""
    for value, expected, dropped in ((1.0, -1.0, 0), (10.0, None, 1)):
        running = cluster(2)
        ps, faults = connect_faulty(running.servers, retry_timeout_s=0)

        def both_have_counted(running: Any = running) -> None:
            until(lambda: all(shard.shard.job.version_min == 1 for shard in running.shards))

        with ps:
            declare(ps)
            ps._worker.gradients.views[0][...] = 1
            faults.lose_reply("push_pull", shard=1, after=both_have_counted)

            def fed(value: float, ps: ParameterServer = ps) -> Feed:
                feed = Feed(ps._worker.gradients.layout)
                ps._worker.begin_feed(feed)
                ps._worker.gradients.views[0][...] = value
                feed.ready(0)
                feed.finish(None)
                return feed

            with pytest.raises(ShardUnavailable):
                ps._worker.push_pull_feed(SCALARS, 1.0, fed(1.0), lambda _: None)
            ps._worker.push_pull_feed(SCALARS, 1.0, fed(value), lambda _: None)

            params = set(ps._worker.parameters.views[0].ravel().tolist())
            assert (params == {expected}) or (expected is None and len(params) == 1)
            assert ps.stats()["pushes_dropped"] == dropped


def test_push_when_its_lease_ran_out_and_the_round_went_on_without_it_then_says_so(
    cluster: Start, caplog: pytest.LogCaptureFixture
) -> None:
    c = cluster(2)
    ps, faults = connect_faulty(c.servers, 0, 2, wait_timeout_s=20)
    with ps, connect(c.servers, 1, 2) as peer:
        in_threads(lambda: declare(ps), lambda: declare(peer))

        def go_on_without() -> None:
            for shard in c.shards:
                expire(shard, 0)
            peer.push_pull(gradient(10))

        faults.run_before("push", shard=0, action=go_on_without)
        ps.push(gradient(1))
        assert everywhere(ps.pull()) == {-10}
        stats = ps.stats()
    assert (stats["pushes"], stats["rejoins"]) == (1, 1)
    assert stats["blocks_late"] >= 1
    assert "too late for its round" in caplog.text


def test_barrier_that_has_failed_when_called_again_then_is_the_same_call(cluster: Start) -> None:
    """It had opened, for all; the answer was lost, and the worker's lease, too. Nobody comes to a second one."""
    for is_fenced in (False, True):
        c = cluster(1)
        ps, faults = connect_faulty(c.servers, 0, 2, retry_timeout_s=0)
        with ps, connect(c.servers, 1, 2) as peer:
            faults.lose_reply("barrier", shard=0)
            other = Thread(lambda peer=peer: peer.barrier("b"))
            with pytest.raises(ShardUnavailable):
                ps.barrier("b")
            other.result()
            if is_fenced:
                expire(c.shards[0], 0)

            ps.barrier("b")

            others = Thread(lambda peer=peer: peer.barrier("b"))
            ps.barrier("b")
            others.result()
