"""psd-run's last lines, and its log files."""

import pytest

from psd.cli.job.summary import Summary
from psd.cli.processes.log_files import LogFiles
from psd.contract.config import ConfigError

COUNTED = "psd-server: shard {}/2 has counted {} pushes, {} late, up to step {} from {}; {} steps in {} s"


def started(*, shards=(0, 1), **settings):
    summary = Summary(**settings)
    for index in shards:
        summary.on_start("shard", index)
    summary.on_start("worker", 0)
    summary.on_start("worker", 1)
    return summary


def test_summary_when_all_is_well_then_steps_are_counted_from_the_checkpoint_that_the_job_began_with():
    summary = started(checkpoint_dir="s3://bucket/run")
    summary.on_line(0, COUNTED.format(0, 200, 3, 1100, 1000, 100, "5.000"))
    summary.on_line(1, COUNTED.format(1, 203, 0, 1100, 1000, 100, "5.010"))

    assert summary.lines(9.04) == [
        "9.0 s; step 1100, 20.0 steps/s; 203 pushes accepted, 3 late",
        "checkpoints: s3://bucket/run",
    ]


def test_summary_when_steps_are_fast_then_their_rate_has_no_exponent():
    summary = started()
    summary.on_line(0, COUNTED.format(0, 200, 0, 100, 0, 100, "0.068"))

    assert "; step 100, 1471 steps/s;" in summary.lines(3.9)[0]


def test_summary_when_a_worker_has_ended_the_job_then_it_says_so():
    """Shard 0 knows it; the others do not."""
    summary = started()
    summary.on_line(0, COUNTED.format(0, 12, 0, 6, 0, 6, "2.000") + "; ended there, as worker 1 has asked (stop)")
    summary.on_line(1, COUNTED.format(1, 12, 0, 6, 0, 6, "2.000"))

    assert summary.lines(9.0) == [
        "9.0 s; step 6, 3.0 steps/s; 12 pushes accepted, 0 late",
        "ended at step 6, as worker 1 has asked (stop)",
    ]


def test_summary_when_the_only_shard_was_killed_then_it_does_not_guess_what_came_before():
    summary = started(shards=(0, 0))
    summary.on_start("worker", 1)
    summary.on_line(0, COUNTED.format(0, 10, 0, 50, 0, 40, "2.000"))

    assert summary.lines(9.0) == [
        "9.0 s; step 50; 10 pushes accepted, 0 late since the shards were last started",
        "1 restart of workers, 1 restart of shards",
    ]


def test_summary_when_no_step_was_made_after_all_workers_had_joined_then_there_is_no_word_of_a_rate():
    summary = started()
    summary.on_line(0, "psd-server: shard 0/2 has counted 10 pushes, 0 late, up to step 50 from 0")

    assert summary.lines(9.0) == ["9.0 s; step 50; 10 pushes accepted, 0 late"]


def test_summary_when_no_shard_has_ended_in_order_then_there_is_only_the_time():
    assert started().lines(1.0) == ["1.0 s"]


def test_log_files_when_a_run_comes_after_another_then_it_adds_to_them(tmp_path):
    for run in (b"first", b"second"):
        files = LogFiles(tmp_path / "logs")
        files.write("worker 0", [run, b"\xff"])
        files.close()

    assert (tmp_path / "logs" / "worker-0.log").read_bytes() == b"first\n\xff\nsecond\n\xff\n"


def test_log_files_when_they_cannot_be_written_then_that_is_said_once(tmp_path):
    with pytest.raises(ConfigError, match=r"--log-dir: cannot write to .*/file: File exists"):
        (tmp_path / "file").touch()
        LogFiles(tmp_path / "file")
    files = LogFiles(tmp_path / "logs")
    (tmp_path / "logs" / "worker-0.log").mkdir()

    assert files.write("worker 0", [b"lost"]).endswith("Is a directory; the job goes on without log files")
    assert files.write("worker 0", [b"lost"]) == ""
    files.close()
