"""The example with a trainer that publishes and players: it learns, whatever is killed."""

from __future__ import annotations

import os
import re
from pathlib import Path
from signal import SIGKILL

import pytest
from commands import Job

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "rollouts.py")


@pytest.mark.process
def test_rollouts_when_everything_is_killed_in_turn_then_they_learn() -> None:
    """A shard, a player, the trainer, and the other shard. The trainer goes on with the policy that is in the store."""
    run = Job("--shards", "2", "--workers", "3", "--max-restarts", "20", "--lease", "60", EXAMPLE, "--updates", "100")
    try:
        run.wait_until_ready()
        run.line(r"worker 0\] update 20:")
        os.kill(run.shard_pid(0), SIGKILL)
        run.line("shard 0 serves again")
        os.kill(run.worker_pid(2), SIGKILL)
        run.line(r"worker 0\] update \d+:")
        os.kill(run.worker_pid(0), SIGKILL)
        run.line(r"worker 0\] goes on after update [1-9]\d+, with version [1-9]\d+")
        os.kill(run.shard_pid(1), SIGKILL)
        run.line("shard 1 serves again")
        assert run.end() == 0, run.output
        run.assert_nothing_left()
    finally:
        run.close()
    reports = re.findall(r"update (\d+): reward (\S+), episodes (\S+) versions old", run.output)
    assert (reports[-1][0], float(reports[0][1]) < float(reports[-1][1])) == ("100", True)
    assert float(reports[-1][1]) > 0.8  # the shortest ways have 0.875
