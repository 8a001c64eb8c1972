"""Exact aggregation at the end, when nobody brings what shard 0 has settled: the others take it from its end note."""

from __future__ import annotations

import math

import pytest
from settling import bring, clipped, commit, measure
from shard_driver import Driver, job_spec

from psd.checkpoint import common_cut, to_settle
from psd.contract.errors import CheckpointFailed, InvalidRequest
from psd.v1 import data_pb2, job_pb2

EXACT = {"blocks": 2, "aggregation": "exact"}


def started(tmp_path, spec):
    """Two shards, each with a block and a state directory, and the workers' seats there."""
    shards = [Driver(spec, shard=i, shards=2, run_id="mine", state_dir=str(tmp_path / f"state-{i}")) for i in range(2)]
    seats = [shards[0].start()]
    seats.append([shards[1].join(seat.rank, session=seat.session) for seat in seats[0]])
    for seat in seats[1]:
        shards[1].declare(seat)
    shards[1].initialize(seats[1][0])
    for shard in shards:
        shard.done = shard.shard.cuts.take_part()
    return shards, seats


def push_to_all(shards, seats, clock, *values, **header):
    for shard, there in zip(shards, seats, strict=True):
        for seat, value in zip(there, values, strict=False):
            shard.push(seat, clock, value, **header)


def notes_of(shards):
    """The notes with which the shards end."""
    return {index: shard.shard.schedule.end_note() for index, shard in enumerate(shards)}


def settle_by(notes, shards):
    """What the shards do that have no common cut: each tries to close the rounds that others have closed. Returns which."""
    step, behind = to_settle(notes)
    for index in behind:
        notes[index] = shards[index].shard.schedule.reach(step, notes[0].brings, notes[index])
    return behind


def versions(shards):
    return [shard.core.declared().version_max for shard in shards]


def values(shards):
    return [shard.values(index)[0] for index, shard in enumerate(shards)]


def test_a_round_that_shard_0_alone_has_closed_is_closed_by_its_note_and_stored(tmp_path):
    """Both workers have committed, and none has asked shard 1 for the round."""
    shards, seats = started(tmp_path, job_spec(2, **EXACT))
    push_to_all(shards, seats, 0, 1.0, 5.0)
    for seat in seats[0]:
        commit(shards[0], seat, 0)
    notes = notes_of(shards)
    with pytest.raises(CheckpointFailed):
        common_cut(notes, shards[0].layout)

    settle_by(notes, shards)
    cut = common_cut(notes, shards[0].layout)
    for shard in shards:
        shard.shard.schedule.take_end(cut)

    stored = [shard.done.get_nowait() for shard in shards]
    assert (cut.step, versions(shards), values(shards)) == (1, [1, 1], [-3.0, -3.0])
    assert [snapshot.why_missed for snapshot in stored] == ["", ""]
    assert shards[1].core.counters.pushes_accepted == 2


@pytest.mark.parametrize("is_quorum", [False, True])
def test_a_push_that_shard_0_has_left_out_is_left_out_by_all(tmp_path, is_quorum):
    """It came late, with a quorum; or its worker died before it had told shard 0 that all shards have it."""
    shards, seats = started(tmp_path, job_spec(2, quorum=1 if is_quorum else 0, **EXACT))
    push_to_all(shards, seats, 0, 1.0, 5.0)
    commit(shards[0], seats[0][0], 0)
    if not is_quorum:
        shards[0].leave(seats[0][1], failed=True)
    notes = notes_of(shards)

    settle_by(notes, shards)

    assert common_cut(notes, shards[0].layout).step == 1
    assert values(shards) == [-1.0, -1.0]


def test_a_round_that_is_skipped_passes_on_all_shards(tmp_path):
    """A gradient was not finite, and shard 0 has decided that the round is made of nobody."""
    shards, seats = started(tmp_path, job_spec(2, nan_policy="skip", **EXACT))
    push_to_all(shards, seats, 0, 1.0, 5.0)
    commit(shards[0], seats[0][0], 0, skip=True)
    commit(shards[0], seats[0][1], 0)
    notes = notes_of(shards)

    settle_by(notes, shards)

    assert common_cut(notes, shards[0].layout).step == 1
    assert values(shards) == [0.0, 0.0]


def test_what_shard_0_has_decided_is_in_the_note_of_its_next_process(tmp_path):
    """It was killed, and started again, after all workers were gone."""
    shards, seats = started(tmp_path, job_spec(2, **EXACT))
    push_to_all(shards, seats, 0, 1.0, 5.0)
    for seat in seats[0]:
        commit(shards[0], seat, 0)
    shards[0].restart()
    notes = notes_of(shards)

    settle_by(notes, shards)

    assert common_cut(notes, shards[0].layout).step == 1
    assert values(shards) == [-3.0, -3.0]


