"""A job of many small blocks, on a shard that dies at one named step after another and is started again each time."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
from shard_processes import ShardProcess

import psd_client
from psd.v1 import control_pb2, control_pb2_grpc, data_pb2, data_pb2_grpc

WORLD_SIZE = 2
BLOCKS = 24
"""Several times the spares of an arena, so that a reader that holds a version makes it grow."""

BLOCK_ELEMENTS = 10_000
STEPS_AFTER = 6
PACE_S = 0.02
"""Between the steps of a job that waits for something to happen: each is made again, undisturbed."""

HELD_AHEAD = 4
EXPECTED = (
    grpc.StatusCode.UNAVAILABLE,  # it has died
    grpc.StatusCode.FAILED_PRECONDITION,  # it has no job yet
    grpc.StatusCode.ABORTED,  # the version was too near
)
NARROW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 14))
"""A window of much less than a block, which does not grow: what is not read stays with the shard."""


class Stop:
    """When the workers of a synchronous job have done enough: all of them after the same step."""

    def __init__(self, step: int | None = None) -> None:
        self.clock = 0
        self._step = step
        self._changed = threading.Condition()

    def on_step(self, clock: int) -> None:
        with self._changed:
            self.clock = max(self.clock, clock)
            self._changed.notify_all()
            has_end = self._step is not None
        if not has_end:
            threading.Event().wait(PACE_S)

    def is_reached(self, clock: int) -> bool:
        with self._changed:
            return self._step is not None and clock >= self._step

    def soon(self) -> None:
        """Workers are at most one step apart."""
        with self._changed:
            if self._step is None:
                self._step = self.clock + STEPS_AFTER

    def wait_steps(self, count: int, timeout_s: float) -> None:
        """Wait for some more steps, or until they no longer come."""
        with self._changed:
            until = self.clock + count
            self._changed.wait_for(lambda: self.clock >= until, timeout_s)


def train(servers: str, rank: int, stop: Stop, aggregation: str) -> None:
    """Each group is a block of its own; gradients depend on all updates before."""
    names = [f"w{i}" for i in range(BLOCKS)]
    rng = np.random.default_rng(1)
    initial = {name: rng.standard_normal(BLOCK_ELEMENTS).astype(np.float32) for name in names}
    groups = [{"params": [name], "lr": 0.01 * (1 + i)} for i, name in enumerate(names)]
    with psd_client.connect(servers, rank, WORLD_SIZE, retry_timeout=60, wait_timeout=60) as ps:
        sgd = psd_client.SGD(lr=0.1, momentum=0.9)
        params: dict[str, Any] = ps.declare(initial, sgd, groups=groups, consistency="sync", aggregation=aggregation)
        while not stop.is_reached(ps.clock):
            grads = {name: (np.sin(value + rank + ps.clock) + value) / 7 for name, value in params.items()}
            while True:
                try:
                    params = ps.push_pull(grads, weight=1 + (rank + ps.clock) % 3)
                    break
                except psd_client.RolledBack:
                    params = ps.pull()
                    grads = {name: (np.sin(value + rank + ps.clock) + value) / 7 for name, value in params.items()}
            stop.on_step(ps.clock)


def run(servers: str, stop: Stop, aggregation: str, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Both workers, in threads, and what is to happen meanwhile."""
    with ThreadPoolExecutor(WORLD_SIZE + 1) as pool:
        jobs = [pool.submit(train, servers, rank, stop, aggregation) for rank in range(WORLD_SIZE)]
        try:
            meanwhile()
        finally:
            stop.soon()
            for job in jobs:
                job.result()


def die_at_each(shard: ShardProcess, points: Sequence[str], stop: Stop) -> None:
    """The shard, which has been started with the first point, dies there, is started with the next, and so on."""
    for following in [*points[1:], ""]:
        while not shard.has_ended:
            try:
                with _held_version(shard):
                    stop.wait_steps(4, 0.3)
            except grpc.RpcError as error:
                if error.code() not in EXPECTED:
                    raise
            stop.wait_steps(2, 0.3)
        assert shard.wait() == -9
        shard.start(following)


@contextlib.contextmanager
def _held_version(shard: ShardProcess) -> Iterator[None]:
    """A reader that does not read on: the shard keeps most pages of one version, and must make room for more."""
    with grpc.insecure_channel(shard.address, options=NARROW) as channel:
        job = control_pb2_grpc.ControlServiceStub(channel).Describe(control_pb2.DescribeRequest(shard_count=1), timeout=100)
        cut = data_pb2.Cut(id=secrets.token_hex(4), step=job.progress + HELD_AHEAD)
        request = data_pb2.ReadRequest(run_id=job.run_id, layout_digest=job.layout_digest, cut=cut)
        frames = data_pb2_grpc.DataServiceStub(channel).Read(request, timeout=100)
        next(frames)
        yield
        frames.cancel()
