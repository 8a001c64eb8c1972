"""psdctl jobs, and the job that other commands take without addresses; several psd-runs at once on one machine."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import sys

import pytest
from certificates import Authority
from commands import TIMEOUT_S, Job, Process, shard_pid
from free_ports import free_port

from psd.cli.psdctl import main
from psd.cli.run import parse
from psd.contract.job_records import JobEntry, new_record

TRAINING = """
import threading
import numpy as np
import psd_client

with psd_client.connect() as ps:
    ps.declare({"w": np.zeros(100, np.float32)}, optimizer=psd_client.SGD(lr=1.0))
    while not ps.is_over:
        ps.push_pull({"w": np.ones(100, np.float32)})
        if ps.clock == 3:
            print("trains", flush=True)
        if ps.clock >= 3:
            threading.Event().wait(0.2)
"""
"""Trains until it is told to end, from its third step at a pace that leaves the machine to others."""

IDLE = "import signal; print('waits', flush=True); signal.pause()"
"""Never joins."""

DRAWN = "dashboard: (http://127.0.0.1:(\\d+)/)"


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """An empty directory for records."""
    monkeypatch.setenv("PSD_JOBS_DIR", str(tmp_path / "jobs"))
    for name in ("PSD_SERVERS", "PSD_LOG_DIR", "PSD_TLS_CA", "PSD_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "jobs"


@pytest.fixture
def listed(cluster):
    """listed(name, servers or shards of this process) -> the addresses of a job that this process runs."""

    def begin(name, servers=None, **files):
        servers = servers or cluster(2, run_id=name).servers
        JobEntry(new_record(name, tuple(servers.split(",")), 2, ("train.py", "--lr", "0.1"), **files))
        return servers

    return begin


def listed_jobs(capsys):
    """The jobs that psdctl jobs --json prints, by name."""
    assert main(["jobs", "--json", "--timeout", "30"]) == 0
    return {job["name"]: job for job in json.loads(capsys.readouterr().out)["jobs"]}


# -- which job ----------------------------------------------------------------------------------------------------------


def test_status_takes_the_only_job_and_says_which(listed, capsys):
    listed("train-1a")

    assert main(["status"]) == 0

    shown = capsys.readouterr()
    assert "run train-1a: nothing declared yet" in shown.out
    assert shown.err == "psdctl status: job train-1a\n"


@pytest.mark.parametrize("name", ["train-1a", "train-1", "t"])
def test_a_job_is_named_by_the_beginning_of_its_name(name, listed, capsys):
    listed("train-1a")
    listed("other-1a")

    assert main(["status", "--job", name]) == 0

    shown = capsys.readouterr()
    assert "run train-1a: nothing declared yet" in shown.out
    assert shown.err == ""


def test_a_whole_name_is_that_job_though_others_begin_with_it(listed, capsys):
    listed("train")
    listed("train-2")

    assert main(["status", "--job", "train"]) == 0

    assert "run train: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("jobs", "options", "message"),
    [
        (
            [],
            [],
            "--servers: expected the shards' addresses, here or in PSD_SERVERS; you have no job that runs on this machine",
        ),
        ([], ["--job", "x"], "--job: there is no job 'x'; you have none that runs on this machine"),
        (["a-1"], ["--job", "x"], "--job: there is no job 'x'; there are a-1"),
        (["a-1"], ["--job", ""], "--job: there is no job ''; there are a-1"),
        (["a-1", "a-2"], [], "--job: 2 jobs of yours run on this machine; name one: a-1, a-2 "),
        (["a-1", "a-2"], ["--job", "a"], "--job: 'a' begins the names of a-1, a-2; give more of it"),
        (["a-1"], ["--job", "a-1", "--servers", "h:1"], "--job: not beside --servers, which says which job"),
        ([f"a-{i:02}" for i in range(22)], [], "name one: " + ", ".join(f"a-{i:02}" for i in range(20)) + " and 2 more "),
    ],
)
@pytest.mark.parametrize("command", ["status", "checkpoint", "drain", "workers", "dashboard"])
def test_where_it_is_not_clear_which_job_an_error_names_them(command, jobs, options, message, listed, refusal):
    for name in jobs:
        listed(name, "127.0.0.1:1")

    assert message in refusal(main, [command, *options])


def test_addresses_in_the_environment_come_before_jobs_and_job_before_them(listed, cluster, capsys, monkeypatch):
    listed("train-1")
    monkeypatch.setenv("PSD_SERVERS", cluster(1, run_id="elsewhere-1").servers)

    assert main(["status"]) == 0
    assert "run elsewhere-1" in capsys.readouterr().out
    assert main(["status", "--job", "train-1"]) == 0
    assert "run train-1" in capsys.readouterr().out


def test_a_directory_that_others_can_open_is_not_believed(listed, directory, refusal, capsys):
    listed("train-1", "127.0.0.1:1")
    directory.chmod(0o777)

    assert f"your jobs on this machine cannot be found: {directory} can be opened by other users" in refusal(main, ["drain"])
    assert main(["jobs"]) == 1
    assert f"error: the records of jobs cannot be read: {directory} can be opened by other users" in capsys.readouterr().err


def test_the_files_of_a_job_are_its_records_unless_options_name_others(listed, cluster, tmp_path, capsys, monkeypatch):
    """Those in the environment are for other shards: with them, the shards of a job of this machine could not be reached."""
    authority = Authority("ours")
    (tmp_path / "ca").write_bytes(authority.pem)
    for name, token in {"tokens": "reader " + "r" * 16, "token": "r" * 16, "wrong": "w" * 16}.items():
        (tmp_path / name).write_text(token)
        (tmp_path / name).chmod(0o600)
    pair = authority.issue("127.0.0.1").write(tmp_path, "host")
    guarded = cluster(1, run_id="guarded-1", token_file=str(tmp_path / "tokens"), **pair).servers
    listed("guarded-1", guarded, tls_ca=str(tmp_path / "ca"), token_file=str(tmp_path / "token"))
    listed("open-1")
    monkeypatch.setenv("PSD_TLS_CA", str(tmp_path / "ca"))
    monkeypatch.setenv("PSD_TOKEN_FILE", str(tmp_path / "wrong"))

    for name in ("guarded-1", "open-1"):
        assert main(["status", "--job", name]) == 0
        assert f"run {name}" in capsys.readouterr().out
    assert main(["status", "--job", "guarded-1", "--token-file", str(tmp_path / "wrong")]) == 1
    assert "UNAUTHENTICATED" in capsys.readouterr().out
    assert all(job["problems"] == [] for job in listed_jobs(capsys).values())

    (tmp_path / "token").unlink()
    jobs = listed_jobs(capsys)
    assert str(tmp_path / "token") in jobs["guarded-1"]["problems"][0]
    assert jobs["open-1"]["problems"] == []


def test_a_plan_records_the_workers_files_and_only_where_they_have_some(tmp_path, monkeypatch):
    """By paths that hold in every directory."""
    monkeypatch.chdir(tmp_path)
    authority = Authority("ours")
    for name, content in {"ca": authority.pem, "tokens": b"worker " + b"w" * 16, "token": b"w" * 16}.items():
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).chmod(0o600)
    authority.issue("127.0.0.1").write(tmp_path, "host")
    environ = {"PSD_TLS_CA": "ca", "PSD_TOKEN_FILE": "token", "PATH": os.environ["PATH"]}
    hosts = ["--nnodes", "2", "--rendezvous", "h:9", "--node-rank", "0", "--workers", "2"]
    guarded = ["--tls-cert", "host.crt", "--tls-key", "host.key", "--token-file", "tokens"]

    record = parse([*hosts, *guarded, "--log-dir", "logs", "true", "--now"], environ).record(["h:1"])

    assert (record.tls_ca, record.token_file, record.tls_cert) == (f"{tmp_path}/ca", f"{tmp_path}/token", "")
    assert (record.log_dir, record.command, record.workers) == (f"{tmp_path}/logs", ("true", "--now"), 2)
    record = parse(["true"], environ).record(["h:1"])
    assert (record.tls_ca, record.token_file, record.log_dir) == ("", "", "")


class Terminal:
    """A terminal with a command of psdctl; `shown` is what it has written there."""

    def __init__(self, *words):
        self.shown = ""
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            os.execv(sys.executable, [sys.executable, "-m", "psd.cli.psdctl", *words])

    def answer(self, question, text):
        """Wait for a question, and type the text."""
        while not self.shown.endswith(question):
            assert self._read(), self.shown
        os.write(self._terminal, text.encode())
        self.shown += "\n"

    def end(self):
        """Wait for the end; the exit status."""
        while self._read():
            pass
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self._terminal)
        return status

    def _read(self):
        assert select.select([self._terminal], [], [], TIMEOUT_S)[0], f"nothing more in time: {self.shown}"
        try:
            data = os.read(self._terminal, 4096)
        except OSError:  # nobody has it open any more
            return False
        self.shown += data.decode().replace("\r\n", "\n")
        return bool(data)


@pytest.mark.process
def test_on_a_terminal_it_asks_which_of_several(listed):
    """Until the answer is one of the numbers."""
    listed("first-1", "127.0.0.1:1")
    listed("second-2")
    terminal = Terminal("status")

    for text in ("3\n", "second\n", "2\n"):
        terminal.answer("which one? (1 to 2) ", text)

    assert terminal.end() == 0, terminal.shown
    assert re.search(r"^ +JOB +AGE +COMMAND\n1 +first-1 .* train\.py --lr 0\.1\n2 +second-2 ", terminal.shown)
    assert "run second-2: nothing declared yet" in terminal.shown


@pytest.mark.process
def test_at_the_end_of_a_terminals_input_none_is_chosen(listed):
    for name in ("first-1", "second-2"):
        listed(name, "127.0.0.1:1")
    terminal = Terminal("drain")

    terminal.answer("which one? (1 to 2) ", "\x04")

    assert terminal.end() == 2, terminal.shown
    assert "--job: none was chosen" in terminal.shown


def test_logs_takes_the_directory_of_a_job(listed, tmp_path, capsys, refusal):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker-0.log").write_text("hello\n")
    listed("train-1", "127.0.0.1:1", log_dir=str(tmp_path / "logs"))

    assert main(["logs"]) == 0
    assert capsys.readouterr().out == "hello\n"

    listed("other-1", "127.0.0.1:1")
    assert main(["logs", "0", "--job", "train-1"]) == 0
    assert capsys.readouterr().out == "hello\n"
    assert "--job: other-1 has no --log-dir" in refusal(main, ["logs", "--job", "other"])
    assert "--job: 2 jobs of yours run on this machine" in refusal(main, ["logs"])
    assert "--job: not beside --log-dir" in refusal(main, ["logs", "--job", "train-1", "--log-dir", "x"])


# -- the list -----------------------------------------------------------------------------------------------------------


def test_without_jobs_the_list_says_so(capsys):
    assert main(["jobs"]) == 0
    assert capsys.readouterr().out == "you have no job that runs on this machine\n"
    assert main(["jobs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"jobs": []}


def test_a_job_whose_shards_do_not_answer_is_listed_with_the_reason(listed, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    servers = listed("train-1")
    listed("silent-1", "127.0.0.1:1")

    assert main(["jobs"]) == 0

    head, first, second, problem = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "AGE", "STEP", "WORKERS", "SHARDS", "DASHBOARD", "SERVERS", "COMMAND"]
    assert re.fullmatch(rf"train-1 +\S+ s +- +0/2 +2 +- +{servers} +train\.py --lr 0\.1", first)
    assert re.fullmatch(r"silent-1 +\S+ s +- +-/2 +1 +- +127\.0\.0\.1:1 +train\.py --lr 0\.1", second)
    assert problem.startswith("problem: silent-1: 127.0.0.1:1 did not answer: UNAVAILABLE")
    assert listed_jobs(capsys)["silent-1"]["live"] is None


def test_what_a_record_says_cannot_control_the_terminal(listed, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    JobEntry(new_record("a\x1b]0;x\x07", ("127.0.0.1:1",), 1, ("x\n\x1b[2J",)))

    assert main(["jobs"]) == 0

    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert len(shown.splitlines()) == 3


# -- jobs of psd-run ----------------------------------------------------------------------------------------------------


@pytest.fixture
def psd_runs(tmp_path):
    """psd_runs(options, ...) -> psd-runs that begin at once, one for each list of options."""
    path = tmp_path / "script.py"
    started = []

    def begin(*each, script=TRAINING):
        path.write_text(script)
        jobs = [Job(*options, str(path)) for options in each]
        started.extend(jobs)
        return jobs

    yield begin
    for process in started:
        process.close()


def drawn(job: Process) -> tuple[str, int]:
    """Address and port of a job's dashboard."""
    found = job.line(DRAWN)
    return found[1], int(found[2])


