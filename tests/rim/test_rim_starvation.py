"""256 workers that wait, as threads of one process, keep nobody else from being served."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from raw_client import TIMEOUT_S, RawWorker, spec

from psd.contract.config import Limits
from psd.v1 import control_pb2, control_pb2_grpc

WAITING = 256
CHANNELS = 4


@pytest.fixture
def crowd(cluster, dial):
    """Starts a world of 257: crowd(job) -> the shard, 256 workers on a few connections, and one more on its own."""

    def start(job):
        shard = cluster(1, lease_s=600.0, limits=Limits(streams_max=8 * WAITING // CHANNELS)).shards[0]
        channels = [dial(shard.address) for _ in range(CHANNELS)]
        world = WAITING + 1
        last = RawWorker(dial(shard.address), WAITING, world)
        last.declare(job)
        with ThreadPoolExecutor(32) as pool:
            workers = list(pool.map(lambda rank: RawWorker(channels[rank % CHANNELS], rank, world), range(WAITING)))
            list(pool.map(lambda worker: worker.declare(job), workers))
        return shard, workers, last

    return start


@pytest.mark.slow
def test_a_full_barrier_does_not_keep_one_more_worker_from_training(crowd, eventually):
    """256 of 257 workers wait in a barrier of an asynchronous job; the last one pushes, pulls and push_pulls meanwhile, each
    quickly, and then opens the barrier for all."""
    shard, workers, last = crowd(spec(WAITING + 1, mode="async"))
    with ThreadPoolExecutor(WAITING) as pool:
        calls = [pool.submit(w.control.Barrier, w.barrier_request("epoch"), timeout=120) for w in workers]
        eventually(lambda: len(shard.shard._core.waiting.open()) == WAITING, "all wait")

        began = time.monotonic()
        for clock in range(10):
            last.push(clock, [[1.0] * 3])
            assert last.pull(clock + 1) == {0: [-1.0 - clock] * 3}
        answer = list(last.data.PushPull(iter(last.frames(10, [[1.0] * 3])), timeout=TIMEOUT_S))
        took = time.monotonic() - began

        assert np.frombuffer(answer[0].payload, np.float32).tolist() == [-11.0] * 3
        assert len(shard.shard._core.waiting.open()) == WAITING
        assert took < 60
        last.control.Barrier(last.barrier_request("epoch"), timeout=TIMEOUT_S)
        assert {call.result(TIMEOUT_S).generation for call in calls} == {0}
    assert shard.shard._core.waiting.open() == []


@pytest.mark.slow
def test_an_open_round_does_not_keep_the_last_worker_from_closing_it(crowd, eventually):
    """256 of 257 workers have pushed a synchronous round and wait for it in a pull, each also in a barrier; the last one sees
    in the status that they wait for it, pushes and pulls, and with its push all of them are served."""
    shard, workers, last = crowd(spec(WAITING + 1))
    with ThreadPoolExecutor(2 * WAITING) as pool:
        list(pool.map(lambda w: w.push(0, [[float(w.caller.rank)] * 3]), workers))
        pulls = [pool.submit(w.pull, 1, timeout=120) for w in workers]
        barriers = [pool.submit(w.control.Barrier, w.barrier_request("epoch"), timeout=120) for w in workers]
        eventually(lambda: len(shard.shard._core.waiting.open()) == 2 * WAITING, "all wait")

        assert last.heartbeat().waits == []
        status = control_pb2_grpc.ControlServiceStub(last.channel).Status(control_pb2.StatusRequest(), timeout=TIMEOUT_S)
        assert len(status.waits) == 2 * WAITING
        assert {m.rank for wait in status.waits for m in wait.missing} == {WAITING}
        assert last.pull(0) == {0: [0.0] * 3}
        began = time.monotonic()
        last.push(0, [[float(WAITING)] * 3])
        own = last.pull(1)
        took = time.monotonic() - began

        assert own == {0: [-128.0] * 3}
        assert took < 60
        assert all(call.result(TIMEOUT_S) == own for call in pulls)
        last.control.Barrier(last.barrier_request("epoch"), timeout=TIMEOUT_S)
        assert {call.result(TIMEOUT_S).generation for call in barriers} == {0}
    assert shard.shard._core.waiting.open() == []
