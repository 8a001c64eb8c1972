"""Shards that the client's tests stop and start again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from client_faults import Restartable


@pytest.fixture
def restartable(cluster: Callable[..., Any], tmp_path: Path) -> Callable[..., Restartable]:
    return lambda **config: Restartable(cluster, tmp_path, **config)
