"""ps.log: scalars on their way to shard 0 and to files, beside training."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from client_faults import connect_faulty
from full_disk import full_disk

from psd.contract.errors import InvalidRequest, ShardUnavailable
from psd.contract.scalars import LoggedScalars
from psd.v1 import control_pb2
from psd_client import SGD, connect
from psd_client.worker.scalars import scalar_log
from psd_client.worker.scalars.scalar_files import ScalarFiles
from psd_client.worker.scalars.scalar_log import ScalarLog


class Wire:
    """Takes requests as shard 0 does; fails as often as it is told to."""

    def __init__(self, failures: int = 0) -> None:
        self.requests: list[control_pb2.LogRequest] = []
        self.failures = failures

    def __call__(self, request: control_pb2.LogRequest, timeout_s: float) -> None:
        if self.failures:
            self.failures -= 1
            raise ShardUnavailable("away")
        self.requests.append(request)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[Wire], ScalarLog]]:
    """A log without a thread: the test calls `flush`."""
    monkeypatch.setattr(ScalarLog, "_start", lambda self: None)
    files = ScalarFiles(3, str(tmp_path), "")
    yield lambda wire: ScalarLog(3, wire, files, lambda: "mnist-1")
    files.close()


def test_scalars_go_in_batches_and_into_lines_of_json(made: Callable[[Wire], ScalarLog], tmp_path: Path) -> None:
    """Numbers of any kind; NaN and infinity as such, which JSON has no numbers for."""
    wire = Wire()
    log = made(wire)
    log.add(np.int64(7), {"loss": torch.tensor(0.5, requires_grad=True), "accuracy": np.float32(0.25)})
    log.add(8, {"loss": float("nan"), "gap": -math.inf, "huge": 10**400, "one": np.array([[2.0]])})
    log.flush()

    (request,) = wire.requests
    assert list(request.names) == ["loss", "accuracy", "gap", "huge", "one"]
    assert list(request.series) == [0, 1, 0, 2, 3, 4]
    assert list(request.steps) == [7, 7, 8, 8, 8, 8]
    assert repr(list(request.values)) == "[0.5, 0.25, nan, -inf, inf, 2.0]"
    lines = [json.loads(line) for line in (tmp_path / "worker-3.jsonl").read_text().splitlines()]
    assert [(line["run"], line["rank"], line["step"]) for line in lines] == [("mnist-1", 3, 7), ("mnist-1", 3, 8)]
    assert lines[0]["scalars"] == {"loss": 0.5, "accuracy": 0.25}
    assert lines[1]["scalars"] == {"loss": "NaN", "gap": "-Infinity", "huge": "Infinity", "one": 2.0}


def test_what_shard_0_does_not_answer_is_sent_again_and_the_oldest_are_given_up(
    made: Callable[[Wire], ScalarLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers tell the shard which points it has had already."""
    monkeypatch.setattr(scalar_log, "UNSENT_MAX", 3)
    monkeypatch.setattr(scalar_log, "BATCH_POINTS_MAX", 2)
    wire = Wire(failures=1)
    log = made(wire)
    for step in range(5):
        log.add(step, {"loss": step})
    log.flush()
    assert wire.requests == []
    log.flush()

    assert [(request.first, list(request.steps)) for request in wire.requests] == [(2, [2, 3]), (4, [4])]


