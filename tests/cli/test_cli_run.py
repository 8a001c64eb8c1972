"""psd-run: whole jobs whose processes are killed one by one."""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGPIPE, SIGTERM

import pytest

from psd.checkpoint import CheckpointDirectory, CheckpointState
from psd.cli.words.arguments import EXIT_CHECKPOINT
from psd.contract.launching import python_command

SERVERS = ["127.0.0.1:7000", "127.0.0.1:7001"]

TRAINING = """
import os, signal, sys
import numpy as np
import psd_client

victim = sys.argv[1:] and len(os.listdir(sys.argv[1]))
with psd_client.connect() as ps:
    params = ps.declare({"w": np.zeros(5, np.float32)}, optimizer=psd_client.SGD(lr=1.0))
    while ps.clock < 4:
        if victim and ps.rank == 1 and ps.clock == 2:
            os.remove(os.path.join(sys.argv[1], str(victim)))
            if victim == 2:
                raise RuntimeError("a bad row")
            os.kill(os.getpid(), signal.SIGKILL)
        params = ps.push_pull({"w": np.ones(5, np.float32)})
        ps.log(ps.clock, loss=params["w"][0])
print("trained to", params["w"][0])
"""
"""Four steps; as long as there are files in the directory that it is given, worker 1 removes one and dies in the third."""

KILLED_TOGETHER = """
import os, pathlib, signal, sys, threading
import numpy as np
import psd_client

with psd_client.connect() as ps:
    ps.declare({"w": np.zeros(5000, np.float32)}, optimizer=psd_client.SGD(lr=1.0), aggregation="exact")
    ps.push_pull({"w": np.ones(5000, np.float32)})
    ps.push({"w": np.ones(5000, np.float32)})
    pathlib.Path(sys.argv[1], f"pushed-{ps.rank}").touch()
    while not all(pathlib.Path(sys.argv[1], f"pushed-{rank}").exists() for rank in range(2)):
        threading.Event().wait(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
"""
"""Both workers die once their second pushes are acknowledged; neither asks for the round."""

LEFT_ALONE = """
import logging, threading
import numpy as np
import psd_client

class Heard(logging.StreamHandler):
    def emit(self, record):
        super().emit(record)
        if "has failed" in record.getMessage():
            heard.set()

heard = threading.Event()
logging.getLogger("psd_client").addHandler(Heard())
with psd_client.connect() as ps:
    ps.declare({"w": np.zeros(5, np.float32)}, optimizer=psd_client.SGD(lr=1.0))
    while not heard.wait(0.02):
        if ps.rank == 1 and ps.clock == 2:
            raise SystemExit(3)
        ps.push_pull({"w": np.ones(5, np.float32)})
print("heard of it")
"""
"""Worker 1 ends with status 3; worker 0 trains on until its log says so."""

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


ENDLESS = """
import signal, sys, threading
import numpy as np
import psd_client

ps = psd_client.connect()
params = ps.declare({"w": np.zeros(3000, np.float32)}, optimizer=psd_client.SGD(lr=0.5))
for step in range(10**9):
    params = ps.push_pull({"w": params["w"] - 1})
    if step == 3:
        if sys.argv[1:] == ["hang"]:
            signal.signal(signal.SIGTERM, lambda *_: None)
        print("training", flush=True)
        while sys.argv[1:] == ["hang"]:
            signal.pause()
    threading.Event().wait(0.01)
"""
"""Trains until it is ended; or, if it is to hang, does nothing after four steps, and does not end on SIGTERM."""

SPOILING = """
import shutil, sys
import numpy as np
import psd_client

with psd_client.connect() as ps:
    ps.declare({"w": np.zeros(5, np.float32)}, optimizer=psd_client.SGD(lr=1.0))
    ps.push_pull({"w": np.ones(5, np.float32)})
    shutil.rmtree(sys.argv[1])
    open(sys.argv[1], "w").close()
"""
"""Trains, and puts a file in the place of the directory for checkpoints."""

LEAVING = """
import subprocess, sys
subprocess.Popen(["sleep", "inf"], start_new_session=True)
"""
"""Starts a process in a session of its own, whose end is nobody's business."""

DECLARED = """
import numpy as np
import psd_client

ps = psd_client.connect()
ps.declare({"w": np.zeros(5, np.float32)}, optimizer=psd_client.SGD(lr=1.0))
"""
"""Has parameters on the shards."""

TIMEOUT_S = 100.0


