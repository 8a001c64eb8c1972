"""The PyTorch face: `distribute` places a torch optimizer's parameters and slots on the shards.

A step is one push_pull. The gradients lie in the client's flat gradient space (gradients.py) and are sent to the shards, which
apply the rule; the new parameters are then copied into the model in place (parameters.py). The copies convert dtypes and
strides, so parameters may have any memory layout, be on any device, and be float64, float32, float16 or bfloat16 (for the last
two the shards hold a float32 master).

given.py reads what it is given, one model and optimizer or several; declaration.py decides what is declared, and groups.py
which scalars go with each push; job.py has what the optimizers of one job share; learner.py makes local steps, and
learner_group.py those of a learner of several processes; embedding.py has
the modules whose rows are on the shards, and tables.py pulls and pushes these rows (outside of a job, own_rows.py and
reading.py have them); schedule.py keeps a learning-rate schedule at the job's clock; uncompiled.py keeps torch.compile out of
all this, surroundings.py looks what else averages gradients. Must not know blocks, shards or messages. Only the torch modules
import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, overload

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import Unpack

from psd.contract.arguments import refuse
from psd.contract.errors import InvalidRequest
from psd.contract.keywords import ConnectKeywords, FaceKeywords, JobKeywords, LinkKeywords, takes
from psd.contract.rules import weight_of
from psd_client.client import ParameterServer, worker_of
from psd_client.faces import connection_of, split
from psd_client.lanes.overlap_feed import Feed
from psd_client.torch import amp as torch_amp
from psd_client.torch.declaration import BUFFER_POLICIES, DeclaredPart, TorchDeclaration, read_declaration
from psd_client.torch.embedding import Embedding, EmbeddingBag, EmbeddingCollection
from psd_client.torch.given import Models, OneOptimizer, Params, given_fragments, given_optimizers, whole_model
from psd_client.torch.gradients import Overlap
from psd_client.torch.job import TorchJob, write_all
from psd_client.torch.job_optimizer import JobOptimizer
from psd_client.torch.learner import LocalOptimizer
from psd_client.torch.learner_group import distribute_group
from psd_client.torch.local import Local
from psd_client.torch.options import check_overlap, has_slots
from psd_client.torch.parameters import as_tensors, copy_all
from psd_client.torch.reading import read_rows
from psd_client.torch.schedule import DistributedScheduler, register, scheduler
from psd_client.torch.slots import slots_of, state_of
from psd_client.torch.surroundings import refuse_data_parallel, tell_of_process_group
from psd_client.torch.uncompiled import uncompiled

__all__ = [
    "distribute",
    "scheduler",
    "DistributedOptimizer",
    "DistributedScheduler",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingCollection",
    "Local",
    "LocalOptimizer",
    "read_rows",
]


def __dir__() -> list[str]:
    return __all__


@overload
def distribute(
    model: Models,
    optimizer: OneOptimizer,
    *,
    params: Iterable[Any] | None = None,
    ps: ParameterServer | None = None,
    overlap: bool | str = False,
    buffers: str = "first",
    **keywords: Unpack[FaceKeywords],
) -> DistributedOptimizer: ...
@overload
def distribute(
    model: Models,
    optimizer: torch.optim.Optimizer,
    *,
    local: Local,
    group: Any = None,
    ps: ParameterServer | None = None,
    buffers: str = "first",
    **keywords: Unpack[FaceKeywords],
) -> LocalOptimizer: ...
@overload
def distribute(
    model: Models,
    optimizer: Mapping[str, OneOptimizer],
    *,
    params: Mapping[str, Iterable[Any]] | None = None,
    ps: ParameterServer | None = None,
    buffers: str = "first",
    **keywords: Unpack[FaceKeywords],
) -> dict[str, DistributedOptimizer]: ...
@takes(JobKeywords, LinkKeywords, ConnectKeywords)
def distribute(
    model: Models,
    optimizer: OneOptimizer | Mapping[str, OneOptimizer],
    *,
    params: Params = None,
    ps: ParameterServer | None = None,
    overlap: bool | str = False,
    buffers: str = "first",
    local: Local | None = None,
    group: Any = None,
    **keywords: Unpack[FaceKeywords],
) -> DistributedOptimizer | dict[str, DistributedOptimizer] | LocalOptimizer:
    """Declare the model's parameters and return an optimizer whose steps happen on the shards.

    Several optimizers, such as those of a generator and a discriminator, are given and returned by name. Each has its own
    parameters and its own rule, and all workers step them in the same order; a step sends and fetches the parameters of its
    optimizer alone. The job's clock counts the steps of all of them.

    The first worker's parameters become everybody's: when the call returns, the model holds the job's current values. The rule
    and its options are read from `optimizer`, which is not stepped any more; its param_groups are shared with the result, so a
    learning rate scheduler may be built on either.

    Args:
        model: what is trained, or several models by name, with which the names of their tensors then begin. Parameters that the
            optimizer does not update (frozen, or left out) get the same values on all workers once, and are never pushed.
            Embedding and EmbeddingBag in it declare their tables, and are joined to them.
        optimizer: over parameters of the model, not stepped yet. One of torch.optim's SGD, Adagrad, Adadelta, RMSprop,
            Adam, AdamW, Adamax and NAdam; not a subclass. Or a rule that torch does not have: psd_client.FTRL, LAMB, Lion,
            or CustomRule for one of your own; its options are then in the result's param_groups. Or several, by name.
        params: with such a rule, what it updates, as torch's optimizers take it: parameters, or dicts of "params" and options;
            None: all of the model that need gradients. Of several optimizers, by their names; None: those of the model of that
            name.
        ps: a connection; None connects with the keywords from `run_id` on, as psd_client.connect does.
        overlap: send each block of gradients as soon as backward() has made it, while it makes the others; step() waits for the
            rest. What is sent cannot be changed any more: clipping or unscaling after backward(), and a second backward()
            without `no_sync()`, are refused, and such an error ends this worker's part in the job. "forward", in async only:
            step() does not wait either, and the next forward pass begins with what has arrived; the rest is one step older, and
            never two. Errors of a push are then raised by the next backward() or step(); `pull` makes the model whole.
        buffers: whose buffers checkpoints, exports and readers have, such as BatchNorm's running statistics: of those in the
            model's state_dict. "first": those of the first worker that is there. "mean": the mean over all workers, of integers
            the first one's. "local": nobody's. Each worker computes with its own, which begin as the job's.
        local: let the optimizer, any of torch's, step in this process, and exchange what it has learned only now and then; the
            result is a LocalOptimizer.
        group: with `local`, the process group of torch.distributed whose processes are one learner: all call this, and make the
            same calls of the result. Rank 0 of the group connects. The model may be a DistributedDataParallel, have DTensors
            (fully_shard), or be alike on all ranks.
        **keywords

    Raises:
        TypeError: an optimizer that psd does not have, a DistributedDataParallel without `group`, or arguments that exclude
            each other.
        InvalidRequest, InvalidTensor: an option or a parameter that psd cannot train; the message names it.
        SpecMismatch: another worker has declared something else.
    """
    job, of_connect = split(keywords)
    if buffers not in BUFFER_POLICIES:
        raise InvalidRequest(f'buffers: must be "first", "mean" or "local", got {buffers!r}')
    check_overlap(overlap, job)
    module = whole_model(model)
    if group is None:
        refuse_data_parallel(module)
    elif local is None:
        raise InvalidRequest("group: only with local=psd.Local(...): a learner may be a group of processes, a worker is one")
    if local is not None:
        if overlap or params is not None:
            raise InvalidRequest(
                "local: not with overlap or params; the exchange has a `delay` instead, and the optimizer its own"
            )
        if group is not None:
            return distribute_group(module, optimizer, local, group, buffers, ps, job, of_connect)
        given = given_fragments(module, optimizer, local)
    else:
        given = given_optimizers(model, module, optimizer, params)
    if overlap and len(given) > 1:
        raise InvalidRequest("overlap: not with several optimizers: back-propagation does not say whose gradients it makes")
    declaration = read_declaration(module, given, buffers)
    if local is not None:
        declaration.merge(local.merges(module, [declaration.parameters[index] for index in declaration.trained]))
    with connection_of(ps, of_connect) as connection:
        worker = worker_of(connection)
        initial, tables = partial(write_all, declaration), declaration.tables.specs
        is_learner = local is not None
        tensors, groups = declaration.tensors, declaration.groups
        worker.declare_tensors(
            tensors,
            groups,
            initial=initial,
            reads_planes=local is None and len(declaration.parts) == 1,
            tables=tables,
            is_learner=is_learner,
            sample=local.sample if local is not None else None,
            **job,
        )
    tell_of_process_group(connection.rank, connection.world_size)
    copy_all(declaration.parameters, as_tensors(worker.parameters)[: len(declaration.parameters)])
    if local is not None:
        assert isinstance(optimizer, torch.optim.Optimizer)
        return LocalOptimizer(optimizer, connection, declaration, local)
    first, *others = declaration.parts
    made = [DistributedOptimizer(first, connection, declaration, overlap=overlap)]
    shared = made[0]._job  # noqa: SLF001 - of its own module
    made += [DistributedOptimizer(part, connection, declaration, job=shared) for part in others]
    return dict(zip(optimizer, made, strict=True)) if isinstance(optimizer, Mapping) else made[0]


class DistributedOptimizer(JobOptimizer):
    """A torch optimizer whose parameters and slots live on the shards; made by `distribute`.

    Attributes:
        ps: the connection, for barriers, the clock and the rank.
        batch_size: number of samples behind the gradients of the next step; see `step`. With overlap, set it before backward().
    """

    _step_supports_amp_scaling = True  # see amp.py

    def __init__(
        self,
        part: DeclaredPart,
        ps: ParameterServer,
        declaration: TorchDeclaration,
        *,
        overlap: bool | str = False,
        job: TorchJob | None = None,
    ) -> None:
        optimizer = part.given.optimizer
        super().__init__(optimizer, ps)
        torch_amp.ignore_the_warning()
        self._part = part
        self._overlap = overlap
        self._sent: tuple[list[list[float]], float] | None = None
        self._size_of_step: float | None = None
        self.batch_size = 1.0
        leaving = None
        worker = self._worker = worker_of(ps)
        if overlap:
            in_background = overlap == "forward"
            leaving = Overlap(self._prepare_push, worker.begin_feed, worker.forget_failure, in_background=in_background)
        self._job = TorchJob(ps, declaration, leaving) if job is None else job
        self._gradients = self._job.gradients
        self._groups = self._job.groups[declaration.parts.index(part)]
        register(self, self, optimizer)

    @property
    def table_groups(self) -> dict[str, dict[str, Any]]:
        """Options of the tables' rules by name of the table, such as {"user": {"lr": 0.05, ...}}. The program may change them.

        For an embedding without its own optimizer this is the entry of param_groups.
        """
        return self._job.declaration.tables.by_name

    @overload
    def step(self, closure: None = None, *, batch_size: float | None = None, grad_scaler: GradScaler | None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float], *, batch_size: float | None = None, grad_scaler: None = None) -> float: ...
    @uncompiled
    def step(
        self,
        closure: Callable[[], float] | None = None,
        *,
        batch_size: float | None = None,
        grad_scaler: GradScaler | None = None,
    ) -> float | None:
        """Push the gradients and pull the new parameters into the model.

        Returns when the round of these gradients has closed (sync), or as soon as the staleness bound allows. If the step
        fails, the model is unchanged; with overlap, some parameters may already be new, and `pull` brings the others up to
        date.

        Args:
            closure: evaluates the model again and returns the loss, as in torch; called once.
            batch_size: number of samples behind these gradients. Workers with batches of different sizes pass it, so that the
                mean over all samples is right. With 0 the worker takes part in the round but contributes nothing. None: the
                attribute `batch_size`, which is 1 unless the program has set it.
            grad_scaler: passed by `grad_scaler.step(optimizer)`; the gradients are unscaled here, unless the program has done
                so.

        Raises:
            InvalidRequest: the program has changed parameters itself (use `load_parameters` for that); nothing has been sent.
            NonFiniteGradient: a gradient has NaN or infinity, and nan_policy is "refuse". Nothing has been sent, except with
                overlap, after which this worker cannot go on.
            PsdError: what the shards or the connection refuse.
        """
        loss = None
        if not callable(closure) and closure is not None:
            refuse(TypeError, "closure", "a function that computes the loss, or batch_size= for the number of samples", closure)
        size = self._size_of_step = weight_of(self.batch_size if batch_size is None else batch_size, "batch_size")
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._exchange(size, grad_scaler)
        finally:
            self._size_of_step = None
        # Otherwise a scheduler built on the given optimizer would warn that its step has not been called.
        self._part.given.optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001
        if self._groups.schedule is not None:
            self._groups.schedule.on_optimizer_step()
        return loss

    @torch.no_grad()
    def _exchange(self, size: float, grad_scaler: GradScaler | None) -> None:
        """Push the gradients, and pull into the model."""
        torch_amp.check(grad_scaler, self, self.ps.nan_policy)
        job, part = self._job, self._part
        job.parameters.check_unchanged(None if part.job_part is None else self._stepped)
        job.tables.settle()
        if self._overlap:
            self._finish_overlapped(size)
        else:
            scalars = job.scalars(self._groups, self.param_groups)
            is_infinite = grad_scaler is not None and torch_amp.unscale(grad_scaler, self)
            if part.job_part is None:
                self._worker.push_pull_flat(scalars, size, job.gradients.gather(), job.tables.gradients(), skip=is_infinite)
                job.parameters.copy()
            else:
                present, rows = job.gradients.gather(numbers=part.trained), job.tables.gradients(part.tables)
                self._worker.push_pull_flat(scalars, size, present, rows, skip=is_infinite, job_part=part.job_part)
                job.parameters.copy_received()
            if grad_scaler is not None:
                torch_amp.report(grad_scaler, self, is_skipped=self.ps.is_skipped)
        job.tables.on_step()

    @property
    def _stepped(self) -> list[int]:
        """Indices of the tensors that a step changes."""
        trained = self._job.declaration.trained
        return [trained[position] for position in self._part.trained]

    @uncompiled
    def pull(self) -> None:
        """Fetch the current parameters into the model, without pushing; for evaluation in async and ssp."""
        self._job.pull()

    def load_parameters(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Set the job's parameters as `model.load_state_dict` would in one process; also buffers, unless they are "local".

        All workers call this at the same step, with the same values: see ParameterServer.load_parameters. A restarted worker
        must not call it at another step than the others; to begin with certain values, load them before `distribute`.

        Args:
            state_dict: the complete state_dict of the model, such as torch.load or safetensors return it.

        Raises:
            InvalidRequest, InvalidTensor: a tensor is missing, unexpected, or has another shape; nothing was set. Likewise what
                ParameterServer.load_parameters raises.
        """
        self._job.load_parameters(state_dict)

    def reset_slots(self) -> None:
        """Reset momentum, moments and counts of steps, of tensors and rows, as ParameterServer.reset_slots does: all workers
        call it at the same step."""
        self._job.reset_slots()

    def stop(self) -> int:
        """End the job for all workers at one step, and return it: ParameterServer.stop, which says how. The next step() then
        raises psd_client.Drained on each worker, unless that looks at `optimizer.ps.is_over` after each step."""
        self._gradients.settle()
        return self.ps.stop()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up gradients without sending them (with overlap); the next back-propagation outside of the block sends the sums.

        Without overlap gradients add up until step() in any case, as in torch.
        """
        with self._gradients.no_sync():
            yield

    def _prepare_push(self) -> Callable[[Feed, Callable[[int], None]], None]:
        """With overlap: prepare the push when the first gradient is there, with the scalars of that moment."""
        self._job.parameters.check_unchanged()
        scalars = self._job.scalars(self._groups, self.param_groups)
        size = weight_of(self.batch_size, "batch_size") if self._size_of_step is None else self._size_of_step
        self._sent = scalars, size
        # After the job has gone back, the model may have versions that do not exist any more.
        versions = [min(pair) for pair in zip(self._job.parameters.versions, self._worker.parameters.versions, strict=True)]
        return lambda feed, on_received: self._worker.push_pull_feed(scalars, size, feed, on_received, versions)

    def _finish_overlapped(self, size: float) -> None:
        sent, self._sent = self._sent, None
        with self._gradients.abandoned_on_error():
            if sent is not None and sent != (self._job.scalars(self._groups, self.param_groups, moves_schedules=False), size):
                raise InvalidRequest(
                    "overlap=True: options or batch_size were changed after the first gradients had been sent; set them, and "
                    "the optimizer's attribute batch_size, before backward()"
                )
            try:
                self._gradients.finish(self._take_parameters, self._worker.rows_by_shard(self._job.tables.gradients()))
            finally:
                self._sent = None  # of a step without back-propagation

    def _take_parameters(self, next_block: Callable[[bool], int | None]) -> None:
        self._job.parameters.copy_as_received(next_block, is_all=self._overlap != "forward")

    def close(self) -> None:
        """Finish: no other worker waits for this one any more. The end of the program does the same."""
        try:
            self._gradients.close()
        finally:
            self._job.tables.leave()
            self.ps.close()

    def state_dict(self, *, slots: bool = False) -> dict[str, Any]:
        """The param_groups and the clock, and with `slots` also what the shards keep, such as momentum.

        With slots this is a state of torch's own optimizer, whose load_state_dict takes it; so does `load_state_dict` here. Any
        worker may call it, alone. It then holds the slots of all parameters, but of no rows, in memory of the CPU. Without
        rounds, or with a quorum, the other workers train on meanwhile: parts of it may be of different steps.

        Args:
            slots: fetch the slots, each as large as the parameters; waits for the round of the last step, as `pull` does.
        """
        state: dict[str, Any] = super().state_dict()
        if not slots:
            return {**state, **self._job.slots.clocks}
        self._gradients.settle()
        found = state_of(self._job.declaration, state, self.param_groups, self._worker.slots())
        return {**state, "state": found, "clock": self.ps.clock, "has_slots": True}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the param_groups; also the slots, if the state has them: that of state_dict(slots=True), or of one of
        torch's own optimizers.

        With slots, all workers must call this at the same step, as with `load_parameters`: the slots are set on the shards, and
        those that the state lacks are reset. Of several optimizers, slots of the others and of all rows stay, and all workers
        load them in the same order. Without slots, those on the shards stay. The clock stays in any case.

        Raises:
            InvalidRequest: the state does not fit the slots on the shards. Either it was taken at another step (a state from
                before the first step fits again right after `reset_slots`), or it has slots that the job's rules do not have.
            InvalidTensor: a slot has another shape than its parameter. Nothing has changed.
            NonFiniteGradient, BarrierTimeout: as `load_parameters`.
        """
        if state_dict.get("has_slots") or any(has_slots(state) for state in state_dict["state"].values()):
            found = slots_of(self._job.declaration, self.param_groups, state_dict)
            self._gradients.settle()
            self._worker.set_slots(found, self._part.job_part)
            self._job.slots.load()
            self._job.parameters.copy()
        else:
            self._job.slots.check(state_dict)
        super().load_state_dict({**state_dict, "state": {}})
        self._groups.take_over(self)

    def keep_schedule(self, given: LRScheduler, every: int) -> DistributedScheduler:
        """Keep a schedule at the job's clock. Called by `scheduler`; not for programs."""
        connection = self.ps
        return self._groups.keep(given, lambda: connection.clock, every)
