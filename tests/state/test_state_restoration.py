"""Going back to a checkpoint: tentative shards, timelines, and what becomes of those who were waiting."""

from __future__ import annotations

import pytest
from shard_driver import Driver, job_spec

from psd.checkpoint import BlockPart, CheckpointDirectory, Cut
from psd.contract.errors import (
    CheckpointCorrupt,
    CheckpointFailed,
    ForeignRun,
    NotDeclared,
    RolledBack,
    ShardRestarted,
    StateLost,
)
from psd.state.life import Life
from psd.state.tickets import Ticket
from psd.v1 import control_pb2, data_pb2

MOMENTUM = (1.0, 0.5, 0.0, 0.0)


def spec_of(mode="sync", aggregation="fast"):
    return job_spec(2, blocks=2, mode=mode, flags=("momentum",), aggregation=aggregation)


@pytest.fixture
def directory(tmp_path):
    return CheckpointDirectory(str(tmp_path / "checkpoints"))


def store(driver, directory, step, timeline=0, cut_id="a1"):
    """Write the shard's blocks as they are; the checkpoint's name."""
    cut = Cut(cut_id, step, timeline, driver.core.run_id, 5.0, driver.core.job.layout)
    driver.write_part(directory, cut, client_states={0: b"row 2"})
    assert directory.complete(cut)
    return cut.name


def trained(directory, steps=2, spec=None, **arguments):
    """A shard after some rounds, which are stored; with its workers and the checkpoint's name."""
    driver = Driver(spec or spec_of(), run_id="mine", directory=directory, **arguments)
    seats = driver.start()
    for clock in range(steps):
        for seat in seats:
            driver.push(seat, clock, 1.0, scalars=MOMENTUM)
    return driver, seats, store(driver, directory, steps)


def rollback(driver, checkpoint, timeline, run_id="mine"):
    driver.rollback(checkpoint, timeline, run_id=run_id)


def state_of(driver):
    """Versions, pages, windows."""
    return driver.fingerprint()[0]


def test_a_fresh_shard_loads_the_newest_checkpoint_and_waits_to_be_told(directory):
    """Parameters, slots, steps and versions are there, but nobody's pushes; until a timeline begins it takes nothing."""
    first, _, name = trained(directory)
    fresh = Driver(spec_of(), directory=directory)

    assert (fresh.shard.restored_from, fresh.core.is_tentative, fresh.core.run_id) == (name, True, "mine")
    assert [block[:3] for block in state_of(fresh)] == [block[:3] for block in state_of(first)]
    assert all(set(part) == {0} for block in state_of(fresh) for part in block[3])
    reply = fresh.shard.admission.join(control_pb2.JoinRequest(shard_count=1, rank=0, world_size=2))
    assert (reply.is_tentative, reply.checkpoint, reply.clock) == (True, name, 2)
    seat = fresh.join(1)
    with pytest.raises(NotDeclared, match="waits to be told"):
        fresh.declare(seat)


@pytest.mark.parametrize("dies", [False, True])
def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(directory, tmp_path, dies):
    """Two rounds, a restore, one more round: the numbers of three rounds; each worker gets back what it had saved, also from
    the restored shard's next process."""
    first, seats, name = trained(directory)
    fresh = Driver(spec_of(), directory=directory, state_dir=str(tmp_path / "state"))
    rollback(fresh, name, 1)
    if dies:
        fresh.restart(directory=directory)
    again = [fresh.join(rank) for rank in range(2)]

    replies = [fresh.declare(seat)[0] for seat in again]
    for driver, workers in ((first, seats), (fresh, again)):
        for seat in workers:
            driver.push(seat, 2, 1.0, scalars=MOMENTUM)

    assert [(reply.clock, reply.initialized, reply.client_state) for reply in replies] == [(2, True, b"row 2"), (2, True, b"")]
    assert fresh.values() == first.values()
    assert fresh.version() == 3


