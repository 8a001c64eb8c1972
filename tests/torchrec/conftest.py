"""Tests with TorchRec itself, which `make test-torchrec` runs in its own environment."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Importing fbgemm warns of its own parts that its build for the CPU does not have."""
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning:fbgemm_gpu")
