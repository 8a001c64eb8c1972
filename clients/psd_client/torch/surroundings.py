"""Checks of what else in a program averages gradients: DistributedDataParallel is refused, and a process group is told of.

Both are what trainers and launchers make of a program that has several processes. Must not know shards, or what is declared.
"""

from __future__ import annotations

import logging

import torch
from torch.nn.parallel import DistributedDataParallel

logger = logging.getLogger("psd_client")


def refuse_data_parallel(model: torch.nn.Module) -> None:
    """Raise TypeError if the model, or a module in it, is a DistributedDataParallel."""
    name = next((name for name, module in model.named_modules() if isinstance(module, DistributedDataParallel)), None)
    if name is None:
        return
    what, inner = ("model", "model.module") if name == "" else (f"model.{name}", f"model.{name}.module")
    raise TypeError(
        f"{what}: is a DistributedDataParallel, which averages gradients among its own processes before psd does so among the "
        f"workers. Leave the wrapper out, or pass {inner}; psd needs no init_process_group either. Learners, which make local "
        "steps, may be process groups: local=psd.Local(...), group=..."
    )


def tell_of_process_group(rank: int, world_size: int) -> None:
    """Warn if torch.distributed has been initialised for several processes.

    Args:
        rank, world_size: of this worker in the job.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return
    logger.warning(
        "psd: torch.distributed has a process group of %d processes, which psd does not use: gradients are averaged among the "
        "%d workers of the job, of which this is number %d. Samplers and trainers that take their share of the data from the "
        "group see process %d of %d, and those that wrap the model in DistributedDataParallel average gradients a second time",
        distributed.get_world_size(),
        world_size,
        rank,
        distributed.get_rank(),
        distributed.get_world_size(),
    )
