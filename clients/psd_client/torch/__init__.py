"""The PyTorch face: `distribute` places a torch optimizer's parameters and slots on the shards.

A step is one push_pull. The gradients lie in the client's flat gradient space (gradients.py) and are sent to the shards, which
apply the rule; the new parameters are then copied into the model in place (parameters.py). The copies convert dtypes and
strides, so parameters may have any memory layout, be on any device, and be float64, float32, float16 or bfloat16 (for the last
two the shards hold a float32 master).

declaration.py decides what is declared, and groups.py which scalars go with each push; embedding.py has the modules whose rows
are on the shards, and tables.py pulls and pushes these rows (outside of a job, own_rows.py and reading.py have them);
schedule.py keeps a learning-rate schedule at the job's clock; uncompiled.py keeps torch.compile out of all this,
surroundings.py looks what else averages gradients. Must not know blocks, shards or messages. Only the torch modules import
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, overload

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from psd.contract.arguments import refuse
from psd.contract.environment import job_defaults
from psd.contract.errors import InvalidRequest
from psd.contract.rules import weight_of
from psd.contract.staleness import parse_staleness
from psd_client.client import ParameterServer, worker_of
from psd_client.faces import check_connection, connection_of
from psd_client.lanes.flat import FlatBuffers
from psd_client.lanes.overlap_feed import Feed
from psd_client.optimizers import spec_of
from psd_client.torch import amp as torch_amp
from psd_client.torch.buffers import Buffers
from psd_client.torch.declaration import (
    BUFFER_POLICIES,
    Options,
    TorchDeclaration,
    check_optimizer,
    read_declaration,
    state_values,
)
from psd_client.torch.embedding import Embedding, EmbeddingBag, EmbeddingCollection, table_modules
from psd_client.torch.gradients import Gradients, Overlap
from psd_client.torch.groups import SharedGroups
from psd_client.torch.options import has_slots
from psd_client.torch.parameters import Parameters, as_tensors, copy_all
from psd_client.torch.reading import read_rows
from psd_client.torch.schedule import DistributedScheduler, register, scheduler
from psd_client.torch.slots import LoadedSlots, slots_of
from psd_client.torch.surroundings import refuse_data_parallel, tell_of_process_group
from psd_client.torch.tables import Tables
from psd_client.torch.uncompiled import uncompiled
from psd_core.optimizer import Optimizer

__all__ = [
    "distribute",
    "scheduler",
    "DistributedOptimizer",
    "DistributedScheduler",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingCollection",
    "read_rows",
]


def __dir__() -> list[str]:
    return __all__


def distribute(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Optimizer,
    *,
    params: Iterable[Any] | None = None,
    ps: ParameterServer | None = None,
    consistency: str | None = None,
    reduce: str | None = None,
    quorum: int | None = None,
    aggregation: str | None = None,
    staleness: str | None = None,
    clip_norm: float | None = None,
    nan_policy: str = "refuse",
    overlap: bool | str = False,
    buffers: str = "first",
    **connect_args: Any,
) -> DistributedOptimizer:
    """Declare the model's parameters and return an optimizer whose steps happen on the shards.

    The first worker's parameters become everybody's: when the call returns, the model holds the job's current values. The rule
    and its options are read from `optimizer`, which is not stepped any more; its param_groups are shared with the result, so a
    learning rate scheduler may be built on either.

    Args:
        model: what is trained. Parameters that the optimizer does not update (frozen, or left out) get the same values on all
            workers once, and are never pushed. Embedding and EmbeddingBag in it declare their tables, and are joined to them.
        optimizer: over parameters of the model, not stepped yet. One of torch.optim's SGD, Adagrad, Adadelta, RMSprop,
            Adam, AdamW, Adamax and NAdam; not a subclass. Or a rule that torch does not have: psd_client.FTRL, LAMB, Lion,
            or CustomRule for one of your own; its options are then in the result's param_groups.
        params: with such a rule, what it updates, as torch's optimizers take it: parameters, or dicts of "params" and options;
            None: all of the model that need gradients.
        ps: a connection; None connects with `connect_args`, as psd_client.connect does.
        consistency: "sync", "async" or "ssp:S"; None takes PSD_CONSISTENCY, or "sync".
        reduce: "mean" over the samples, or "sum"; None takes PSD_REDUCE, or "mean".
        quorum: workers whose gradients close a synchronous round; None takes PSD_QUORUM, or all.
        aggregation: "fast" or "exact", see ParameterServer.declare; None takes PSD_AGGREGATION, or "fast".
        staleness: async and ssp: treatment of gradients that come late, "lr"; see ParameterServer.declare.
        clip_norm: the largest norm of the mean (or sum) of all workers' gradients, over all parameters: what
            torch.nn.utils.clip_grad_norm_ does in one process, where calling it clips each worker's own. Implies "exact".
        nan_policy: treatment of NaN and infinity: "refuse", "skip" or "allow", see ParameterServer.declare. A GradScaler
            needs "skip": `scaler.step(optimizer)` then skips rounds on all workers alike, and so their scales stay equal.
        overlap: send each block of gradients as soon as backward() has made it, while it makes the others; step() waits for the
            rest. What is sent cannot be changed any more: clipping or unscaling after backward(), and a second backward()
            without `no_sync()`, are refused, and such an error ends this worker's part in the job. "forward", in async only:
            step() does not wait either, and the next forward pass begins with what has arrived; the rest is one step older, and
            never two. Errors of a push are then raised by the next backward() or step(); `pull` makes the model whole.
        buffers: whose buffers checkpoints, exports and readers have, such as BatchNorm's running statistics: of those in the
            model's state_dict. "first": those of the first worker that is there. "mean": the mean over all workers, of integers
            the first one's. "local": nobody's. Each worker computes with its own, which begin as the job's.
        connect_args: servers, rank, world_size and so on, of psd_client.connect.

    Raises:
        TypeError: an optimizer that psd does not have, a DistributedDataParallel, or arguments that exclude each other.
        InvalidRequest, InvalidTensor: an option or a parameter that psd cannot train; the message names it.
        SpecMismatch: another worker has declared something else.
    """
    check_connection(ps, *connect_args)
    if buffers not in BUFFER_POLICIES:
        raise InvalidRequest(f'buffers: must be "first", "mean" or "local", got {buffers!r}')
    if overlap not in (False, True, "forward"):
        raise InvalidRequest(f'overlap: must be False, True or "forward", got {overlap!r}')
    mode = job_defaults().consistency_of(consistency)
    if overlap == "forward" and mode.mode != "async":
        raise InvalidRequest(
            f'overlap: "forward" is for consistency="async", where parameters may be old; this job is {str(mode)!r}'
        )
    if overlap and clip_norm is not None and not mode.has_rounds:
        raise InvalidRequest(
            f"overlap: not with clip_norm under consistency={str(mode)!r}, where each push is clipped by its own norm, which "
            'is known only when back-propagation has ended; leave one of them out, or use consistency="sync"'
        )
    if overlap and nan_policy == "skip":
        raise InvalidRequest('overlap: not with nan_policy="skip", which looks at the whole gradient before anything is sent')
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {model!r}")
    refuse_data_parallel(model)
    if isinstance(optimizer, Optimizer):
        always, template = optimizer.always, spec_of(optimizer)
        optimizer = Options(optimizer, params if params is not None else [p for p in model.parameters() if p.requires_grad])
    elif params is not None:
        raise TypeError("params: torch's optimizers have theirs already; it is for psd_client's rules")
    else:
        always, template = check_optimizer(optimizer)
    _add_handles(model, optimizer)
    declaration = read_declaration(model, optimizer, replace(template, staleness=parse_staleness(staleness)), always, buffers)

    def initialize(flat: FlatBuffers) -> None:
        copy_all(as_tensors(flat)[: len(declaration.parameters)], declaration.parameters)
        Buffers(declaration, flat).write()

    with connection_of(ps, connect_args) as connection:
        worker_of(connection).declare_tensors(
            declaration.tensors,
            declaration.groups,
            initial=initialize,
            consistency=consistency,
            reduce=reduce,
            quorum=quorum,
            aggregation=aggregation,
            clip_norm=clip_norm,
            nan_policy=nan_policy,
            tables=declaration.tables.specs,
        )
    tell_of_process_group(connection.rank, connection.world_size)
    copy_all(declaration.parameters, as_tensors(worker_of(connection).parameters)[: len(declaration.parameters)])
    return DistributedOptimizer(optimizer, connection, declaration, overlap=overlap)


def _add_handles(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Add the handles of embeddings with their own rule to the param_groups: zero_grad and a GradScaler look there."""
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for embedding in table_modules(model):
        if embedding.optimizer is not None and id(embedding.handle) not in known:
            optimizer.param_groups[0]["params"].append(embedding.handle)
            known.add(id(embedding.handle))


class DistributedOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose parameters and slots live on the shards; made by `distribute`.

    Attributes:
        ps: the connection, for barriers, the clock and the rank.
        batch_size: number of samples behind the gradients of the next step; see `step`. With overlap, set it before backward().
    """

    _step_supports_amp_scaling = True  # see amp.py

    def __init__(
        self, optimizer: torch.optim.Optimizer, ps: ParameterServer, declaration: TorchDeclaration, *, overlap: bool | str
    ) -> None:
        self._is_declared = False
        super().__init__(optimizer.param_groups, dict(optimizer.defaults))  # the groups' dicts themselves, not copies
        self._is_declared = True
        torch_amp.ignore_the_warning()
        self.ps = ps
        worker = self._worker = worker_of(ps)
        self._given = optimizer
        self._slots = LoadedSlots(declaration, lambda: ps.clock, lambda: worker.times_gone_back)
        self._groups = SharedGroups(optimizer, declaration, self._slots)
        register(self, self, optimizer)
        self._declaration = declaration
        self._parameters = Parameters(declaration, worker.parameters)
        self._buffers = Buffers(declaration, worker.parameters, worker.times_gone_back)
        self._buffers.receive()
        if declaration.places:
            worker.keep_buffers(self._buffers.send)
        self._overlap = overlap
        self._sent: tuple[list[list[float]], float] | None = None
        self._size_of_step: float | None = None
        self.batch_size = 1.0
        leaving = None
        if overlap:
            in_background = overlap == "forward"
            leaving = Overlap(self._prepare_push, worker.begin_feed, worker.forget_failure, in_background=in_background)
        self._tables = Tables(worker, declaration.tables.members, has_feeds=bool(overlap))
        self._gradients = Gradients(declaration, worker.gradients, leaving)

    @property
    def table_groups(self) -> dict[str, dict[str, Any]]:
        """Options of the tables' rules by name of the table, such as {"user": {"lr": 0.05, ...}}. The program may change them.

        For an embedding without its own optimizer this is the entry of param_groups.
        """
        return self._declaration.tables.by_name

    @property
    def rank(self) -> int:
        """This worker's number, from 0; it selects this worker's share of the data."""
        return self.ps.rank

    @property
    def world_size(self) -> int:
        """Number of workers, and so of shares of the data."""
        return self.ps.world_size

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
        self._given._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001
        if self._groups.schedule is not None:
            self._groups.schedule.on_optimizer_step()
        return loss

    @torch.no_grad()
    def _exchange(self, size: float, grad_scaler: GradScaler | None) -> None:
        """Push the gradients, and pull into the model."""
        torch_amp.check(grad_scaler, self, self.ps.nan_policy)
        self._parameters.check_unchanged()
        self._tables.settle()
        if self._overlap:
            self._finish_overlapped(size)
        else:
            scalars = self._groups.scalars_now(self.param_groups)
            is_infinite = grad_scaler is not None and torch_amp.unscale(grad_scaler, self)
            present = self._gradients.gather()
            self._worker.push_pull_flat(scalars, size, present, self._tables.gradients(), skip=is_infinite)
            self._parameters.copy()
            if grad_scaler is not None:
                torch_amp.report(grad_scaler, self, is_skipped=self.ps.is_skipped)
        self._tables.on_step()

    @uncompiled
    def pull(self) -> None:
        """Fetch the current parameters into the model, without pushing; for evaluation in async and ssp."""
        self._gradients.settle()
        self._worker.pull_flat()
        self._parameters.copy()
        self._buffers.follow(self._worker.times_gone_back)

    def load_parameters(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Set the job's parameters as `model.load_state_dict` would in one process; also buffers, unless they are "local".

        All workers must call this at the same step, with the same values. The call waits for all of them, and one of them sends
        the values; when it returns, every worker has them. The rule's slots on the shards, such as momentum, stay (see
        `reset_slots`), and so do the rows of tables. A restarted worker must not call this at another step than the others; to
        begin training with certain values, load them into the model before `distribute`.

        Args:
            state_dict: the complete state_dict of the model, such as torch.load or safetensors return it.

        Raises:
            InvalidRequest, InvalidTensor: a tensor is missing, unexpected, or has another shape; or another worker passed
                other values. Nothing was set.
            NonFiniteGradient: a parameter holds NaN or infinity; nothing was set.
            BarrierTimeout: not all workers have called it within the wait timeout.
        """
        values = state_values(self._declaration, state_dict)
        self._gradients.settle()
        count = len(self._declaration.parameters)

        def write(flat: FlatBuffers) -> None:
            copy_all(as_tensors(flat)[:count], values[:count])

        self._worker.set_parameters(write)
        self._parameters.copy()
        with torch.no_grad():
            for tensor, value in zip(self._declaration.parameters + self._declaration.buffers, values, strict=True):
                tensor.copy_(value)
        self._parameters.note()

    def reset_slots(self) -> None:
        """Reset the slots of the rules (momentum, moments, counts of steps) of all tensors and rows to their initial values.

        Parameters, rows and the clock stay. All workers must call this at the same step, as with `load_parameters`.

        Raises:
            BarrierTimeout: not all workers have called it within the wait timeout.
        """
        self._gradients.settle()
        self._worker.set_slots({})
        self._slots.begin()
        self._parameters.copy()

    def stop(self) -> int:
        """End the job for all workers at one step, as an early stop does: ParameterServer.stop, which says how.

        Returns:
            The step at which the job ends. The next step() then raises psd_client.Drained on each worker, which ends the
            program in order unless it is caught; or look at `optimizer.ps.is_over` after each step.
        """
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
        self._parameters.check_unchanged()
        scalars = self._groups.scalars_now(self.param_groups)
        size = weight_of(self.batch_size, "batch_size") if self._size_of_step is None else self._size_of_step
        self._sent = scalars, size
        # After the job has gone back, the model may have versions that do not exist any more.
        versions = [min(pair) for pair in zip(self._parameters.versions, self._worker.parameters.versions, strict=True)]
        return lambda feed, on_received: self._worker.push_pull_feed(scalars, size, feed, on_received, versions)

    def _finish_overlapped(self, size: float) -> None:
        sent, self._sent = self._sent, None
        with self._gradients.abandoned_on_error():
            if sent is not None and sent != (self._groups.scalars(self.param_groups), size):
                raise InvalidRequest(
                    "overlap=True: options or batch_size were changed after the first gradients had been sent; set them, and "
                    "the optimizer's attribute batch_size, before backward()"
                )
            try:
                self._gradients.finish(self._take_parameters, self._worker.rows_by_shard(self._tables.gradients()))
            finally:
                self._sent = None  # of a step without back-propagation

    def _take_parameters(self, next_block: Callable[[bool], int | None]) -> None:
        self._parameters.copy_as_received(next_block, is_all=self._overlap != "forward")

    def close(self) -> None:
        """Finish: no other worker waits for this one any more. The end of the program does the same."""
        try:
            self._gradients.close()
        finally:
            self._tables.leave()
            self.ps.close()

    def state_dict(self) -> dict[str, Any]:
        """The param_groups and the clock. The slots, such as momentum, live on the shards and are not in it."""
        return {**super().state_dict(), **self._slots.clocks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the param_groups; also the slots, if this is the state of one of torch's own optimizers and has slots.

        With slots, all workers must call this at the same step, as with `load_parameters`: the slots are set on the shards, and
        those that the state lacks are reset. Without, the slots on the shards stay. The clock stays in any case.

        Raises:
            InvalidRequest: the state does not fit the slots on the shards. Either it was taken at another step (a state from
                before the first step fits again right after `reset_slots`), or it has slots that the job's rules do not have.
            InvalidTensor: a slot has another shape than its parameter. Nothing has changed.
            NonFiniteGradient, BarrierTimeout: as `load_parameters`.
        """
        if any(has_slots(state) for state in state_dict["state"].values()):
            found = slots_of(self._declaration, self.param_groups, state_dict)
            self._gradients.settle()
            self._worker.set_slots(found)
            self._slots.load()
            self._parameters.copy()
        else:
            self._slots.check(state_dict)
        super().load_state_dict({**state_dict, "state": {}})
        self._groups.take_over(self)

    def keep_schedule(self, given: LRScheduler, every: int) -> DistributedScheduler:
        """Keep a schedule at the job's clock. Called by `scheduler`; not for programs."""
        connection = self.ps
        return self._groups.keep(given, lambda: connection.clock, every)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise InvalidRequest: the groups of a job are fixed when it is declared."""
        if self._is_declared:
            raise InvalidRequest("add_param_group: the job has been declared; add all groups before distribute()")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a DistributedOptimizer holds a connection and cannot be copied or pickled; use its state_dict()")
