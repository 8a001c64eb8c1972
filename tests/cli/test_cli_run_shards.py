"""psd-run when shards die: started again with their parameters, or not; and no state directory is left that nobody wants."""

import os
import re
import socket
from pathlib import Path
from signal import SIGCONT, SIGINT, SIGKILL, SIGSTOP, SIGTERM

import pytest

from psd.checkpoint import CheckpointDirectory, CheckpointState
from psd.cli.run import parse

EXAMPLE = (Path(__file__).parents[2] / "examples" / "linear_regression.py").read_text()

HALTING = """
def print(text, flush):
    import builtins, os, signal
    builtins.print(text, flush=flush)
    if text.startswith("step   20 "):
        os.kill(os.getpid(), signal.SIGSTOP)

if __name__ == """
"""Before the example's last lines: a worker that says that it has made 20 steps makes no more until it is told to."""

TRAINING = """
import json, os, pathlib, signal, sys
import numpy as np
import psd_client

def signal_shard(index, signum):
    run = f"PSD_RUN_ID={os.environ['PSD_RUN_ID']}".encode()
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            is_ours = run in (process / "environ").read_bytes().split(b"\\0")
            if is_ours and f"--shard\\0{index}/".encode() in (process / "cmdline").read_bytes():
                os.kill(int(process.name), signum)
        except OSError:
            continue

signals, steps, status = map(json.loads, sys.argv[1:])
with psd_client.connect() as ps:
    initial = {"w": np.zeros(300_000, np.float32), "b": np.zeros(5, np.float32)}
    params = ps.declare(initial, optimizer=psd_client.SGD(lr=1.0))
    start = params["w"][0]
    for step in range(steps):
        if signals and ps.rank == 0 and step % 2 == 1:
            signal_shard(step // 2 % 2, signals[step // 2 % 2])
        params = ps.push_pull({"w": np.ones(300_000, np.float32), "b": np.ones(5, np.float32)})
    ps.barrier("end")
    if status:
        os._exit(status)
    params = ps.pull()
values = {float(value) for array in params.values() for value in array}
print("trained from", start, "to", values)
"""
"""Given signals for both shards or for none, a number of steps, and a status: worker 0 sends its signal to shard 0 before step
2, to shard 1 before step 4, to shard 0 before step 6 and so on. In the end all workers fail with the status, unless it is 0."""

STEADY = """
import signal
print("steady", flush=True)
signal.pause()
"""
"""Never joins."""

JOINED = """
import signal
import numpy as np
import psd_client

ps = psd_client.connect()
ps.declare({"w": np.zeros(5, np.float32)}, optimizer=psd_client.SGD(lr=1.0))
print("steady", flush=True)
signal.pause()
"""
"""Has parameters on the shards, and does not leave."""


HANGING = """
import signal
import numpy as np
import psd_client

with psd_client.connect() as ps:
    ps.declare({"w": np.zeros(300_000, np.float32)}, optimizer=psd_client.SGD(lr=1.0))
    ps.push_pull({"w": np.ones(300_000, np.float32)})
    ps.vector("x", size=3 * 4096).fill(7.0)
    print("hanging", flush=True)
    signal.pause()
"""
"""Has parameters and a vector on the shards, and does nothing more."""


