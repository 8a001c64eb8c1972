"""Loops that are written for accelerate.Accelerator: `distribute` takes the place of `Accelerator.prepare`.

Accelerate is given one process, in which nothing is averaged; psd averages gradients, and each worker reads the batches that
Accelerate would give to the process of its rank. Must not know Trainers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from torch.utils.data import DataLoader

import psd_client.torch as psd
from psd.contract.errors import InvalidRequest


def distribute(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *loaders: DataLoader[Any],
    **options: Any,
) -> tuple[Any, ...]:
    """Place the optimizer on the shards, and prepare all for the accelerator; for `accelerator.prepare(model, optimizer, ...)`.

        model, optimizer, loader = psd_accelerate.distribute(accelerator, model, optimizer, loader, clip_norm=1.0)

    Do not call `accelerator.clip_grad_norm_`, which would clip this worker's gradients alone: pass `clip_norm`. Batches are
    those that Accelerate would give to the process of this worker's rank, as many on each worker. Loaders for evaluation, which
    all workers read whole, are prepared by the accelerator as usual.

    Args:
        accelerator: of one process, with mixed_precision "no" or "bf16".
        model, optimizer: as for psd_client.torch.distribute.
        loaders: for training. A loader that shuffles does so by torch's initial seed, so all workers set the same.
        options: of psd_client.torch.distribute, such as consistency and clip_norm.

    Returns:
        Model, optimizer and loaders, prepared. The optimizer's attribute `optimizer` is psd_client.torch's, with `ps`, `rank`,
        `batch_size` and so on.

    Raises:
        InvalidRequest: the accelerator has several processes or a GradScaler; and what psd_client.torch.distribute raises.
    """
    check_alone(accelerator)
    distributed = psd.distribute(model, optimizer, **options)
    prepared: tuple[Any, ...] = accelerator.prepare(model, distributed)
    return *prepared, *(share(accelerator, loader, distributed.rank, distributed.world_size) for loader in loaders)


def check_alone(accelerator: Accelerator) -> None:
    """Raise InvalidRequest if the accelerator would do what psd does."""
    if accelerator.num_processes > 1:
        raise InvalidRequest(
            f"accelerator: has {accelerator.num_processes} processes, which average gradients among themselves; start the "
            "program by psd-run, not by torchrun or accelerate launch"
        )
    if accelerator.scaler is not None:
        raise InvalidRequest(
            'accelerator: mixed_precision="fp16" has a GradScaler, which psd does not support here; use "bf16"'
        )


def share(accelerator: Accelerator, loader: DataLoader[Any], rank: int, world_size: int) -> DataLoader[Any]:
    """The batches of a loader that are this worker's: each `world_size`-th, and as many on each worker."""
    return prepare_data_loader(
        loader,
        device=accelerator.device,
        num_processes=world_size,
        process_index=rank,
        put_on_device=accelerator.device_placement,
        dispatch_batches=False,
        use_seedable_sampler=True,
    )


class GoingOn:
    """A loader for a worker that comes to a job under way: it begins in the midst of an epoch, and then goes on as the loader.

    Args:
        loader: made by `share`. epochs: whole epochs that the job has made. batches: batches of the present one.
    """

    def __init__(self, loader: Any, epochs: int, batches: int) -> None:
        self._loader = loader
        self._epochs = epochs
        self._batches = batches
        self.is_over = False

    def set_epoch(self, epoch: int) -> None:
        """Have the next pass in the order of an epoch, counted from the one in which this worker has come."""
        self._loader.set_epoch(self._epochs + epoch)

    def __len__(self) -> int:
        """Number of batches in a whole epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        batches, self._batches = self._batches, 0
        return iter(()) if self.is_over else iter(skip_first_batches(self._loader, batches) if batches else self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