@pytest.mark.process
def test_job_when_all_workers_train_to_the_end_then_the_status_is_0_and_the_shards_end_by_themselves(job, tmp_path):
    checkpoints = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-steps", "1")
    logs = tmp_path / "logs"
    files = ("--log-dir", str(logs), "--tensorboard", str(tmp_path / "board"))
    (tmp_path / "torch.py").write_text("raise ImportError('not on this machine')")  # tensorboardX would load it, for nothing
    environ = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    run = job(TRAINING, "--shards", "2", "--workers", "2", "--reduce", "sum", *checkpoints, *files, environ=environ)

    assert run.end() == 0, run.output
    assert re.search(r"\[psd-run\]  \d+\.\d s; step 4, \S+ steps/s; 8 pushes accepted, 0 late", run.output)
    assert run.lines[-1] == f"[psd-run]  checkpoints: {tmp_path / 'checkpoints'}"
    assert (logs / "worker-1.log").read_text().endswith("trained to -8.0\n")
    assert sorted(file.name for file in logs.iterdir()) == sorted(
        ["psd-run.log", "shard-0.log", "shard-1.log"]
        + [f"worker-{rank}.{suffix}" for rank in range(2) for suffix in ("log", "jsonl")]
    )
    lines = [json.loads(line) for line in (logs / "worker-1.jsonl").read_text().splitlines()]
    assert [(line["rank"], line["step"], line["scalars"]) for line in lines] == [
        (1, step, {"loss": -2.0 * step}) for step in (1, 2, 3, 4)
    ]
    assert sorted(path.name for path in (tmp_path / "board").iterdir()) == ["worker-0", "worker-1"]
    for rank in range(2):
        assert f"[worker {rank}] trained to -8.0" in run.output
    for index in range(2):
        assert f"[shard {index}]  psd-server: shard {index}/2 done: all workers have left" in run.output
    assert all(re.match(r"\[(psd-run|shard \d|worker \d)\] ", line) for line in run.lines)
    stored = re.findall(r"stored checkpoint (\S+)", run.output)
    assert stored[-1].endswith("-final")
    assert len(set(stored)) == len(stored), "one line each, whichever shards were last"
    run.assert_nothing_left()


@pytest.mark.process
def test_job_when_workers_never_join_then_the_shards_are_drained(job):
    run = job("print('no training here')", "--workers", "2")

    assert run.end() == 0, run.output
    assert (
        "all workers have ended, and in 3.2 s shard 0 has not told that all have joined and left, as a script does that calls"
        in run.output
    )


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
    run.assert_nothing_left()


@pytest.mark.process
def test_job_when_a_worker_is_killed_then_the_status_says_by_which_signal(job):
    run = job(WAITING, "--workers", "2")
    pid = int(run.line(r"\[worker 1\] pid (\d+)")[1])

    os.kill(pid, SIGKILL)

    assert run.end() == 128 + SIGKILL
    assert "worker 1 was killed by SIGKILL" in run.output
    run.assert_nothing_left()


@pytest.mark.process
def test_job_when_a_worker_that_has_failed_may_be_restarted_then_no_step_is_made_without_it(job, tmp_path):
    """First by an error, then by a signal."""
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    for number in ("1", "2"):
        (deaths / number).touch()
    options = ("--workers", "2", "--reduce", "sum", "--max-restarts", "2", "--lease", "60")

    run = job(TRAINING, *options, args=(str(deaths),))

    assert run.end() == 0, run.output
    assert re.search(r"worker 1 ended with status 1.*; starting it again \(1 restart left\)", run.output)
    assert re.search(r"worker 1 was killed by SIGKILL.*; starting it again \(no restarts left\)", run.output)
    for rank in range(2):
        assert f"[worker {rank}] trained to -8.0" in run.output
    assert not re.search("has failed|has fallen silent", run.output), "only that one has finished may be told"
    run.assert_nothing_left()


@pytest.mark.process
def test_job_when_the_others_are_to_go_on_without_a_worker_then_every_log_says_so_and_so_does_the_status(job):
    run = job(LEFT_ALONE, "--shards", "2", "--workers", "2", "--on-worker-failure", "continue", "--lease", "6")

    assert run.end() == 3
    assert "worker 1 ended with status 3; the others go on without it" in run.output
    news = "worker 1 has failed: 1 of 2 workers are waited for from now on"
    assert f"[worker 0] psd: worker 0: {news}" in run.output
    # A shard tells what has changed since its last look: worker 0 may have finished meanwhile.
    assert re.search(
        r"\[shard 0\] .*worker 1 has failed(; worker 0 has finished)?: [01] of 2 workers are waited for", run.output
    )
    assert len(re.findall("worker 1 has failed[:;]", run.output)) == 2
    assert "[worker 0] heard of it" in run.output
    run.assert_nothing_left()


@pytest.mark.process
def test_job_when_psd_run_is_killed_then_its_watchdog_ends_everything(job):
    run = job(LEAVING + DECLARED + WAITING, "--shards", "2", "--workers", "2")
    for _ in range(2):
        run.line(r"\[worker \d\] pid")
    assert (run.state_dir / "shard-1" / "arena").exists()
    assert len(run.orphans()) >= 5  # two shards, two workers, and what worker 0 has started in a session of its own

    run.signal(SIGKILL)

    assert run.end() == -SIGKILL
    assert "psd-run was killed; ending the processes of" in run.output
    run.assert_nothing_left()


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
    run.assert_nothing_left()


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
    run.assert_nothing_left()


