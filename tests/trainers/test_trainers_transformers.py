"""transformers.Trainer, and TRL's SFTTrainer, on shards: the numbers of one process, whoever is killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Train, assert_equal

PROGRAM = "train_transformers.py"
pytestmark = pytest.mark.process


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("ways", [(), ("sft",)], ids=["trainer", "sft"])
def test_workers_train_as_one_process_with_all_their_batches(train: Train, workers: int, ways: tuple[str, ...]) -> None:
    """The Trainer did not start under psd-run: it took RANK and WORLD_SIZE for torch.distributed."""
    (alone,) = train(PROGRAM, 8, *ways)

    found = train(PROGRAM, 8 // workers, *ways, workers=workers)

    assert alone["steps"] == 12
    assert_equal(found, alone)


def test_a_worker_that_is_started_again_goes_on_at_the_jobs_step_in_schedule_and_data(train: Train) -> None:
    (alone,) = train(PROGRAM, 8)

    found = train(PROGRAM, 4, "die", workers=2, flags=("--max-restarts", "1"))

    assert_equal(found, alone)


def test_a_worker_that_stops_early_ends_the_job_for_all_at_one_step(train: Train) -> None:
    found = train(PROGRAM, 4, "stop", workers=2)

    assert_equal(found[:1], found[0])
    assert 4 <= found[0]["steps"] < 12


def test_worker_0_alone_saves_what_all_have_learnt(train: Train, tmp_path: Path) -> None:
    place = tmp_path / "job"

    train(PROGRAM, 4, "save", workers=2, directory=place)

    assert {path.name for path in (place / "out").iterdir()} == {f"checkpoint-{step}" for step in (3, 6, 9, 12)}
    assert [path.name for path in place.glob("model-of-*")] == ["model-of-0"]


def test_all_workers_load_the_best_model_at_the_end(train: Train) -> None:
    """Worker 0 alone did."""
    (alone,) = train(PROGRAM, 8, "best")

    found = train(PROGRAM, 4, "best", workers=2)

    assert_equal(found, alone)


def test_a_job_goes_on_from_psds_checkpoints_and_not_from_the_trainers(train: Train, tmp_path: Path) -> None:
    """It ended in "parameter was changed by the program"."""
    (alone,) = train(PROGRAM, 8)
    place, flags = tmp_path / "job", ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-steps", "2")
    train(
        PROGRAM, 4, "resume", workers=2, directory=place, flags=flags, fails_with="resume_from_checkpoint=True: the job goes on"
    )
    train(PROGRAM, 4, "die", workers=2, directory=place, flags=flags, fails_with="worker 0")

    found = train(PROGRAM, 4, "die", workers=2, directory=place, flags=flags)

    assert_equal(found, alone)


def test_shards_that_are_killed_in_the_middle_change_nothing(train: Train) -> None:
    (alone,) = train(PROGRAM, 8)

    found = train(PROGRAM, 4, "kill", workers=2)

    assert_equal(found, alone)
