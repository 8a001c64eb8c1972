"""The cut of vectors through several shards: all have run the same batches, whatever their workers go through."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from psd.checkpoint import CheckpointDirectory, Cut
from psd.contract.config import ServerConfig
from psd.contract.consistency import Consistency
from psd.contract.jobspec import JobSpec
from psd.contract.layout import Layout
from psd.contract.vector_batches import OutgoingBatch
from psd.contract.vectors import spec_message
from psd.rim.vector_gate import VectorGate, vectors_of_cut
from psd.state.shard import Shard
from psd.v1 import control_pb2, job_pb2, vectors_pb2
from psd_core.vector import VectorSpec
from psd_core.vector_operations import Fill

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
        request, _ = OutgoingBatch([Fill("v", seq)], {"v": VECTOR}).at(self._index, 2)
        request.caller.CopyFrom(self.caller)
        request.session, request.seq = session, seq
        with self.gate.passing(session, seq):
            self.shard.vectors.run(request, memoryview(b""))

    def cut(self, cut, directory, pause):
        """Take part in a cut; the first of this shard's elements, and what its part says of batches."""
        desk = self.shard.vectors
        with vectors_of_cut(self.gate, desk, directory, cut, self._index, pause=pause) as vectors:
            (piece,) = vectors
            return piece.values[0], vectors.sessions


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

        with ThreadPoolExecutor(2) as pool:
            found = [pool.submit(shard.cut, cut, directory, pause) for shard in shards]
            parts = [each.result(20) for each in found]

        assert parts == [(3.0, {first.session: 3, again.session: 0})] * 2
    finally:
        for shard in shards:
            shard.shard.close(keep=False)
