"""A shard killed at any instant while steps with rows come leaves whole tables, whose notes say exactly which pushes they
have."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from raw_client import MODES, SGD
from raw_row_steps import RowStepWorker
from test_rim_steps_killed import Killed, push_until_death

from psd.contract.errors import PsdError
from psd.contract.tables import SparseTableSpec
from psd.contract.wire import Disconnected
from psd.v1 import job_pb2
from psd_core.arena import Arena
from psd_core.table import TableStore

pytestmark = [pytest.mark.process, pytest.mark.slow]

TABLES, SHARED, WORLD = 2, 99, 2
KILLS = 2
POINTS = ["row", "record", "root", "commit", "flip", "applied", "done"]


def job_of(mode: str, world: int) -> job_pb2.JobSpec:
    return job_pb2.JobSpec(
        world_size=world,
        mode=MODES[mode],
        reduction=job_pb2.REDUCTION_SUM,
        groups=[job_pb2.GroupSpec(rule="sgd"), job_pb2.GroupSpec(rule="sgd")],
        tensors=[job_pb2.TensorSpec(name="t", shape=[3], dtype=job_pb2.DTYPE_FLOAT32, group=0)],
        tables=[SparseTableSpec(f"r{i}", 2, 1).to_message() for i in range(TABLES)],
    )


class Pusher:
    """A worker that pushes ones, to a row of its own and to one that all have, until its shard has gone.

    Attributes:
        acknowledged: pushes that were answered. steps: of these, as steps.
    """

    def __init__(self, address: str, rank: int, mode: str, world: int, lane: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self.worker = RowStepWorker(self._channel, rank, world, lane=lane, job=job_of(mode, world))
        self.worker.scalars = [SGD, SGD]
        self.rank, self.acknowledged, self.steps = rank, 0, 0

    def push(self, is_fast: threading.Event, have_stepped: threading.Barrier) -> None:
        ids, ones = np.array([self.rank, SHARED], np.uint64), np.ones((2, 2), np.float32)
        pushed: Any = dict.fromkeys(range(TABLES), (ids, ones))
        pulled: Any = dict.fromkeys(range(TABLES), ids[:1])
        try:
            while True:
                found, is_step = self.worker.train_rows((1,), self.acknowledged, pushed, pulled)
                assert found.counted + found.duplicate == 2
                self.steps += is_step
                self.acknowledged += 1
                assert [found.rows[table][0][0] for table in range(TABLES)] == [-self.acknowledged] * TABLES
                if is_step and self.steps == 1:
                    have_stepped.wait(100)
                if self.steps > 20:
                    is_fast.set()
        except (Disconnected, OSError, PsdError, threading.BrokenBarrierError):
            return
        finally:
            have_stepped.abort()
            is_fast.set()

    def close(self) -> None:
        self.worker.close()
        self._channel.close()


def die(directory: Path, mode: str, lane: str, crash_point: str, after_s: float) -> list[Pusher]:
    """Push until a shard dies; the workers."""
    shard = Killed(directory, crash_point)
    pushers = [Pusher(shard.address, rank, mode, WORLD, lane) for rank in range(WORLD)]
    push_until_death(shard, pushers, mode, after_s)
    assert all(pusher.steps for pusher in pushers)
    return pushers


def check(directory: Path, mode: str, pushers: list[Pusher]) -> None:
    """Compare what is left with what the workers know."""
    arena, world = Arena.open(directory), WORLD
    assert arena is not None
    page = arena.current(0)
    assert page is not None
    before = [int(clock) for clock in page.clocks]  # a push comes to the parameters, then to the tables in their order
    assert page.parameter.tolist() == [-float(sum(before))] * 3
    arena.close(remove=False)
    for table in range(TABLES):
        store = TableStore.open(directory / f"table-{table}")
        try:
            version, *notes = store.notes().tolist()
            clocks = notes[world:]
            assert notes[:world] == [pusher.worker.session for pusher in pushers]
            for pusher, clock in zip(pushers, clocks, strict=True):
                assert pusher.acknowledged <= clock <= pusher.acknowledged + 1, "nothing that was acknowledged is lost"
            assert all(clock <= earlier for clock, earlier in zip(clocks, before, strict=True))
            assert version == (sum(clocks) if mode == "async" else clocks[0])
            assert mode == "async" or clocks[0] == clocks[1]
            rows = store.read(np.array([*range(world), SHARED]))[:, 0].tolist()
            assert rows == [-float(each) for each in (*clocks, sum(clocks))], "and each counts once"
            before = clocks
        finally:
            store.close(remove=False)


@pytest.mark.parametrize("lane", ["tcp", "memory"])
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_shard_killed_at_random_has_each_push_of_rows_once(tmp_path: Path, mode: str, lane: str) -> None:
    """Nothing that was acknowledged is lost, and nothing counts twice."""
    for life in range(KILLS):
        directory = tmp_path / str(life)
        check(directory, mode, die(directory, mode, lane, "", random.uniform(0, 0.2)))


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize(("mode", "number"), [("async", 301), ("async", 302), ("sync", 301), ("sync", 302)])
def test_a_shard_killed_between_two_stores_has_each_push_of_rows_once(
    tmp_path: Path, point: str, mode: str, number: int
) -> None:
    """At each store of a push to a table: of the first or the second one."""
    check(tmp_path / "state", mode, die(tmp_path / "state", mode, "tcp", f"{point}:{number}", 0))
