"""psd-run --on slurm under a real slurmctld with two slurmd on this machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import processes
from conftest import free_port, is_open, wait_until

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
SchedulerParameters=sched_interval=1
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={first} CPUs=2
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={second} CPUs=2
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""

BATCH = """\
#!/bin/sh
#SBATCH --nodes=2 --ntasks-per-node=2 --requeue --open-mode=append
srun {python} -m psd.cli.run --on slurm --shards 2 --checkpoint-dir {checkpoints} --checkpoint-steps 20 {script} {steps} {pause}
"""


class Slurm:
    """A cluster of two nodes.

    Attributes:
        environ: for SLURM's commands.
    """

    def __init__(self, folder: Path) -> None:
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._folder = folder
        ports = {"control": free_port(), "first": free_port(), "second": free_port()}
        configuration = folder / "slurm.conf"
        configuration.write_text(CONFIGURATION.format(folder=folder, **ports))
        self.environ = {**os.environ, "SLURM_CONF": str(configuration)}
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        munge = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log"}
        options = [f"--{name}={folder / file}" for name, file in {**munge, "seed-file": "munged.seed"}.items()]
        self._start("munged", "--foreground", "--force", *options)
        wait_until((folder / "munge.socket").exists, "munged listens")
        self._start("slurmctld", "-D")
        for node in ("n1", "n2"):
            self._start("slurmd", "-D", "-N", node)
        for port in ports.values():
            wait_until(lambda port=port: is_open(port), "SLURM's daemons listen")
        wait_until(lambda: self.ask("sinfo", "--noheader", "--format=%T") == "idle", "both nodes are idle")

    def _start(self, *command: str) -> None:
        output = (self._folder / f"{command[0]}.out").open("ab")
        self._daemons.append(subprocess.Popen(command, env=self.environ, stdout=output, stderr=output, start_new_session=True))
        output.close()

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
        for daemon in reversed(self._daemons):
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
def batch(slurm, script, tmp_path):
    """Submits a job that trains for so many steps; returns its number, and the file with its output."""

    def submit(steps: int, pause: float) -> tuple[str, Path]:
        file, output = tmp_path / "job.sh", tmp_path / "job.out"
        values = {"python": sys.executable, "checkpoints": tmp_path / "checkpoints", "script": script}
        file.write_text(BATCH.format(steps=steps, pause=pause, **values))
        return slurm.ask("sbatch", "--parsable", f"--output={output}", str(file)), output

    return submit


def test_slurm_when_a_job_is_submitted_then_each_task_is_the_worker_of_its_number(slurm, batch):
    job, output = batch(20, 0.0)

    wait_until(lambda: slurm.state(job).startswith("COMPLETED"), "the job completes")
    text = output.read_text()
    assert sorted(re.findall(r"\[worker (\d)\] begins at step 0 node (\d)", text)) == [(n, n) for n in "0123"]
    assert text.count("trained to -50.0 -50.0") == 4
    assert re.search(r"step 20, \S+ steps/s; 80 pushes accepted", text)


def test_slurm_when_a_job_is_queued_again_then_it_goes_on_from_its_last_checkpoint(slurm, batch):
    """SLURM sends SIGTERM to every process of the job at once, workers too, so that the checkpoint is one taken before."""
    job, output = batch(400, 0.02)
    wait_until(lambda: output.exists() and "stored checkpoint" in output.read_text(), "the job has a checkpoint")
    run_id = re.search(r"run (\S+); to look inside", output.read_text())[1]

    slurm.ask("scontrol", "requeue", job)

    wait_until(lambda: slurm.state(job) == "COMPLETED 1", "the job completes, the second time")
    text = output.read_text()
    begun = [int(step) for step in re.findall(r"begins at step (\d+)", text)]
    assert begun[:4] == [0] * 4, text
    assert len(set(begun[4:])) == 1, text
    assert 20 <= begun[4] < 400, text
    assert text.count("trained to -1000.0 -1000.0") == 4
    assert processes(run_id) == {}


def test_slurm_when_a_task_is_killed_then_the_job_fails_and_nothing_is_left(slurm, batch):
    job, output = batch(10**6, 0.01)
    wait_until(lambda: output.exists() and "trains" in output.read_text(), "the job trains")
    run_id = re.search(r"run (\S+); to look inside", output.read_text())[1]

    slurm.ask("scancel", "--signal=KILL", f"{job}.0")

    wait_until(lambda: slurm.state(job).startswith("FAILED"), "the job fails")
    wait_until(lambda: processes(run_id) == {}, "its processes end")