def test_exact_rounds_go_on_at_the_restored_step(directory):
    """Rounds up to there count as decided."""
    driver = Driver(spec_of(aggregation="exact"))
    seats = driver.start()
    for clock in range(4):
        for seat in seats:
            driver.push(seat, clock, 1.0, scalars=MOMENTUM)
        for seat in seats:
            driver.shard.settlement.commit(control_pb2.CommitRequest(caller=seat.caller, clock=clock))
    store(driver, directory, 4)
    fresh = Driver(spec_of(aggregation="exact"), directory=directory)

    assert fresh.core.job.coordinator.next_round == 4


def test_going_back_again_to_the_same_timeline_changes_nothing(directory):
    """Several workers do it at once: the first one's takes effect, the others' is answered."""
    driver, _, name = trained(directory)
    rollback(driver, name, 1)
    incarnation, seats = driver.core.incarnation, [driver.join(rank) for rank in range(2)]
    for seat in seats:
        driver.declare(seat)
        driver.push(seat, 2, 1.0, scalars=MOMENTUM)
    before = driver.fingerprint()

    for timeline in (1, 0):
        rollback(driver, name, timeline)

    assert driver.fingerprint() == before
    assert driver.core.incarnation == incarnation


def test_a_rollback_that_was_meant_for_an_earlier_life_of_the_shard_changes_nothing(directory):
    """The shard has been lost again meanwhile, or another worker has seen to it: this one will look again."""
    _, _, name = trained(directory)
    fresh = Driver(spec_of(), directory=directory)
    found = fresh.core.incarnation
    rollback(fresh, name, 2)

    for timeline in (2, 3):
        fresh.rollback(name, timeline, incarnation=found)

    assert fresh.core.timeline == 2


def test_a_shard_that_has_just_loaded_the_checkpoint_does_not_load_it_again(directory):
    """Tentative and untouched: it only learns that this is it. All the same it is another incarnation."""
    trained(directory)
    fresh = Driver(spec_of(), directory=directory)
    job, incarnation = fresh.core.job, fresh.core.incarnation

    rollback(fresh, fresh.shard.restored_from, 3)

    assert fresh.core.job is job
    assert (fresh.core.timeline, fresh.core.is_tentative) == (3, False)
    assert fresh.core.incarnation != incarnation


def test_a_shard_that_has_gone_on_since_loads_it_again(directory):
    """The same checkpoint once more, after further rounds: back to its numbers, on a later timeline."""
    driver, seats, name = trained(directory)
    for seat in seats:
        driver.push(seat, 2, 1.0, scalars=MOMENTUM)
    expected = Driver(spec_of(), directory=directory)

    rollback(driver, name, 1)

    assert state_of(driver) == state_of(expected)
    assert (driver.core.timeline, driver.core.restored_from) == (1, name)
    again = driver.join(0)
    driver.declare(again)
    driver.pull(again, 2)
    rollback(driver, name, 2)
    assert driver.core.timeline == 2


def test_those_who_wait_are_told_and_their_sessions_have_ended(directory):
    """Rounds, barriers: every wait ends with the typed event; later calls meet another incarnation; resuming says it, too."""
    driver, (a, b), name = trained(directory)
    driver.push(a, 2, 1.0, scalars=MOMENTUM)
    waits = [driver.pull(a, 3)[0], driver.arrive(b)]
    push = driver.begin_push(b, 2, scalars=MOMENTUM)

    rollback(driver, name, 1)

    for ticket in waits:
        assert isinstance(ticket, Ticket)
        assert ticket.future.exception(0).detail == {"timeline": 1, "checkpoint": name}
    with pytest.raises(ShardRestarted):
        driver.push_block(push, 0, 1.0)
    with pytest.raises(ShardRestarted):
        driver.heartbeat(a)
    with pytest.raises(RolledBack, match=f"has gone back to checkpoint {name}"):
        driver.resume(a, timeline=0)
    assert driver.version() == 2


