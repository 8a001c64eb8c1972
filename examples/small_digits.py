"""The 1,797 handwritten digits of 8x8 pixels that come with scikit-learn, read from its file: to load scikit-learn itself takes
each process a second."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np


def load() -> tuple[np.ndarray, np.ndarray]:
    """Pixels (1797, 64) from 0 to 16, float64, and labels (1797,) from 0 to 9, as sklearn.datasets.load_digits has them.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("the digits come with scikit-learn: pip install scikit-learn")
    table = np.loadtxt(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    return table[:, :-1], table[:, -1].astype(int)
