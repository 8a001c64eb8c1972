"""psdctl: what steers a job, workers, logs."""

import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest

import psd_client
from psd.cli.ctl import job_logs
from psd.cli.psdctl import main

GRADIENT = {"w": np.ones(4, np.float32)}


@pytest.fixture
def job(cluster, monkeypatch):
    """Two workers that have declared a job on two shards, whose addresses are in PSD_SERVERS."""
    servers = cluster(2, lease_s=60.0).servers
    monkeypatch.setenv("PSD_SERVERS", servers)
    monkeypatch.setattr("psd.watch.sampler.MEASURED_S", 0.0)
    with psd_client.connect(servers, 0, 2) as first, psd_client.connect(servers, 1, 2) as second:
        both(lambda ps: ps.declare(GRADIENT, psd_client.SGD(lr=1.0)), first, second)
        both(step, first, second)
        monkeypatch.delenv("PSD_SERVERS")
        yield servers, first, second


def both(call, *connections):
    threads = [threading.Thread(target=call, args=(ps,)) for ps in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def step(ps):
    ps.push_pull(GRADIENT)


def shown(capsys, *words):
    """What a command prints as JSON."""
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_an_operator_scales_the_learning_rate_kicks_a_worker_and_ends_the_job(job, capsys):
    """Each command twice: the second one changes nothing, and says the same."""
    servers, first, second = job
    where = ("--servers", servers)
    for _ in range(2):
        assert shown(capsys, "set-lr", "0.5", *where)["step"] == 3
    assert main(["set-lr", "0.5", *where]) == 0
    assert capsys.readouterr().out == "the learning rate is scaled by 0.5 from step 3 on\n"
    assert shown(capsys, "status", *where)["learning_rates"] == [{"clock": 3, "scale": 0.5}]
    assert main(["status", *where]) == 0
    assert "order: the learning rate is scaled by 0.5 from step 3 on\n" in capsys.readouterr().out

    table = shown(capsys, "workers", *where, "--sort", "clock")
    assert [(worker["rank"], worker["state"], worker["clock"]) for worker in table["workers"]] == [
        (0, "live", 1),
        (1, "live", 1),
    ]
    assert main(["workers", *where]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["0", "live", "1"]

    assert [shown(capsys, "kick", "1", *where)["has_ended"] for _ in range(2)] == [True, False]
    with pytest.raises(psd_client.SessionFenced, match="ended by an operator"):
        second.push_pull(GRADIENT)

    ends_at = shown(capsys, "drain", *where)["step"]
    assert shown(capsys, "drain", *where)["step"] == ends_at
    with pytest.raises(psd_client.Drained):
        while True:
            first.push_pull(GRADIENT)
    assert first.clock == ends_at


def test_a_command_that_cannot_be_done_says_what_to_type_next(job, cluster, capsys):
    servers, *_ = job
    lonely = cluster(1).servers
    psd_client.connect(lonely, 0, 2).close()
    for words, message in [
        (
            ["kick", "1", "--servers", servers.partition(",")[0]],
            "is shard 0/2, but was given as 0/1; name all shards of the job",
        ),
        (["kick", "7", "--servers", servers], "there is no worker 7 in the job (psdctl workers lists them)"),
        (
            ["kick", "1", "--servers", lonely],
            "worker 1 has not joined, so there is nothing to end (psdctl workers shows",
        ),
        (["drain", "--servers", lonely], "no job has been declared on this shard yet (psdctl status shows how far the job is)"),
        (["set-lr", "0", "--servers", servers], "scale: expected more than 0 and at most 1e+06, got 0.0"),
        (["drain", "--servers", "127.0.0.1:1"], "psdctl status shows which shards answer"),
        (["logs", "--log-dir", "/nowhere"], "/nowhere has no logs; psd-run --log-dir makes them"),
    ]:
        assert main(words) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"psdctl {words[0]}: error: ")
        assert message in line


def test_workers_when_no_shard_answers_then_it_does_not_say_that_there_are_none(capsys, monkeypatch):
    monkeypatch.setattr("psd.watch.sampler.MEASURED_S", 0.0)

    assert main(["workers", "--servers", "127.0.0.1:1", "--timeout", "0.5"]) == 1

    first, *problems = capsys.readouterr().out.splitlines()
    assert first == "no shard answered"
    assert problems[0].startswith("problem: 127.0.0.1:1 did not answer: ")


def test_logs_shows_the_last_lines_of_processes_and_what_follows(tmp_path, capsys, monkeypatch):
    """A line that is still being written is shown when it is complete."""
    for name in ("worker-0", "worker-1", "shard-0"):
        (tmp_path / f"{name}.log").write_text("".join(f"{name} line {number}\n" for number in range(5)) + "begun")
    where = ("--log-dir", str(tmp_path))

    assert main(["logs", "-n", "2", "1", *where]) == 0
    assert capsys.readouterr().out == "worker-1 line 3\nworker-1 line 4\n"
    assert main(["logs", "-n", "1", *where, "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["process"] for line in found] == ["shard-0", "worker-0", "worker-1"]

    def interrupt(_):
        if (tmp_path / "worker-1.log").read_text().endswith("begun"):
            with (tmp_path / "worker-1.log").open("a") as file:
                file.write(" and done\n")
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr(job_logs.time, "sleep", interrupt)
    assert main(["logs", "worker-1", "shard-0", "-n", "0", "--follow", *where]) == 130
    assert capsys.readouterr().out == "[worker-1] begun and done\n"
    assert main(["logs", "worker-9", *where]) == 1
    assert "no log of worker-9; there are shard-0, worker-0, worker-1" in capsys.readouterr().err


def test_logs_follows_processes_that_begin_to_write_later(tmp_path, capsys, monkeypatch):
    """A job that is followed from its beginning."""
    (tmp_path / "psd-run.log").touch()
    looks = iter(["worker-0.log"])

    def begin(_):
        for name in looks:
            (tmp_path / name).write_text("one\ntwo\n")
            return
        raise KeyboardInterrupt

    monkeypatch.setattr(job_logs.time, "sleep", begin)
    assert main(["logs", "--follow", "--log-dir", str(tmp_path)]) == 130
    assert capsys.readouterr().out == "[worker-0] one\n[worker-0] two\n"


def test_logs_reads_long_files_from_their_ends_and_says_which_cannot_be_read(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(job_logs, "_READ_BYTES", 4)
    (tmp_path / "worker-0.log").write_bytes(b"".join(b"%d \xff \xc3\xa9\n" % number for number in range(100)))
    (tmp_path / "folder.log").mkdir()

    for count in (1, 3, 99, 100, 1000):
        assert main(["logs", "0", "-n", f"{count}", "--log-dir", str(tmp_path)]) == 0
        assert capsys.readouterr().out == "".join(f"{number} \ufffd é\n" for number in range(max(0, 100 - count), 100))
    monkeypatch.setattr(Path, "open", lambda path, mode: os.open(path / "no-folder", os.O_RDONLY))
    assert main(["logs", "--log-dir", str(tmp_path)]) == 1
    assert capsys.readouterr().err.endswith("worker-0.log/no-folder: Not a directory\n")
