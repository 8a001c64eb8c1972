"""psd-run --on slurm under a real slurmctld with two slurmd on this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from signal import SIGCONT, SIGSTOP

import pytest
from commands import processes
from conftest import parent, wait_until, worker_of
from free_ports import free_port
from waiting import is_open

PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "scontrol")

CONFIGURATION = """
ClusterName=psd
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd_%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=20
SlurmdTimeout=10
SchedulerParameters=sched_interval=1
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={first} CPUs=2
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={second} CPUs=2
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""

ROOT = Path(__file__).parents[2]

SBATCH_FILE = ROOT / "deploy/slurm/train.sbatch"
"""The file that docs/launchers.md names."""


class Slurm:
    """A cluster of two nodes.

    Attributes:
        environ: for SLURM's commands.
    """

    def __init__(self, folder: Path) -> None:
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._folder = folder
        ports = {"control": free_port(), "first": free_port(), "second": free_port()}
        configuration = folder / "slurm.conf"
        configuration.write_text(CONFIGURATION.format(folder=folder, **ports))
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environ = {**os.environ, "SLURM_CONF": str(configuration), "PATH": path}
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        munge = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log"}
        options = [f"--{name}={folder / file}" for name, file in {**munge, "seed-file": "munged.seed"}.items()]
        self._start("munged", "--foreground", "--force", *options)
        wait_until((folder / "munge.socket").exists, "munged listens")
        self._start("slurmctld", "-D")
        for node in ("n1", "n2"):
            self.start_node(node)
        for port in ports.values():
            wait_until(lambda port=port: is_open(port), "SLURM's daemons listen")
        wait_until(lambda: self.ask("sinfo", "--noheader", "--format=%T") == "idle", "both nodes are idle")

    def _start(self, *command: str) -> None:
        output = (self._folder / f"{command[0]}.out").open("ab")
        name = " ".join((command[0], command[-1])) if command[0] == "slurmd" else command[0]
        self._daemons[name] = subprocess.Popen(command, env=self.environ, stdout=output, stderr=output, start_new_session=True)
        output.close()

    def start_node(self, node: str) -> None:
        """Start a node's daemon."""
        self._start("slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """Kill a node's daemon; what it has started lives on."""
        daemon = self._daemons.pop(f"slurmd {node}")
        daemon.kill()
        daemon.wait()

    def ask(self, *command: str) -> str:
        """Output of a command of SLURM's."""
        return subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=60, check=True).stdout.strip()

    def state(self, job: str) -> str:
        """State of a job, and how often it has been queued again."""
        shown = self.ask("scontrol", "--oneliner", "show", "job", job)
        return " ".join(re.search(rf"{name}=(\S+)", shown)[1] for name in ("JobState", "Restarts"))

    def close(self) -> None:
        """End its jobs and its daemons."""
        subprocess.run(["scancel", "--me"], env=self.environ, check=False)
        wait_until(lambda: self.ask("squeue", "--noheader") == "", "all jobs have ended")
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
            daemon.wait(30)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A cluster, for the tests of this file."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (apt install slurmctld slurmd slurm-client munge)")
    if os.geteuid() != 0:
        pytest.skip("slurmd needs root")
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.close()


@pytest.fixture
def submit(slurm, tmp_path):
    """Submits a job that takes checkpoints: options of psd-run, a script, its arguments; returns its number and its output."""

    def begin(*words: object) -> tuple[str, Path]:
        output = tmp_path / "job.out"
        psd_run = ["--checkpoint-dir", tmp_path / "checkpoints", "--checkpoint-steps", 20, *words]
        job = slurm.ask("sbatch", "--parsable", f"--output={output}", str(SBATCH_FILE), *map(str, psd_run))
        return job, output

    return begin


def read(output: Path) -> str:
    """What a job has written so far."""
    return output.read_text() if output.exists() else ""


