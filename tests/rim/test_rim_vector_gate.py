"""The cut of vectors through several shards: all have run the same batches, whatever their workers go through."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from psd.checkpoint import CheckpointDirectory, Cut
from psd.contract.config import ServerConfig
from psd.contract.consistency import Consistency
from psd.contract.errors import CheckpointFailed
from psd.contract.jobspec import JobSpec
from psd.contract.layout import Layout
from psd.contract.vector_batches import OutgoingBatch
from psd.contract.vectors import spec_message
from psd.rim.vector_gate import COME_S_MAX, HELD_S_MAX, LEFT_S, GivenUp, VectorCuts, VectorGate
from psd.state.shard import Shard
from psd.v1 import control_pb2, job_pb2, vectors_pb2
from psd_core.vector import VectorSpec
from psd_core.vector_operations import Operations

JOB = JobSpec(1, (), (), Consistency.parse("async"))
VECTOR = VectorSpec("v", 9000)
PROGRAM = 77
"""The connection of the one worker's program, over all its sessions."""


class OneShard:
    """A shard, with its gate, and the calls of the one worker on it."""

    def __init__(self, index):
        self.shard, self.gate = Shard(ServerConfig(index, 2, lease_s=600)), VectorGate()
        self._index = index

    def join(self, session, run_id):
        request = control_pb2.JoinRequest(
            shard_index=self._index, shard_count=2, world_size=1, session=session, run_id=run_id, connection=PROGRAM
        )
        reply = self.shard.admission.join(request)
        self.caller = job_pb2.Caller(run_id=reply.run_id, incarnation=reply.incarnation, session=reply.session)
        return self.caller

    def begin(self):
        self.shard.admission.declare(control_pb2.DeclareRequest(caller=self.caller, spec=JOB.to_message()))
        self.shard.vectors.create(
            vectors_pb2.VectorChange(caller=self.caller, session=self.caller.session, seq=1, vector=spec_message(VECTOR))
        )

    def run(self, session, seq):
        """A batch that fills the vector with its number, sent as by the client, under the session with which it began."""
        request, _ = OutgoingBatch([Operations.fill("v", seq)], {"v": VECTOR}).at(self._index, 2)
        request.caller.CopyFrom(self.caller)
        request.session, request.seq = session, seq
        with self.gate.passing(session, seq):
            self.shard.vectors.run(request, memoryview(b""))

    def cuts(self, directory, **how):
        how = {"lease_s": 10.0, "is_ending": lambda: False, "pause": threading.Event().wait, **how}
        return VectorCuts(self.gate, self.shard.vectors, directory, self._index, **how)

    def cut(self, cut, cuts):
        """Take a cut to which all have come; the first of this shard's elements, and what its part says of batches."""
        with cuts.take(cut) as vectors:
            (piece,) = vectors
            return piece.values[0], vectors.sessions


class Clock:
    """Time that passes only where it is waited for."""

    def __init__(self):
        self.now, self.at = 0.0, {}

    def pause(self, seconds):
        self.now += seconds
        for time in [time for time in self.at if time <= self.now]:
            self.at.pop(time)()


@pytest.fixture
def shards():
    """Two shards, which have the same vector of the one worker, and have run its batch 2."""
    one, other = found = [OneShard(0), OneShard(1)]
    first = one.join(0, "")
    other.join(first.session, first.run_id)
    for shard in found:
        shard.begin()
        shard.run(first.session, 2)
    yield found
    for shard in found:
        shard.shard.close(keep=False)


@pytest.fixture
def directory(tmp_path):
    return CheckpointDirectory(str(tmp_path))


def cut_of(shard):
    return Cut("a1", 1, 0, shard.caller.run_id, 5.0, Layout(JOB, 2))


def test_batches_are_held_for_five_seconds_in_all_whoever_is_late(shards, directory):
    """Another shard says late which batches it has run, and then one of them does not come."""
    one, _ = shards
    clock, cut, session = Clock(), cut_of(one), one.caller.session
    cuts = one.cuts(directory, pause=clock.pause, now=lambda: clock.now)
    for index in range(2):
        directory.notes.write(cut.name, "come", index, 2, {})
    clock.at[4.9] = lambda: directory.notes.write(cut.name, "held", 1, 2, {str(session): 3})

    with pytest.raises(CheckpointFailed, match=f"batch 3 of session {session}, which another shard has run, has not come"):
        one.cut(cut, cuts)

    assert 4.9 < clock.now < HELD_S_MAX + 0.1
    one.run(session, 3)


