"""The declaration of a torch model and its optimizer, checked before connecting.

Decides names, groups, what is trained and what is only shared, and refuses what the shards would not do as torch does. Must not
know connections, gradients or steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from psd.contract.errors import InvalidRequest, InvalidTensor
from psd.contract.jobspec import GroupSpec, TensorSpec
from psd.contract.rules import STATIC
from psd_client.optimizers import group_spec
from psd_client.torch.options import check_no_slots, check_options, rule_of
from psd_core.optimizer import Optimizer

_DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


@dataclass(frozen=True, eq=False)
class TorchDeclaration:
    """The declaration of one model and optimizer.

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


class Options(torch.optim.Optimizer):
    """The param_groups of a rule that torch does not have, for its result and for schedulers."""

    def __init__(self, rule: Optimizer, params: Iterable[Any]) -> None:
        super().__init__(params, rule.option_values())
        for index, group in enumerate(self.param_groups):
            unknown = sorted(group.keys() - {"params"} - self.defaults.keys())
            if unknown:
                raise InvalidRequest(f"params[{index}]: no option {unknown[0]!r}; there are {', '.join(sorted(self.defaults))}")
            rule.with_options({name: value for name, value in group.items() if name != "params"})


def read_declaration(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, template: GroupSpec, always: tuple[str, ...]
) -> TorchDeclaration:
    """Read and check the declaration. `template`: the rule."""
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
    return TorchDeclaration([parameter for _, parameter in named], tensors, groups, always, trained, frozen)


def check_optimizer(optimizer: torch.optim.Optimizer) -> tuple[tuple[str, ...], GroupSpec]:
    """Check the optimizer; return the rule that corresponds to it."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer: expected one of torch.optim, or a rule of psd_client, got {optimizer!r}")
    if hasattr(optimizer, "ps"):
        raise TypeError("optimizer: is distributed already; pass the torch.optim optimizer that distribute() was given")
    kind = type(optimizer)
    rule, always = rule_of(kind, torch.optim)
    check_no_slots(optimizer.state.values(), "optimizer: it has been stepped, and its state")
    for index, group in enumerate(optimizer.param_groups):
        check_options(rule, {option: group[option] for option in optimizer.defaults}, index)
    return always, GroupSpec(rule)


def _named_parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """The model's distinct parameters, by their names without DistributedDataParallel and torch.compile."""
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
