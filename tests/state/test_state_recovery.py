"""A shard whose process was killed comes back on its arena: what it knows then, and whom it refuses."""

from __future__ import annotations

import os

import pytest
from shard_driver import INCARNATION, Driver, Fuse, Killed, job_spec

from psd.contract.config import ConfigError, ServerConfig
from psd.contract.errors import NotDeclared, RolledBack, SessionFenced, ShardRestarted, StateLost
from psd.state.durability import notes
from psd.state.life import Life
from psd.state.shard import Shard
from psd.state.tickets import Ticket
from psd.state.workers.membership import WorkerState


def test_parameters_slots_versions_and_windows_are_as_they_were(driver_of):
    """What was applied is there again; a push that was counted is a duplicate; the next round goes on from it."""
    driver = driver_of(job_spec(2, blocks=2, flags=("momentum",)))
    a, b = driver.start()
    momentum = (1.0, 0.5, 0.0, 0.0)
    for seat in (a, b):
        driver.push(seat, 0, 2.0, scalars=momentum)
    before = driver.fingerprint()

    driver.restart(a, b)

    assert driver.shard.is_recovered
    assert driver.fingerprint()[0] == before[0]
    assert driver.push(a, 0, 2.0, scalars=momentum).blocks_duplicate == 2
    for seat in (a, b):
        driver.push(seat, 1, 2.0, scalars=momentum)
    assert (driver.version(), driver.values()) == (2, [-5.0] * 3)


def test_the_open_round_is_empty_again_and_waits_for_all_that_had_pushed(driver_of):
    """Gradients of an open round die with the process. Whoever had pushed one is waited for, and sends it again."""
    driver = driver_of()
    a, b = driver.start()
    for clock in range(3):
        driver.push(a, clock, 2.0)
        driver.push(b, clock, 4.0)
    driver.push(a, 3, 2.0)

    driver.restart(a, b)
    driver.push(b, 3, 4.0)

    assert driver.version() == 3, "without the gradient that a had sent"
    assert (driver.worker(0).clock, driver.worker(0).floor) == (4, 3)
    assert driver.push(a, 3, 2.0).blocks_counted == 1
    assert (driver.version(), driver.values()) == (4, [-12.0] * 3)


@pytest.mark.parametrize("clock", [1, 2, 1000])
def test_a_worker_that_skipped_rounds_is_not_waited_for_in_them_afterwards(driver_of, clock):
    """Its floor is its clock: the rounds before are not its own, also for the next process."""
    driver = driver_of()
    a, b = driver.start()
    driver.heartbeat(a, clock)

    driver.restart(a, b)
    driver.push(b, 0, 6.0)

    assert (driver.worker(0).clock, driver.worker(0).floor) == (clock, clock)
    assert (driver.version(), driver.values()) == (1, [-6.0] * 3)


def test_states_of_workers_are_kept_and_leases_begin_anew(driver_of):
    """Absent ones are still waited for, ended ones are not; a live one has a whole lease to come back."""
    driver = driver_of(job_spec(5))
    seats = [driver.join(rank) for rank in range(4)]
    for seat in seats:
        driver.declare(seat)
    assert driver.initialize(seats[0])
    driver.leave(seats[1])
    driver.leave(seats[2], failed=True)
    driver.time.value += 8  # of a lease of 10

    driver.restart()

    states = [worker.state for worker in driver.core.members.workers]
    assert states == [
        WorkerState.LIVE,
        WorkerState.FINISHED,
        WorkerState.EXPIRED,
        WorkerState.LIVE,
        WorkerState.ABSENT,
    ]
    assert driver.advance(9) == []
    assert driver.advance(2) == [0, 3]


@pytest.mark.parametrize("step", range(1, 5))
def test_a_shard_that_dies_while_a_worker_joins_knows_all_of_it_or_nothing(driver_of, step):
    """Session, clock and first round are kept in one step. Otherwise the new session would have its predecessor's first round,
    in which it never takes part, and everybody would wait for it there."""
    driver = driver_of(job_spec(2, blocks=2), shard=1, shards=2)
    a, b = driver.join(0, session=1), driver.join(1, session=2)
    for seat in (a, b):
        driver.declare(seat)
    driver.initialize(a)
    driver.push(a, 0, 2.0)  # its session dies with this gradient in the open round
    fuse = Fuse()
    driver.restart(a, b, crash_point=fuse)
    fuse.steps = step

    with pytest.raises(Killed):
        driver.join(0, session=3)
    driver.restart(b)
    again = driver.join(0, session=3)
    driver.declare(again)
    driver.heartbeat(again, 1)  # shard 0 has closed round 0

    driver.push(b, 0, 6.0)
    assert (driver.version(1), driver.values(1)) == (1, [-6.0] * 3)


