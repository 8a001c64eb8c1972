"""Joining, sessions, fencing, leases and leaving, with injected time."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from shard_driver import Driver, job_spec

from psd.cli.server import _heed
from psd.contract.config import ServerConfig
from psd.contract.errors import (
    ForeignRun,
    InvalidRequest,
    NotDeclared,
    PsdError,
    SessionFenced,
    ShardRestarted,
    SpecMismatch,
    WrongShard,
)
from psd.state.workers.membership import Membership, WorkerState, tick_s
from psd.v1 import control_pb2, data_pb2, job_pb2


def joined(driver, **fields):
    """A join request as a shard of that driver wants it, with some fields changed."""
    request = control_pb2.JoinRequest(shard_index=0, shard_count=1, world_size=2)
    for name, value in fields.items():
        setattr(request, name, value)
    return driver.shard.admission.join(request)


@pytest.mark.parametrize(
    ("fields", "error", "names"),
    [
        ({"shard_count": 2}, WrongShard, "0/1"),
        ({"shard_index": 1, "shard_count": 2}, WrongShard, "1/2"),
        ({"rank": 2}, InvalidRequest, "rank"),
        ({"world_size": 0}, InvalidRequest, "world_size"),
        ({"world_size": 5000}, InvalidRequest, "world_size"),
        ({"host": "x" * 257}, InvalidRequest, "host"),
        ({"run_id": "x" * 129}, InvalidRequest, "run_id"),
        ({"session": 5}, InvalidRequest, "session"),
    ],
)
def test_join_with_a_wrong_field_is_refused_and_enters_nobody(fields, error, names):
    """A join that is wrong in one field is refused by that field's name and leaves the shard as it was."""
    driver = Driver()

    with pytest.raises(error, match=names):
        joined(driver, **fields)

    assert driver.core.membership is None
    assert driver.core.run_id == ""


def test_shards_above_zero_take_the_session_that_shard_zero_issued():
    """A shard other than 0 issues no session, and keeps the one that it is told."""
    driver = Driver(shard=1, shards=2)

    with pytest.raises(InvalidRequest, match="session"):
        driver.join(0, session=0)

    assert driver.join(0, session=42).session == 42


def test_sessions_grow_even_if_the_wall_clock_does_not():
    """Each join gets a larger session, also when wall time stands still or goes back."""
    driver = Driver()

    first = driver.join(0).session
    driver.time.value -= 500
    second = driver.join(0).session

    assert second > first


def test_a_foreign_run_is_refused_at_join_and_in_every_call():
    """The run's name is fixed by the first worker; another name is refused."""
    driver = Driver()
    seat = driver.join(0, run_id="mine")
    stranger = job_pb2.Caller(run_id="other", incarnation=seat.caller.incarnation, rank=0, session=seat.session)

    with pytest.raises(ForeignRun, match="run_id"):
        driver.join(1, run_id="other")
    with pytest.raises(ForeignRun, match="run_id"):
        driver.shard.admission.heartbeat(control_pb2.HeartbeatRequest(caller=stranger))


@pytest.mark.parametrize(
    ("field", "error", "detail"),
    [("incarnation", ShardRestarted, {"shard": 0}), ("session", SessionFenced, {"cause": "expired"})],
)
def test_a_caller_that_knew_another_incarnation_or_never_joined_is_told_so(field, error, detail):
    """So that a blank shard is not taken for the old one, and a session that this shard never saw may simply join."""
    driver = Driver()
    seat = driver.join(0)
    setattr(seat.caller, field, getattr(seat.caller, field) + 1)

    with pytest.raises(error) as caught:
        driver.heartbeat(seat)

    assert detail.items() <= caught.value.detail.items()


def test_a_second_join_of_a_rank_fences_the_first_as_superseded():
    """Whoever joins last has the rank; the earlier session is refused with the cause, and told where the rank is now."""
    driver = Driver()
    old = driver.join(0)
    new = driver.join(0)

    with pytest.raises(SessionFenced, match="host0") as caught:
        driver.heartbeat(old)

    assert caught.value.detail["cause"] == "superseded"
    assert driver.heartbeat(new) == []


