"""Slots from and to the states of torch's own optimizers: which value in torch's state is which slot on the shards.

Reads and writes the `state` of a state_dict. Refuses a state from which the shards would not continue as torch does. Must not
know connections.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from psd.contract.errors import InvalidRequest, InvalidTensor
from psd.contract.jobspec import GroupSpec, TensorSpec
from psd_client.torch.declaration import TorchDeclaration
from psd_client.torch.options import has_slots
from psd_client.worker.exchange.loading import SlotValues

_IN_TORCH = {("sgd", "momentum"): "momentum_buffer"}
"""Torch's names of slots that are called differently in psd, by rule and slot."""

_COUNTED = {"step", "mu_product"}
"""Parts of torch's state that follow from the number of steps."""


class LoadedSlots:
    """Decides which states fit the slots that are on the shards.

    Args:
        clock: returns the worker's clock. times_gone_back: returns how often the job has gone back to a checkpoint.
    """

    def __init__(self, declaration: TorchDeclaration, clock: Callable[[], int], times_gone_back: Callable[[], int]) -> None:
        self._has_slots = any(group.info.slots(group.flags) for group in declaration.groups if not group.is_static)
        self._clock = clock
        self._times_gone_back = times_gone_back
        self._began: tuple[int, int] | None = 0, times_gone_back()

    def begin(self) -> None:
        """Note that the slots have just been reset."""
        self._began = self._clock(), self._times_gone_back()

    def load(self) -> None:
        """Note that the slots were loaded."""
        self._began = None

    @property
    def _began_at(self) -> int | None:
        """The clock at which the slots were last reset; None if they were loaded, or come from a checkpoint."""
        if self._began is None or self._began[1] != self._times_gone_back():
            return None
        return self._began[0]

    @property
    def clocks(self) -> dict[str, int | None]:
        """Entries of a state_dict by which `check` can tell whether it fits."""
        return {"clock": self._clock(), "slots_began": self._began_at}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise InvalidRequest if a state without slots belongs to other slots than those on the shards, which would stay."""
        now = self._clock()
        clock = state.get("clock", 0)
        is_begun = clock == state.get("slots_began", 0)
        if self._has_slots and clock != now and not (is_begun and now == self._began_at):
            raise InvalidRequest(
                f"load_state_dict: the state is of step {clock}, and the job is at step {now}; the slots, such as momentum, "
                "would stay those of now. A state of state_dict(slots=True) has its own. To begin anew with a state that was "
                "taken before the first step call reset_slots() on all workers first; to change options alone, set them in "
                "param_groups"
            )


def slots_of(
    declaration: TorchDeclaration, param_groups: list[dict[str, Any]], state_dict: Mapping[str, Any]
) -> dict[int, SlotValues]:
    """The slots in a state_dict, by index of the tensor; parameters that have made no step are left out.

    Args:
        param_groups: param_groups of the job's optimizer. Those of the state must have as many parameters, in the same order.

    Raises:
        InvalidRequest, InvalidTensor: a slot does not fit the job's rules or parameters; the message says which.
    """
    groups = state_dict["param_groups"]
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in param_groups]:
        raise InvalidRequest("load_state_dict: the state has other param_groups, or other numbers of parameters in them")
    index_of = {id(parameter): index for index, parameter in enumerate(declaration.parameters)}
    found = {}
    for group, own in zip(groups, param_groups, strict=True):
        for key, parameter in zip(group["params"], own["params"], strict=True):
            state = state_dict["state"].get(key)
            if state is None or has_slots(state) is None:
                continue
            index = index_of.get(id(parameter))
            if index is None:
                raise InvalidRequest(
                    f"load_state_dict: the state has slots for parameter {key}, which stands for an embedding's rows here; "
                    "what the shards keep of rows cannot be loaded"
                )
            if index in declaration.trained:
                tensor = declaration.tensors[index]
                found[index] = _slots(declaration.groups[tensor.group], tensor, state)
    return found


def state_of(
    declaration: TorchDeclaration,
    state_dict: Mapping[str, Any],
    param_groups: list[dict[str, Any]],
    found: Mapping[int, SlotValues],
) -> dict[int, dict[str, torch.Tensor]]:
    """The `state` that torch's own optimizer would have, by the parameters' numbers in `state_dict`.

    Args:
        param_groups: param_groups of the job's optimizer. found: slots by index of the tensor.
    """
    index_of = {id(declaration.parameters[index]): index for index in declaration.trained}
    state: dict[int, dict[str, torch.Tensor]] = {}
    for group, own in zip(state_dict["param_groups"], param_groups, strict=True):
        for key, parameter in zip(group["params"], own["params"], strict=True):
            index = index_of.get(id(parameter), -1)
            slots = found.get(index)
            if slots is None:
                continue
            tensor = declaration.tensors[index]
            rule = declaration.groups[tensor.group].rule
            if slots.steps or rule == "adagrad":  # whose slots torch has from the beginning
                named = {_IN_TORCH.get((rule, slot), slot): values for slot, values in slots.arrays.items()}
                state[key] = {name: torch.from_numpy(values).view(tensor.shape) for name, values in named.items()}
                if rule != "sgd":
                    state[key]["step"] = torch.tensor(float(slots.steps))
                if rule == "nadam":
                    state[key]["mu_product"] = _product_of_momenta(group, slots.steps)
    return state


def _product_of_momenta(group: Mapping[str, Any], steps: int) -> torch.Tensor:
    """NAdam's running product, with the present options, as the shards compute it."""
    product = 1.0
    for step in range(1, steps + 1):
        product *= group["betas"][0] * (1 - 0.5 * 0.96 ** (step * group["momentum_decay"]))
        if product < 1e-20:  # beside 1 it can no longer be told from 0
            break
    return torch.tensor(product)


def _slots(group: GroupSpec, tensor: TensorSpec, state: Mapping[str, Any]) -> SlotValues:
    names = {_IN_TORCH.get((group.rule, slot), slot): slot for slot in group.info.slots(group.flags)}
    unknown = sorted(name for name, value in state.items() if value is not None and name not in names.keys() | _COUNTED)
    if unknown:
        raise InvalidRequest(
            f"load_state_dict: {tensor.name!r}: the state has {unknown[0]!r}, and the rule of the job, {group.rule!r} with the "
            "options that were declared, does not"
        )
    arrays = {}
    for name, slot in names.items():
        value = state.get(name)
        if value is None:
            raise InvalidRequest(
                f"load_state_dict: {tensor.name!r}: the state has no {name!r}, which the rule {group.rule!r} has"
            )
        if tuple(value.shape) != tensor.shape:
            raise InvalidTensor(
                f"load_state_dict: {name!r} of {tensor.name!r} has the shape {tuple(value.shape)}, the parameter {tensor.shape}"
            )
        arrays[slot] = value.detach().to("cpu", getattr(torch, tensor.master_dtype)).contiguous().view(-1).numpy()
    return SlotValues(arrays, int(state.get("step", 1)))
