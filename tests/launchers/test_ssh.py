"""psd-run --hosts over a real sshd: two hosts on this machine, at different ports."""

from __future__ import annotations

import os
import re
import subprocess
from signal import SIGINT, SIGKILL

import pytest
from commands import processes
from conftest import wait_until

from psd.cli.words.arguments import EXIT_HOST_LOST


@pytest.fixture
def job(run, sshd, script):
    """A job of two shards and two workers on both hosts, that trains for so many steps."""

    def begin(*options, steps=10**6, **more):
        hosts = ["--hosts", "a:1,b:1", "--ssh", sshd.command, "--shards", 2, "--grace", 5]
        started = run(*hosts, *options, script, steps, 0.01, **more)
        started.run_id = started.line(r"\[psd-run\] +run (\S+);")[1]
        for _ in range(2):
            started.line("trains")
        return started

    return begin


def test_hosts_when_all_is_well_then_each_has_a_shard_and_a_worker_and_the_command_stays_secret(job, tmp_path):
    logs = tmp_path / "logs"
    started = job("--log-dir", logs, "--env", "SECRET", steps=40, environ={"SECRET": "dark"})
    commands = " ".join(processes(started.run_id).values())

    assert started.end() == 0
    assert sorted(re.findall(r"begins at step 0 node (\d)", started.output)) == ["0", "1"]
    assert started.output.count("trained to -60.0 -60.0") == 2
    assert re.search(r"step 40, \S+ steps/s; 80 pushes accepted, 0 late", started.output)
    assert "train.py" in commands
    assert "dark" not in commands
    assert (logs / "worker-1.log").read_text().endswith("trained to -60.0 -60.0\n")
    assert processes(started.run_id) == {}


def test_hosts_when_a_remote_worker_dies_then_it_is_started_again_there(job):
    started = job("--max-restarts", 1, steps=300)

    victim = next(pid for pid in processes(started.run_id) if is_worker(pid, 1))
    os.kill(victim, SIGKILL)

    assert started.end() == 0
    assert "worker 1 was killed by SIGKILL" in started.output
    assert "1 restart of workers" in started.output
    assert re.search(r"\[worker 1\] +begins at step \d{1,3} node 1", started.output)


def is_worker(pid, rank):
    with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
        return f"PSD_RANK={rank}".encode() in file.read().split(b"\0")


def test_hosts_when_ctrl_c_is_pressed_then_nothing_is_left_on_any(job):
    started = job()

    started.signal(SIGINT)

    assert started.end() == 130
    assert processes(started.run_id) == {}


def test_hosts_when_a_connection_is_lost_then_its_remote_processes_end_and_the_job_says_which_host(job, sshd):
    started = job()

    sshd.cut("b")

    assert started.end() == EXIT_HOST_LOST
    assert re.search(r"node 1 \(\S+\) is lost: the connection has ended, and with it shard 1, worker 1", started.output)
    wait_until(lambda: processes(started.run_id) == {}, "the processes of the lost host end")


def test_hosts_when_psd_run_is_killed_then_nothing_is_left_on_any(job):
    started = job()

    started.signal(SIGKILL)

    wait_until(lambda: processes(started.run_id) == {}, "the processes of both hosts end")


def test_hosts_when_one_cannot_be_reached_then_the_job_does_not_begin(run, sshd, script):
    sshd.daemons["b"].kill()
    sshd.daemons["b"].wait()
    started = run("--hosts", "a:1,b:1", "--ssh", sshd.command, script, 1)

    assert started.end() == 1
    assert "Connection refused" in started.output
    assert "node 1 (b) has not joined: ssh has ended with status 255; stopping the job" in started.output


def test_hosts_when_ssh_would_ask_for_a_password_then_the_job_does_not_begin(run, sshd, script):
    started = run("--hosts", "a:1", "--ssh", f"{sshd.command} -o PubkeyAuthentication=no", script, 1)

    assert started.end() == 1
    assert "Permission denied" in started.output
    assert "node 0 (a) has not joined: ssh has ended with status 255; stopping the job" in started.output


def test_hosts_when_arguments_and_variables_have_spaces_and_quotes_then_they_arrive_as_they_are(run, sshd, tmp_path):
    odd = ["two words", "a'b", 'c"d', "$HOME", "`id`", "", "*", "back\\slash", "line\nbreak", "-x", "ü"]
    (tmp_path / "say.py").write_text("import os, sys\nprint(ascii([*sys.argv[1:], os.environ['ODD']]))")

    started = run("--hosts", "b:1", "--ssh", sshd.command, "--env", "ODD", tmp_path / "say.py", *odd, environ={"ODD": odd[1]})

    assert started.end() == 0
    assert ascii([*odd, odd[1]]) in started.output


def test_hosts_when_there_are_certificates_and_tokens_then_workers_have_them(job, tmp_path):
    key = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=host -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(["openssl", *key.split(), "-keyout", "key", "-out", "ca"], cwd=tmp_path, check=True)
    for name, text in {"tokens": "worker " + "w" * 16, "token": "w" * 16}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    environ = {"PSD_TLS_CA": str(tmp_path / "ca"), "PSD_TOKEN_FILE": str(tmp_path / "token")}
    files = ["--tls-cert", tmp_path / "ca", "--tls-key", tmp_path / "key", "--token-file", tmp_path / "tokens"]

    started = job(*files, *(f"--env={name}" for name in environ), steps=40, environ=environ)

    assert started.end() == 0
    assert started.output.count("trained to -60.0 -60.0") == 2