def test_a_session_whose_own_worker_has_joined_again_is_not_told_of_another_worker():
    """The reply to its join was lost, say, and a second one took the first one's place: it may simply join again."""
    driver = Driver(job_spec(3))
    first, other = driver.join(0, connection=7), driver.join(1, connection=8)
    driver.declare(first)
    ticket = driver.arrive(other)
    second = driver.join(0, connection=7)
    waiting = driver.arrive(second)
    driver.join(0, connection=7)

    errors = [waiting.future.exception(0)]
    for seat in (first, second):
        with pytest.raises(SessionFenced) as caught:
            driver.heartbeat(seat)
        errors.append(caught.value)

    assert [error.detail["cause"] for error in errors] == ["expired"] * 3
    assert all("its worker has joined again" in str(error) for error in errors)
    assert not ticket.future.done()
    driver.join(0, connection=9)
    for seat in (first, second):
        with pytest.raises(SessionFenced, match="are two workers started with the same rank") as caught:
            driver.heartbeat(seat)
        assert caught.value.detail["cause"] == "superseded"


@pytest.mark.parametrize("is_back", [False, True])
def test_a_session_before_the_one_that_a_killed_shard_knows_is_not_told_of_a_worker_that_it_does_not_know(tmp_path, is_back):
    """Who has the rank is not kept in the arena. The worker that resumes says who it is."""
    driver = Driver(state_dir=str(tmp_path))
    driver.start()
    old = driver.join(0, connection=7)
    new = driver.join(0, connection=9)
    driver.restart()
    if is_back:
        driver.resume(new, connection=9)
    old.caller.incarnation += 1

    with pytest.raises(SessionFenced, match="joined again from host0" if is_back else "joined again$") as caught:
        driver.heartbeat(old)

    assert caught.value.detail["cause"] == "superseded"
    if is_back:
        later = driver.join(0, connection=9)
        assert later.session > new.session
        with pytest.raises(SessionFenced, match="its worker has joined again"):
            driver.heartbeat(new)


def test_an_older_session_cannot_join_a_shard_again():
    """At the shards above 0, a session older than the rank's last is fenced, the same one is idempotent."""
    driver = Driver(shard=1, shards=2)
    driver.join(0, session=5)
    driver.join(1, session=6)

    assert driver.join(0, session=5).session == 5
    driver.join(0, session=9)
    with pytest.raises(SessionFenced):
        driver.join(0, session=5)


def test_silence_expires_a_worker_and_heartbeats_keep_it():
    """A lease runs out after lease_s of silence, not before; a heartbeat renews it; afterwards the session is fenced."""
    driver = Driver(lease_s=10)
    silent, lively = driver.join(0), driver.join(1)

    assert driver.advance(9.9) == []
    driver.heartbeat(lively)
    assert driver.advance(2.5) == [0]

    with pytest.raises(SessionFenced, match="lease of 10 s") as caught:
        driver.heartbeat(silent)
    assert caught.value.detail["cause"] == "expired"
    driver.heartbeat(lively)


def test_a_zombie_comes_back_as_a_new_session():
    """An expired worker joins again under its rank, and is live."""
    driver = Driver()
    old, _other = driver.join(0), driver.join(1)
    driver.expire(old)

    new = driver.join(0)

    assert new.session > old.session
    assert driver.worker(0).state is WorkerState.LIVE


def test_world_size_is_fixed_by_the_first_worker_until_nobody_is_left():
    """Another world size is refused by name; once all that said the first one are gone without a job, a new one holds."""
    driver = Driver(job_spec(2))
    first = driver.join(0)

    with pytest.raises(SpecMismatch, match=r"world_size.*2.*3"):
        driver.join(1, world_size=3)
    driver.expire(first)

    assert driver.join(1, world_size=3).rank == 1