@pytest.mark.parametrize("killed", [0, 1])
def test_shards_that_have_lost_the_gradients_of_a_round_make_no_cut_and_say_so_once(tmp_path, killed):
    """Shard 1 was killed after shard 0 had closed the round; or shard 0 before it did, and a worker had told shard 1 before
    that. The workers, who would send them again, are gone."""
    shards, seats = started(tmp_path, job_spec(2, **EXACT))
    push_to_all(shards, seats, 0, 1.0, 5.0)
    if killed == 0:
        shards[0].core.declared().arena.record_decision(0, 0b11)
        shards[0].core.declared().arena.set_word("decided", 1)
        shards[1].core.declared().participant.follow([(0, 0b11)])
    else:
        for seat in seats[0]:
            commit(shards[0], seat, 0)
    shards[killed].restart()
    notes = notes_of(shards)

    assert settle_by(notes, shards) == {0, 1}

    assert settle_by(notes, shards) == set()
    assert sorted(versions(shards)) == [0, 1]
    with pytest.raises(CheckpointFailed, match="in the middle of a round: they are at version 0, version 1"):
        common_cut(notes, shards[0].layout)


@pytest.mark.parametrize("applied", [0, 1])
def test_a_round_is_applied_by_its_verdict_on_the_shards_that_have_not_heard_it(tmp_path, applied):
    """Also on shard 0 itself: a worker brings it there like to the others, and has brought it to shard 1 only."""
    shards, seats = started(tmp_path, clipped(blocks=2))
    push_to_all(shards, seats, 0, 1.0, 3.0)
    for seat in seats[0]:
        reply = commit(shards[0], seat, 0, without_waiting=True)
    measures = [measure(shards[i], seats[i][0], 0, decisions=reply.decisions).measure for i in range(2)]
    reply = commit(shards[0], seats[0][0], 0, measures=measures)
    bring(shards[applied], seats[applied][0], 1, verdict=reply.verdict, decisions=reply.decisions)
    assert versions(shards)[applied] == 1 != versions(shards)[1 - applied]
    notes = notes_of(shards)

    settle_by(notes, shards)

    assert common_cut(notes, shards[0].layout).step == 1
    assert values(shards) == [-2 / (math.sqrt(24) + 1e-6)] * 2


def test_a_decided_round_whose_verdict_nobody_has_found_is_left_out_by_all(tmp_path):
    """No shard can have applied it."""
    shards, seats = started(tmp_path, clipped(blocks=2))
    push_to_all(shards, seats, 0, 1.0, 3.0)
    for seat in seats[0]:
        commit(shards[0], seat, 0, without_waiting=True)

    assert common_cut(notes_of(shards), shards[0].layout).step == 0
    assert values(shards) == [0.0, 0.0]


def test_a_cut_that_waited_for_the_round_is_taken_with_it(tmp_path):
    """The rounds before it were closed everywhere."""
    shards, seats = started(tmp_path, job_spec(2, **EXACT))
    for shard in shards:
        shard.learn_cuts([data_pb2.Cut(id="c1", step=1)])
    push_to_all(shards, seats, 0, 1.0, 5.0)
    for seat in seats[0]:
        commit(shards[0], seat, 0)
    assert [shard.done.qsize() for shard in shards] == [1, 0]

    settle_by(notes_of(shards), shards)

    assert [shard.done.get_nowait().why_missed for shard in shards] == ["", ""]


def test_a_job_goes_on_where_its_shards_have_ended(tmp_path):
    """From their state directories, with the workers' next processes."""
    shards, seats = started(tmp_path, job_spec(2, **EXACT))
    push_to_all(shards, seats, 0, 1.0, 5.0)
    for seat in seats[0]:
        commit(shards[0], seat, 0)
    settle_by(notes_of(shards), shards)

    seats = []
    for shard in shards:
        shard.restart()
        seats.append([shard.join(rank, session=0 if not seats else seats[0][rank].session) for rank in range(2)])
        for seat in seats[-1]:
            shard.declare(seat)
    push_to_all(shards, seats, 1, 1.0, 5.0)
    for seat in seats[0]:
        reply = commit(shards[0], seat, 1)
    bring(shards[1], seats[1][0], 2, decisions=reply.decisions)

    assert [seat.clock for there in seats for seat in there] == [1] * 4
    assert (versions(shards), values(shards)) == ([2, 2], [-6.0, -6.0])


@pytest.mark.parametrize(
    "brought",
    [
        data_pb2.PullRequest(decisions=[job_pb2.Decision(round=0, members=b"\x04")]),
        data_pb2.PullRequest(verdict=job_pb2.Verdict(round=0, is_final=True)),
    ],
    ids=["a decision on a worker that there is not", "a verdict where there are none"],
)
def test_what_is_not_of_the_job_is_refused_and_changes_nothing(tmp_path, brought):
    """As if somebody else had written shard 0's note."""
    shards, seats = started(tmp_path, job_spec(2, **EXACT))
    push_to_all(shards, seats, 0, 1.0, 5.0)
    note = shards[1].shard.schedule.end_note()

    with pytest.raises(InvalidRequest):
        shards[1].shard.schedule.reach(1, brought, note)

    assert versions(shards) == [0, 0]
