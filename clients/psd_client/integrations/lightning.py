"""lightning.Trainer: a strategy whose optimizer's steps happen on the shards.

Lightning is given one device, and believes that it is one process; the strategy gives it this worker's share of the training
data, the job's step, and the job's schedule of the learning rate. Must not know shards.
"""

from __future__ import annotations

import logging
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.data_connector import _get_distributed_sampler
from lightning.pytorch.utilities.data import _update_dataloader
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler

import psd_client
import psd_client.torch as psd
from psd.contract.errors import InvalidRequest
from psd.contract.keywords import OF_CONNECT
from psd_client.client import worker_of
from psd_client.integrations.first_worker import text_of_worker_0

logger = logging.getLogger("psd_client")


class PsdStrategy(SingleDeviceStrategy):
    """Trains a LightningModule together with the other workers of the job.

        trainer = Trainer(strategy=PsdStrategy(), devices=1, max_epochs=10)

    * A training loader without a DistributedSampler gets one, by the worker's rank. Loaders for validation and tests are read
      whole by each worker, so that all see the same numbers, and `sync_dist=True` changes nothing.
    * `gradient_clip_val` becomes `clip_norm`, the norm of the gradient of all workers.
    * Schedules of the learning rate are kept at the job's step. A worker that is started again goes on at that step. It reads
      the epoch's data from their beginning, as Lightning does with its own checkpoints, for the steps that the epoch still has;
      so does a job that goes on from psd's (`psd-run --checkpoint-dir`). `fit(ckpt_path=...)` is refused; a new job
      can begin with what was loaded before.
    * A worker that is to stop early, by EarlyStopping or the like, has all workers stop at one step, two steps later.
    * What Lightning logs goes to `ps.log`, too. Worker 0 alone saves checkpoints; after `fit` all workers know
      their paths, as for `test(ckpt_path="best")`.

    Args:
        device: on which this worker computes.
        options: of psd_client.torch.distribute and psd_client.connect, such as consistency, quorum, servers.

    Attributes:
        ps: the connection. optimizer: psd_client.torch's; once `fit` has begun.

    Raises:
        InvalidRequest, by `fit`: there are several optimizers, precision="16-mixed", clipping by value, or a ckpt_path; and
            what psd_client.torch.distribute raises.
    """

    strategy_name = "psd"
    optimizers: Any  # the base's

    def __init__(self, device: Any = "cpu", **options: Any) -> None:
        super().__init__(device)
        self.ps = psd_client.connect(**{name: options.pop(name) for name in OF_CONNECT & options.keys()})
        self.optimizer: psd.DistributedOptimizer | None = None
        self._is_of_training = False
        self._options = options
        self.global_rank = rank_zero_only.rank = self.ps.rank
        self.world_size = self.ps.world_size

    @property
    def is_global_zero(self) -> bool:
        """True for worker 0."""
        return self.global_rank == 0

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Place the module's optimizer on the shards, and begin at the job's step."""
        super().setup_optimizers(trainer)
        made = self.optimizers
        if len(made) != 1:
            raise InvalidRequest(f"configure_optimizers: returned {len(made)} optimizers, and psd has one for a job")
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise InvalidRequest('precision: "16-mixed" has a GradScaler, which psd does not support here; use "bf16-mixed"')
        if trainer.ckpt_path:
            raise InvalidRequest(
                f"ckpt_path={trainer.ckpt_path!r}: the job goes on by itself, from psd's checkpoints (psd-run "
                "--checkpoint-dir), which have the optimizer's state. A new job can begin with these parameters, loaded before"
            )
        if trainer.gradient_clip_val:
            if trainer.gradient_clip_algorithm not in (None, "norm"):
                raise InvalidRequest("gradient_clip_algorithm: must be norm with psd, got value")
            self._options.setdefault("clip_norm", float(trainer.gradient_clip_val))
            trainer.gradient_clip_val = None
        module = self.lightning_module
        assert module is not None
        self.optimizer = psd.distribute(module, made[0], ps=self.ps, **self._options)
        self.optimizers = [self.optimizer]
        self._share_training_data(trainer)
        steps = max(1, -(-int(trainer.num_training_batches) // trainer.accumulate_grad_batches))
        total = _total_steps(trainer, steps)
        trainer.callbacks.append(_EndTogether(self.ps, total))
        trainer.loggers = [*trainer.loggers, _JobLogger(self.ps, total)]
        for config in self.lr_scheduler_configs:
            if isinstance(config.scheduler, LRScheduler) and not isinstance(config.scheduler, ReduceLROnPlateau):
                every = config.frequency * (1 if config.interval == "step" else steps)
                config.scheduler = psd.scheduler(config.scheduler, every=every)
        if self.ps.clock:
            _go_on(trainer, self.ps.clock, steps)

    def process_dataloader(self, dataloader: object) -> object:
        """Give a training loader a sampler of this worker's rank, unless it has a DistributedSampler already."""
        if not (self._is_of_training and isinstance(dataloader, DataLoader)) or isinstance(dataloader.dataset, IterableDataset):
            return dataloader
        sampler = dataloader.sampler
        if isinstance(sampler, DistributedSampler):
            if (sampler.num_replicas, sampler.rank) != (self.world_size, self.global_rank):
                raise InvalidRequest(
                    f"train_dataloader: its DistributedSampler has share {sampler.rank} of {sampler.num_replicas}, and this is "
                    f"worker {self.global_rank} of {self.world_size}"
                )
            return dataloader
        kwargs = {"num_replicas": self.world_size, "rank": self.global_rank}
        is_shuffled = not isinstance(sampler, SequentialSampler)
        return _update_dataloader(dataloader, _get_distributed_sampler(dataloader, is_shuffled, overfit_batches=0, **kwargs))

    def _share_training_data(self, trainer: Trainer) -> None:
        """Have `process_dataloader` know which loaders are for training, whenever they are made."""
        loop = trainer.fit_loop
        own = loop.setup_data

        def setup_data() -> None:
            self._is_of_training = True
            try:
                own()
            finally:
                self._is_of_training = False

        loop.setup_data = setup_data
        loop.setup_data()


