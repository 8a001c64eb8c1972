"""Batches on vectors that can be told apart: a row of a matrix for each life of a worker, whose batches add 1 to all of it."""

from __future__ import annotations

from pathlib import Path

from plan import LIVES

MATRIX = "batches"
ROWS, COLUMNS = LIVES + 4, 600
"""Stripes of 4,096 elements, so that each shard has some, and most rows are on one, and some on two."""


def batches_of(trial: Path) -> Path:
    """File of the matrix in the end."""
    return trial / "batches.npy"