def _list_beside_a_suspended_shard(slow, quick, capsys):
    """It holds up the list of the others no longer than the timeout."""
    shard = shard_pid(slow.run_id, 0)
    os.kill(shard, signal.SIGSTOP)
    try:
        assert main(["jobs", "--json", "--timeout", "5"]) == 0
        found = {job["name"]: job for job in json.loads(capsys.readouterr().out)["jobs"]}
    finally:
        os.kill(shard, signal.SIGCONT)

    assert found[slow.run_id]["step"] is None
    assert "DEADLINE_EXCEEDED" in found[slow.run_id]["problems"][0]
    assert found[quick.run_id]["step"] >= 2


@pytest.mark.process
def test_jobs_at_once_are_told_apart_and_a_killed_one_leaves_no_ghost(psd_runs, directory, capsys):
    """They want the same port for their dashboards: one has it, the others say which they took. One that has ended is listed no
    more."""
    port = free_port()
    jobs = psd_runs(*[["--dashboard", "--dashboard-port", str(port)]] * 3)
    for job in jobs:
        job.wait_until_ready()
    dashboards = [drawn(job) for job in jobs]
    assert len(set(dashboards)) == 3
    assert [wanted for _, wanted in dashboards].count(port) == 1
    others = [job for job, (_, taken) in zip(jobs, dashboards, strict=True) if taken != port]
    assert all(job.lines[-1].endswith(f"(port {port} is not free)") for job in others)
    for job in jobs:
        if "trains" not in job.output:
            job.line("trains")

    found = listed_jobs(capsys)
    assert found.keys() == {job.run_id for job in jobs}
    servers = [server for job in found.values() for server in job["servers"]]
    assert len(set(servers)) == 3
    for job, (address, _) in zip(jobs, dashboards, strict=True):
        seen = found[job.run_id]
        assert (seen["dashboard"], seen["pid"], seen["workers"], seen["live"], seen["problems"]) == (address, job.pid, 1, 1, [])
        assert seen["step"] >= 2
        assert seen["servers"][0] in job.output

    killed, stopped, drained = jobs
    _list_beside_a_suspended_shard(stopped, drained, capsys)

    killed.signal(signal.SIGKILL)
    killed.end()
    assert listed_jobs(capsys).keys() == {stopped.run_id, drained.run_id}
    assert len(list(directory.iterdir())) == 2

    (dashboard,) = (pid for pid, command in drained.orphans().items() if "psd.cli.psdctl dashboard" in command)
    os.kill(dashboard, signal.SIGKILL)
    drained.line("the dashboard has ended with status -9")
    assert listed_jobs(capsys)[drained.run_id]["dashboard"] == ""

    assert main(["drain", "--job", drained.run_id]) == 0
    assert drained.end() == 0
    assert main(["status"]) == 0, "it is the only one"
    assert capsys.readouterr().err == f"psdctl status: job {stopped.run_id}\n"
    stopped.signal(signal.SIGINT)
    assert stopped.end() == 130
    assert list(directory.iterdir()) == []


