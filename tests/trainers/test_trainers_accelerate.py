"""A loop that is written for Accelerate, on shards: the numbers of one process."""

from __future__ import annotations

import pytest
from conftest import Train, assert_equal

PROGRAM = "train_accelerate.py"
pytestmark = pytest.mark.process


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_train_as_one_process_with_all_their_batches(train: Train, workers: int) -> None:
    """Accelerate did not start under psd-run: it took RANK and WORLD_SIZE for torch.distributed."""
    (alone,) = train(PROGRAM, 8)

    found = train(PROGRAM, 8 // workers, workers=workers)

    assert alone["steps"] == 12
    assert_equal(found, alone)
