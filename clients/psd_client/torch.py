"""The PyTorch face: `distribute` makes a torch optimizer's parameters and slots live on the shards.

A step is one push_pull: gradients are copied from the parameters' `.grad` into the client's flat gradient space, travel to the
shards, which apply the rule, and the new parameters are copied back into the model in place. The copies convert dtypes and
strides on the way, so parameters may have any memory layout, any device, and be float64, float32, float16 or bfloat16 (the
shards hold a float32 master of the last two).

The copies are torch._foreach_copy_, one call for all tensors. It has no public name; its public neighbours either lay out a new
vector at each step (torch.cat, parameters_to_vector) or replace the parameters' memory (vector_to_parameters).

Decides what is declared (names, groups, what is trained and what is only shared) and refuses what the shards would not do as
torch does. Must not know blocks, shards or messages. This is the only module that imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch.amp.grad_scaler import GradScaler

from psd.contract.errors import InvalidRequest, InvalidTensor
from psd.contract.jobspec import GroupSpec, TensorSpec
from psd.contract.rules import STATIC
from psd.contract.staleness import parse_staleness
from psd_client import torch_amp
from psd_client.client import ParameterServer, connect
from psd_client.flat import FlatBuffers
from psd_client.optimizers import Optimizer, group_spec, scalar_values
from psd_client.torch_options import check_no_slots, check_options, rule_of

__all__ = ["distribute", "DistributedOptimizer"]

_DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


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
    staleness: str = "",
    clip_norm: float | None = None,
    nan_policy: str = "refuse",
    buffers: str = "local",
    **connect_args: Any,
) -> DistributedOptimizer:
    """Declare the model's parameters and return an optimizer whose steps happen on the shards.

    The first worker's parameters become everybody's: when the call returns, the model holds the job's current values. The rule
    and its options are read from `optimizer`, which is not stepped any more; its param_groups are shared with the result, so a
    learning rate scheduler may be built on either.

    Args:
        model: what is trained. Parameters that the optimizer does not update (frozen, or left out) get the same values on all
            workers once, and are never pushed.
        optimizer: over parameters of the model, not stepped yet. One of torch.optim's SGD, Adagrad, Adadelta, RMSprop,
            Adam, AdamW, Adamax and NAdam; not a subclass. Or a rule that torch does not have: psd_client.FTRL, Lion, or
            CustomRule for one of your own; its options are then in the result's param_groups.
        params: with such a rule, what it updates, as torch's optimizers take it: parameters, or dicts of "params" and options;
            None: all of the model that need gradients.
        ps: a connection; None connects with `connect_args`, as psd_client.connect does.
        consistency: "sync", "async" or "ssp:S"; None takes PSD_CONSISTENCY, or "sync".
        reduce: "mean" over the samples, or "sum"; None takes PSD_REDUCE, or "mean".
        quorum: workers whose gradients close a synchronous round; None takes PSD_QUORUM, or all.
        aggregation: "fast" or "exact", see ParameterServer.declare; None takes PSD_AGGREGATION, or "fast".
        staleness: async and ssp: what is done about gradients that come late, "lr", "dc" or "dc-adaptive", see
            ParameterServer.declare. The strength of "dc" is in the param_groups, as "dc_lambda", and may change.
        clip_norm: the largest norm of the mean (or sum) of all workers' gradients, over all parameters: what
            torch.nn.utils.clip_grad_norm_ does in one process, where calling it clips each worker's own. Implies "exact".
        nan_policy: what becomes of NaN and infinity: "refuse", "skip" or "allow", see ParameterServer.declare. A GradScaler
            needs "skip": `scaler.step(optimizer)` then skips rounds on all workers alike, and so their scales stay equal.
        buffers: "local", the only policy: each worker keeps its own buffers, such as BatchNorm's running statistics, which are
            then those of the data it has seen. To save a model, save any worker's.

    Raises:
        TypeError: an optimizer that is not supported yet, or arguments that exclude each other.
        InvalidRequest, InvalidTensor: an option or a parameter that psd cannot train; the message names it.
        SpecMismatch: another worker has declared something else.
    """
    if ps is not None and connect_args:
        raise TypeError(f"distribute: pass either ps or {', '.join(sorted(connect_args))}; ps is connected already")
    if buffers != "local":
        raise InvalidRequest(f'buffers: the only policy is "local" (each worker keeps its own), got {buffers!r}')
    if isinstance(optimizer, Optimizer):
        always, template = optimizer.always, optimizer.group()
        optimizer = _Options(optimizer, params if params is not None else [p for p in model.parameters() if p.requires_grad])
    elif params is not None:
        raise TypeError("params: torch's optimizers have theirs already; it is for psd_client's rules")
    else:
        always, template = _check_optimizer(optimizer)
    name, stale_scalars = parse_staleness(staleness)
    for group in optimizer.param_groups:
        for scalar, value in stale_scalars.items():
            group.setdefault(scalar, value)
    declaration = _read(model, optimizer, replace(template, staleness=name), always)
    connection = ps if ps is not None else connect(**connect_args)

    def initialize(flat: FlatBuffers) -> None:
        with torch.no_grad():
            torch._foreach_copy_(_tensors(flat), declaration.parameters)

    try:
        connection.declare_tensors(
            declaration.tensors,
            declaration.groups,
            initial=initialize,
            consistency=consistency,
            reduce=reduce,
            quorum=quorum,
            aggregation=aggregation,
            clip_norm=clip_norm,
            nan_policy=nan_policy,
        )
    except BaseException:
        if ps is None:
            connection.close()
        raise
    with torch.no_grad():
        torch._foreach_copy_(declaration.parameters, _tensors(connection.parameters))
    return DistributedOptimizer(optimizer, connection, declaration)


class DistributedOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose parameters and slots live on the shards; made by `distribute`.

    Attributes:
        ps: the connection, for barriers, the clock and the rank.
    """

    _step_supports_amp_scaling = True  # see torch_amp.py

    def __init__(self, optimizer: torch.optim.Optimizer, ps: ParameterServer, declaration: _Declaration) -> None:
        self._is_declared = False
        super().__init__(optimizer.param_groups, dict(optimizer.defaults))  # the groups' dicts themselves, not copies
        self._is_declared = True
        torch_amp.ignore_the_warning()
        self.ps = ps
        self._given = optimizer
        self._declaration = declaration
        self._trained = [declaration.parameters[i] for i in declaration.trained]
        parameters, gradients = _tensors(ps.parameters), _tensors(ps.gradients)
        self._parameter_views = [parameters[i] for i in declaration.trained]
        self._gradient_views = [gradients[i] for i in declaration.trained]

    @overload
    def step(self, closure: None = None, *, batch_size: float = 1, grad_scaler: GradScaler | None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float], *, batch_size: float = 1, grad_scaler: None = None) -> float: ...
    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], float] | None = None,
        *,
        batch_size: float = 1,
        grad_scaler: GradScaler | None = None,
    ) -> float | None:
        """Push the gradients and pull the new parameters into the model.

        Returns when the round that the gradients belong to has closed (sync), or as soon as the staleness bound allows.

        Args:
            closure: evaluates the model again and returns the loss, as in torch; called once.
            batch_size: samples behind these gradients. Workers with batches of different sizes pass theirs, so that the mean
                over all samples comes out right; 0 takes part in the round and contributes nothing.
            grad_scaler: given by `grad_scaler.step(optimizer)`; the gradients are unscaled here, unless they have been.

        Raises:
            NonFiniteGradient: NaN or infinity in a gradient, and nan_policy is "refuse"; nothing has been sent.
            PsdError: what the shards or the connection refuse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        torch_amp.check(grad_scaler, self, self.ps.nan_policy)
        scalars = self._scalars()
        is_infinite = grad_scaler is not None and torch_amp.unscale(grad_scaler, self)
        present = self._gather()
        self.ps.push_pull_flat(scalars, float(batch_size), present, skip=is_infinite)
        if grad_scaler is not None:
            torch_amp.report(grad_scaler, self, is_skipped=self.ps.is_skipped)
        torch._foreach_copy_(self._trained, self._parameter_views)
        # A scheduler that was built on the given optimizer would warn that nobody has called its step.
        self._given._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001
        return loss

    @torch.no_grad()
    def pull(self) -> None:
        """Fetch the parameters as they are now into the model, without pushing; for evaluation in async and ssp."""
        self.ps.pull_flat()
        torch._foreach_copy_(self._trained, self._parameter_views)

    def close(self) -> None:
        """Finish: no other worker waits for this one any more. The end of the program does the same."""
        self.ps.close()

    def state_dict(self) -> dict[str, Any]:
        """The param_groups and the clock. The slots, such as momentum, live on the shards and are not in it."""
        return {**super().state_dict(), "clock": self.ps.clock}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the param_groups. The clock and the slots stay what they are on the shards.

        Raises:
            InvalidRequest: the state holds slots of an ordinary torch optimizer, which would be lost.
        """
        check_no_slots(state_dict["state"].values(), "load_state_dict: the state")
        groups = self.param_groups
        super().load_state_dict({**state_dict, "state": {}})
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.update(loaded)  # in place: the given optimizer and its schedulers share these dicts
        self.param_groups = groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: what a job trains is fixed when it is declared."""
        if self._is_declared:
            raise InvalidRequest("add_param_group: the job has been declared; add all groups before distribute()")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a DistributedOptimizer holds a connection and cannot be copied or pickled; use its state_dict()")

    def _scalars(self) -> list[list[float]]:
        """What travels with this push, per group; raises InvalidRequest if an option that is fixed for the job has changed."""
        if len(self._given.param_groups) != len(self.param_groups):
            raise InvalidRequest("add_param_group: the job has been declared; add all groups before distribute()")
        specs = self._declaration.groups
        for index, group in enumerate(self.param_groups):
            now = group_spec(specs[index], self._declaration.always, group)
            declared, flags = set(specs[index].flags), set(now.flags)
            # Momentum that has become 0 keeps its slot; the other way round there is none.
            changed = sorted((declared ^ flags) - {"momentum"} | (flags - declared))
            if changed:
                raise InvalidRequest(
                    f"param_groups[{index}]: {changed[0]} was {'on' if changed[0] in declared else 'off'} when the job was "
                    "declared and cannot change; set it before distribute()"
                )
            if now.constants != specs[index].constants:
                raise InvalidRequest(
                    f"param_groups[{index}]: {now.info.constants[0]} was {specs[index].constants[0]} when the job "
                    "was declared and cannot change; set it before distribute()"
                )
        groups = [*self.param_groups, *({} for _ in specs[len(self.param_groups) :])]
        return [scalar_values(spec, group, index) for index, (spec, group) in enumerate(zip(specs, groups, strict=True))]

    def _gather(self) -> NDArray[np.bool_] | None:
        """Copy the gradients into the flat space; returns which tensors have one, None for all."""
        declaration = self._declaration
        sources, targets, missing = [], [], []
        for index, parameter, view in zip(declaration.trained, self._trained, self._gradient_views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                missing.append(index)
            elif gradient.layout is not torch.strided:
                raise InvalidTensor(
                    f"parameter {declaration.tensors[index].name!r}: its gradient is sparse, which psd does not support yet; "
                    "build the layer with sparse=False"
                )
            else:
                sources.append(gradient)
                targets.append(view)
        for index in declaration.frozen:
            if declaration.parameters[index].grad is not None:
                raise InvalidRequest(
                    f"parameter {declaration.tensors[index].name!r} was frozen when the job was declared and now has a "
                    "gradient; unfreeze parameters before distribute()"
                )
        if sources:
            torch._foreach_copy_(targets, sources)
        if not missing:
            return None
        present = np.ones(len(declaration.tensors), dtype=np.bool_)
        present[missing] = False
        return present


@dataclass(frozen=True, eq=False)
class _Declaration:
    """What one model and optimizer declare.

    Attributes:
        parameters: the model's distinct parameters. tensors: their specs, in the same order.
        always: flags that the optimizer's class stands for.
        trained: indices of those that are pushed. frozen: of those that the optimizer has, but that need no gradient.
    """

    parameters: list[torch.Tensor]
    tensors: list[TensorSpec]
    groups: list[GroupSpec]
    always: tuple[str, ...]
    trained: list[int]
    frozen: list[int]


class _Options(torch.optim.Optimizer):
    """The param_groups of a rule that torch does not have, for its result and for schedulers."""

    def __init__(self, rule: Optimizer, params: Iterable[Any]) -> None:
        super().__init__(params, rule.option_values())
        for index, group in enumerate(self.param_groups):
            unknown = sorted(set(group) - {"params"} - rule.options())
            if unknown:
                raise InvalidRequest(
                    f"params[{index}]: no option {unknown[0]!r}; there are {', '.join(sorted(rule.options()))}"
                )
            rule.with_options({name: value for name, value in group.items() if name != "params"})


def _read(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, template: GroupSpec, always: tuple[str, ...]
) -> _Declaration:
    """Everything that is declared, checked before anybody is connected to. `template`: the rule."""
    groups = [group_spec(template, always, group) for group in optimizer.param_groups]
    named = _named_parameters(model)
    known = {id(parameter) for _, parameter in named}
    group_of: dict[int, int] = {}
    for number, options in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(options["params"]):
            if id(parameter) not in known:
                raise InvalidRequest(
                    f"optimizer: parameter {position} of param_groups[{number}], of shape {tuple(parameter.shape)}, is not in "
                    "the model. Pass the module that holds all of them, such as torch.nn.ModuleList([encoder, decoder])"
                )
            group_of[id(parameter)] = number
    static = len(groups)
    tensors, trained, frozen = [], [], []
    for index, (name, parameter) in enumerate(named):
        _check_parameter(name, parameter)
        is_trained = id(parameter) in group_of and parameter.requires_grad
        if is_trained:
            trained.append(index)
        elif id(parameter) in group_of:
            frozen.append(index)
        group = group_of[id(parameter)] if is_trained else static
        tensors.append(TensorSpec(name, tuple(parameter.shape), _DTYPES[parameter.dtype], group))
    if not trained:
        raise InvalidRequest("optimizer: none of its parameters has requires_grad=True, so there is nothing to train")
    _check_memory(named)
    if len(trained) < len(tensors):
        groups.append(GroupSpec(STATIC.name))
    return _Declaration([parameter for _, parameter in named], tensors, groups, always, trained, frozen)


def _check_optimizer(optimizer: torch.optim.Optimizer) -> tuple[tuple[str, ...], GroupSpec]:
    """The flags that the optimizer's class stands for, and the rule that it is here."""
    kind = type(optimizer)
    rule, always = rule_of(kind, torch.optim)
    check_no_slots(optimizer.state.values(), "optimizer: it has been stepped, and its state")
    for index, group in enumerate(optimizer.param_groups):
        check_options(rule, {option: group[option] for option in optimizer.defaults}, index)
    return always, GroupSpec(rule)


