"""Fixtures of the checkpoint tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from helpers_checkpoint import clear_memory


@pytest.fixture(autouse=True)
def _no_leftovers() -> Iterator[None]:
    """memory:// outlives a test."""
    yield
    clear_memory()


@pytest.fixture
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip fsync in tests that write hundreds of files and do not depend on a power failure."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