@pytest.mark.parametrize(
    ("happens", "why"),
    [("given up", "another shard has given it up"), ("ending", "the shard ends")],
)
def test_batches_are_not_held_for_a_cut_that_will_not_be(shards, directory, happens, why):
    """Another shard could not go on with it, or this one ends: whoever waits is let through at once."""
    one, _ = shards
    clock, cut = Clock(), cut_of(one)
    is_ending = threading.Event()
    cuts = one.cuts(directory, pause=clock.pause, now=lambda: clock.now, is_ending=is_ending.is_set)
    for index in range(2):
        directory.notes.write(cut.name, "come", index, 2, {})
    clock.at[0.3] = is_ending.set if happens == "ending" else lambda: directory.discard(cut)

    with pytest.raises(GivenUp, match=why):
        one.cut(cut, cuts)

    assert clock.now < 0.5
    one.run(one.caller.session, 3)


def test_a_batch_that_runs_for_long_does_not_use_up_the_time_for_which_others_are_held(shards, directory):
    """It keeps them out of its shard by itself; when it has ended, there are five seconds for the others' notes."""
    slow, fast = shards
    clock, cut, session = Clock(), cut_of(slow), slow.caller.session
    cuts = [slow.cuts(directory, now=lambda: clock.now), fast.cuts(directory, now=lambda: 0.0)]
    for each in cuts:
        each.come(cut)
    with ThreadPoolExecutor(2) as pool:
        with slow.gate.passing(session, 3):
            first = pool.submit(slow.cut, cut, cuts[0])
            while slow.gate._let_through is None:
                pass
            clock.now = 60.0
        second = pool.submit(fast.cut, cut, cuts[1])

        assert first.result(100) == second.result(100) == (2.0, {session: 2})


def test_a_cut_that_the_others_have_left_long_ago_is_not_waited_for(shards, directory):
    """A shard that was restarted hears of it; for one that is new, all wait until workers have carried it to the others."""
    one, _ = shards
    cut = cut_of(one)
    cuts = one.cuts(directory)
    cuts.come(cut)

    assert not cuts.have_all_come(cut, HELD_S_MAX + 1, is_fresh=True)
    with pytest.raises(GivenUp, match="the other shards have given it up"):
        cuts.have_all_come(cut, HELD_S_MAX + 1, is_fresh=False)
    assert not cuts.have_all_come(cut, COME_S_MAX + 9, is_fresh=True), "workers' heartbeats bring it within a lease"
    with pytest.raises(CheckpointFailed, match="not all shards have come"):
        cuts.have_all_come(cut, COME_S_MAX + 11, is_fresh=True)


@pytest.mark.parametrize("step", [1, 4])
def test_a_cut_in_which_another_shard_takes_no_part_is_not_waited_for(shards, directory, step):
    """It has missed it, and may know it by another step than the one that positions have given it."""
    one, other = shards
    cut = cut_of(one)
    cuts = one.cuts(directory)
    cuts.come(cut)
    other.cuts(directory).leave(dataclasses.replace(cut, step=step))

    with pytest.raises(GivenUp, match="another shard takes no part in it"):
        cuts.have_all_come(cut, LEFT_S + 1, is_fresh=True)


def test_a_cut_whose_notes_another_shard_has_removed_is_not_waited_for(shards, directory):
    """Before all have come, too."""
    one, _ = shards
    cut = cut_of(one)
    cuts = one.cuts(directory)
    cuts.come(cut)
    directory.discard(cut)

    with pytest.raises(GivenUp, match="another shard takes no part in it"):
        cuts.have_all_come(cut, 0.0, is_fresh=True)


def test_a_batch_that_a_program_completes_after_it_has_joined_anew_is_on_all_shards_of_a_cut(tmp_path):
    """One shard had run it when the worker's lease ran out; the other gets it while the cut is taken."""
    directory = CheckpointDirectory(str(tmp_path))
    one, other = shards = [OneShard(0), OneShard(1)]
    try:
        first = one.join(0, "")
        other.join(first.session, first.run_id)
        for shard in shards:
            shard.begin()
            shard.run(first.session, 2)
        one.run(first.session, 3)
        again = one.join(0, first.run_id)
        other.join(again.session, first.run_id)
        cut = Cut("a1", 1, 0, first.run_id, 5.0, Layout(JOB, 2))

        def pause(seconds):
            threading.Event().wait(seconds)
            if other.gate._let_through:
                other.run(first.session, 3)

        cuts = [shard.cuts(directory, pause=pause) for shard in shards]
        for each in cuts:
            each.come(cut)
        assert all(each.have_all_come(cut, 0.0, is_fresh=True) for each in cuts)
        with ThreadPoolExecutor(2) as pool:
            found = [pool.submit(shard.cut, cut, of_shard) for shard, of_shard in zip(shards, cuts, strict=True)]
            parts = [each.result(100) for each in found]

        assert parts == [(3.0, {first.session: 3, again.session: 0})] * 2
    finally:
        for shard in shards:
            shard.shard.close(keep=False)
