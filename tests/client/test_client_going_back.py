"""A program whose job goes back to a checkpoint is told so, however often its worker fails to follow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_faults import connect_faulty, in_threads, until

from psd.checkpoint import CheckpointDirectory
from psd.contract.errors import InternalError, RolledBack
from psd_client import SGD, ParameterServer, connect

SIZE = 20_000


def gradient(value: float) -> dict[str, Any]:
    return {"w": np.full(SIZE, value, np.float32)}


def declare(ps: ParameterServer) -> dict[str, Any]:
    return ps.declare({"w": np.zeros(SIZE, np.float32)}, SGD(lr=1.0))


@pytest.fixture
def lost(cluster: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """lost(train, index=1) -> shards with a checkpoint; one of them has lost its memory after `train(servers)`."""
    settings: dict[str, Any] = {"checkpoint_dir": str(tmp_path / "checkpoints"), "checkpoint_steps": 5, "lease_s": 60}

    def make(train: Callable[[str], object], index: int = 1, **others: Any) -> Any:
        settings.update(others)
        job = cluster(2, **settings)
        train(job.servers)
        until(lambda: CheckpointDirectory(settings["checkpoint_dir"]).newest() is not None)
        job.shards[index].stop()
        job.shards[index] = cluster(2, only=index, listen=job.shards[index].address, **settings).shards[0]
        return job

    return make


@pytest.mark.parametrize("method", ["join", "declare", "pull"])
def test_call_when_going_back_has_failed_then_the_next_one_says_so_again(lost: Callable[..., Any], method: str) -> None:
    """The program still has the parameters of before; a gradient of theirs would count in the job as it was long ago."""
    made: list[Any] = []

    def train(servers: str) -> None:
        ps, faults = connect_faulty(servers)
        made.extend((ps, faults))
        declare(ps)
        for clock in range(8):
            ps.save_client_state(f"after {clock}".encode())
            ps.push_pull(gradient(1.0))

    lost(train)
    ps, faults = made
    with ps:
        strike = {"join": 3, "declare": 1, "pull": 1}[method]  # joins: to resume, and to find the loss, come before
        for _ in range(strike - 1):
            faults.run_before(method, shard=1, action=lambda: None)
        faults.fail(method, shard=1, error=InternalError("a defect"))

        with pytest.raises(InternalError):
            ps.push_pull(gradient(100.0))
        with pytest.raises(RolledBack, match="went back to a checkpoint at step 5") as caught:
            ps.push_pull(gradient(100.0))

        assert caught.value.detail["step"] == ps.clock == 5
        assert ps.client_state == b"after 4"
        assert set(ps.pull()["w"].tolist()) == {-5.0}
        assert set(ps.push_pull(gradient(1.0))["w"].tolist()) == {-6.0}
    faults.assert_all_fired()


def test_declare_when_the_job_goes_back_meanwhile_then_begins_there(lost: Callable[..., Any]) -> None:
    """A program that has seen nothing of the job yet has nothing to forget."""
    late: list[ParameterServer] = []

    def train(servers: str) -> None:
        with connect(servers, 0, 1) as ps:
            declare(ps)
            for _ in range(8):
                ps.push_pull(gradient(1.0))
            ps._worker.close(RuntimeError("it crashes"))
        late.append(connect(servers, 0, 1))

    lost(train)
    with late[0] as ps:
        assert set(declare(ps)["w"].tolist()) == {-5.0}
        assert ps.clock == 5


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("end", ["left", "died"])
def test_push_pull_when_the_job_has_gone_back_then_nobody_waits_for_a_worker_that_has_ended(
    lost: Callable[..., Any], end: str, index: int
) -> None:
    """The shard that lost its memory does not know; the others do. One that has just died has a lease to come back."""
    made: list[ParameterServer] = []

    def train(servers: str) -> None:
        made.extend(connect(servers, rank, 2, wait_timeout=60) for rank in range(2))
        in_threads(*(lambda ps=ps: declare(ps) for ps in made))
        for _ in range(8):
            in_threads(*(lambda ps=ps: ps.push_pull(gradient(1.0)) for ps in made))
        if end == "left":
            made[1].close()
        else:
            made[1]._worker._heartbeats.stop()
            made[1]._worker._shards.close()
            assert made[1]._worker._ended.acquire(blocking=False)

    lost(train, index, lease_s=2)
    with made[0] as ps:
        with pytest.raises(RolledBack):
            ps.push_pull(gradient(1.0))
        assert set(ps.push_pull(gradient(1.0))["w"].tolist()) == {-6.0}