def test_slurm_when_a_job_is_submitted_then_each_task_is_the_worker_of_its_number(slurm, submit, script):
    job, output = submit(script, 20)

    wait_until(lambda: slurm.state(job).startswith("COMPLETED"), "the job completes")
    text = read(output)
    assert sorted(re.findall(r"\[worker (\d)\] begins at step 0 node (\d)", text)) == [(n, n) for n in "0123"]
    assert text.count("trained to -50.0 -50.0") == 4
    assert re.search(r"step 20, \S+ steps/s; 80 pushes accepted", text)


def test_slurm_when_the_mnist_job_is_queued_again_then_it_goes_on_from_its_last_checkpoint(slurm, submit):
    """SLURM sends SIGTERM to every process of the job at once, workers too, so that the checkpoint is one taken before."""
    job, output = submit(ROOT / "examples/mnist.py", "--data", "digits", "--lr", 0.02, "--steps", 200)
    wait_until(lambda: "stored checkpoint" in read(output), "the job has a checkpoint")
    run_id = re.search(r"run (\S+); to look inside", read(output))[1]

    slurm.ask("scontrol", "requeue", job)

    wait_until(lambda: slurm.state(job) == "COMPLETED 1", "the job completes, the second time")
    text = read(output)
    assert text.count("images for 4 workers") == 2, text
    assert 20 <= int(re.search(r"goes on after step (\d+)", text)[1]) < 200, text
    result = json.loads(text.partition("result ")[2].splitlines()[0])
    assert result["accuracy"] > 0.7
    assert processes(run_id) == {}


def test_slurm_when_a_nodes_daemon_dies_then_the_job_is_queued_again_and_goes_on_when_it_is_back(slurm, submit, script):
    job, output = submit(script, 10**6, 0.02)
    wait_until(lambda: "stored checkpoint" in read(output), "the job has a checkpoint")
    run_id = re.search(r"run (\S+); to look inside", read(output))[1]

    slurm.kill_node("n2")

    wait_until(lambda: slurm.state(job) == "PENDING 1", "the job is queued again")
    wait_until(lambda: processes(run_id) == {}, "its processes end")
    slurm.start_node("n2")
    wait_until(lambda: read(output).count("begins at step") == 8, "its workers train again")
    begun = {int(step) for step in re.findall(r"begins at step (\d+)", read(output))}
    slurm.ask("scancel", job)
    wait_until(lambda: slurm.state(job).startswith("CANCELLED"), "the job ends")
    assert len(begun) == 2, "all begin at step 0, and then at the checkpoint's"
    assert min(begun) == 0
    assert max(begun) >= 20


def test_slurm_when_the_tasks_of_a_node_are_lost_and_not_the_node_then_the_job_file_queues_the_job_again(slurm, submit, script):
    """As where the network between two nodes is gone, and SLURM still reaches both."""
    job, output = submit(script, 10**6, 0.02)
    wait_until(lambda: "stored checkpoint" in read(output), "the job has a checkpoint")
    run_id = re.search(r"run (\S+); to look inside", read(output))[1]
    lost = [parent(worker_of(run_id, rank)) for rank in (2, 3)]

    for psd_run in lost:
        os.kill(psd_run, SIGSTOP)
    wait_until(lambda: "the job has ended with status 75" in read(output), "psd-run gives them up")
    for psd_run in lost:
        os.kill(psd_run, SIGCONT)

    wait_until(lambda: slurm.state(job).endswith(" 1"), "the job is queued again")
    slurm.ask("scancel", job)
    wait_until(lambda: slurm.state(job).startswith("CANCELLED"), "the job ends")
    wait_until(lambda: processes(run_id) == {}, "its processes end")


def test_slurm_when_a_task_is_killed_then_the_job_fails_and_nothing_is_left(slurm, submit, script):
    job, output = submit(script, 10**6, 0.01)
    wait_until(lambda: "trains" in read(output), "the job trains")
    run_id = re.search(r"run (\S+); to look inside", read(output))[1]

    slurm.ask("scancel", "--signal=KILL", f"{job}.0")

    wait_until(lambda: slurm.state(job).startswith("FAILED"), "the job fails")
    wait_until(lambda: processes(run_id) == {}, "its processes end")