def test_an_opened_barrier_is_answered_again_and_the_next_one_waits(driver_of):
    """The answer was lost with the shard: the same call is answered, instead of waiting for those that have gone on."""
    driver = driver_of()
    a, b = driver.start()
    tickets = driver.arrive(a), driver.arrive(b)
    assert [ticket.future.result(0).generation for ticket in tickets] == [0, 0]

    driver.restart(a, b)

    assert driver.arrive(a).future.result(0).generation == 0
    ahead = driver.arrive(b, seq=2)
    assert not ahead.future.done()
    driver.arrive(a, seq=2)
    assert ahead.future.done()


def test_a_barrier_that_had_not_opened_is_entered_anew(driver_of):
    """An arrival dies with the process, and the worker sends it again."""
    driver = driver_of()
    a, b = driver.start()
    driver.arrive(a)

    driver.restart(a, b)
    ticket = driver.arrive(b)

    assert not ticket.future.done()
    assert driver.arrive(a).future.result(0).generation == ticket.future.result(0).generation == 0


def test_a_shard_that_is_killed_before_it_has_values_comes_back_empty(driver_of, tmp_path):
    """Nobody can have built on it; the directory is as if never used."""
    driver = driver_of()
    a = driver.join(0)
    driver.declare(a)

    driver.restart()

    assert not driver.shard.is_recovered
    assert not (tmp_path / "state" / "arena").exists()
    with pytest.raises(StateLost, match="shard 0 has come back without the parameters that it held"):
        driver.resume(a)
    assert driver.start(value=3.0)
    assert driver.values() == [3.0] * 3


def test_a_shard_that_has_lost_everything_and_begun_anew_lets_nobody_resume_that_it_does_not_know(driver_of):
    """Another worker was restarted, and has brought initial values: this one would train on without what it has pushed."""
    driver = driver_of()
    a, _ = driver.start()
    driver.push(a, 0, 2.0)
    driver.shard.close(keep=False)
    driver.incarnation += 1
    driver._start()
    b = driver.join(1)
    driver.declare(b)
    driver.initialize(b)

    with pytest.raises(StateLost, match="serves a job that worker 0 has never joined"):
        driver.resume(a)


def test_a_job_that_is_done_leaves_nothing(driver_of, tmp_path):
    """Without `keep` the arena goes, and with it the directory that was made for it."""
    driver = driver_of()
    a, b = driver.start()
    driver.arrive(a)
    driver.arrive(b)

    driver.shard.close(keep=False)

    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shard_index": 1, "shard_count": 2}, r"--state-dir: .*state: holds shard 0/1, this is 1/2"),
        ({"run_id": "other"}, r"--state-dir: .*state: holds run 'mine', not 'other'"),
    ],
)
def test_an_arena_of_another_shard_or_run_is_refused_and_left_alone(driver_of, tmp_path, change, words):
    """An operator's mistake is named with both values, and changes nothing."""
    driver = driver_of(run_id="mine")
    driver.start(value=3.0)
    driver.kill()
    settings = {"shard_index": 0, "shard_count": 1, "run_id": "mine", "state_dir": str(tmp_path / "state")} | change

    with pytest.raises(ConfigError, match=words):
        Shard(ServerConfig(**settings))

    driver._start()
    assert driver.values() == [3.0] * 3


def test_an_arena_that_is_in_use_is_refused(driver_of, tmp_path):
    """Two processes of one shard would write over each other."""
    driver_of().start()

    with pytest.raises(ConfigError, match=r"--state-dir: .* is in use by process"):
        Shard(ServerConfig(0, 1, state_dir=str(tmp_path / "state")))


def test_a_damaged_arena_is_refused_with_what_to_do(driver_of, tmp_path):
    """A flipped byte in the front: the shard does not start, and says how to go on without it."""
    driver = driver_of()
    driver.start()
    driver.kill()
    arena = tmp_path / "state" / "arena"
    data = bytearray(arena.read_bytes())
    data[70] ^= 1
    arena.write_bytes(data)

    with pytest.raises(ConfigError, match=r"--state-dir: .*this shard cannot go on with it. Remove the directory"):
        Shard(ServerConfig(0, 1, state_dir=str(tmp_path / "state")))


@pytest.mark.parametrize("note", ["barriers", "orders", "client-state-first"])
def test_a_damaged_note_beside_the_arena_is_refused_with_what_to_do(driver_of, tmp_path, note):
    """What a shard has promised by it is not known any more."""
    driver = driver_of()
    driver.start()
    notes.write(tmp_path / "state", note, b"no such message")

    with pytest.raises(ConfigError, match=r"--state-dir: .*state: .*this shard cannot go on with it. Remove the directory"):
        driver.restart()


# -- resuming --------------------------------------------------------------------------------------------------------------


def test_the_old_incarnation_is_refused_and_resuming_changes_nothing_but_that(driver_of):
    """The same session goes on at the same clock: no rejoin, no new entry, no lost round."""
    driver = driver_of()
    a, b = driver.start()
    driver.push(a, 0, 2.0)
    driver.restart()
    with pytest.raises(ShardRestarted, match=f"is incarnation {INCARNATION + 1}, not {INCARNATION}"):
        driver.heartbeat(a)
    before = driver.fingerprint()

    reply = driver.resume(a)

    assert (reply.session, reply.clock, reply.incarnation) == (a.session, 1, INCARNATION + 1)
    assert driver.fingerprint() == before
    driver.resume(b)
    driver.push(a, 0, 2.0)
    driver.push(b, 0, 4.0)
    assert driver.values() == [-3.0] * 3


