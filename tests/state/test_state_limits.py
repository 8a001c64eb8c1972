"""Limits that two lives of one state directory have different: what is there goes on as it was made, whatever the flags say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from shard_driver import Driver, job_spec, tables_spec

from psd.contract.config import Limits
from psd.contract.consistency import Consistency
from psd.contract.errors import InvalidRequest, InvalidTensor, SessionFenced
from psd.contract.jobspec import JobSpec
from psd.contract.vector_batches import OutgoingBatch
from psd.contract.vectors import spec_message
from psd.v1 import control_pb2, vectors_pb2
from psd_core.vector import VectorSpec
from psd_core.vector_operations import VectorOperation

VECTOR = VectorSpec("counts", 10, "int64")


class VectorWorkers:
    """Workers of vectors alone on one shard, whose state directory has several lives."""

    def __init__(self, tmp_path, world_size, **limits):
        spec = JobSpec(world_size, (), (), Consistency.parse("async"))
        self.driver = Driver(spec, state_dir=str(tmp_path / "state"), limits=Limits(**limits))
        self.seats = self.driver.start()
        seat = self.seats[0]
        request = vectors_pb2.VectorChange(caller=seat.caller, session=seat.session, seq=1, vector=spec_message(VECTOR))
        self.driver.shard.vectors.create(request)

    def restart(self, **limits):
        self.driver.config = replace(self.driver.config, limits=Limits(**limits))
        self.driver.restart(*self.seats)

    def join_anew(self, rank):
        self.seats[rank] = self.driver.join(rank)

    def add(self, rank, seq, session=0):
        """A batch that adds 1 to the rank's element."""
        operation = VectorOperation("add_at", "counts", places=np.array([rank]), values=np.array([1]))
        request, pieces = OutgoingBatch([operation], {"counts": VECTOR}).at(0, 1)
        request.caller.CopyFrom(self.seats[rank].caller)
        request.session, request.seq = session or self.seats[rank].session, seq
        self.driver.shard.vectors.run(request, memoryview(b"".join(piece.tobytes() for piece in pieces)))

    @property
    def counts(self):
        return self.driver.core.storage.vectors.read("counts").tolist()


def test_a_batch_that_is_sent_again_after_many_lives_is_not_run_again(tmp_path):
    """Its worker has been there from the start, while the other one has joined in each life of a shard for few workers."""
    workers = VectorWorkers(tmp_path, 2, workers_max=2)
    workers.add(0, 2)
    for _ in range(6):
        workers.restart(workers_max=2)
        workers.join_anew(1)
        workers.add(1, 1)

    workers.add(0, 2)

    assert workers.counts[:2] == [1, 6]
    assert workers.driver.shard.vectors.status().repeated == 1


def test_batches_go_on_after_many_sessions_of_shards_for_ever_more_workers(tmp_path):
    """The files have room for the job's workers, and need no more."""
    workers = VectorWorkers(tmp_path, 1, workers_max=1)
    for life in range(8):
        workers.restart(workers_max=1 << life)
        workers.join_anew(0)
        workers.add(0, 1)

    assert workers.counts[0] == 8


def test_a_batch_of_a_session_that_another_has_followed_is_refused_in_the_next_life_too(tmp_path):
    """Nobody remembers its answer, so that it would run again."""
    workers = VectorWorkers(tmp_path, 1)
    before = workers.seats[0].session
    workers.add(0, 2)
    workers.join_anew(0)
    workers.add(0, 3)
    workers.restart()

    with pytest.raises(SessionFenced):
        workers.add(0, 2, session=before)

    assert workers.counts[0] == 2


TINY = Limits(
    workers_max=1, tensors_max=1, elements_max=1, name_bytes_max=1, tables_max=0, table_dim_max=1, table_rows_max=1,
    table_bytes_max=1, vectors_max=0, push_ids_max=1,
)  # fmt: skip


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_job_goes_on_where_the_limits_have_become_too_small_for_it(tmp_path, mode):
    """Its workers resume, join and declare as before; another job, or another number of workers, is refused."""
    spec = tables_spec(2, tables=2, blocks=2, mode=mode)
    limits = Limits(table_bytes_max=1 << 20, push_ids_max=64)
    driver = Driver(spec, state_dir=str(tmp_path / "state"), limits=limits)
    seats = driver.start()
    ids = list(range(50))
    for seat in seats:
        driver.push_rows(seat, 0, {0: (ids, 1.0)})

    driver.config = replace(driver.config, limits=TINY)
    driver.restart(*seats)
    for seat in seats:
        driver.push_rows(seat, 1, {0: (ids, 1.0)})
    again = driver.join(1)
    driver.declare(again)
    with pytest.raises(InvalidRequest, match="world_size: must be 1 to 1"):
        driver.join(0, world_size=3)
    with pytest.raises((InvalidRequest, InvalidTensor), match="tensors"):
        driver.declare(again, job_spec(2, blocks=3))

    assert driver.worker(1).session == again.session
    assert driver.core.push_ids_max == 64


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_workers_are_told_how_many_ids_the_files_take_not_how_many_the_flag_allows(tmp_path, mode):
    """A table's file has room for what was allowed when it was made; a push of more would fail for good."""
    spec = tables_spec(2, mode=mode)
    driver = Driver(spec, state_dir=str(tmp_path / "state"), limits=Limits(table_bytes_max=1 << 20, push_ids_max=16))
    seats = driver.start()
    driver.config = replace(driver.config, limits=Limits(table_bytes_max=1 << 20, push_ids_max=64))
    driver.restart(*seats)

    assert driver.resume(seats[0]).push_ids_max == 16
    assert driver.shard.describe(control_pb2.DescribeRequest(shard_count=1)).push_ids_max == 16
    with pytest.raises(InvalidRequest, match="rows: 33 ids are above the shard's --max-push-ids 16"):
        driver.push_rows(seats[0], 0, {0: (range(33), 1.0)})
    for seat in seats:
        driver.push_rows(seat, 0, {0: (range(16), 1.0)})