def test_leave_finishes_and_a_failed_leave_expires():
    """Leaving ends the session; only a worker that has not failed counts as finished; leaving twice is harmless."""
    driver = Driver()
    a, b = driver.start()

    driver.leave(a)
    driver.leave(a)
    driver.leave(b, failed=True)

    assert driver.worker(0).state is WorkerState.FINISHED
    assert driver.worker(1).state is WorkerState.EXPIRED
    with pytest.raises(SessionFenced, match="left"):
        driver.heartbeat(a)


def test_leave_of_a_fenced_session_does_not_end_the_new_one():
    """A superseded program that says goodbye does not take its successor with it."""
    driver = Driver()
    old = driver.join(0)
    driver.join(0)

    driver.leave(old)

    assert driver.worker(0).state is WorkerState.LIVE


def test_is_done_when_all_have_left_and_the_dead_are_given_up():
    """Done means: everybody left, or was silent for many leases; a worker that failed may still come back."""
    driver = Driver(lease_s=10)
    a, b = driver.start()

    driver.leave(a)
    assert not driver.shard.is_done
    driver.leave(b, failed=True)
    assert not driver.shard.is_done
    driver.advance(70)

    assert driver.shard.is_done


def test_calls_before_anything_is_there_say_what_is_missing():
    """Before a job or its values exist, calls are refused as NotDeclared."""
    driver = Driver()
    seat = driver.join(0)

    with pytest.raises(NotDeclared, match="no job"):
        driver.begin_push(seat, 0)
    driver.declare(seat)
    with pytest.raises(NotDeclared, match="initial values"):
        driver.pull(seat, 0)


def test_a_clock_far_ahead_is_refused_and_changes_nothing():
    """A clock that no drift between shards explains is refused, by heartbeat, push and pull alike."""
    driver = Driver()
    seat, _ = driver.start()
    before = driver.fingerprint()

    for call in (driver.heartbeat, driver.begin_push, driver.pull):
        with pytest.raises(InvalidRequest, match="clock"):
            call(seat, 2000)

    assert driver.fingerprint() == before


def test_a_shard_without_blocks_believes_any_clock():
    """Where nobody pushes, the clock moves by heartbeats alone, however far apart, also after a rejoin."""
    driver = Driver(job_spec(1, blocks=1), shard=1, shards=2)
    seat = driver.join(0, session=1)
    driver.declare(seat)
    driver.initialize(seat)

    driver.heartbeat(seat, 5000)
    again = driver.join(0, session=2)
    driver.declare(again)
    driver.heartbeat(again, 50_000)

    assert again.clock == 5000
    assert driver.worker(0).clock == 50_000


def test_waits_of_an_ended_session_end_with_it():
    """Leaving, expiry and a new session fail what the session waits for; a superseded one learns that it is."""
    causes = []
    for end in (Driver.leave, lambda driver, seat: driver.expire(seat), lambda driver, seat: driver.join(seat.rank)):
        driver = Driver(job_spec(2))
        a, _b = driver.start()
        ticket = driver.pull(a, 1)[0]
        end(driver, a)
        error = ticket.future.exception(0)
        assert isinstance(error, SessionFenced)
        causes.append(error.detail["cause"])
        assert driver.core.waiting.open() == []

    assert causes == ["expired", "expired", "superseded"]


def test_a_wait_that_begins_after_its_session_ended_is_refused_at_once():
    """Between two blocks of a pull the session may end; the next wait is then refused, because nothing would end it."""
    driver = Driver(job_spec(2))
    a, _b = driver.start()
    pull, blocks = driver.shard.exchange.begin_pull(
        data_pb2.PullRequest(caller=a.caller, clock=1, layout_digest=driver.layout.digest)
    )
    driver.join(0)

    with pytest.raises(SessionFenced):
        driver.shard.exchange.read(blocks[0], pull)

    assert driver.core.waiting.open() == []


