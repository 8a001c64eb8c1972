"""Relays of this process, on free loopback ports, and a small job whose parameters say their version."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from free_ports import claimed_port

import psd_client
from psd.contract.config import Limits, ServerConfig
from psd.contract.environment import client_config
from psd.relay.server import RelayServer

INITIAL = {"encoder.w": np.arange(500_000, dtype=np.float32), "encoder.b": np.arange(3.0), "head": np.ones((2, 3), np.float32)}

StartRelay = Callable[..., RelayServer]


@pytest.fixture
def relay() -> Iterator[StartRelay]:
    """relay(SERVERS, **ServerConfig fields) -> a relay of these.

    `reads`: its --max-reads. `upstream`: settings of its reader.
    """
    started: list[RelayServer] = []
    claims: list[socket.socket] = []

    def start(servers: str, *, reads: int = 100, upstream: dict[str, str] | None = None, **config: Any) -> RelayServer:
        port, claim = claimed_port()
        claims.append(claim)
        given = ServerConfig(0, 1, **{"listen": f"127.0.0.1:{port}", **config}, limits=Limits(reads_max=reads))
        as_reader = client_config(servers=servers, rank=0, world_size=1, transport="grpc", retry_timeout=1, **(upstream or {}))
        started.append(RelayServer(given, as_reader))
        started[-1].start()
        return started[-1]

    yield start
    for server in started:
        server.stop()
    for claim in claims:
        claim.close()


def declare(ps: psd_client.ParameterServer, **declaration: Any) -> None:
    ps.declare(INITIAL, psd_client.SGD(lr=1.0), **declaration)


def step(ps: psd_client.ParameterServer) -> None:
    """Take 1 from every element."""
    ps.push_pull({name: np.ones_like(value) for name, value in INITIAL.items()})


def assert_is_of(version: int, params: dict[str, Any], names: tuple[str, ...] = tuple(INITIAL)) -> None:
    """Every element of every tensor is that of a version."""
    assert tuple(params) == names
    for name in names:
        np.testing.assert_array_equal(params[name], INITIAL[name] - version)