@pytest.mark.process
def test_two_jobs_do_not_mix_their_logs(psd_runs, tmp_path):
    """Neither the lines of their processes nor the curves of their workers. The next job may have the directory."""
    logs = str(tmp_path / "logs")
    (first,) = psd_runs(["--log-dir", logs], script=IDLE)
    first.wait_until_ready()
    (second,) = psd_runs(["--log-dir", logs], script=IDLE)

    assert second.end() == 1
    assert f"error: --log-dir: another psd-run is writing to {logs}; name a directory of this job's own" in second.output
    first.signal(signal.SIGKILL)
    first.end()

    (third,) = psd_runs(["--log-dir", logs], script=IDLE)
    third.wait_until_ready()
    third.signal(signal.SIGINT)
    assert third.end() == 130


@pytest.mark.process
def test_a_job_that_cannot_be_recorded_says_so_and_goes_on(psd_runs, directory):
    directory.mkdir()
    directory.chmod(0o755)
    (job,) = psd_runs([], script=IDLE)

    job.line(r"\[psd-run\]  psdctl jobs will not list this job: .* can be opened by other users; chmod 700")
    job.wait_until_ready()
    job.line("waits")
    job.signal(signal.SIGINT)
    assert job.end() == 130


@pytest.mark.process
def test_a_job_that_fails_leaves_no_record(psd_runs, directory):
    (job,) = psd_runs([], script="raise SystemExit(3)")
    job.wait_until_ready()

    assert job.end() == 3
    assert list(directory.iterdir()) == []
