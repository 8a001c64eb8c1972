"""A client and shards that are restarted under it: on what they held, without it, or with another job's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_faults import Restartable, Thread, connect_faulty, expire, until

from psd.contract.errors import InvalidRequest, RolledBack, SessionFenced, StateLost, WaitTimeout
from psd.state.workers.membership import WorkerState
from psd_client import SGD, ParameterServer, connect
from psd_client.worker.session.session import REJOINS_MAX

Start = Callable[..., Any]

SIZE = 20_000  # two blocks on two shards

PROGRAM = """
import numpy as np, psd_client

def train():
    ps = psd_client.connect({servers!r}, 0, 2)
    ps.declare({{"w": np.zeros({size}, np.float32)}}, psd_client.SGD(lr=1.0))
    ps.push({{"w": np.full({size}, 2, np.float32)}})
    return ps

{last}
"""


def declare(ps: ParameterServer, **options: Any) -> dict[str, Any]:
    return ps.declare({"w": np.zeros(SIZE, np.float32)}, SGD(lr=1.0), **options)


def declare_both(ps: ParameterServer, peer: ParameterServer, **options: Any) -> None:
    other = Thread(lambda: declare(peer, **options))
    declare(ps, **options)
    other.result()


@contextmanager
def two_workers(job: Restartable, **options: Any) -> Iterator[tuple[ParameterServer, ParameterServer]]:
    with connect(job.servers, 0, 2) as ps, connect(job.servers, 1, 2) as peer:
        declare_both(ps, peer, **options)
        yield ps, peer


def gradient(value: float) -> dict[str, Any]:
    return {"w": np.full(SIZE, value, np.float32)}


@pytest.mark.parametrize("aggregation", ["fast", "exact"])
def test_slots_when_a_shard_was_restarted_after_the_push_then_they_are_those_of_the_closed_round(
    job: Restartable, aggregation: str
) -> None:
    """The gradient that died with the shard's open round is sent again before the slots are asked for."""
    with connect(job.servers, 0, 2) as ps, connect(job.servers, 1, 2) as peer:
        params, rule = {"w": np.zeros(SIZE, np.float32)}, SGD(lr=1.0, momentum=0.5)
        other = Thread(lambda: peer.declare(params, rule, aggregation=aggregation))
        ps.declare(params, rule, aggregation=aggregation)
        other.result()
        for value in (2.0, 4.0):
            ps.push(gradient(value))
            job.restart(1)
            slots = Thread(ps._worker.slots)
            peer.push(gradient(value + 2))
            ((_, found),) = slots.result().items()

            expected = 3.0 if value == 2.0 else 0.5 * 3.0 + 5.0
            assert set(found.arrays["momentum"].tolist()) == {expected}
            assert found.steps == value / 2
            peer.pull()


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("aggregation", ["fast", "exact"])
def test_pull_when_a_shard_was_restarted_after_the_push_then_the_gradient_counts_once(
    job: Restartable, aggregation: str, index: int
) -> None:
    """The open round died with the shard; the client sends its gradient again, before it waits for the round."""
    with two_workers(job, aggregation=aggregation) as (ps, peer):
        ps.push(gradient(2.0))

        job.restart(index)
        pulled = Thread(ps.pull)
        peer.push(gradient(4.0))
        other = Thread(peer.pull)

        assert set(pulled.result()["w"].tolist()) == set(other.result()["w"].tolist()) == {-3.0}
        assert [job.version(0), job.version(1)] == [1, 1]


@pytest.mark.parametrize("aggregation", ["fast", "exact"])
def test_stats_when_a_shard_has_lost_a_gradient_then_they_say_what_became_of_it_in_the_end(
    job: Restartable, aggregation: str
) -> None:
    """Also where its round was decided before the shard had it again."""
    with connect(job.servers, 0, 1) as ps:
        declare(ps, aggregation=aggregation)
        ps.push(gradient(2.0))
        job.restart(1)

        assert set(ps.pull()["w"].tolist()) == {-2.0}
        stats = ps.stats()

    assert stats["blocks_counted"] + stats["blocks_duplicate"] == 2
    assert (stats["blocks_staged"], stats["blocks_late"]) == (0, 0)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("aggregation", ["fast", "exact"])