def test_draining_fails_waits_now_and_later():
    """A shard that shuts down keeps nobody waiting, neither those that wait nor those that come."""
    driver = Driver(job_spec(2))
    a, b = driver.start()
    early = driver.pull(a, 1)[0]

    driver.shard.drain()
    late = driver.arrive(b)

    for ticket in (early, late):
        assert isinstance(ticket.future.exception(0), PsdError)
        assert ticket.future.exception(0).reason == "Draining"
    with pytest.raises(PsdError, match="shutting down"):
        driver.shard.check_draining()
    assert driver.core.waiting.open() == []


def test_a_worker_that_was_live_before_the_job_went_back_is_awaited_for_a_lease():
    """Refused heartbeats of one that is in the middle of a step show that it lives; one that never came is awaited for ever."""
    members = Membership(4, lease_s=10)
    members.on_gone_back([WorkerState.LIVE, WorkerState.LIVE, WorkerState.FINISHED], 100.0)
    assert members.waited_in(0) == 0b1011

    now, expired = 100.0, {}
    while now < 125:
        if now < 110:
            members.on_heard_again(1, now)
        expired |= {worker.rank: now for worker in members.on_tick(now)}
        now += tick_s(10)

    assert list(expired) == [0, 1]
    assert 110 < expired[0] <= 110 + 2 * tick_s(10) < 119 < expired[1]
    assert members.waited_in(0) == 0b1000


def test_time_of_training_begins_when_all_have_joined_and_ends_with_the_last_word_of_one():
    """What a worker does before it joins, such as its imports, is not the job's time; nor are steps made meanwhile its pace."""
    members = Membership(2, 9.0)
    first = members.on_join(0, 1, now=10.0)
    members.on_step(first, 7)
    assert members.trained() == (0, 0.0)

    second = members.on_join(1, 2, now=15.0)
    members.on_step(second, 17)
    members.on_seen(second, 17.5)

    assert members.trained() == (10, 2.5)


def test_a_worker_that_a_launcher_starts_again_is_waited_for_beyond_its_lease():
    """Also by a membership that follows, as the job goes back. A process that was heard in the meantime is the new one."""
    starting = {}
    members = Membership(2, 9.0, starting=starting)
    for rank in range(2):
        members.on_join(rank, 1 + rank, now=0.0)
    starting[1] = 1.0

    def tick_to(end, *heard):
        expired = []
        for now in range(round(members._last_tick) + 1, end + 1):
            for rank in heard:
                members.on_seen(members.workers[rank], float(now))
            expired += members.on_tick(float(now))
        return [worker.rank for worker in expired]

    assert tick_to(60, 0) == []
    members.on_join(1, 7, now=60.0)
    assert starting == {}
    assert tick_to(80, 0) == [1], "its lease is what it was"

    members.on_join(1, 8, now=80.0)
    starting[1] = 80.0  # the word came late: it has joined already
    assert tick_to(95, 0, 1) == []
    assert tick_to(120, 0) == [1]


def test_a_shard_that_is_starved_while_a_launcher_starts_a_worker_again_takes_its_own_lateness_for_no_sign_of_life():
    """Each tick comes late, by more than a lease in all, before the new process has joined; then that one falls silent."""
    starting = {}
    members = Membership(2, 9.0, starting=starting)
    for rank in range(2):
        members.on_join(rank, 1 + rank, now=0.0)
    members.on_tick(0.0)
    starting[1] = now = 0.0
    for _ in range(40):
        now += tick_s(9.0) + 0.5
        members.on_seen(members.worker(0), now)
        assert members.on_tick(now) == []
    assert list(starting) == [1]

    members.on_seen(members.worker(1), now)  # it had joined before the word came
    members.on_tick(now)
    assert starting == {}


def test_a_shard_hears_from_a_launcher_which_workers_to_expect(monkeypatch):
    """What is no such line, or of no worker of the job, is passed over."""
    driver = Driver()
    driver.join(0)
    monkeypatch.setattr("sys.stdin", io.StringIO("starting 1\nnonsense\nstarting 7\nstarting 0\ngone 1\n"))
    config = ServerConfig(0, 1)

    _heed(SimpleNamespace(shard=driver.shard), config, None)

    assert list(driver.shard._core.starting) == [0], "rank 7 is no worker's"
