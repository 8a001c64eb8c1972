"""Lost replies, fenced sessions, and the ways in which a worker ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from client_faults import Thread, connect_faulty, expire, until

from psd.contract.errors import Draining, Overloaded, PsdError, SessionFenced, ShardUnavailable
from psd.state.workers.membership import WorkerState
from psd_client import SGD, ParameterServer, connect

Start = Callable[..., Any]

SIZE = 20_000  # two blocks on two shards


def declare(ps: ParameterServer, **options: Any) -> dict[str, Any]:
    return ps.declare({"w": np.zeros(SIZE, np.float32)}, SGD(lr=1.0), **options)


def ones() -> dict[str, Any]:
    return {"w": np.ones(SIZE, np.float32)}


@pytest.mark.parametrize("consistency", ["sync", "async", "ssp:2"])
@pytest.mark.parametrize("method", ["push", "push_pull"])
def test_push_when_the_reply_is_lost_then_is_counted_once(cluster: Start, method: str, consistency: str) -> None:
    """A push that is sent again is the same push."""
    ps, faults = connect_faulty(cluster(2).servers)
    with ps:
        declare(ps, consistency=consistency)
        for shard in (0, 1, 1):
            faults.lose_reply(method, shard=shard)
            getattr(ps, method)(ones())
        params = ps.pull()
        stats = ps.stats()

    faults.assert_all_fired()
    assert set(params["w"].tolist()) == {-3.0}
    assert stats["blocks_duplicate"] == 3
    assert (stats["pushes"], stats["pushes_dropped"]) == (3, 0)


@pytest.mark.parametrize("error", [Overloaded("busy"), Draining("going"), ShardUnavailable("gone")])
@pytest.mark.parametrize("method", ["join", "declare", "initialize", "push", "pull", "push_pull", "barrier"])
def test_call_when_a_shard_fails_for_a_moment_then_is_sent_again(cluster: Start, method: str, error: PsdError) -> None:
    """No call is too delicate to be repeated."""
    servers = cluster(2).servers
    ps, faults = connect_faulty(servers)
    with ps:
        faults.fail(method, shard=0, error=error)
        if method == "join":
            ps._worker._session.join()
        declare(ps)
        ps.push(ones())
        ps.pull()
        params = ps.push_pull(ones())
        ps.barrier("b")

    faults.assert_all_fired()
    assert params["w"][0] == -2


@pytest.mark.parametrize("shard", [0, 1])
@pytest.mark.parametrize("method", ["join", "declare", "initialize"])
def test_call_when_the_reply_of_the_start_is_lost_then_is_repeated(cluster: Start, method: str, shard: int) -> None:
    """Joining, declaring and initializing may each be done twice."""
    ps, faults = connect_faulty(cluster(2).servers)
    with ps:
        faults.lose_reply(method, shard=shard)
        if method == "join":
            ps._worker._session.join()
        params = ps.declare({"w": np.full(SIZE, 3, np.float32)}, SGD(lr=1.0))
        assert set(params["w"].tolist()) == {3.0}
        assert ps.push_pull(ones())["w"][-1] == 2
    faults.assert_all_fired()


def test_barrier_when_the_reply_is_lost_then_is_answered_again(cluster: Start) -> None:
    """The barrier has opened for all; the repeated call does not begin the next one."""
    servers = cluster(1).servers
    ps, faults = connect_faulty(servers, 0, 2)
    with ps, connect(servers, 1, 2) as peer:
        for name in ("a", "b"):
            faults.lose_reply("barrier", shard=0)
            other = Thread(lambda name=name: peer.barrier(name))
            ps.barrier(name)
            other.result()
    faults.assert_all_fired()


def test_push_when_a_shard_stays_away_then_may_be_called_again(cluster: Start) -> None:
    """All or an error; the shards that counted the push count the second call as a duplicate."""
    ps, faults = connect_faulty(cluster(2).servers, retry_timeout_s=0)
    with ps:
        declare(ps)
        faults.fail("push", shard=1, error=ShardUnavailable("refused"))
        with pytest.raises(ShardUnavailable, match="shard 1 at"):
            ps.push(ones())
        assert ps.clock == 0

        ps.push(ones())

        assert ps.clock == 1
        assert set(ps.pull()["w"].tolist()) == {-1.0}


def test_declare_when_the_initializer_dies_then_the_next_one_provides_the_values(cluster: Start) -> None:
    """The worker that waits is chosen in its place; half of the dead one's values are not left behind."""
    c = cluster(2)
    dying, faults = connect_faulty(c.servers, 0, 2)
    chosen: list[Thread] = []

    def die() -> None:
        chosen.append(Thread(lambda: peer.declare({"w": np.full(SIZE, 2, np.float32)}, SGD(lr=1.0))))
        until(lambda: bool(c.shards[0].shard._core.waiting.open()))
        raise ZeroDivisionError

    faults.run_before("initialize", shard=0, action=die)  # shard 1 has its values already
    with connect(c.servers, 1, 2) as peer:
        with pytest.raises(ZeroDivisionError), dying:
            dying.declare({"w": np.full(SIZE, 1, np.float32)}, SGD(lr=1.0))

        assert set(chosen[0].result()["w"].tolist()) == {2.0}