def test_push_when_the_round_before_is_open_then_keeps_its_gradient_until_it_has_closed(
    job: Restartable, aggregation: str, index: int
) -> None:
    """The buffers are the only copy that survives the shard: the next push must not overwrite them before."""
    with two_workers(job, aggregation=aggregation) as (ps, peer):
        ps.push(gradient(2.0))
        second = Thread(lambda: ps.push(gradient(100.0)))
        until(lambda: all(shard.shard._core.waiting.open(0) for shard in job.shards[:1]))
        assert set(ps._worker.gradients.views[0].tolist()) == {2.0}

        job.restart(index)
        peer.push(gradient(4.0))

        assert set(peer.pull()["w"].tolist()) == {-3.0}
        second.result()
        peer.push(gradient(0.0))
        assert set(ps.pull()["w"].tolist()) == {-53.0}


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("aggregation", ["fast", "exact"])
def test_close_when_a_shard_is_restarted_before_the_last_round_has_closed_then_the_gradient_counts(
    job: Restartable, aggregation: str, index: int
) -> None:
    """The push was acknowledged, and is in no arena: the worker stays until it need not be sent again."""
    with connect(job.servers, 1, 2) as peer:
        ps = connect(job.servers, 0, 2)
        declare_both(ps, peer, aggregation=aggregation)
        ps.push(gradient(2.0))
        closing = Thread(ps.close)
        until(lambda: bool(job.shards[0].shard._core.waiting.open(0)))

        job.restart(index)
        peer.push(gradient(4.0))
        closing.result()

        assert set(peer.pull()["w"].tolist()) == {-3.0}
        assert set(peer.push_pull(gradient(1.0))["w"].tolist()) == {-4.0}, "nobody waits for one that has left"


@pytest.mark.parametrize("aggregation", ["fast", "exact"])
def test_worker_when_forgotten_after_a_push_then_stays_until_the_round_has_closed(job: Restartable, aggregation: str) -> None:
    """As a program's own function does that connects, trains, and returns."""
    with connect(job.servers, 1, 2) as peer:
        ps = connect(job.servers, 0, 2)
        declare_both(ps, peer, aggregation=aggregation)
        ps.push(gradient(2.0))
        del ps
        until(lambda: bool(job.shards[0].shard._core.waiting.open(0)))

        job.restart(0)
        peer.push(gradient(4.0))

        assert set(peer.pull()["w"].tolist()) == {-3.0}
        until(lambda: job.shards[0].shard._core.members.worker(0).state is WorkerState.FINISHED)


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="gRPC needs threads for streams, and exiting interpreters give none any more"
)
@pytest.mark.process
@pytest.mark.parametrize("last", ["ps = train()", "train()"], ids=["kept", "forgotten"])
def test_program_when_it_ends_after_a_push_then_stays_until_the_round_has_closed(
    job: Restartable, tmp_path: Path, last: str
) -> None:
    """Without close(), too; the shard that was killed is sent the gradient again at the interpreter's exit."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.format(servers=job.servers, size=SIZE, last=last))
    with connect(job.servers, 1, 2) as peer, subprocess.Popen([sys.executable, str(script)]) as process:
        declare(peer)
        until(lambda: any(wait.kind.name == "ROUND" for wait in job.shards[0].shard._core.waiting.open(0)))

        job.restart(0)
        peer.push(gradient(4.0))

        assert process.wait(100) == 0
        assert set(peer.pull()["w"].tolist()) == {-3.0}


def test_close_when_the_others_do_not_push_then_gives_up_and_says_so(
    cluster: Start, impatient: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Bounded by the wait timeout."""
    servers = cluster(2).servers
    with connect(servers, 1, 2) as peer:
        ps = connect(servers, 0, 2)
        declare(ps)
        declare(peer)
        ps.push(gradient(1.0))

        with impatient():
            ps.close()

    assert [m for m in caplog.messages if "worker 0: ends without knowing whether its last push was applied" in m]


