"""The port for Kubernetes' probes: health, and nothing else."""

from __future__ import annotations

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from raw_client import TIMEOUT_S

import psd_client
from psd.contract.config import ConfigError, ServerConfig
from psd.rim.server import READY, ShardServer
from psd.v1 import control_pb2, control_pb2_grpc


@pytest.fixture
def probed(cluster):
    """A shard, and a channel to its port for probes."""
    started = cluster(health_port=0)
    (shard,) = started.shards
    with grpc.insecure_channel(f"127.0.0.1:{shard.probe_port}") as channel:
        yield started, channel


def test_probes_hear_of_process_and_job(probed):
    """Liveness from the start, readiness from when the job has its values."""
    started, channel = probed
    stub = health_pb2_grpc.HealthStub(channel)

    def status(service: str) -> int:
        return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S).status

    assert status("") == health_pb2.HealthCheckResponse.SERVING
    assert status(READY) == health_pb2.HealthCheckResponse.NOT_SERVING
    with psd_client.connect(started.servers, 0, 1) as ps:
        ps.declare({"w": np.zeros(3, np.float32)}, psd_client.SGD(lr=1.0))
        started.shards[0]._update_readiness()

        assert status(READY) == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(
    "call",
    [
        lambda channel: control_pb2_grpc.ControlServiceStub(channel).Status(control_pb2.StatusRequest(), timeout=TIMEOUT_S),
        lambda channel: next(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)),
    ],
)
def test_nothing_else_is_answered_there(probed, call):
    """Neither psd's services nor a watch, which would keep a thread."""
    with pytest.raises(grpc.RpcError) as failed:
        call(probed[1])

    assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_port_that_is_taken_is_named(probed):
    """The error names the flag."""
    (shard,) = probed[0].shards

    other = ShardServer(ServerConfig(0, 1, listen="127.0.0.1:0", health_port=shard.probe_port))
    with pytest.raises(OSError, match="--health-port: cannot bind 127"):
        other.start()
    other.shard.close(keep=False)


def test_a_port_out_of_range_is_refused():
    """As every port."""
    with pytest.raises(ConfigError, match="--health-port: expected 0 to 65535"):
        ServerConfig(0, 1, health_port=65536)
