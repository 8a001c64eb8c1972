"""A worker that becomes another session: whatever happens on the way, all shards know it in the end, or it is told why not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from client_faults import Thread, until
from fake_world import World

from psd.contract.errors import CheckpointFailed, PsdError, RolledBack, SessionFenced, ShardUnavailable, StateLost
from psd.state.life import Life
from psd.v1 import control_pb2
from psd_client.lanes.transport import Cancelled


@pytest.fixture
def world() -> Iterator[World]:
    """Two shards, lease 2 s; the worker has declared its job."""
    made = World(wait_timeout_s=20, retry_timeout_s=0)
    made.enter()
    yield made
    made.faults.assert_all_fired()
    made.close()


def operate(world: World, action: Callable[[], object] = lambda: None) -> None:
    """Do something as the worker's session does, whichever that is by then."""
    for attempt in world.session.attempts():
        with attempt:
            action()


def fence(world: World) -> SessionFenced:
    """Let the worker's lease run out; what its next call is told."""
    world.expire()
    with pytest.raises(SessionFenced) as caught:
        world.shards[0]._core.check_caller(world.session.caller(0))
    return caught.value


def assert_is_in(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """All shards know the session, and nobody else was blamed."""
    assert world.seen_as() == [("LIVE", world.session.number)] * len(world.shards)
    operate(world)
    assert "same rank" not in caplog.text


@pytest.mark.parametrize("method", ["join", "declare"])
def test_rejoin_when_a_shard_is_away_for_longer_than_the_lease_then_the_others_are_kept(
    world: World, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    """The session is shard 0's from its answer on; heartbeats renew it there, with no clock before there is one."""
    error, before = fence(world), world.session.number
    world.session.clock = 41
    world.lanes[0].joins.clear()
    world.lanes[0].heartbeats.clear()
    world.faults.run_before(method, shard=1, action=lambda: world.pass_time(5))

    world.session.rejoin(error)

    assert_is_in(world, caplog)
    assert (len(world.lanes[0].joins), world.session.rejoins, world.session.clock) == (1, 1, 0)
    assert {beat.caller.session for beat in world.lanes[0].heartbeats} == {world.session.number} != {before}
    assert {beat.clock for beat in world.lanes[0].heartbeats} == {0}
    assert caplog.messages == [
        f"psd: worker 0: session {before} of worker 0 has ended: its lease of 2 s ran out; it has joined again and continues "
        "at step 0"
    ]


def test_join_when_a_shard_is_away_for_longer_than_the_lease_then_the_others_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    """The first time, too."""
    world = World()
    world.faults.run_before("join", shard=1, action=lambda: world.pass_time(5))

    world.enter()

    assert_is_in(world, caplog)
    assert len(world.lanes[0].joins) == 1
    world.close()


@pytest.mark.parametrize("method", ["join", "declare"])
def test_rejoin_when_the_lease_runs_out_on_the_way_then_is_repeated(
    world: World, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    """The worker was suspended once more, or its heartbeats did not get through."""
    error = fence(world)
    for _ in range(3):
        world.faults.run_before(method, shard=1, action=world.expire)

    world.session.rejoin(error)

    assert_is_in(world, caplog)
    assert world.session.rejoins == 1
    assert sum("its lease of 2 s ran out, while joining; joining again" in text for text in caplog.messages) == 3


def test_rejoin_when_the_lease_always_runs_out_then_says_so_at_the_deadline(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Too short for this worker: the error is the lease's, not another worker's."""
    error, before = fence(world), world.now
    for _ in range(7):
        world.faults.run_before("declare", shard=1, action=world.expire)  # 4 s each

    with pytest.raises(SessionFenced, match="its lease of 2 s ran out"):
        operate(world, lambda: raise_once(error))

    assert 20 < world.now - before < 30
    assert "same rank" not in caplog.text
    world.faults._before.clear()
    operate(world)
    assert_is_in(world, caplog)


def raise_once(error: PsdError) -> None:
    raise error


def test_rejoin_when_another_program_takes_the_rank_on_the_way_then_is_told(world: World) -> None:
    """Now it is true, and says who."""
    error = fence(world)
    world.faults.run_before("declare", shard=0, action=world.other_joins)

    with pytest.raises(SessionFenced, match=r"from elsewhere \(process 7\); are two workers started with the same rank\?"):
        world.session.rejoin(error)


def test_rejoin_when_its_first_request_is_taken_up_late_then_joins_again(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """The shard was suspended while it held the request: the reply comes to nobody, and the session is a later one."""
    error = fence(world)

    def taken_up() -> None:
        world.shards[0].admission.join(world.lanes[0].joins[-1])

    world.faults.run_before("declare", shard=0, action=taken_up)

    world.session.rejoin(error)

    assert_is_in(world, caplog)
    assert "its worker has joined again, while joining" in caplog.text


@pytest.mark.parametrize(("method", "shard"), [("join", 0), ("join", 1), ("declare", 0), ("declare", 1)])
def test_rejoin_when_it_fails_then_the_next_operation_does_it(
    world: World, caplog: pytest.LogCaptureFixture, method: str, shard: int
) -> None:
    """A session that only some shards know, or to which only some have agreed, is not used."""
    error = fence(world)
    world.faults.fail(method, shard=shard, error=ShardUnavailable("gone"))
    with pytest.raises(ShardUnavailable):
        world.session.rejoin(error)
    for lane in world.lanes:
        lane.joins.clear()

    operate(world)

    assert [len(lane.joins) for lane in world.lanes] == [1, 1]
    assert_is_in(world, caplog)
    operate(world)
    assert len(world.lanes[0].joins) == 1


def test_rejoin_when_all_shards_have_come_back_blank_then_is_told(world: World) -> None:
    """A job that has begun does not begin again with whatever this worker has in its buffers."""
    error = fence(world)
    blank = World()

    def lose_all() -> None:
        world.shards[:], blank.shards[:] = blank.shards, world.shards

    world.faults.run_before("join", shard=0, action=lose_all)

    with pytest.raises(StateLost, match="shard 0 at h:7000 has come back without the parameters that it held"):
        world.session.rejoin(error)
    blank.close()


def test_declare_when_a_shard_was_away_for_longer_than_the_wait_timeout_and_comes_back_blank_then_begins_anew() -> None:
    """Nobody has built on anything; and how long the shard was away says nothing of how long beginning anew takes."""
    world, blank = World(wait_timeout_s=2.0), World()

    def come_back() -> None:
        world.shards[1], blank.shards[1] = blank.shards[1], world.shards[1]
        world.now += 6

    world.session.join()
    world.faults.run_before("declare", shard=1, action=come_back)

    world.declare(lambda: None)

    assert world.session.clock == 0
    assert [name for name, _ in world.seen_as()] == ["LIVE", "LIVE"]
    for each in (world, blank):
        each.close()


def test_begin_anew_then_nothing_of_the_session_before_counts(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """A worker fences itself, and nobody is blamed for it."""
    before = world.session.number, world.session.caller(1)

    world.session.begin_anew()

    assert_is_in(world, caplog)
    assert (world.session.number > before[0], world.session.rejoins, caplog.messages) == (True, 1, [])
    with pytest.raises(SessionFenced, match="its worker has joined again") as caught:
        world.shards[1]._core.check_caller(before[1])
    assert caught.value.detail["cause"] == "expired"


@pytest.mark.parametrize("at_first", [True, False])
def test_begin_anew_when_the_lease_runs_out_on_the_way_then_is_repeated(
    world: World, caplog: pytest.LogCaptureFixture, at_first: bool
) -> None:
    """As a rejoin; also of a worker that was fenced and does not know it yet."""
    if at_first:
        world.expire()
    else:
        world.faults.run_before("declare", shard=1, action=world.expire)

    world.session.begin_anew()

    assert_is_in(world, caplog)


# -- going back ------------------------------------------------------------------------------------------------------------


def move_on(world: World, timeline: int) -> None:
    """All shards go back to a checkpoint, as far as workers can see."""
    for shard in world.shards:
        shard._core.timeline = timeline
        shard._core.incarnation += 1


@pytest.mark.parametrize(("method", "shard"), [("join", 0), ("join", 1), ("declare", 0), ("declare", 1), ("fetch", 0)])
def test_go_back_when_it_fails_then_every_operation_says_so_until_it_has_succeeded(
    world: World, caplog: pytest.LogCaptureFixture, method: str, shard: int
) -> None:
    """The program still has the parameters of before: their gradients belong nowhere."""
    move_on(world, 3)
    fetched: list[int] = []

    def fetch() -> None:
        operate(world)
        with world.faults.around("fetch", 0):
            fetched.append(world.session.clock)

    world.faults.fail(method, shard=shard, error=ShardUnavailable("gone"))
    with pytest.raises(ShardUnavailable):
        world.session.go_back(fetch)

    for _ in range(2):
        with pytest.raises(RolledBack, match="has not followed yet"):
            operate(world)
    world.session.go_back(fetch)

    assert len(fetched) == 1
    assert_is_in(world, caplog)


@pytest.mark.parametrize("what", ["fenced", "back again"])
def test_go_back_when_disturbed_on_the_way_then_is_repeated(world: World, caplog: pytest.LogCaptureFixture, what: str) -> None:
    """The lease ran out, or another shard was lost: in the end the program hears of it once."""
    move_on(world, 3)
    world.faults.run_before("declare", shard=1, action=world.expire if what == "fenced" else lambda: move_on(world, 4))

    world.session.go_back(lambda: None)

    assert_is_in(world, caplog)
    assert world.session.memberships.held.timeline == world.shards[0]._core.timeline


def test_declare_when_the_job_goes_back_meanwhile_then_follows_it(caplog: pytest.LogCaptureFixture) -> None:
    """A program that has seen nothing of the job yet need not hear of that."""
    world = World(retry_timeout_s=0)
    world.enter()
    late = World(wait_timeout_s=20, retry_timeout_s=0, of=world)
    fetched = [ShardUnavailable("gone"), RolledBack("x"), None]

    def fetch() -> None:
        outcome = fetched.pop(0)
        if outcome is not None:
            raise outcome

    late.session.join()
    late.faults.run_before("declare", shard=1, action=lambda: move_on(world, 3))
    with pytest.raises(ShardUnavailable):
        late.declare(fetch)

    late.declare(fetch)

    assert fetched == []
    assert_is_in(late, caplog)
    world.close()


def test_join_when_a_shard_answers_nonsense_then_is_a_typed_error(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease of 0 would make the heartbeats spin, a timeline without a successor end in an overflow."""
    good = world.lanes[1].join

    for field, value in (("lease_s", 0.0), ("lease_s", float("nan")), ("incarnation", 0), ("timeline", 1 << 63)):

        def join(request: control_pb2.JoinRequest, call: Any, field: str = field, value: Any = value) -> Any:
            reply = good(request, call)
            setattr(reply, field, value)
            return reply

        monkeypatch.setattr(world.lanes[1], "join", join)
        with pytest.raises(PsdError, match="shard 1 at h:7001: its answer to a worker that joins makes no sense"):
            world.session.join()


def test_go_back_when_a_shard_cannot_read_the_checkpoint_then_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The typed error of that shard."""
    world.shards[1]._core.life.now = Life.TENTATIVE
    world.shards[1]._core.restored_from = "c1"

    def rollback(request: Any, call: Any) -> None:
        raise CheckpointFailed("no network")

    for lane in world.lanes:
        monkeypatch.setattr(lane, "rollback", rollback, raising=False)
    monkeypatch.setattr("psd_client.worker.session.timeline.LOOK_AGAIN_S", 0.0)

    with pytest.raises(CheckpointFailed, match="no network"):
        world.session.go_back(lambda: None)


def test_leave_when_it_fences_a_call_then_nobody_joins_again(world: World) -> None:
    """Another thread waited in the call; nobody would end the session it began, and others would wait for that one."""
    caller = world.session.caller(0)
    world.session.leave()
    with pytest.raises(SessionFenced) as caught:
        world.shards[0]._core.check_caller(caller)

    with pytest.raises(Cancelled):
        world.session.rejoin(caught.value)

    assert world.seen_as() == [("FINISHED", caller.session)] * 2


@pytest.mark.parametrize("shard", [0, 1])
def test_leave_when_another_thread_is_joining_then_that_session_ends_too(world: World, shard: int) -> None:
    error, leaving = fence(world), []

    def leave() -> None:
        leaving.append(Thread(world.session.leave))
        until(lambda: world.session.has_left)

    world.faults.run_before("join", shard=shard, action=leave)
    with contextlib.suppress(Cancelled):  # it may have declared itself by then, or not
        world.session.rejoin(error)
    leaving[0].result()

    sessions = [world.worker(shard).session for shard in range(2)]
    assert world.seen_as() == [("FINISHED", sessions[0])] * 2
    assert sessions[0] > 1
