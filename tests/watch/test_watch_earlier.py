"""Earlier runs of a log directory: psd/watch/earlier.py, on files as workers write them."""

import json
import math

import pytest

from psd.contract.scalars import LoggedScalars
from psd.watch import earlier
from psd.watch.earlier import EarlierRuns
from psd_client.worker.scalars.scalar_files import ScalarFiles


def write(directory, run, rank, values, *, begun_at=1e9, name="loss", every=1):
    """A worker's losses, as it writes them itself."""
    files = ScalarFiles(rank, str(directory), "")
    files.write([LoggedScalars(begun_at + i, run, rank, i * every, {name: value}) for i, value in enumerate(values)])
    files.close()


def curves(runs, name, present="now"):
    text = runs.curves(name, present)
    return None if text is None else json.loads(text)["curves"]


def test_runs_that_used_one_directory_are_told_apart_and_each_is_the_mean_of_its_workers(tmp_path):
    """Also those in folders of it; the present run is none of them."""
    for rank in range(2):
        write(tmp_path, "first", rank, [4.0 + rank, 2.0 + rank], begun_at=1e9)
        write(tmp_path, "now", rank, [8.0], begun_at=2e9)
    write(tmp_path / "sgd", "first", 0, [1.0], begun_at=1.5e9)
    write(tmp_path / "old", "", 0, [7.0], begun_at=1)
    runs = EarlierRuns(tmp_path)

    assert [(run.name, run.begun_at) for run in runs.runs("now")] == [
        ("sgd/first", 1.5e9),
        ("first", 1e9),
        ("old/unnamed", 1),
    ]
    assert curves(runs, "first") == {"loss": [[0, 4.5], [1, 2.5]]}
    assert curves(runs, "sgd/first") == {"loss": [[0, 1.0]]}
    assert curves(runs, "old/unnamed") == {"loss": [[0, 7.0]]}
    assert curves(runs, "now") is None
    assert curves(runs, "another") is None
    assert [run.name for run in runs.runs("later")] == ["now", "sgd/first", "first", "old/unnamed"]


def test_what_is_added_to_a_file_later_is_seen_and_what_was_seen_is_not_read_again(tmp_path, monkeypatch):
    """A line that is still being written is read when it is whole."""
    write(tmp_path, "a", 0, [1.0])
    runs = EarlierRuns(tmp_path)
    assert [run.name for run in runs.runs("")] == ["a"]
    assert curves(runs, "a") == {"loss": [[0, 1.0]]}
    line = LoggedScalars(2e9, "b", 0, 5, {"loss": 3.0}).line()
    file = tmp_path / "worker-0.jsonl"
    read = []
    monkeypatch.setattr(earlier, "_lines", lambda *args, real=earlier._lines: read.append(args[1:]) or real(*args))

    with file.open("a") as writing:
        writing.write(line[:-9])
        writing.flush()
        assert [run.name for run in runs.runs("")] == ["a"]
        writing.write(line[-9:])
    assert [run.name for run in runs.runs("")] == ["b", "a"]

    size = file.stat().st_size
    assert read == [(size - len(line), size - 9), (size - len(line), size)]
    assert curves(runs, "a") == {"loss": [[0, 1.0]]}
    assert len(read) == 2, "its curves are kept"
    assert curves(runs, "b") == {"loss": [[5, 3.0]]}


def test_a_worker_that_went_back_logs_its_steps_anew(tmp_path):
    """What it had logged from there on is gone, as in the job; NaN is a gap."""
    write(tmp_path, "a", 0, [4.0, 3.0, 2.0, 1.0])
    files = ScalarFiles(0, str(tmp_path), "")
    files.write([LoggedScalars(2e9, "a", 0, step, {"loss": value}) for step, value in ((2, 9.0), (3, math.nan))])
    files.close()
    runs = EarlierRuns(tmp_path)
    runs.runs("")

    assert curves(runs, "a") == {"loss": [[0, 4.0], [1, 3.0], [2, 9.0]]}


def test_however_long_a_run_its_curve_has_a_bounded_number_of_points(tmp_path, monkeypatch):
    """Workers log at different distances, and get to different steps."""
    monkeypatch.setattr(earlier, "POINTS_MAX", 100)
    for rank, every in enumerate((1, 8)):
        write(tmp_path, "a", rank, [step * every / 1000 for step in range(3000 // every)], every=every)
    write(tmp_path, "a", 2, [0.0], name="other")
    runs = EarlierRuns(tmp_path)
    runs.runs("")

    found = curves(runs, "a")

    assert 50 < len(found["loss"]) <= 100
    assert all(value == pytest.approx(step / 1000, abs=0.02) for step, value in found["loss"])
    assert found["other"] == [[0, 0.0]]


def test_runs_files_and_lines_are_bounded_and_what_is_no_line_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(earlier, "RUNS_MAX", 2)
    monkeypatch.setattr(earlier, "CURVES_MAX", 1)
    monkeypatch.setattr(earlier, "KEPT_MAX", 1)
    monkeypatch.setattr(earlier, "READ_BYTES_MAX", 2000)
    good = LoggedScalars(5.0, "a\x1b", 0, 1, {"loss": 0.5, "lr": 0.1}).line().encode()
    lines = [
        b"x" * 3000,  # only what is left of it is looked through
        b'{"run": "\\ud8", "time": 1}',
        b'{"time": "now"}',
        b'{"time": 1e999, "run": "endless"}',
        b'{"time": 5, "run": "a\\u001b", "rank": 0, "step": 9007199254740993, "scalars": {"loss": 1}}',
        b'{"time": 5, "run": "a\\u001b", "rank": 0, "step": 2, "scalars": 7}',
        b"[" * 500,
        good.strip(),
        b"y" * 500,
    ]
    (tmp_path / "worker-0.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    (tmp_path / "worker-1.jsonl").mkdir()
    runs = EarlierRuns(tmp_path)

    (run,) = runs.runs("")
    assert "\x1b" not in run.name
    assert curves(runs, run.name) == {"loss": [[1, 0.5]]}

    for index, name in enumerate("bcd"):
        write(tmp_path / "more", name, 0, [1.0], begun_at=10 + index)
    assert [run.name for run in runs.runs("")] == ["more/d", "more/c"]
    assert EarlierRuns(tmp_path / "none").runs("") == []
