"""Shards that a test of psd.state has made are closed when it ends, so that their memory is given back then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from shard_driver import Driver, close_all

from psd.state.aggregation import small_block


@pytest.fixture(autouse=True)
def _shards_are_closed() -> Iterator[None]:
    yield
    close_all()


@pytest.fixture
def driver_of(tmp_path: Path) -> Callable[..., Driver]:
    """Makes drivers whose shards outlive their process, in one directory: driver_of(spec, **arguments)."""
    return lambda spec=None, **arguments: Driver(spec, state_dir=str(tmp_path / "state"), **arguments)


@pytest.fixture
def no_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks have the rounds of large ones, whose gradients are lent."""
    monkeypatch.setattr(small_block, "BYTES_MAX", 0)
