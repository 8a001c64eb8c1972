"""A worker that is killed and started again has the job's learning rate, by a schedule that is kept."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from loaded_programs import WITH_TORCH, Program

STEPS = 8
UNDISTURBED = -sum(0.5 ** (step // 2) for step in range(STEPS))


@pytest.mark.process
@pytest.mark.usefixtures("later_compiler")
def test_job_when_the_schedule_is_kept_then_the_worker_returns_at_the_rate_of_its_step(
    cluster: Callable[..., Any], tmp_path: Path
) -> None:
    """There is nothing to give way, as there is to one that begins anew: tests/client/test_client_attendance.py."""
    servers = cluster(2).servers
    dies = tmp_path / "dies"
    dies.touch()

    def begin(rank: int, *arguments: str) -> Program:
        said = {"PSD_SERVERS": servers, "PSD_RANK": str(rank), "PSD_WORLD_SIZE": "2"}
        script = str(Path(__file__).with_name("scheduled_worker.py"))
        return Program([script, *arguments], env=os.environ | said, loads=WITH_TORCH)

    with begin(0) as other:
        with begin(1, str(dies)) as killed:
            assert killed.wait(100) == -9
        with begin(1, str(dies)) as successor:
            shown = [worker.stdout.read() for worker in (other, successor)]

    assert [other.returncode, successor.returncode] == [0, 0]
    assert "begins at 4 with 0.25" in shown[1]
    for text in shown:
        assert f"trained to {UNDISTURBED} overruled 0" in text
