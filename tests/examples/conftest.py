"""The modules of examples/."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _programs_are_light(later_compiler):
    pass


@pytest.fixture
def _one_thread():
    """Torch computes in one thread, as in the examples: the numbers are the same, and none of them waits for others."""
    torch = pytest.importorskip("torch")
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.fixture
def example(monkeypatch):
    """example("ctr"): a module of examples/."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module
