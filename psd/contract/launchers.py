"""Ranks from other launchers: which worker a process is, if psd-run has not set it.

    PSD_RANK, PSD_WORLD_SIZE               psd-run, and Kubernetes manifests
    ray.train.get_context()                Ray Train, which has a function instead of variables
    RANK, WORLD_SIZE                       torchrun
    OMPI_COMM_WORLD_RANK, ..._SIZE         mpirun of Open MPI
    PMI_RANK, PMI_SIZE                     mpirun of MPICH and Intel MPI
    SLURM_PROCID, SLURM_STEP_NUM_TASKS     srun
    JOB_COMPLETION_INDEX                   an Indexed Job of Kubernetes, which does not tell the number of workers

The first one present counts. torchrun comes before srun, which often starts one torchrun per host: then its tasks are not the
workers. torchrun and mpirun do not start each other: if they disagree, one's variables are left over from elsewhere, and nobody
can tell which. srun may set PMI_RANK, too, so this counts only outside SLURM. Workers of Ray inherit the variables of the
launcher that started Ray on their node, often srun; these do not describe them.

Pure functions on mappings; knows no connection, and imports no launcher.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from psd.contract.config import ConfigError


class Launched(NamedTuple):
    """A launcher's facts about this process: its rank, the number of workers if known, and the names of the two variables."""

    rank: int
    world_size: int | None
    rank_name: str
    size_name: str


_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("JOB_COMPLETION_INDEX", ""),
)

_EXCLUSIVE = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Rank variables of launchers of which at most one has started this process."""


def launched(environ: Mapping[str, str], modules: Mapping[str, Any] = sys.modules) -> Launched | None:
    """Read this process's rank from its launcher; None if none of those above has started it.

    Args:
        environ: this process's environment. modules: the modules that it has imported.

    Raises:
        ConfigError: two launchers disagree, or a variable is not a number.
    """
    if "ray.train" in modules and (said := _ray_train(modules["ray.train"])):
        return said
    found = [_read(environ, rank_name, size_name) for rank_name, size_name in _LAUNCHERS if _is_there(environ, rank_name)]
    first = found[0] if found else None
    for other in found[1:]:
        assert first is not None
        agree = other.rank == first.rank and first.world_size in (None, other.world_size)
        if other.rank_name in _EXCLUSIVE and not agree:
            raise ConfigError(
                f"rank: {_words(first)}, but {_words(other)}. One of them is left over from another launcher: unset it, or set "
                "PSD_RANK and PSD_WORLD_SIZE"
            )
    return first


def _ray_train(train: Any) -> Launched | None:
    """The rank from Ray Train; None in a process that is not one of its workers."""
    try:
        with warnings.catch_warnings():  # older versions warn in such a process
            warnings.simplefilter("ignore")
            context = train.get_context()
            rank, world_size = context.get_world_rank(), context.get_world_size()
    except RuntimeError:
        return None
    return None if rank is None else Launched(rank, world_size, "Ray Train's rank", "Ray Train's number of workers")


def _is_there(environ: Mapping[str, str], rank_name: str) -> bool:
    if rank_name == "PMI_RANK" and "SLURM_PROCID" in environ:
        return False
    # A batch script has SLURM_PROCID, too, but is no task: a process that it starts without srun is alone.
    return rank_name in environ and (rank_name != "SLURM_PROCID" or "SLURM_STEP_NUM_TASKS" in environ)


def _read(environ: Mapping[str, str], rank_name: str, size_name: str) -> Launched:
    rank = _integer(environ, rank_name)
    world_size = _integer(environ, size_name) if size_name in environ else None
    if world_size is not None and not 0 <= rank < world_size:
        raise ConfigError(f"{rank_name}: expected 0 to {size_name} - 1, which is {world_size - 1}, got {rank}")
    return Launched(rank, world_size, rank_name, size_name)


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigError(f"{name}: expected a whole number, got {environ[name]!r}") from None


def _words(said: Launched) -> str:
    size = "" if said.world_size is None else f" of {said.size_name}={said.world_size}"
    return f"{said.rank_name} is {said.rank}{size}"
