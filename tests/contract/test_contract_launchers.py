"""Ranks of workers that torchrun, mpirun, srun or Ray Train has started."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

from psd.contract.config import ConfigError
from psd.contract.environment import client_config, why_not_alone

SERVERS = {"PSD_SERVERS": "127.0.0.1:7000"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}
SRUN = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8"}

WHO = """
import sys
from psd.contract.environment import client_config
config = client_config(servers="127.0.0.1:7000")
sys.stdout.write(f"worker {config.rank} of {config.world_size}\\n")  # at once, beside the other's
"""


def who(environ: dict[str, str]) -> tuple[int, int]:
    config = client_config(environ={**SERVERS, **environ})
    return config.rank, config.world_size


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        (TORCHRUN, (1, 4)),
        (OPEN_MPI, (2, 4)),
        ({"PMI_RANK": "1", "PMI_SIZE": "3"}, (1, 3)),
        (SRUN, (3, 8)),
        ({**TORCHRUN, "PSD_RANK": "0", "PSD_WORLD_SIZE": "2"}, (0, 2)),  # psd's own are what is meant
        ({**SRUN, **TORCHRUN}, (1, 4)),  # srun has started torchrun, once per host
        ({**SRUN, **OPEN_MPI}, (2, 4)),
        ({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "8"}, (3, 8)),  # srun --mpi=pmi2
        ({"RANK": "1", "PSD_WORLD_SIZE": "4"}, (1, 4)),
        ({"RANK": "2", "WORLD_SIZE": "4", **OPEN_MPI}, (2, 4)),  # a script under mpirun that sets them
        ({"PSD_WORLD_SIZE": "4", "JOB_COMPLETION_INDEX": "3"}, (3, 4)),
    ],
)
def test_rank_when_a_launcher_has_given_it_then_it_is_understood(environ, found):
    """psd's own variables come first; then the launcher that is nearest to the process."""
    assert who(environ) == found


@pytest.fixture
def ray_train(monkeypatch) -> types.SimpleNamespace:
    """The module as it is in a worker, number 1 of 2."""
    train = types.SimpleNamespace(rank=1)
    train.get_context = lambda: train
    train.get_world_rank, train.get_world_size = lambda: train.rank, lambda: 2
    monkeypatch.setitem(sys.modules, "ray.train", train)
    return train


def test_rank_when_ray_train_has_given_it_then_the_variables_of_whoever_has_started_ray_do_not_count(ray_train):
    """Ray's workers have srun's variables if it has started Ray, the same on all of a node. A program that gives it wins."""
    assert [who(environ) for environ in ({}, SRUN, {"PSD_RANK": "0", "PSD_WORLD_SIZE": "3"})] == [(1, 2), (1, 2), (0, 3)]
    with pytest.raises(ConfigError, match=r"world_size: it is given as 3, but Ray Train's number of workers is 2"):
        who({"PSD_WORLD_SIZE": "3"})
    assert why_not_alone({}) == "Ray Train's number of workers is 2"


def test_rank_when_ray_train_is_imported_outside_of_its_workers_then_it_has_no_word(ray_train):
    """The program that starts the training, for one: newer versions raise an error there, older ones warn and say None."""
    ray_train.rank = None
    assert who(SRUN) == (3, 8)

    def refuse():
        raise RuntimeError("`get_context` cannot be used outside of a Ray Train training function")

    ray_train.get_context = refuse
    assert who(SRUN) == (3, 8)
    assert why_not_alone({}) == ""


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {**TORCHRUN, **OPEN_MPI},
            "rank: RANK is 1 of WORLD_SIZE=4, but OMPI_COMM_WORLD_RANK is 2 of OMPI_COMM_WORLD_SIZE=4. One of",
        ),
        ({"RANK": "2", "WORLD_SIZE": "3", **OPEN_MPI}, "RANK is 2 of WORLD_SIZE=3, but OMPI_COMM_WORLD_RANK is 2 of"),
        ({**TORCHRUN, "PSD_WORLD_SIZE": "2"}, "world_size: it is given as 2, but WORLD_SIZE is 4 and RANK 1"),
        ({"RANK": "1"}, "world_size: not given. Pass world_size= to connect(), set PSD_WORLD_SIZE"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK: expected 0 to WORLD_SIZE - 1, which is 3, got 4"),
        ({"RANK": "one", "WORLD_SIZE": "4"}, "RANK: expected a whole number, got 'one'"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, "rank: not given"),  # a batch script, which is no task
    ],
)
def test_rank_when_launchers_contradict_each_other_then_says_who_says_what(environ, message):
    """A worker with another's rank would train in its place."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        who(environ)


@pytest.mark.process
@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_rank_when_the_real_launcher_starts_two_processes_then_each_is_one_of_them(launcher, tmp_path, monkeypatch):
    """The variables are those that today's torchrun and Open MPI set."""
    script = tmp_path / "who.py"
    script.write_text(WHO)
    commands = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", str(script)],
        "mpirun": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable, str(script)],
    }
    if launcher == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("Open MPI is not installed (apt install openmpi-bin)")
    for name in ("PSD_RANK", "PSD_WORLD_SIZE", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    ended = subprocess.run(commands[launcher], capture_output=True, text=True, timeout=60, check=False, cwd=Path.cwd())

    assert sorted(ended.stdout.splitlines()) == ["worker 0 of 2", "worker 1 of 2"], ended.stderr
