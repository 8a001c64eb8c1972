"""A program for test_trainers_lightning.py: trains a small net with lightning.Trainer, and stores what it has learnt.

python train_lightning.py DIRECTORY BATCH WAY...; BATCH: samples of a step on one worker. Ways: "alone", in one process and
without psd, in the order in which two workers read the data; "stop" early on worker 1; "die" once at the begin of the second
epoch, on worker 0; "die-within" it, after three of its steps; "stall" worker 0 there, until worker 1 has gone on
without it; "kill" both shards, one after the other; "resume" from a
checkpoint of Lightning's, which psd refuses; "best": load the best checkpoint at the end, from a directory that each worker
names otherwise, as Lightning's loggers do.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import lightning
import numpy as np
import torch
from commands import shard_pid
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SAMPLES, EPOCHS = 64, 4
RANK = int(os.environ.get("PSD_RANK", "0"))
WAYS = sys.argv[3:]


class Net(lightning.LightningModule):
    """Two layers, trained with a schedule in epochs."""

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self._mark = mark
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        if "stop" in WAYS and RANK == 1 and self.global_step == 9:
            self.trainer.should_stop = True
        dies_at = {"die": 0, "die-within": 3}.get(WAYS[0] if WAYS else "", -1)
        if RANK == 0 and self.trainer.current_epoch == 1 and index == dies_at and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if "stall" in WAYS and RANK == 0 and self.global_step == 11:
            self._mark.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        if "stall" in WAYS and RANK == 1 and self.global_step == 14:
            os.kill(int(self._mark.read_text()), signal.SIGCONT)
        if "kill" in WAYS and RANK == 0 and self.global_step in (5, 17):
            os.kill(shard_pid(os.environ["PSD_RUN_ID"], self.global_step // 10), signal.SIGKILL)
        return self._loss("loss", batch)

    def validation_step(self, batch: list[torch.Tensor], _index: int) -> torch.Tensor:
        return self._loss("val_loss", batch)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)}

    def _loss(self, name: str, batch: list[torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        self.log(name, loss, sync_dist=True)
        return loss


class AsTwoWorkers:
    """The batches of two workers, one behind the other."""

    def __init__(self, batch: int) -> None:
        self._half = batch // 2
        self.sampler = self
        self._samplers = [DistributedSampler(range(SAMPLES), 2, rank) for rank in range(2)]

    def set_epoch(self, epoch: int) -> None:
        for sampler in self._samplers:
            sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return SAMPLES // (2 * self._half)

    def __iter__(self) -> Iterator[list[int]]:
        orders = [list(sampler) for sampler in self._samplers]
        for begin in range(0, SAMPLES // 2, self._half):
            yield [number for order in orders for number in order[begin : begin + self._half]]


def main() -> None:
    directory, batch = Path(sys.argv[1]), int(sys.argv[2])
    warnings.simplefilter("ignore")
    strategy = {}
    if "alone" not in WAYS:
        from psd_client.integrations.lightning import PsdStrategy

        strategy["strategy"] = PsdStrategy()
    source = torch.Generator().manual_seed(2)
    inputs = torch.randn(SAMPLES, 4, generator=source)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
    order = {"batch_sampler": AsTwoWorkers(batch)} if "alone" in WAYS else {"batch_size": batch, "shuffle": True}
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        devices=1,
        accelerator="cpu",
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        default_root_dir=directory / "out",
        logger=CSVLogger(directory / "logs", version=RANK) if "best" in WAYS else False,
        callbacks=[ModelCheckpoint(monitor="val_loss", mode="max")] if "best" in WAYS else None,
        enable_progress_bar=False,
        enable_model_summary=False,
        **strategy,
    )
    net = Net(directory / "died")
    checkpoint = str(directory / "saved.ckpt") if "resume" in WAYS else None
    if checkpoint:
        torch.save({"state_dict": net.state_dict(), "pytorch-lightning_version": lightning.__version__}, checkpoint)
    trainer.fit(net, DataLoader(data, **order), DataLoader(data, batch_size=SAMPLES), ckpt_path=checkpoint)
    if "best" in WAYS:
        trainer.validate(net, DataLoader(data, batch_size=SAMPLES), ckpt_path="best", verbose=False)
    values = {name: tensor.numpy() for name, tensor in net.state_dict().items()}
    val_loss = float(trainer.callback_metrics.get("val_loss", torch.nan))
    clock = strategy["strategy"].ps.clock if strategy else trainer.global_step
    np.savez(directory / f"trained-{RANK}.npz", steps=trainer.global_step, clock=clock, val_loss=val_loss, **values)


if __name__ == "__main__":
    main()