def test_a_page_that_was_being_read_is_given_back_to_its_own_arena(directory):
    """A pull holds a page of the old timeline while the shard goes back: the new arena must not take it for one of its own."""
    driver, (a, _), name = trained(directory)
    exchange = driver.shard.exchange
    pull, (block, *_) = exchange.begin_pull(data_pb2.PullRequest(caller=a.caller, clock=2, layout_digest=driver.layout.digest))
    _, page = exchange.read(block, pull)
    numbers = page.parameter.tolist()

    rollback(driver, name, 1)

    assert page.parameter.tolist() == numbers
    block.unpin(page)
    with pytest.raises(ShardRestarted):
        exchange.read(block, pull)


def test_what_cannot_be_read_is_refused_and_the_shard_is_as_it_was(directory, tmp_path):
    """No such checkpoint, a damaged one, no directory at all, another run: named, before anything is given up."""
    driver, _, name = trained(directory)
    bare = Driver(spec_of(), run_id="mine")
    bare.start()
    before = driver.fingerprint()

    with pytest.raises(CheckpointFailed, match="was started without --checkpoint-dir"):
        rollback(bare, name, 1)
    with pytest.raises(ForeignRun, match="this shard serves run 'mine', not 'other'"):
        rollback(driver, name, 1, run_id="other")
    with pytest.raises((CheckpointCorrupt, CheckpointFailed)):
        rollback(driver, "timeline-00000-step-000000000009-zz", 1)
    part = next(path for path in (tmp_path / "checkpoints" / name).iterdir() if path.suffix == ".chunks")
    data = bytearray(part.read_bytes())
    data[-3] ^= 1
    part.write_bytes(data)
    with pytest.raises(CheckpointCorrupt):
        rollback(driver, name, 1)

    assert driver.fingerprint() == before
    assert (driver.core.timeline, driver.core.is_tentative) == (0, False)


def test_a_damaged_newest_checkpoint_is_passed_over(directory, tmp_path, caplog):
    """Loudly: the one before is used, and the log names both the file and the reason."""
    driver, seats, name = trained(directory)
    for seat in seats:
        driver.push(seat, 2, 1.0, scalars=MOMENTUM)
    newest = store(driver, directory, 3, cut_id="a2")
    for path in (tmp_path / "checkpoints" / newest).iterdir():
        if path.suffix == ".chunks":
            path.write_bytes(path.read_bytes()[:-8])

    fresh = Driver(spec_of(), directory=directory)

    assert fresh.shard.restored_from == name
    assert any(newest in message and "going back to the one before" in message for message in caplog.messages)


def test_a_worker_that_was_on_another_timeline_of_the_same_number_is_told(directory):
    """All shards had lost that one, and began this from the checkpoint: the worker goes on, and from there."""
    _, seats, name = trained(directory)
    fresh = Driver(spec_of(), directory=directory)
    rollback(fresh, name, 1)

    with pytest.raises(RolledBack, match=name):
        fresh.resume(seats[0], timeline=1)


def test_a_restored_shard_that_is_killed_knows_its_timeline(directory, tmp_path):
    """Timeline, checkpoint, and being tentative are kept in the arena."""
    trained(directory)
    fresh = Driver(spec_of(), directory=directory, state_dir=str(tmp_path / "state"))
    name = fresh.shard.restored_from

    fresh.restart(directory=directory)
    assert (fresh.core.is_tentative, fresh.core.restored_from) == (True, name)
    rollback(fresh, name, 4)
    fresh.restart(directory=directory)

    assert (fresh.core.is_tentative, fresh.core.timeline, fresh.core.restored_from) == (False, 4, name)
    assert fresh.version() == 2