@pytest.mark.parametrize(("end", "cause"), [("expire", "expired"), ("leave", "expired"), ("rejoin", "superseded")])
def test_a_session_that_has_ended_does_not_resume(driver_of, end, cause):
    """Whatever ended it, before the restart or after: it is fenced, and its worker joins again."""
    driver = driver_of()
    a, b = driver.start()
    driver.restart(b)
    if end == "expire":
        driver.expire(a, keep=[b])
    elif end == "leave":
        driver.leave(a, failed=True)
    else:
        driver.join(0)

    with pytest.raises(SessionFenced) as caught:
        driver.resume(a)

    assert caught.value.detail["cause"] == cause


@pytest.mark.parametrize("shard", [0, 1])
def test_a_session_that_the_shard_never_issued_does_not_resume(driver_of, shard):
    """A later session than the shard has seen is no session of its, and takes nobody's place."""
    driver = driver_of(job_spec(1, blocks=2), shard=shard, shards=2)
    seat = driver.join(0, session=5 * shard)
    driver.declare(seat)
    driver.initialize(seat)
    before = driver.fingerprint()
    seat.session += 1

    with pytest.raises(SessionFenced, match="never joined this shard"):
        driver.resume(seat)

    assert driver.fingerprint() == before


def test_another_timeline_does_not_resume(driver_of):
    """The job has gone back to a checkpoint meanwhile: the worker is told so, and not mixed in."""
    driver = driver_of()
    a, _b = driver.start()
    driver.core.timeline, driver.core.restored_from = 2, "earlier"

    with pytest.raises(RolledBack, match="has gone back to checkpoint earlier") as caught:
        driver.resume(a, timeline=1)

    assert caught.value.detail == {"timeline": 2, "checkpoint": "earlier"}


def test_a_tentative_shard_takes_nothing_and_nobody_resumes_there(driver_of):
    """It does not know yet whether its state is everybody's."""
    driver = driver_of()
    a, _b = driver.start()
    driver.core.life.now = Life.TENTATIVE

    with pytest.raises(RolledBack):
        driver.resume(a)
    with pytest.raises(NotDeclared, match="waits to be told, by Rollback"):
        driver.heartbeat(a)


def test_a_worker_leaves_whichever_incarnation_it_knew(driver_of):
    """It ends, and will not resume first; the shard should not wait for its lease."""
    driver = driver_of()
    a, b = driver.start()
    driver.push(b, 0, 4.0)
    driver.restart(b)
    driver.push(b, 0, 4.0)

    driver.leave(a)

    assert driver.worker(0).state is WorkerState.FINISHED
    assert driver.values() == [-4.0] * 3


def test_a_call_that_began_before_the_rollback_counts_nowhere(driver_of):
    """The new timeline's workers are others, although ranks and rounds may be the same: a gradient from the old one would be
    mixed in."""
    driver = driver_of()
    a, b = driver.start()
    push, late = driver.begin_push(a, 0), driver.begin_push(b, 0)
    driver.push_block(late, 0, 1.0)
    members = driver.core.members
    driver.core.membership = type(members)(2, 10.0)
    driver.core.membership.on_join(0, a.session + 1, host="", pid=0, now=driver.time())

    for call in (push, late):
        with pytest.raises(ShardRestarted, match="gone back to a checkpoint since the call began"):
            driver.push_block(call, 0, 1.0)
    with pytest.raises(ShardRestarted):
        driver.shard.exchange.end_push(late)


def test_ssp_gates_know_the_clocks_of_before(driver_of):
    """The staleness bound holds over a restart: a worker that was ahead still waits for the slow one."""
    driver = driver_of(job_spec(2, mode="ssp:1"))
    a, b = driver.start()
    for clock in range(2):
        driver.push(a, clock, 1.0)

    driver.restart(a, b)

    found = driver.pull(a, 2)[0]
    assert isinstance(found, Ticket)
    driver.push(b, 0, 1.0)
    assert found.future.done()


def test_what_killed_shards_left_in_memory_is_cleared_by_the_next_one(tmp_path, monkeypatch):
    """Whole arenas at once; directories in which none was made yet only when nobody can be about to lock them."""
    monkeypatch.setattr("psd.state.durability.state_directory.memory_directory", lambda: tmp_path)
    driver = Driver()
    driver.start()
    left = driver.core.storage.directory
    driver.kill()
    driver.core.storage._clean_up.detach()
    young, old = left.with_name(f"{left.name}1"), left.with_name(f"{left.name}2")
    for path in (young, old):
        path.mkdir()
    os.utime(old, (1, 1))
    assert (left / "arena").exists()

    Driver()

    assert sorted(tmp_path.rglob("*")) == [young], "nobody has touched it"
