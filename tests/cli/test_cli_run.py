"""psd-run: options, the workers' environment, and whole jobs whose processes are killed one by one."""

import os
import re
import subprocess
import sys
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGPIPE, SIGTERM

import pytest

from psd.cli.processes import python_command
from psd.cli.run import main, parse
from psd.cli.server import parse as parse_shard
from psd.contract.environment import VARIABLES

SERVERS = ["127.0.0.1:7000", "127.0.0.1:7001"]

TRAINING = """
import os, signal, sys
import numpy as np
import psd_client

victim = os.path.exists(sys.argv[1]) if len(sys.argv) > 1 else False
with psd_client.connect() as ps:
    params = ps.declare({"w": np.zeros(5, np.float32)}, optimizer=psd_client.SGD(lr=1.0))
    for step in range(4):
        if victim and ps.rank == 1 and step == 2:
            os.remove(sys.argv[1])
            os.kill(os.getpid(), signal.SIGKILL)
        params = ps.push_pull({"w": np.ones(5, np.float32)})
print("trained to", params["w"][0])
"""
"""Four steps; if the file that it is given exists, worker 1 removes it and dies in the third."""

WAITING = """
import os, signal, sys

def stop(signum, frame):
    print("stopping", flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, stop)
print("pid", os.getpid(), flush=True)
while True:
    signal.pause()
"""
"""Says its pid, and waits to be told to end."""

STUBBORN = """
import os, signal
signal.signal(signal.SIGTERM, lambda *_: print("no", flush=True))
print("pid", os.getpid(), flush=True)
while True:
    signal.pause()
"""
"""Does not end on SIGTERM."""


LEAVING = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
"""
"""Starts a process in a session of its own, whose end is nobody's business."""

TIMEOUT_S = 30.0


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "expected a script, -m and a module, or a command"),
        (["nowhere.py"], "there is no script 'nowhere.py'"),
        (["no-such-command"], "'no-such-command' is neither a script (.py) nor a command"),
        (["-m"], "-m: expected the name of a Python module"),
        (["--shards", "0", "true"], "--shards: expected 1 to 256, got 0"),
        (["--workers", "two", "true"], "--workers: expected a whole number, got 'two'"),
        (["--consistency", "ssp", "true"], '--consistency: got \'ssp\'; expected "sync", "async" or "ssp:S"'),
        (["--quorum", "2", "true"], "--quorum: expected 1 to 1, got 2"),
        (["--workers", "2", "--quorum", "1", "--consistency", "async", "true"], "--quorum: is for sync only"),
        (["--aggregation", "exact", "--consistency", "async", "true"], "--aggregation: exact is for sync only"),
        (["--aggregation", "quick", "true"], "--aggregation: invalid choice: 'quick'"),
        (["--max-shard-restarts", "-1", "true"], "--max-shard-restarts: expected 0 to 1000000, got -1"),
        (["--checkpoint-secs", "60", "true"], "--checkpoint-dir: not given"),
        (["--checkpoint-keep", "0", "true"], "--checkpoint-keep: expected 1 to 1000000, got 0"),
        (["--grace", "-1", "true"], "--grace: expected 0 to 3600 seconds, got -1"),
        (["--unknown", "true"], "unrecognized arguments: --unknown"),
    ],
)
def test_main_when_an_option_is_wrong_then_one_line_says_what_was_expected(options, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(options)

    error = capsys.readouterr().err
    assert exit_.value.code == 2
    assert error.startswith("psd-run: error: ")
    assert message in error
    assert error.count("\n") == 1


def test_main_when_asked_for_help_then_it_explains_the_environment_and_the_policy(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])

    help_ = capsys.readouterr().out
    assert exit_.value.code == 0
    assert all(name in help_ for name in VARIABLES)
    assert "when something dies" in help_
    assert "exit status:" in help_


def test_parse_when_a_script_is_given_then_all_after_it_is_its_own(script):
    plan = parse(["--workers", "2", script, "--workers", "7", "--help"], {})

    assert plan.workers == 2
    assert plan.worker_command == [sys.executable, "-u", script, "--workers", "7", "--help"]


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["-m", "package.train", "--shards", "9"], [sys.executable, "-u", "-m", "package.train", "--shards", "9"]),
        (["--", "echo", "--", "x"], ["echo", "--", "x"]),
        (["echo", "-m", "x"], ["echo", "-m", "x"]),
    ],
)
def test_parse_when_a_module_or_a_command_is_given_then_it_is_run_as_it_is(words, command):
    plan = parse(["--shards", "2", *words], {})

    assert (plan.shards, plan.worker_command) == (2, command)


def test_parse_when_twice_then_the_runs_have_different_ids(script):
    first, second = parse([script], {}), parse([script], {})

    assert first.run_id.startswith("train-")
    assert first.run_id != second.run_id


def test_shard_command_when_metrics_are_asked_for_then_each_shard_has_a_port_of_its_own(script):
    plan = parse(["--shards", "2", "--metrics-port", "9100", script], {})

    words = [word for index in range(2) for word in plan.shard_command(index, "127.0.0.1:0", Path("/state"))]
    assert [word for word in words if "metrics" in word] == ["--metrics-port=9100", "--metrics-port=9101"]


