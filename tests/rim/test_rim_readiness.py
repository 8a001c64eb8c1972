"""The readiness that probes ask for: a shard is ready when it can be trained."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import psd_client
from psd.rim.server import READY


def test_a_shard_is_ready_when_the_job_has_its_values_and_not_while_it_drains(cluster: Callable[..., Any]) -> None:
    """EMPTY: not ready. SERVING: ready. DRAINING: not ready."""
    running = cluster(1)
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    with grpc.insecure_channel(running.servers) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=READY), timeout=100)

        assert next(watch).status == not_serving
        with psd_client.connect(running.servers, 0, 1) as ps:
            ps.declare({"w": np.zeros(3, np.float32)}, psd_client.SGD(lr=1.0))
            assert next(watch).status == serving
            running.shards[0].drain(1)
        assert next(watch).status == not_serving
        watch.cancel()


def test_a_shard_whose_workers_are_gone_does_not_wait_for_a_checkpoint_that_nobody_completes(
    cluster: Callable[..., Any], tmp_path: Path
) -> None:
    """A cut lies some rounds ahead, and rounds are made by workers."""
    running = cluster(1, checkpoint_dir=str(tmp_path))
    (shard,) = running.shards
    with pytest.raises(KeyError), psd_client.connect(running.servers, 0, 1) as ps:
        ps.declare({"w": np.zeros(3, np.float32)}, psd_client.SGD(lr=1.0))
        ps.push_pull({"w": np.ones(3, np.float32)})
        raise KeyError("the worker fails")
    assert shard.shard.schedule.is_training
    assert not shard.shard.is_done

    began = time.monotonic()
    shard.drain(60)

    assert time.monotonic() - began < 20