@pytest.mark.parametrize("method", ["push", "push_pull"])
@pytest.mark.parametrize("expired", [[0], [1], [0, 1]])
@pytest.mark.parametrize("consistency", ["sync", "async", "ssp:2"])
def test_push_when_the_lease_ran_out_then_counts_once_and_training_goes_on(
    cluster: Start, caplog: pytest.LogCaptureFixture, method: str, expired: list[int], consistency: str
) -> None:
    """A new session of the same rank completes it by its old name; alone in the job, so that nobody could help it on."""
    c = cluster(2)
    with connect(c.servers, 0, 1, wait_timeout=60) as ps:
        declare(ps, consistency=consistency)
        ps.push_pull(ones())
        for shard in expired:
            expire(c.shards[shard], 0)

        getattr(ps, method)(ones())

        before = ps.pull()
        after = ps.push_pull(ones())
        stats = ps.stats()

    assert (set(before["w"].tolist()), set(after["w"].tolist())) == ({-2.0}, {-3.0})
    assert (stats["rejoins"], stats["pushes"], stats["pushes_dropped"], stats["blocks_late"]) == (1, 3, 0, 0)
    assert "too late" not in caplog.text


@pytest.mark.parametrize(("method", "call"), [("push", "commit"), ("push_pull", "commit"), ("push_pull", "pull")])
def test_push_when_the_lease_ran_out_after_its_commit_then_counts(
    cluster: Start, caplog: pytest.LogCaptureFixture, method: str, call: str
) -> None:
    """Exact aggregation; the reply to the commit is lost, or that to the pull. Nobody says that the gradient was dropped."""
    c = cluster(2)
    ps, faults = connect_faulty(c.servers, wait_timeout_s=20)
    with ps:
        declare(ps, aggregation="exact")
        faults.lose_reply(call, shard=0)
        faults.run_before(call, shard=0, action=lambda: None)
        faults.run_before(call, shard=0, action=lambda: [expire(shard, 0) for shard in c.shards])

        getattr(ps, method)(ones())

        assert set(ps.pull()["w"].tolist()) == {-1.0}
        stats = ps.stats()
    faults.assert_all_fired()
    assert (stats["rejoins"], stats["pushes"], stats["pushes_dropped"]) == (1, 1, 0)
    assert "dropped" not in caplog.text