def _named_parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """The model's distinct parameters, by the names that they have without DistributedDataParallel and torch.compile."""
    named = [
        (".".join(part for part in name.split(".") if part != "_orig_mod"), parameter)
        for name, parameter in model.named_parameters()  # a tied parameter comes once, by its first name
    ]
    while named and all(name.startswith("module.") for name, _ in named):
        named = [(name.removeprefix("module."), parameter) for name, parameter in named]
    return named


def _check_parameter(name: str, parameter: torch.nn.Parameter) -> None:
    if torch.nn.parameter.is_lazy(parameter):
        raise InvalidTensor(f"parameter {name!r} has no shape yet; pass one batch through the model before distribute()")
    if parameter.is_meta:
        raise InvalidTensor(f"parameter {name!r} is on the meta device and has no values; see torch.nn.Module.to_empty")
    if parameter.layout is not torch.strided:
        raise InvalidTensor(f"parameter {name!r} has layout {parameter.layout}; psd trains dense (strided) parameters")
    if parameter.dtype not in _DTYPES:
        raise InvalidTensor(f"parameter {name!r} has dtype {parameter.dtype}; psd trains {', '.join(map(str, _DTYPES))}")


def _check_memory(named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    """Raise InvalidTensor if two elements share memory: an update of one would silently change the other."""
    storages: dict[tuple[torch.device, int], list[tuple[str, torch.nn.Parameter]]] = {}
    for name, parameter in named:
        if parameter.numel():
            storage = parameter.untyped_storage()
            storages.setdefault((parameter.device, storage.data_ptr()), []).append((name, parameter))
    for members in storages.values():
        if len(members) == 1 and members[0][1].is_contiguous():
            continue
        unit = min(parameter.element_size() for _, parameter in members)
        # Which member, numbered from 1, has each cell of the storage.
        owner = torch.zeros(members[0][1].untyped_storage().nbytes() // unit, dtype=torch.int32)
        for number, (name, parameter) in enumerate(members, 1):
            width = parameter.element_size() // unit
            mine = owner.as_strided(
                (*parameter.shape, width), (*(width * n for n in parameter.stride()), 1), width * parameter.storage_offset()
            )
            other = int(mine.max())
            if other:
                first = members[other - 1][0]
                raise InvalidTensor(f"parameter {name!r} shares memory with {first!r}; to tie them, use one Parameter for both")
            mine.fill_(number)
            if int((owner == number).sum()) != mine.numel():
                raise InvalidTensor(f"parameter {name!r} is expanded: its elements share memory; call contiguous() on it first")


def _tensors(flat: FlatBuffers) -> list[torch.Tensor]:
    """Torch's views of the flat buffers, one per tensor of the spec."""
    return [torch.from_numpy(view) for view in flat.views]
