"""Relays of this process, on free loopback ports."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from free_ports import claimed_port
from relayed_job import StartRelay

from psd.contract.config import Limits, ServerConfig
from psd.contract.environment import client_config
from psd.relay.server import RelayServer


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
        given = ServerConfig(0, 1, **{"listen": f"127.0.0.1:{port}", "limits": Limits(reads_max=reads), **config})
        as_reader = client_config(servers=servers, rank=0, world_size=1, transport="grpc", retry_timeout=1, **(upstream or {}))
        started.append(RelayServer(given, as_reader))
        started[-1].start()
        return started[-1]

    yield start
    for server in started:
        server.stop()
    for claim in claims:
        claim.close()
