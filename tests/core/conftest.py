"""What the kernel tests share."""

import numpy as np
import pytest


@pytest.fixture
def rng():
    """Return a generator that makes the same numbers in every run."""
    return np.random.default_rng(20240229)
