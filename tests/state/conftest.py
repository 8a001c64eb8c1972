"""Shards that a test of psd.state has made are closed when it ends, so that their memory is given back then."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from shard_driver import close_all


@pytest.fixture(autouse=True)
def _shards_are_closed() -> Iterator[None]:
    yield
    close_all()