def _total_steps(trainer: Trainer, epoch_steps: int) -> int | None:
    """Number of steps after which the trainer ends by itself; None if it does not."""
    ends = [epoch_steps * (trainer.max_epochs or 0), trainer.max_steps]
    return min((end for end in ends if end > 0), default=None)  # -1: no such end


def _go_on(trainer: Trainer, clock: int, epoch_steps: int) -> None:
    """Have the loops begin as after a checkpoint of the job's step; within an epoch, with its remaining steps."""
    epochs, steps = divmod(clock, epoch_steps)
    batches = clock * trainer.accumulate_grad_batches
    loop = trainer.fit_loop
    state = loop.state_dict()
    _set(state["epoch_progress"], epochs, epochs)
    if steps:  # the epoch has begun
        for part in state["epoch_progress"].values():
            part.update(ready=epochs + 1, started=epochs + 1)
    _set(state["epoch_loop.batch_progress"], batches, steps * trainer.accumulate_grad_batches)
    _set(state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"], clock, steps)
    state["epoch_loop.state_dict"]["_batches_that_stepped"] = clock
    loop.load_state_dict(state)
    logger.info("psd: Lightning goes on at step %d, in epoch %d", clock, epochs)


def _set(progress: dict[str, Any], total: int, current: int) -> None:
    for part, count in (("total", total), ("current", current)):
        progress[part].update(dict.fromkeys(progress[part], count))


class _EndTogether(Callback):
    """Has a trainer stop with the job, and the job with a trainer that stops early; then all know what has been saved.

    Args:
        total: the job's steps. A trainer that has missed some, because its worker was out of the job, counts fewer.
    """

    def __init__(self, ps: psd_client.ParameterServer, total: int | None) -> None:
        self._ps = ps
        self._total = total

    def on_train_batch_end(self, trainer: Trainer, *others: Any) -> None:
        """Look after each step."""
        del others
        self._look(trainer)

    def on_validation_end(self, trainer: Trainer, *others: Any) -> None:
        """Look after each validation, in which EarlyStopping decides."""
        del others
        if not trainer.sanity_checking:
            self._look(trainer)

    def on_train_epoch_end(self, trainer: Trainer, *others: Any) -> None:
        """Look after each epoch."""
        del others
        self._look(trainer)

    def on_fit_end(self, trainer: Trainer, *others: Any) -> None:
        """Tell all workers what worker 0 has saved: each had chosen a directory of its own, and theirs are empty."""
        del others
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                callback.best_model_path = text_of_worker_0(self._ps, callback.best_model_path)
                callback.last_model_path = text_of_worker_0(self._ps, callback.last_model_path)

    def _look(self, trainer: Trainer) -> None:
        clock = self._ps.clock
        if self._ps.is_over or (clock > trainer.global_step and self._total is not None and clock >= self._total):
            trainer.should_stop = True
        elif trainer.should_stop:
            self._ps.stop()
            trainer.should_stop = False


class _JobLogger(Logger):
    """Reports to the job what Lightning logs."""

    def __init__(self, ps: psd_client.ParameterServer, total: int | None) -> None:
        super().__init__()
        self._ps = ps
        self._total = total

    @property
    def name(self) -> str:
        """Name of the logger."""
        return "psd"

    @property
    def version(self) -> str:
        """Version of the run: psd's run has its own id."""
        return ""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Report scalars of a step."""
        if metrics:
            worker_of(self._ps).log(self._ps.clock if step is None else step, metrics, self._total)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: they are the module's."""
