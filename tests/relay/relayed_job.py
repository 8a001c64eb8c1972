"""A small job whose parameters say their version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

import psd_client
from psd.relay.server import RelayServer

INITIAL = {"encoder.w": np.arange(500_000, dtype=np.float32), "encoder.b": np.arange(3.0), "head": np.ones((2, 3), np.float32)}

StartRelay: TypeAlias = Callable[..., RelayServer]


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
