"""The job of test_recovery_half_push.py: four blocks, two on each of two shards, integers all the way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

import psd_client
from psd.v1 import control_pb2, control_pb2_grpc

SIZE = 600_000
SCALARS = (1.0, 0.5, 0.0, 0.0)
"""lr, momentum, dampening, weight_decay."""


@contextmanager
def connected(
    servers: str, rank: int, world_size: int, aggregation: str, transport: str
) -> Iterator[tuple[psd_client.ParameterServer, dict[str, NDArray[Any]]]]:
    """A worker, and the parameters."""
    with psd_client.connect(servers, rank, world_size, transport=transport, retry_timeout=60) as ps:
        sgd = psd_client.SGD(lr=SCALARS[0], momentum=SCALARS[1])
        initial = {"w": np.zeros(SIZE, np.float32)}
        yield ps, ps.declare(initial, sgd, consistency="sync", aggregation=aggregation, reduce="sum")


def gradients(params: Mapping[str, NDArray[Any]], rank: int, step: int) -> dict[str, NDArray[Any]]:
    """Depend on all updates before; quarters of integers, so that sums are exact in any order."""
    return {"w": np.round(params["w"]) % 5 + (np.arange(SIZE) + 7 * rank + step).astype(np.float32) % 11}


def bytes_received(server: str) -> int:
    """Bytes of pushes that the shard has counted so far."""
    with grpc.insecure_channel(server) as channel:
        status = control_pb2_grpc.ControlServiceStub(channel).Status(control_pb2.StatusRequest(), timeout=100)
        return int(status.numbers["received_bytes"])