def test_worker_environ_when_options_are_given_then_only_those_are_set(script):
    options = "--shards 2 --workers 3 --consistency sync --aggregation exact --reduce sum"
    plan = parse([*options.split(), script], {"HOME": "/home"})

    environ = plan.worker_environ(1, SERVERS)

    assert {name: value for name, value in environ.items() if name.startswith("PSD_")} == {
        "PSD_SERVERS": "127.0.0.1:7000,127.0.0.1:7001",
        "PSD_RANK": "1",
        "PSD_WORLD_SIZE": "3",
        "PSD_RUN_ID": plan.run_id,
        "PSD_CONSISTENCY": "sync",
        "PSD_AGGREGATION": "exact",
        "PSD_REDUCE": "sum",
    }
    assert environ["HOME"] == "/home"
    assert environ["PYTHONUNBUFFERED"] == "1"


def test_worker_environ_when_the_user_has_set_something_then_only_who_is_who_is_replaced(script):
    mine = {
        "OMP_NUM_THREADS": "7",
        "MALLOC_TRIM_THRESHOLD_": "1",
        "PSD_CONSISTENCY": "async",
        "PSD_RUN_ID": "outer",
        "PSD_RANK": "9",
    }
    plan = parse(["--workers", "2", script], mine)

    environ = plan.worker_environ(0, SERVERS)

    assert (environ["OMP_NUM_THREADS"], environ["MALLOC_TRIM_THRESHOLD_"], environ["PSD_CONSISTENCY"]) == ("7", "1", "async")
    assert (environ["PSD_RUN_ID"], environ["PSD_RANK"]) == (plan.run_id, "0")


def test_environ_when_there_are_credentials_for_shards_elsewhere_then_they_are_not_handed_on(script):
    given = {"PSD_TLS_CA": "ca", "PSD_TLS_CERT": "c", "PSD_TLS_KEY": "k", "PSD_TOKEN_FILE": "t", "HOME": "/home"}
    plan = parse([script], given)

    for environ in (plan.shard_environ, plan.worker_environ(0, SERVERS)):
        assert environ.keys() & given.keys() == {"HOME"}


