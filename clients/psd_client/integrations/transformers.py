"""transformers.Trainer, and what is built on it: `distribute(trainer)` places its optimizer on the shards.

The Trainer believes that it is one process, and so reads all data, clips its own gradients, saves its own checkpoints and
begins at step 0. Here each of these becomes the job's. It is no TrainerCallback, because a Trainer counts its steps by the
loader before any callback is called. Must not know shards.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from accelerate.utils import find_batch_size
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import INTEGRATION_TO_CALLBACK

import psd_client.torch as psd
from psd.contract.errors import InvalidRequest
from psd_client.client import worker_of
from psd_client.integrations.accelerate import GoingOn, check_alone, share
from psd_client.integrations.first_worker import text_of_worker_0

logger = logging.getLogger("psd_client")


def distribute(trainer: Trainer, **options: Any) -> psd.DistributedOptimizer:
    """Have a Trainer train together with the other workers of the job; call it before `trainer.train()`.

        trainer = Trainer(model=model, args=args, train_dataset=dataset)
        psd_transformers.distribute(trainer)
        trainer.train()

    * Each worker trains on its share of the batches, those that the process of its rank would have under torchrun: so
      `per_device_train_batch_size` is that of one worker. A round's gradient is the mean over all its samples, or tokens where
      the model's loss counts these.
    * `args.max_grad_norm` becomes `clip_norm`, the norm of the gradient of all workers. The Trainer does not clip, and the norm
      that it logs is of this worker's gradient alone.
    * A worker that is started again goes on at the job's step, in the learning rate's schedule and in the data; so does a job,
      from psd's checkpoints (`psd-run --checkpoint-dir`). So resume_from_checkpoint is refused. A new job can begin with what a
      Trainer has saved: load it into the model.
    * Evaluation runs whole on each worker, which so all see the same numbers. A worker that is to stop early, by
      EarlyStoppingCallback or the like, has all workers stop at one step, two steps later. Add such callbacks before this call.
    * With load_best_model_at_end all workers load the best model, from the directory where worker 0 has saved it; one that does
      not find it there says so, and keeps the model of the last step.
    * The Trainer's logs go to `ps.log`, too. Worker 0 alone saves, `save_model()` included, and reports to wandb and the like.

    Args:
        trainer: with one of torch's optimizers that psd_client.torch.distribute takes, such as `optim="adamw_torch"`; without
            DeepSpeed, FSDP and fp16.
        options: of psd_client.torch.distribute, such as `consistency`, `quorum`, `servers`.

    Returns:
        The optimizer, with `ps`, `rank` and `world_size`.

    Raises:
        InvalidRequest: the Trainer has several processes, or uses fp16; and what psd_client.torch.distribute raises. By
            `trainer.train`: resume_from_checkpoint is given.
    """
    args = trainer.args
    check_alone(trainer.accelerator)
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise InvalidRequest(
            "trainer: DeepSpeed and FSDP share out parameters themselves; with psd each worker has all of them"
        )
    if args.max_grad_norm and args.max_grad_norm > 0:
        options.setdefault("clip_norm", args.max_grad_norm)
    optimizer = psd.distribute(trainer.model, trainer.create_optimizer(), **options)
    trainer.optimizer = optimizer
    args.max_grad_norm = 0.0
    if optimizer.rank:
        args.save_strategy = "no"  # and so load_best_model_at_end finds nothing: see _Job.train
        trainer.save_model = trainer.save_state = _save_nothing
        for kind in INTEGRATION_TO_CALLBACK.values():
            trainer.remove_callback(kind)
    job = _Job(trainer, optimizer)
    trainer.get_train_dataloader = job.get_train_dataloader
    trainer.get_batch_samples = job.get_batch_samples
    trainer.create_scheduler = job.create_scheduler
    trainer.train = job.train
    trainer.add_callback(job)
    return optimizer


class _Job(TrainerCallback):
    """The differences between a Trainer of this job and one that is alone."""

    def __init__(self, trainer: Trainer, optimizer: psd.DistributedOptimizer) -> None:
        self._trainer = trainer
        self._optimizer = optimizer
        self._own_train_dataloader = trainer.get_train_dataloader
        self._own_batch_samples = trainer.get_batch_samples
        self._own_scheduler = trainer.create_scheduler
        self._own_train = trainer.train
        self._going_on: GoingOn | None = None
        self._epoch_steps = 1

    # -- in place of the Trainer's methods -----------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, **others: Any) -> Any:
        """Train, from the job's step on."""
        if resume_from_checkpoint:
            raise InvalidRequest(
                f"resume_from_checkpoint={resume_from_checkpoint!r}: the job goes on by itself, from psd's checkpoints "
                "(psd-run --checkpoint-dir), which have the optimizer's state. To begin a new job with these parameters alone, "
                "load them into the model before distribute()"
            )
        output = self._own_train(**others)
        if self._trainer.args.load_best_model_at_end:
            self._load_best_model()
        return output

    def _load_best_model(self) -> None:
        """Load on the other workers what worker 0 has saved, and loaded, as its best model."""
        ps, state = self._optimizer.ps, self._trainer.state
        best = text_of_worker_0(ps, state.best_model_checkpoint or "")
        if ps.rank == 0 or not best:
            return
        if Path(best).is_dir():
            state.best_model_checkpoint = best
            self._trainer._load_best_model()  # noqa: SLF001
        else:
            logger.warning(
                "psd: worker %d: load_best_model_at_end: %s, which worker 0 has saved, is not on this machine; the model here "
                "is that of the last step",
                *(ps.rank, best),
            )

    def get_train_dataloader(self) -> Any:
        """Return this worker's share of the batches, from the job's step on."""
        optimizer = self._optimizer
        loader = share(self._trainer.accelerator, self._own_train_dataloader(), optimizer.rank, optimizer.world_size)
        clock, accumulated = optimizer.ps.clock, self._trainer.args.gradient_accumulation_steps
        if clock == 0:
            return loader
        self._epoch_steps = max(1, -(-len(loader) // accumulated))
        epochs, steps = divmod(clock, self._epoch_steps)
        self._going_on = GoingOn(loader, epochs, steps * accumulated)
        return self._going_on

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """Return the batches of the next step; and note how much their gradient counts."""
        samples, items = self._own_batch_samples(*args, **kwargs)
        if samples:
            self._optimizer.batch_size = float(sum(map(_size, samples)) if items is None else items)
        return samples, items

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Return the schedule of the learning rate, kept at the job's clock."""
        del optimizer  # the Trainer's may be wrapped
        schedule = self._own_scheduler(num_training_steps=num_training_steps, optimizer=self._optimizer)
        if not isinstance(schedule, psd.DistributedScheduler):
            schedule = self._trainer.lr_scheduler = psd.scheduler(schedule)
        return schedule

    # -- called by the Trainer -----------------------------------------------------------------------------------------

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Begin at the job's step."""
        del args, control, others
        if self._going_on is not None:
            state.global_step = self._optimizer.ps.clock
            self._going_on.is_over = state.global_step >= state.max_steps

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Stop with the job, and not before."""
        del args, others
        if self._going_on is not None:
            state.epoch = state.global_step / self._epoch_steps
        self._stop_together(state, control)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Have all workers stop if this one is to stop because of what it has measured."""
        del args, others
        self._stop_together(state, control)

    def _stop_together(self, state: TrainerState, control: TrainerControl) -> None:
        ps = self._optimizer.ps
        if ps.is_over:
            control.should_training_stop = True
        elif control.should_training_stop and state.global_step < state.max_steps:
            ps.stop()
            control.should_training_stop = False

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Report what the Trainer logs."""
        del args, control
        logs = {name: value for name, value in others["logs"].items() if isinstance(value, (int, float))}
        if logs:
            worker_of(self._optimizer.ps).log(state.global_step, logs, state.max_steps if state.max_steps > 0 else None)


def _save_nothing(*_args: Any, **_kwargs: Any) -> None:
    """Leave it to worker 0, in whose place this one would write."""


def _size(batch: Any) -> int:
    return int(find_batch_size(batch) or 1)