def test_push_pull_when_the_lease_ran_out_before_the_decision_then_counts(
    cluster: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Exact aggregation: it has committed, and begins after that round."""
    c = cluster(2)
    with connect(c.servers, 0, 2) as ps, connect(c.servers, 1, 2) as peer:
        other = Thread(lambda: declare(peer, aggregation="exact"))
        declare(ps, aggregation="exact")
        other.result()
        pushing = Thread(lambda: ps.push_pull(ones()))
        until(lambda: bool(c.shards[0].shard._core.waiting.open()))
        for shard in c.shards:
            expire(shard, 0)
        until(lambda: ps.stats()["rejoins"] == 1)
        peer.push_pull({"w": np.full(SIZE, 3, np.float32)})

        assert set(pushing.result()["w"].tolist()) == {-2.0}
        stats = ps.stats()
    assert (stats["pushes"], stats["pushes_dropped"]) == (1, 0)
    assert "dropped" not in caplog.text


def test_push_when_the_lease_ran_out_before_its_commit_then_counts(cluster: Start, caplog: pytest.LogCaptureFixture) -> None:
    """Exact aggregation: all shards have the gradient; the new session commits it."""
    c = cluster(2)
    ps, faults = connect_faulty(c.servers, wait_timeout_s=20)
    with ps:
        declare(ps, aggregation="exact")
        faults.run_before("commit", shard=0, action=lambda: [expire(shard, 0) for shard in c.shards])

        assert set(ps.push_pull(ones())["w"].tolist()) == {-1.0}

        stats = ps.stats()
    assert (stats["rejoins"], stats["pushes"], stats["pushes_dropped"], stats["blocks_late"]) == (1, 1, 0, 0)
    assert "too late" not in caplog.text


@pytest.mark.parametrize("shard", [0, 1])
def test_pull_when_the_lease_ran_out_then_is_repeated(cluster: Start, shard: int) -> None:
    """Nothing is lost that could have been: a pull is asked again."""
    c = cluster(2)
    with connect(c.servers, 0, 1, wait_timeout=60) as ps:
        declare(ps)
        ps.push(ones())
        expire(c.shards[shard], 0)

        assert set(ps.pull()["w"].tolist()) == {-1.0}

        assert ps.stats()["pushes_dropped"] == 0
        assert ps.push_pull(ones())["w"][0] == -2


def test_pull_when_fenced_while_it_waits_then_goes_on(cluster: Start) -> None:
    """The shard ends the waits of a session whose lease ran out; the worker joins again and waits as before."""
    c = cluster(2)
    with connect(c.servers, 0, 2) as ps:
        declare(ps)
        with connect(c.servers, 1, 2) as peer:
            declare(peer)
            ps.push(ones())
            waiting = Thread(ps.pull)
            until(lambda: all(s.shard._core.waiting.open() for s in c.shards))
            for s in c.shards:
                expire(s, 0)
            peer.push_pull(ones())
            waiting.result()
            other = Thread(lambda: peer.push_pull(ones()))
            until(lambda: peer.clock == ps.clock)
            ps.push_pull(ones())
            other.result()


def test_barrier_when_the_lease_ran_out_then_is_entered_again(cluster: Start) -> None:
    c = cluster(1)
    with connect(c.servers, 0, 1) as ps:
        ps.barrier("a")
        expire(c.shards[0], 0)
        ps.barrier("a")
        assert ps.stats()["rejoins"] == 1


@pytest.mark.parametrize("state", ["idle", "waiting"])
def test_call_when_somebody_else_has_the_rank_then_is_refused(cluster: Start, state: str) -> None:
    """Two programs with one rank would otherwise throw each other out for ever; the later one stays."""
    c = cluster(2)
    first = connect(c.servers, 0, 2)
    declare(first)
    first.push(ones())
    if state == "waiting":
        waiting = Thread(first.pull)
        until(lambda: all(s.shard._core.waiting.open() for s in c.shards))
    with connect(c.servers, 0, 2):
        with pytest.raises(SessionFenced, match="joined again from") as caught:
            waiting.result() if state == "waiting" else first.pull()

        assert caught.value.detail["cause"] == "superseded"
        first.close()
        assert c.shards[0].shard._core.members.worker(0).state is WorkerState.LIVE


def test_close_when_called_then_nobody_waits_for_the_worker(cluster: Start) -> None:
    """Finished: uneven data never hangs anybody."""
    servers = cluster(2).servers
    with connect(servers, 0, 2) as ps:
        declare(ps)
        peer = connect(servers, 1, 2)
        declare(peer)
        peer.push(ones())
        closing = Thread(peer.close)
        ps.push_pull(ones())
        closing.result()
        ps.push_pull(ones())
        ps.barrier("all")


def test_worker_when_forgotten_then_leaves(cluster: Start) -> None:
    """An object that nobody holds cannot push any more."""
    c = cluster(1)
    ps = connect(c.servers, 0, 1)
    del ps

    until(lambda: c.shards[0].shard._core.members.worker(0).state is WorkerState.FINISHED)


def test_with_when_an_exception_escapes_then_leaves_as_failed(cluster: Start) -> None:
    """Nobody waits for it, and the job is not done: it may be started again."""
    c = cluster(2)
    with pytest.raises(ZeroDivisionError), connect(c.servers, 0, 1):
        raise ZeroDivisionError

    for shard in c.shards:
        assert shard.shard._core.members.worker(0).state is WorkerState.EXPIRED


def test_close_when_a_shard_is_gone_then_ends_and_logs(cluster: Start, caplog: pytest.LogCaptureFixture) -> None:
    """The end of a worker does not hang, and does not raise."""
    c = cluster(2)
    ps = connect(c.servers, 0, 1)
    c.shards[1].stop()

    ps.close()

    assert [m for m in caplog.messages if "could not tell shard 1" in m]
    assert c.shards[0].shard._core.members.worker(0).state is WorkerState.FINISHED


PROGRAM = """
import multiprocessing, os, sys
import numpy as np
import psd_client

def work():
    global ps
    ps = psd_client.connect({servers!r}, 0, 1)
    ps.declare({{"w": np.zeros(20000, np.float32)}}, psd_client.SGD(lr=1.0))
    ps.push_pull({{"w": np.ones(20000, np.float32)}})
    {end}

if __name__ == "__main__":
    {main}
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("main", "end", "state"),
    [
        ("work()", "pass", WorkerState.FINISHED),
        ("work()", "sys.exit(0)", WorkerState.FINISHED),
        ("work()", "raise KeyboardInterrupt", WorkerState.EXPIRED),
        ("with_child(work)", "pass", WorkerState.FINISHED),
        ("with_child(work)", "raise ValueError", WorkerState.EXPIRED),
    ],
)
def test_program_when_it_ends_without_close_then_leaves(
    cluster: Start, tmp_path: Any, main: str, end: str, state: WorkerState
) -> None:
    """However a program ends, short of being killed, the shards hear of it."""
    c = cluster(2)
    main = main.replace(
        "with_child(work)", "child = multiprocessing.get_context('spawn').Process(target=work); child.start(); child.join()"
    )
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.format(servers=c.servers, end=end, main=main))

    subprocess.run([sys.executable, str(script)], timeout=200, check=False, stderr=subprocess.DEVNULL)

    assert [shard.shard._core.members.worker(0).state for shard in c.shards] == [state, state]


@pytest.mark.process
def test_program_when_interrupted_in_a_wait_then_leaves_as_failed(cluster: Start, tmp_path: Any) -> None:
    """Ctrl-C in the middle of a pull that waits for another worker."""
    c = cluster(2)
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.format(servers=c.servers, end="pass", main="work()").replace(", 0, 1)", ", 0, 2)"))
    with subprocess.Popen([sys.executable, str(script)], stderr=subprocess.DEVNULL) as process:
        until(lambda: all(s.shard._core.waiting.open() for s in c.shards))
        process.send_signal(signal.SIGINT)
        assert process.wait(100) != 0

    assert [shard.shard._core.members.worker(0).state for shard in c.shards] == [WorkerState.EXPIRED] * 2