def test_where_the_job_ends_is_said_once_and_again_with_every_request(
    made: Callable[[Wire], ScalarLog], tmp_path: Path
) -> None:
    """Alone or beside scalars: a shard that was killed hears it with the next ones. No file has it, for it is no scalar."""
    wire = Wire(failures=1)
    log = made(wire)
    log.add(0, {}, np.int64(40))
    log.flush()
    assert wire.requests == []
    log.flush()
    log.flush()
    log.add(1, {"loss": 0.5})
    log.flush()
    log.add(2, {"loss": 0.25}, 30)
    log.flush()

    assert [(request.first, list(request.steps), request.total) for request in wire.requests] == [
        (0, [], 40),
        (0, [1], 40),
        (1, [2], 30),
    ]
    assert len((tmp_path / "worker-3.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("total", [0, -1, 1 << 53, 1.5, "all", True])
def test_log_when_the_end_is_no_number_of_steps_then_nothing_is_noted(total: Any, made: Callable[[Wire], ScalarLog]) -> None:
    wire = Wire()
    log = made(wire)
    with pytest.raises(InvalidRequest, match="total: expected"):
        log.add(1, {"loss": 1}, total)
    log.flush()

    assert wire.requests == []


def test_a_log_that_is_closed_while_its_last_points_are_sent_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here by its own thread, which waits for nobody; a program would wait for that thread."""
    monkeypatch.setattr(scalar_log, "FLUSH_S", 0.01)
    log = ScalarLog(3, lambda *_: log.close(), ScalarFiles(3, str(tmp_path), ""), lambda: "mnist-1")
    log.add(1, {"loss": 0.5})

    assert log._thread is not None
    log._thread.join(100)
    assert not log._thread.is_alive()


@pytest.mark.parametrize(
    ("step", "scalars", "match"),
    [
        (-1, {"loss": 1}, "step: expected 0 to"),
        (1.5, {"loss": 1}, "step: expected a whole number, got 1.5"),
        (1, {}, "scalars: expected at least one"),
        (1, {"loss": "low"}, "loss: expected a number, got 'low'"),
        (1, {"loss": True}, "loss: expected a number, got True"),
        (1, {"loss": None}, "loss: expected a number, got None"),
        (1, {"loss": np.ones(2)}, "loss: expected a number"),
        (1, {"": 1}, "name: expected 1 to 256 bytes"),
        (1, {"a\nb": 1}, "name: .* has control characters"),
        (1, {f"s{i}": i for i in range(65)}, "at most 64 series"),
    ],
)
def test_log_when_a_scalar_is_wrong_then_nothing_is_noted(
    step: Any, scalars: dict[str, Any], match: str, made: Callable[[Wire], ScalarLog]
) -> None:
    wire = Wire()
    log = made(wire)
    with pytest.raises(InvalidRequest, match=match):
        log.add(step, {"fine": 1, **scalars} if scalars and "s0" not in scalars else scalars)
    log.flush()

    assert wire.requests == []


def test_a_worker_logs_while_shard_0_is_away_and_a_reader_sees_it_in_the_end(
    cluster: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Training never waits for it: the calls return, and close() sends what is left. One lost answer does not count twice."""
    monkeypatch.setattr(scalar_log, "FLUSH_S", 0.01)
    monkeypatch.setenv("PSD_LOG_DIR", str(tmp_path))
    started = cluster()
    ps, faults = connect_faulty(started.servers)
    faults.lose_reply("log", shard=0)
    with ps:
        ps.declare({"w": np.zeros(2)}, SGD(lr=1))
        for _ in range(3):
            ps.push_pull({"w": np.ones(2)})
            ps.log(ps.clock, total=9, **{"loss/train": 1 / ps.clock})

    faults.assert_all_fired()
    (curve,) = started.shards[0].shard.curves(0).curves
    assert (curve.rank, curve.name, list(curve.steps), list(curve.values)) == (0, "loss/train", [1, 2, 3], [1, 0.5, 1 / 3])
    assert started.shards[0].shard.status().total == 9
    assert len((tmp_path / "worker-0.jsonl").read_text().splitlines()) == 3
    with pytest.raises(RuntimeError, match="log: this ParameterServer is closed"):
        ps.log(4, loss=1)


def test_scalars_become_tensorboard_files(
    cluster: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Beside a directory for lines that cannot be made, which is said once."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("PSD_LOG_DIR", str(tmp_path / "file"))
    monkeypatch.setenv("PSD_TENSORBOARD", str(tmp_path / "board"))
    with caplog.at_level(logging.WARNING), connect(cluster().servers, rank=0, world_size=1) as ps:
        ps.log(1, loss=0.5)

    assert ["scalars cannot be written" in record.getMessage() for record in caplog.records] == [True]
    (events,) = (tmp_path / "board" / "worker-0").iterdir()
    assert b"loss" in events.read_bytes()


def test_scalars_on_a_full_disk_are_lost_and_that_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The end included, at which files are written once more."""
    files = ScalarFiles(0, str(tmp_path), "")

    with caplog.at_level(logging.WARNING), full_disk():
        for step in range(3):
            files.write([LoggedScalars(1.0, "mnist-1", 0, step, {"loss": 0.5})])
        files.close()

    assert ["scalars cannot be written: [Errno 27]" in record.getMessage() for record in caplog.records] == [True]