def test_close_when_a_call_has_failed_since_the_push_then_says_that_it_may_be_lost(
    cluster: Start, impatient: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is waited for then; but the push was acknowledged, and a shard that is killed now loses it."""
    servers = cluster(2).servers
    with connect(servers, 1, 2) as peer:
        ps = connect(servers, 0, 2)
        declare(ps)
        declare(peer)
        ps.push(gradient(1.0))
        with impatient(), pytest.raises(WaitTimeout):
            ps.pull()

        ps.close()

    assert [m for m in caplog.messages if "worker 0: ends without knowing whether its last push was applied" in m]


def test_close_when_the_others_wait_at_a_barrier_then_they_do_not_wait_for_this_worker(cluster: Start) -> None:
    """Uneven data: the last push of the longer one meets nobody, and must not stop those who have finished."""
    servers = cluster(2).servers
    with connect(servers, 1, 2) as peer:
        ps = connect(servers, 0, 2)
        declare(ps)
        declare(peer)
        ps.push(gradient(1.0))
        closing = Thread(ps.close)

        peer.barrier("end")

        peer.close()
        closing.result()


@pytest.mark.parametrize("failure", ["of the body", "of the last call"])
def test_close_when_something_has_failed_then_waits_for_nobody(cluster: Start, failure: str) -> None:
    """The others' next push may never come, and the program knows already."""
    servers = cluster(2).servers
    with pytest.raises(InvalidRequest), connect(servers, 0, 2) as ps:
        declare(ps)
        ps.push(gradient(1.0))
        if failure == "of the body":
            raise InvalidRequest("x")
        ps.barrier("")


@pytest.mark.parametrize("consistency", ["async", "ssp:2"])
def test_push_when_a_shard_is_restarted_again_and_again_then_sums_are_exact(job: Restartable, consistency: str) -> None:
    """Integers and lr 1: what was acknowledged is in, once; and what came with the last one is given to the next process."""
    with connect(job.servers, 0, 1) as ps:
        declare(ps, consistency=consistency)
        for step in range(6):
            ps.save_client_state(b"after %d" % step)
            ps.push(gradient(step))
            job.restart(step % 2)
        total = ps.pull()["w"]
        job.restart(0)
        with connect(job.servers, 0, 1) as successor:
            declare(successor, consistency=consistency)

    assert set(total.tolist()) == {-15.0}
    assert successor.client_state == b"after 5"


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("aggregation", ["fast", "exact"])
def test_barrier_when_a_shard_is_restarted_while_it_waits_then_the_shard_has_the_push_again(
    cluster: Start, tmp_path: Path, aggregation: str, index: int
) -> None:
    """The others wait for its round there, and come to the barrier only then."""
    job = Restartable(cluster, tmp_path)
    with two_workers(job, aggregation=aggregation) as (ps, peer):
        ps.push(gradient(2.0))
        waiting = Thread(lambda: ps.barrier("b"))
        until(lambda: bool(job.shards[0].shard._core.waiting.open(0)))
        job.restart(index)

        assert set(peer.push_pull(gradient(4.0))["w"].tolist()) == {-3.0}
        peer.barrier("b")
        waiting.result()


def test_pull_when_a_shard_came_back_without_its_memory_then_is_told(cluster: Start) -> None:
    """No state directory, no checkpoint: a typed error that names the shard; a blank shard is never taken for the old one."""
    job = cluster(2)
    with connect(job.servers, 0, 1) as ps:
        declare(ps)
        ps.push_pull(gradient(1.0))
        job.shards[1].stop()
        cluster(2, only=1, listen=job.shards[1].address)

        with pytest.raises(StateLost, match="shard 1 has come back without the parameters") as caught:
            ps.pull()

    assert caught.value.detail["shard"] == 1


def test_connect_when_this_worker_has_left_a_named_job_before_then_says_so(
    cluster: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """As a second `fit` does under psd-run, whose shards have ended by then: it waited, and nothing said for what."""
    job = cluster(1, run_id="r")
    for rank in (0, 1, 0):
        connect(job.servers, rank, 2, run_id="r").close()
    for _ in range(2):
        connect(job.servers, 1, 3).close()  # without a name nobody ends the shards

    (said,) = caplog.messages
    assert said.startswith("psd: worker 0 of r has left its job before")


def test_declare_when_shard_zero_has_lost_its_part_then_is_told_and_nothing_is_mixed(cluster: Start) -> None:
    """All workers are new, so none resumes: shard 0 wants initial values, shard 1 has those of the job, with updates."""
    job = cluster(2, run_id="r")
    first = connect(job.servers, 0, 1)
    declare(first)
    first.push_pull(gradient(1.0))
    job.shards[0].stop()
    (blank,) = cluster(2, only=0, listen=job.shards[0].address, run_id="r").shards

    with connect(job.servers, 0, 1) as ps, pytest.raises(StateLost, match=r"shard 1 at .* shard 0 has lost its part"):
        declare(ps)

    assert not blank.shard._core.life.has_values
    first.close()


def test_declare_when_the_initializer_was_superseded_on_the_way_then_the_values_are_its_successors(cluster: Start) -> None:
    """Its lease had run out at shard 0 and not at shard 1, where its late values would replace those of its successor."""
    c = cluster(2)
    late, faults = connect_faulty(c.servers, 0, 2)
    with late, connect(c.servers, 1, 2) as successor:

        def be_late() -> None:
            expire(c.shards[0], 0)
            successor.declare({"w": np.full(SIZE, 2, np.float32)}, SGD(lr=1.0))

        faults.run_before("initialize", shard=1, action=be_late)

        params = late.declare({"w": np.full(SIZE, 1, np.float32)}, SGD(lr=1.0))

        assert set(params["w"].tolist()) == {2.0}
        assert set(successor.pull()["w"].tolist()) == {2.0}


@pytest.mark.parametrize("deaths", [1, REJOINS_MAX + 2])
def test_declare_when_a_shard_dies_before_it_has_values_then_begins_anew(job: Restartable, deaths: int) -> None:
    """Nothing was lost that anybody had built on, so the job need not end."""
    ps, faults = connect_faulty(job.servers, 0, 1)
    with ps:
        for _ in range(deaths):
            faults.run_before("initialize", shard=1, action=lambda: job.restart(1))

        assert set(declare(ps)["w"].tolist()) == {0.0}
        faults.assert_all_fired()
        assert set(ps.push_pull(gradient(1.0))["w"].tolist()) == {-1.0}


def test_declare_when_shard_zero_dies_before_it_has_values_and_a_new_worker_comes_first_then_all_meet(job: Restartable) -> None:
    """Nobody has named the run: the next life of shard 0 gives it another name, which neither the first worker nor shard 1
    know yet."""
    early, faults = connect_faulty(job.servers, 0, 2)
    late: list[ParameterServer] = []

    def restart() -> None:
        job.restart(0)
        late.append(connect(job.servers, 1, 2))

    with early:
        faults.run_before("initialize", shard=1, action=restart)
        declaring = Thread(lambda: declare(early))
        until(lambda: bool(late))
        with late[0]:
            declare(late[0])
            declaring.result()
            pulled = Thread(lambda: early.push_pull(gradient(1.0)))
            assert set(late[0].push_pull(gradient(3.0))["w"].tolist()) == {-2.0}
            assert set(pulled.result()["w"].tolist()) == {-2.0}
    assert len({shard.shard._core.run_id for shard in job.shards}) == 1


def test_declare_when_the_others_have_begun_under_another_name_then_joins_them(job: Restartable) -> None:
    """As above, and this worker stands still between two shards for so long that the new name holds when it goes on."""
    slow, faults = connect_faulty(job.servers, 1, 2)
    late: list[ParameterServer] = []

    def restart() -> None:
        job.restart(0)
        late.append(connect(job.servers, 0, 2))
        declare(late[0])
        late[0].push(gradient(1.0))

    with slow:
        faults.run_before("declare", shard=1, action=restart)
        declare(slow)
        with late[0]:
            slow.push(gradient(3.0))
            assert set(late[0].pull()["w"].tolist()) == {-2.0}


def test_rejoin_when_shard_zero_has_come_back_blank_then_is_told(cluster: Start) -> None:
    """It calls an unnamed run by another name than the shards that live on: not a foreign run, but a loss."""
    job = cluster(2)
    with connect(job.servers, 0, 1) as ps:
        declare(ps)
        ps.push_pull(gradient(1.0))
        job.shards[0].stop()
        cluster(2, only=0, listen=job.shards[0].address)

        with pytest.raises(StateLost, match=r"shard 0 at .* has come back without what it held, and the others have not"):
            ps._worker._session.join()


def test_rejoin_when_the_job_has_gone_back_meanwhile_then_is_told(job: Restartable, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose lease ran out over a rollback finds other parameters than it left: not a mere rejoin."""
    with connect(job.servers, 0, 1) as ps:
        declare(ps)
        for server in job.shards:
            server.shard._core.timeline = 3
        told = []
        monkeypatch.setattr(ps._worker, "_go_back", lambda error: told.append(error.detail) or error)

        expire(job.shards[0], 0)
        with pytest.raises(RolledBack, match="went back to a checkpoint while worker 0 was out of it"):
            ps.pull()

    assert told == [{"timeline": 3}]


def test_leave_when_a_shard_was_restarted_meanwhile_then_is_heard(job: Restartable) -> None:
    """The job is done, on the incarnation too that this worker had not met yet."""
    ps = connect(job.servers, 0, 1)
    declare(ps)
    memberships = ps._worker._session.memberships
    memberships._held, known = None, memberships._held  # no heartbeat resumes
    job.restart(1)
    memberships._held = known

    ps.close()

    assert job.shards[1].done.wait(100)


def test_rejoin_when_the_round_it_had_committed_is_decided_later_then_all_shards_hear_of_it(job: Restartable) -> None:
    """The new session begins after that round; the worker on whom it waited leaves, and tells nobody what was decided."""
    peer = connect(job.servers, 1, 2)
    with connect(job.servers, 0, 2) as ps:
        declare_both(ps, peer, aggregation="exact")
        ps.push(gradient(2.0))
        for server in job.shards:
            expire(server, 0)

        pulled = Thread(ps.pull)
        until(lambda: ps._worker._session.rejoins == 1)
        peer.close()

        assert set(pulled.result()["w"].tolist()) == {-2.0}
        assert [job.version(0), job.version(1)] == [1, 1]


def test_rejoin_when_somebody_has_the_rank_then_raises(cluster: Start) -> None:
    """Only an expired session comes back by itself."""
    with connect(cluster(1).servers, 0, 1) as ps:
        error = SessionFenced("x", cause="superseded")

        with pytest.raises(SessionFenced) as caught:
            ps._worker._session.rejoin(error)

    assert caught.value is error
