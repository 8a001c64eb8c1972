"""psd-run: its status when shards are killed for good while they store the last checkpoint, and when they have stored it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from signal import SIGINT

import pytest
from commands import Job

from psd.checkpoint import CheckpointDirectory
from psd.cli.words.arguments import EXIT_CHECKPOINT, EXIT_OK, exit_status

pytestmark = pytest.mark.process

TRAINING = """
import sys
import numpy as np
import psd_client

with psd_client.connect() as ps:
    params = ps.declare({"w": np.zeros(50_000, np.float32)}, psd_client.SGD(lr=1.0), reduce="sum")
    print("begins at", ps.clock, flush=True)
    while ps.clock < int(sys.argv[1]):
        params = ps.push_pull({"w": np.ones(50_000, np.float32)})
    print("trained to", params["w"][0], params["w"][-1], flush=True)
"""
"""So many steps."""


HANGING = TRAINING + "    import signal; print('hangs', flush=True); signal.pause()\n"


@pytest.fixture
def train(job: Callable[..., Job], tmp_path: Path) -> Callable[..., Job]:
    """train(crash point, options): a job of three steps with two shards, which are not started again, if no options say
    otherwise; without a crash point nobody is killed."""

    def begin(point: str, *options: str, script: str = TRAINING, environ: dict[str, str] | None = None) -> Job:
        where = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--state-dir", str(tmp_path / "state"))
        environ = {**(environ or {}), **({"PSD_CRASH_POINT": point} if point else {})}
        return job(script, "--shards", "2", "--max-shard-restarts", "0", *where, *options, args=("3",), environ=environ)

    return begin


def stored(tmp_path: Path) -> int | None:
    """Step of the newest checkpoint."""
    newest = CheckpointDirectory(str(tmp_path / "checkpoints")).newest()
    return None if newest is None else newest.step


def test_job_when_all_shards_are_killed_for_good_while_they_store_it_then_the_status_says_so_and_it_can_go_on(
    train: Callable[..., Job], tmp_path: Path
) -> None:
    killed = train("rename shard-*.json:1")

    assert killed.end() == EXIT_CHECKPOINT, killed.output
    assert ", and is not started again, so that the last checkpoint may lack its part" in killed.output
    assert stored(tmp_path) is None

    again = train("", environ={"PSD_RETRY_TIMEOUT": "1"})
    again.end()  # its workers come to a job that has ended: only its shards have something to do
    assert stored(tmp_path) == 3, again.output
    last = train("")
    assert last.end() == EXIT_OK, last.output
    assert "begins at 3" in last.output


def test_job_when_one_shard_is_killed_for_good_while_it_stores_its_part_then_the_status_says_so(
    train: Callable[..., Job], tmp_path: Path
) -> None:
    """The other one has stored its own, and has ended well."""
    killed = train("rename shard-00001-of-*.json:1")

    assert killed.end() == EXIT_CHECKPOINT, killed.output
    assert "shard 0/2 has nothing left to store" in killed.output
    assert stored(tmp_path) is None


def test_job_when_a_shard_is_killed_once_its_part_is_stored_then_all_is_well(train: Callable[..., Job], tmp_path: Path) -> None:
    """As it removes its note, which only a shard does that has ended. It is not started again, either."""
    done = train("remove shard-00001-of-*.life.note:1", "--max-shard-restarts", "3")

    assert done.end() == EXIT_OK, done.output
    assert "shard 1 was killed by SIGKILL" in done.output
    assert "starting it again" not in done.output
    assert stored(tmp_path) == 3


def test_job_when_it_is_told_to_end_and_its_shard_is_killed_for_good_then_the_status_says_so(
    train: Callable[..., Job], tmp_path: Path
) -> None:
    """Its worker hangs, so that the shard stores what it holds without it."""
    killed = train("rename shard-*.json:1", "--shards", "1", "--grace", "6", script=HANGING)
    killed.line("hangs")
    killed.signal(SIGINT)

    assert killed.end() == EXIT_CHECKPOINT, killed.output
    assert stored(tmp_path) is None


def test_job_when_it_is_told_to_end_and_its_shard_is_killed_once_it_has_stored_it_then_the_status_is_the_signals(
    train: Callable[..., Job], tmp_path: Path
) -> None:
    done = train("remove shard-*.life.note:1", "--shards", "1", "--grace", "6", script=HANGING)
    done.line("hangs")
    done.signal(SIGINT)

    assert done.end() == exit_status(SIGINT), done.output
    assert stored(tmp_path) == 3