@pytest.mark.process
def test_job_when_psd_run_is_signalled_twice_then_everything_is_killed_at_once(job):
    run = job(STUBBORN, "--grace", "600")
    run.line(r"\[worker 0\] pid")

    run.signal(SIGINT)
    run.line(r"\[worker 0\] no")
    run.signal(SIGINT)

    assert run.end() == 128 + SIGINT
    assert "killing all processes" in run.output
    run.assert_nothing_left()


@pytest.mark.process
def test_job_when_psd_run_is_signalled_in_training_then_it_ends_with_a_checkpoint(job, tmp_path):
    """Of workers that are at different steps."""
    place = tmp_path / "checkpoints"
    run = job(ENDLESS, *f"--shards 2 --workers 2 --grace 100 --consistency async --checkpoint-dir {place}".split())
    run.line("training")

    run.signal(SIGINT)

    assert run.end() == 128 + SIGINT
    assert "has stored the last checkpoint: " in run.output
    assert "no checkpoint within" not in run.output
    assert [info.state for info in CheckpointDirectory(str(place)).checkpoints()] == [CheckpointState.VALID]
    run.assert_nothing_left()


@pytest.mark.process
def test_job_when_its_workers_hang_and_ignore_sigterm_then_the_grace_bounds_its_end_and_shards_store_what_they_hold(
    job, tmp_path
):
    place = tmp_path / "checkpoints"
    run = job(ENDLESS, "--workers", "2", "--grace", "1", "--checkpoint-dir", str(place), args=("hang",))
    run.line("training")

    run.signal(SIGTERM)

    assert run.end() == 128 + SIGTERM
    assert "takes no checkpoint while workers train: the workers have not trained up to it" in run.output
    assert re.search("not ended within 1 s: worker .*; killing", run.output)
    assert [info.state for info in CheckpointDirectory(str(place)).checkpoints()] == [CheckpointState.VALID]


@pytest.mark.process
def test_job_when_all_workers_are_killed_in_one_round_then_what_was_acknowledged_is_stored(job, tmp_path):
    place = tmp_path / "checkpoints"
    run = job(KILLED_TOGETHER, "--workers", "2", "--checkpoint-dir", str(place), args=(str(tmp_path),))

    assert run.end() == 128 + SIGKILL
    (stored,) = CheckpointDirectory(str(place)).checkpoints()
    assert (stored.state, stored.step) == (CheckpointState.VALID, 2)
    assert "a checkpoint failed" not in run.output


@pytest.mark.process
def test_job_when_a_worker_leaves_a_process_behind_then_it_is_ended(job):
    run = job(LEAVING + "sys.exit(4)")

    assert run.end() == 4
    assert "left behind" in run.output
    run.assert_nothing_left()


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
def test_job_when_its_reader_is_a_terminal_then_a_progress_bar_is_redrawn_in_place(tmp_path):
    """As soon as its first state is there, though its line has no end yet."""
    script, may_go_on = tmp_path / "script.py", tmp_path / "may-go-on"
    script.write_text("import sys; print(end='\\r1/2'); open(sys.argv[1]).read(); print('\\r2/2'); sys.exit(4)")
    os.mkfifo(may_go_on)
    ours, its = pty.openpty()
    command = [sys.executable, "-m", "psd.cli.run", str(script), str(may_go_on)]
    shown = b""

    with subprocess.Popen(command, stdout=its, stderr=its, env={**os.environ, "TERM": "xterm", "NO_COLOR": "1"}) as run:
        os.close(its)
        with contextlib.suppress(OSError):  # its other end has been closed
            while data := os.read(ours, 4096):
                shown += data
                if b"1/2\x1b" in shown and may_go_on.exists():
                    may_go_on.write_text("")
                    may_go_on.unlink()
    os.close(ours)

    assert run.returncode == 4
    assert re.search(rb"\x1b\[\?7l\[worker 0\] 1/2.*\x1b\[1F\x1b\[J\[worker 0\] 2/2\r\n", shown, re.DOTALL)


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


@pytest.mark.process
def test_job_when_its_last_checkpoint_cannot_be_stored_then_the_status_says_so_and_the_parameters_are_kept(job, tmp_path):
    place, state = tmp_path / "checkpoints", tmp_path / "state"
    run = job(SPOILING, "--checkpoint-dir", str(place), "--state-dir", str(state), args=(str(place),))

    assert run.end() == EXIT_CHECKPOINT
    assert re.search(rf"a checkpoint failed: cannot \w+ {place}\S*: Not a directory", run.output)
    assert "shard 0 could not store the last checkpoint" in run.output
    assert (state / "shard-0" / "arena").exists()