def left_in(directory):
    """Names of all that is in a directory."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@pytest.mark.process
def test_job_when_its_shards_are_killed_one_by_one_then_training_ends_as_if_nothing_had_happened(job):
    """One that is told to end is as good as killed."""
    signals = str([int(SIGKILL), int(SIGTERM)])
    run = job(TRAINING, "--shards", "2", "--workers", "2", "--reduce", "sum", args=(signals, "4", "0"))

    assert run.end() == 0, run.output
    assert re.search(r"shard 0 .*; starting it again, its state is in \S+/shard-0 \(99 restarts left\)", run.output)
    assert re.search(r"shard 1 .*; starting it again, its state is in \S+/shard-1 \(98 restarts left\)", run.output)
    assert re.search(r"shard 1 serves again, \d+\.\d s after its end", run.output)
    assert len(re.findall(r"trained from \S+ to {-8.0}", run.output)) == 2
    assert "INFO the shard continues where its earlier process ended" in run.output
    assert "WARNING" not in run.output
    run.assert_nothing_left()


@pytest.mark.process
def test_example_when_its_shard_is_killed_while_it_runs_then_it_fits_the_line_all_the_same(job):
    """However fast its steps are: worker 0 stands still when the shard is killed, and worker 1 waits for it."""
    halting = EXAMPLE.replace("if __name__ == ", HALTING.lstrip())
    run = job(halting, "--workers", "2", "--lease", "300", args=("--steps", "600"))
    run.line(r"step +20 ")

    os.kill(run.shard_pid(0), SIGKILL)
    os.kill(run.worker_pid(0), SIGCONT)

    assert run.end() == 0, run.output
    assert "shard 0 was killed by SIGKILL" in run.output
    weight, bias = re.search(r"step +600  weight +(\S+)  bias +(\S+) ", run.output).groups()
    assert float(weight) == pytest.approx(2, abs=0.2)
    assert float(bias) == pytest.approx(10, abs=0.2)
    assert not run.state_dir.exists()


@pytest.mark.process
def test_job_when_a_shard_is_killed_before_anybody_has_joined_then_it_starts_again_without_anything(job):
    run = job(STEADY)
    run.line("steady")

    os.kill(run.shard_pid(0), SIGKILL)
    run.line("shard 0 serves again")
    run.signal(SIGINT)

    assert run.end() == 128 + SIGINT
    run.assert_nothing_left()


@pytest.mark.process
def test_job_when_a_shard_may_not_be_started_again_then_its_death_stops_the_job_with_status_1_and_names_it(job):
    """Though it has ended well."""
    run = job(STEADY, "--shards", "2", "--workers", "2", "--max-restarts", "5", "--max-shard-restarts", "0")
    run.line("steady")

    os.kill(run.shard_pid(1), SIGTERM)

    assert run.end() == 1
    assert re.search(r"\[psd-run\] +shard 1 .*no restarts left .*; stopping the job", run.output)
    run.assert_nothing_left()


@pytest.mark.process
def test_job_when_a_shard_fails_at_its_start_then_its_output_is_shown(start, tmp_path):
    (tmp_path / "grpc.py").write_text("raise ImportError('a broken installation')")
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"

    run = start("psd.cli.run", "--", "true", environ={"PYTHONPATH": path}, generations=0)

    assert run.end() == 1
    assert "shard 0 ended with status 1 at its start; stopping the job; its last lines:" in run.output
    assert "ImportError: a broken installation" in run.output.partition("its last lines:")[2]


@pytest.mark.process
def test_job_when_a_killed_shards_port_is_taken_then_the_job_stops_after_a_few_tries(job):
    run = job(STEADY)
    run.line("steady")
    address = re.search(r"shard 0/1 ready at (\S+):(\d+)", run.output)

    run.signal(SIGSTOP)
    os.kill(run.shard_pid(0), SIGKILL)
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        while True:
            try:
                thief.bind((address[1], int(address[2])))
                break
            except OSError:  # the kernel has not ended the shard yet
                continue
        thief.listen()
        run.signal(SIGCONT)
        status = run.end()

    assert status == 1
    assert "shard 0 ended with status 1 before it served again, 3 times in a row; stopping the job" in run.output
    run.assert_nothing_left()


@pytest.mark.process
def test_job_when_a_killed_shards_state_is_damaged_then_the_job_stops_and_says_what_is_wrong(job):
    run = job(JOINED)
    run.line("steady")

    run.signal(SIGSTOP)
    with (run.state_dir / "shard-0" / "arena").open("r+b") as arena:
        arena.write(b"scribble")
    os.kill(run.shard_pid(0), SIGKILL)
    run.signal(SIGCONT)

    assert run.end() == 1
    assert "shard 0 ended with status 1 before it served again, 3 times in a row; stopping the job" in run.output
    assert re.search(r"psd-server: error: --state-dir: \S+/shard-0/arena: .*cannot go on", run.output)
    assert not run.state_dir.exists()


@pytest.mark.process
def test_job_when_a_shard_is_killed_while_it_ends_then_the_last_checkpoint_has_what_all_shards_held(job, tmp_path):
    place = tmp_path / "checkpoints"
    run = job(HANGING, "--shards", "2", "--lease", "60", "--grace", "40", "--checkpoint-dir", str(place))
    run.line("hanging")
    shard = run.shard_pid(1)

    run.signal(SIGTERM)
    run.line("taking a last checkpoint")
    os.kill(shard, SIGKILL)
    run.line("shard 1 was killed by SIGKILL.*starting it again")
    run.signal(SIGTERM)

    assert run.end() == 128 + SIGTERM
    directory = CheckpointDirectory(str(place))
    (stored,) = directory.checkpoints()
    assert (stored.state, stored.step) == (CheckpointState.VALID, 1)
    assert {float(x) for piece in directory.read_vectors(directory.load(stored.name)) for x in piece.values} == {7.0}
    run.assert_nothing_left()


@pytest.mark.process
def test_job_when_it_fails_with_a_state_directory_then_the_next_one_goes_on_with_its_parameters(job, tmp_path):
    options = ("--state-dir", str(tmp_path / "state"))

    failed = job(TRAINING, *options, args=("[]", "3", "5"))
    assert failed.end() == 5
    assert f"the parameters are kept in {tmp_path / 'state'}; psd-run with this --state-dir continues" in failed.output
    second = job(TRAINING, *options, args=("[]", "3", "0"))

    assert second.end() == 0
    assert second.run_id == failed.run_id
    assert "trained from -3.0 to {-6.0}" in second.output
    assert left_in(tmp_path / "state") == []


@pytest.mark.process
def test_job_when_its_state_directory_is_in_use_then_it_does_not_start_and_disturbs_nobody(job, start, tmp_path):
    first = job(STEADY, "--state-dir", str(tmp_path))
    first.line("steady")

    second = start("psd.cli.run", "--state-dir", str(tmp_path), "true")

    assert second.end() == 1
    assert f"[psd-run]  error: --state-dir: {tmp_path} is in use by another psd-run" in second.output
    first.signal(SIGTERM)
    assert first.end() == 128 + SIGTERM
    assert "shard 0 was" not in first.output
    assert left_in(tmp_path) == ["script.py"]


def test_shard_command_when_metrics_are_asked_for_then_each_shard_has_a_port_of_its_own(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    plan = parse(["--shards", "2", "--metrics-port", "9100", str(script)], {})

    commands = [plan.shard_command(index, "127.0.0.1:0", Path("/state")) for index in range(2)]

    assert [[word for word in command if "metrics" in word] for command in commands] == [
        ["--metrics-port=9100"],
        ["--metrics-port=9101"],
    ]