def with_a_lost_gradient(directory, tmp_path, *, is_stored):
    """Exact: shard 1 was killed in a round that shard 0 has decided, and one of the two members has died with its gradient.

    The shard, the member that lives on and has pushed again, and the checkpoint's name.
    """
    spec = job_spec(2, blocks=2, aggregation="exact", flags=("momentum",))
    driver = Driver(spec, shard=1, shards=2, run_id="mine", directory=directory, state_dir=str(tmp_path / "state"))
    a, b = (driver.join(rank, session=rank + 1) for rank in range(2))
    for seat in (a, b):
        driver.declare(seat)
    driver.initialize(a)
    name = store_both(driver, directory) if is_stored else ""
    for seat in (a, b):
        driver.push(seat, 0, 2.0, scalars=MOMENTUM)
    driver.restart(a, b, directory=directory)
    driver.push(b, 0, 2.0, scalars=MOMENTUM)
    driver.core.declared().participant.follow([(0, 0b11)])
    return driver, a, b, name


def store_both(driver, directory):
    """A checkpoint of this shard 1 and of a shard 0 that holds the same."""
    job = driver.core.job
    cut = Cut("a1", 0, 0, "mine", 5.0, job.layout)
    for index in range(2):
        parts = [
            BlockPart(
                space=plan.space,
                offset=plan.offset,
                length=plan.length,
                version=0,
                parameter=page.parameter,
                slots={"momentum": page.slots[0]},
                steps=page.steps,
                sessions=page.sessions,
                clocks=page.clocks,
            )
            for plan in job.layout.blocks_of(index)
            for page in [next(iter(job.blocks.values()))._page]
        ]
        directory.write_part(cut, index, parts)
    assert directory.complete(cut)
    return cut.name


def test_a_round_that_has_lost_a_gradient_for_good_takes_the_shard_back_to_the_last_checkpoint(directory, tmp_path):
    """As if the shard had lost everything: whoever waits, and whoever resumes, is told so, and a new timeline may begin."""
    driver, a, b, name = with_a_lost_gradient(directory, tmp_path, is_stored=True)
    ticket = driver.pull(b, 1)[1]
    incarnation = driver.core.incarnation

    with pytest.raises(ShardRestarted):  # b's heartbeat
        driver.expire(a, keep=[b])

    assert isinstance(ticket.future.exception(0), RolledBack)
    assert (driver.core.is_tentative, driver.core.restored_from, driver.core.life.now) == (True, name, Life.TENTATIVE)
    assert driver.core.incarnation != incarnation
    with pytest.raises(RolledBack):
        driver.resume(b)
    rollback(driver, name, 1)
    driver.advance(1)
    assert (driver.core.timeline, driver.core.is_tentative, driver.version(1)) == (1, False, 0)


def test_a_lost_gradient_of_a_job_that_has_gone_back_meanwhile_takes_nobody_back_again(directory, tmp_path):
    """Another shard had lost something, too, and a worker was faster."""
    driver, _, _, name = with_a_lost_gradient(directory, tmp_path, is_stored=True)
    driver.core._on_lost(StateLost("worker 0's"))

    rollback(driver, name, 1)
    driver.advance(1)

    assert (driver.core.timeline, driver.core.is_tentative) == (1, False)


@pytest.mark.parametrize("why", ["there is none", "it cannot be read"])
def test_a_round_that_has_lost_a_gradient_for_good_is_reported_if_there_is_no_checkpoint(directory, tmp_path, monkeypatch, why):
    """Nothing can be done; the waits end all the same, those that begin later too."""
    driver, a, b, _ = with_a_lost_gradient(directory, tmp_path, is_stored=False)
    if why == "it cannot be read":

        def newest():
            raise CheckpointFailed("no network")

        monkeypatch.setattr(directory, "newest", newest)
    early = driver.pull(b, 1)[1]

    driver.expire(a, keep=[b])
    late = driver.pull(b, 1)[1]

    for ticket in (early, late):
        assert isinstance(ticket.future.exception(0), StateLost)
