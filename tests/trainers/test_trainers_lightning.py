"""lightning.Trainer on shards, by a strategy: the numbers of one process, whoever is killed."""

from __future__ import annotations

from pathlib import Path

import lightning
import numpy as np
import pytest
from conftest import Train, assert_equal

from psd_client.integrations.lightning import _total_steps

PROGRAM = "train_lightning.py"
pytestmark = pytest.mark.process


def test_one_worker_trains_as_one_process(train: Train) -> None:
    """By the same way of drawing data: the order of two workers is in the next test."""
    found = train(PROGRAM, 8, workers=1)

    assert found[0]["steps"] == 32
    assert found[0]["val_loss"] < 0.5


@pytest.mark.parametrize("ways", [(), ("kill",), ("die",)], ids=["calm", "killed-shards", "killed-worker"])
def test_two_workers_train_as_one_process_with_both_their_batches(train: Train, ways: tuple[str, ...]) -> None:
    """In the schedule of the learning rate, the clipping by the norm, and the validation, too."""
    (alone,) = train(PROGRAM, 8)

    found = train(PROGRAM, 4, *ways, workers=2, flags=("--max-restarts", "1"))

    assert alone["steps"] == 32
    assert_equal(found, alone)


@pytest.mark.parametrize(
    ("way", "flags"), [("die-within", ("--max-restarts", "1")), ("stall", ("--lease", "1"))], ids=["killed", "stalled"]
)
def test_a_worker_that_loses_steps_within_an_epoch_ends_with_the_job(train: Train, way: str, flags: tuple[str, ...]) -> None:
    """Killed, it makes the rest of the epoch; silent for longer than its lease, it has missed steps, which count even so."""
    found = train(PROGRAM, 4, way, workers=2, flags=flags)

    assert [trained["clock"] for trained in found] == [32, 32]
    assert found[1]["steps"] == 32
    assert found[0]["steps"] == 32 if way == "die-within" else found[0]["steps"] < 32
    for name in found[0].keys() - {"steps"}:
        np.testing.assert_array_equal(found[0][name], found[1][name], name)


@pytest.mark.parametrize(
    ("ends", "total"), [({"max_epochs": 3}, 15), ({"max_epochs": 3, "max_steps": 7}, 7), ({"max_epochs": -1}, None)]
)
def test_a_trainer_says_where_the_job_ends(ends: dict[str, int], total: int | None) -> None:
    assert _total_steps(lightning.Trainer(accelerator="cpu", logger=False, **ends), 5) == total


def test_a_worker_that_stops_early_ends_the_job_for_all_at_one_step(train: Train) -> None:
    found = train(PROGRAM, 4, "stop", workers=2)

    assert found[0]["steps"] == found[1]["steps"] == 12, "after ten steps it asks; two more are the first that none has begun"


def test_all_workers_find_the_best_checkpoint_which_worker_0_has_saved(train: Train) -> None:
    """The others looked for it in a directory of their own, where nobody saves."""
    found = train(PROGRAM, 4, "best", workers=2)

    assert_equal(found[1:], found[0])


def test_a_job_goes_on_from_psds_checkpoints_and_not_from_lightnings(train: Train, tmp_path: Path) -> None:
    (alone,) = train(PROGRAM, 8)
    flags = ("--checkpoint-dir", str(tmp_path / "checkpoints"))
    train(PROGRAM, 4, "resume", workers=2, directory=tmp_path / "job", flags=flags, fails_with="ckpt_path=")
    train(PROGRAM, 4, "die", workers=2, directory=tmp_path / "job", flags=flags, fails_with="worker 0")

    found = train(PROGRAM, 4, "die", workers=2, directory=tmp_path / "job", flags=flags)

    assert_equal(found, alone)