def test_worker_environ_when_threads_are_not_set_then_the_cores_are_shared_out(script):
    plan = parse(["--workers", "2", script], {})

    assert plan.worker_environ(0, SERVERS)["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))


def test_shard_command_when_options_are_for_shards_then_psd_server_takes_them(script):
    checkpoints = "--checkpoint-dir s3://bucket/run --checkpoint-secs 60 --checkpoint-steps 1000 --checkpoint-keep 2"
    rules = "--rule mine:A --rule mine:B"
    plan = parse([*f"--shards 2 --lease 3 --grace 4 {checkpoints} {rules}".split(), script], {})

    command = plan.shard_command(1, "127.0.0.1:7001", Path("/state/shard-1"))
    config, _ = parse_shard(command[command.index("psd.cli.server") + 1 :])

    assert (config.shard_index, config.shard_count, config.listen) == (1, 2, "127.0.0.1:7001")
    assert (config.run_id, config.state_dir, config.exit_when_done) == (plan.run_id, "/state/shard-1", True)
    assert (config.lease_s, config.grace_s) == (3, 4)
    assert (config.checkpoint_dir, config.checkpoint_secs) == ("s3://bucket/run", 60)
    assert (config.checkpoint_steps, config.checkpoint_keep) == (1000, 2)
    assert config.rules == ("mine:A", "mine:B")
    assert config.rule_dir == str(Path(script).absolute().parent)


@pytest.mark.process
def test_job_when_all_workers_train_to_the_end_then_the_status_is_0_and_the_shards_end_by_themselves(job):
    run = job(TRAINING, "--shards", "2", "--workers", "3", "--reduce", "sum")

    assert run.end() == 0
    for rank in range(3):
        assert f"[worker {rank}] trained to -12.0" in run.output
    for index in range(2):
        assert f"[shard {index}]  psd-server: shard {index}/2 done: all workers have left" in run.output
    assert all(re.match(r"\[(psd-run|shard \d|worker \d)\] ", line) for line in run.lines)
    assert run.orphans() == {}
    assert not run.state_dir.exists()


@pytest.mark.process
def test_job_when_workers_never_join_then_the_shards_are_drained(job):
    run = job("print('no training here')", "--workers", "2")

    assert run.end() == 0
    assert "all workers have ended, but not all have left shard 0; draining" in run.output


@pytest.mark.process
def test_job_when_a_worker_fails_then_the_others_are_stopped_and_its_status_and_last_lines_shown(job):
    run = job(
        "import os, sys\nif os.environ['PSD_RANK'] == '1': sys.exit('out of ideas')\n" + WAITING,
        "--workers",
        "3",
    )

    assert run.end() == 1
    assert re.search(
        r"\[psd-run\] +worker 1 ended with status 1; stopping the job; its last lines:\n\[psd-run\] +out of ideas", run.output
    )
    assert run.orphans() == {}
    assert not run.state_dir.exists()


@pytest.mark.process
def test_job_when_a_worker_is_killed_then_the_status_says_by_which_signal(job):
    run = job(WAITING, "--workers", "2")
    pid = int(run.line(r"\[worker 1\] pid (\d+)")[1])

    os.kill(pid, SIGKILL)

    assert run.end() == 128 + SIGKILL
    assert "worker 1 was killed by SIGKILL" in run.output
    assert run.orphans() == {}
    assert not run.state_dir.exists()


@pytest.mark.process
def test_job_when_a_killed_worker_may_be_restarted_then_training_goes_on_to_the_end(job, tmp_path):
    marker = tmp_path / "die"
    marker.touch()

    run = job(TRAINING, "--shards", "2", "--workers", "2", "--max-restarts", "1", args=(str(marker),))

    assert run.end() == 0
    assert "worker 1 was killed by SIGKILL" in run.output
    assert "starting it again (no restarts left)" in run.output
    assert "[worker 0] trained to" in run.output
    assert "[worker 1] trained to" in run.output
    assert run.orphans() == {}
    assert not run.state_dir.exists()


@pytest.mark.process
def test_job_when_psd_run_is_killed_then_its_watchdog_ends_everything(job):
    run = job(LEAVING + WAITING, "--shards", "2", "--workers", "2")
    run.line(r"\[worker 0\] pid")
    assert run.state_dir.exists()
    assert len(run.orphans()) >= 5  # two shards, two workers, and what worker 0 has started in a session of its own

    run.signal(SIGKILL)

    assert run.end() == -SIGKILL
    assert "psd-run was killed; ending the processes of" in run.output
    assert run.orphans() == {}
    assert not run.state_dir.exists()


@pytest.mark.process
def test_job_when_the_watchdog_is_killed_then_another_one_takes_over(job):
    run = job(WAITING, "--workers", "2")
    run.line(r"\[worker 1\] pid")
    first = run.watchdog_pid()

    os.kill(first, SIGKILL)
    run.line("watchdog.* has died; started another")
    assert run.watchdog_pid() != first
    run.signal(SIGKILL)

    assert run.end() == -SIGKILL
    assert "psd-run was killed; ending the processes of" in run.output
    assert run.orphans() == {}
    assert not run.state_dir.exists()


@pytest.mark.process
@pytest.mark.parametrize("signum", [SIGINT, SIGTERM])
def test_job_when_psd_run_is_signalled_then_the_workers_are_stopped_in_order(job, signum):
    run = job(WAITING, "--workers", "2")
    run.line(r"\[worker \d\] pid")
    run.line(r"\[worker \d\] pid")

    run.signal(signum)

    assert run.end() == 128 + signum
    assert "[worker 0] stopping" in run.output
    assert "[worker 1] stopping" in run.output
    assert run.output.index("[worker 1] stopping") < run.output.index("draining")
    assert run.orphans() == {}
    assert not run.state_dir.exists()


@pytest.mark.process
def test_job_when_psd_run_is_signalled_twice_then_everything_is_killed_at_once(job):
    run = job(STUBBORN, "--grace", "600")
    run.line(r"\[worker 0\] pid")

    run.signal(SIGINT)
    run.line(r"\[worker 0\] no")
    run.signal(SIGINT)

    assert run.end() == 128 + SIGINT
    assert "killing all processes" in run.output
    assert run.orphans() == {}
    assert not run.state_dir.exists()


@pytest.mark.process
def test_job_when_a_worker_ignores_sigterm_then_the_grace_bounds_its_end(job):
    run = job(STUBBORN, "--grace", "0.3")
    run.line(r"\[worker 0\] pid")

    run.signal(SIGTERM)

    assert run.end() == 128 + SIGTERM
    assert "not ended within 0.3 s: shard 0, worker 0; killing" in run.output


@pytest.mark.process
def test_job_when_a_worker_leaves_a_process_behind_then_it_is_ended(job):
    run = job(LEAVING + "sys.exit(4)")

    assert run.end() == 4
    assert "left behind" in run.output
    assert run.orphans() == {}
    assert not run.state_dir.exists()


@pytest.mark.process
def test_job_when_nobody_reads_the_output_any_more_then_it_stops(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("while True: print('on and on')")

    with subprocess.Popen(
        [sys.executable, "-m", "psd.cli.run", str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        run.stdout.readline()
        run.stdout.close()  # as `psd-run script.py | head -1` does
        errors = run.stderr.read().decode()

    assert run.wait(TIMEOUT_S) == 128 + SIGPIPE
    assert "SIGPIPE: stopping the job" in errors
    assert "Traceback" not in errors


@pytest.mark.process
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 cannot leave out the working directory")
def test_python_command_when_the_working_directory_has_modules_of_the_same_names_then_they_are_not_seen(tmp_path):
    (tmp_path / "queue.py").write_text("raise SystemExit('the wrong queue')")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path if entry)}

    done = subprocess.run(
        [*python_command("psd.cli.server"), "--help"], cwd=tmp_path, env=environ, capture_output=True, check=False
    )

    assert done.returncode == 0
    assert b"usage: psd-server" in done.stdout
