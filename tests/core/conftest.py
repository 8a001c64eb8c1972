"""Helpers of the kernel tests."""

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def rng():
    """Return a generator that makes the same numbers in every run."""
    return np.random.default_rng(20240229)


@pytest.fixture
def memory_path(tmp_path):
    """A directory in memory where there is one, else on disk."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    path = Path(tempfile.mkdtemp(prefix="psd-test-", dir=memory))
    yield path
    shutil.rmtree(path)
