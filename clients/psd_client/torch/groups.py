"""The param_groups of a distributed optimizer: the same dicts as the given optimizer's, so that schedulers may use either.

Decides which of their options go with each push, keeps the schedule that changes them, and refuses changes of options that the
declaration has fixed. Must not know connections or gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import torch
from torch.optim.lr_scheduler import LRScheduler

from psd.contract.errors import InvalidRequest
from psd_client.optimizers import group_spec, scalar_values
from psd_client.torch.declaration import DeclaredPart, TorchDeclaration
from psd_client.torch.options import check_no_slots
from psd_client.torch.schedule import DistributedScheduler
from psd_client.torch.slots import LoadedSlots

Groups = list[dict[str, Any]]


class SharedGroups:
    """The groups of one of a job's optimizers.

    Args:
        part: the optimizer that was given to `distribute`, and which of the job's groups are its own.
        slots: checks a state that is loaded into that optimizer.

    Attributes:
        schedule: keeps the learning rates at the job's clock, if the program has asked for that; else None.
    """

    def __init__(self, part: DeclaredPart, declaration: TorchDeclaration, slots: LoadedSlots) -> None:
        self.schedule: DistributedScheduler | None = None
        given = self._given = part.given.optimizer
        self._always = part.given.always
        self._specs = declaration.groups[part.groups.start : part.groups.stop]
        self._dicts = list(given.param_groups)
        self._members = [list(map(id, group["params"])) for group in self._dicts]
        take_over, check = WeakMethod(self.take_over), WeakMethod(slots.check)

        def without_slots(given: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            del given
            check_no_slots(state["state"].values(), "load_state_dict: the state")
            method = check()
            if method is not None:
                method(state)
            return {**state, "state": {}}

        def share(given: torch.optim.Optimizer) -> None:
            take = take_over()
            if take is not None:
                take(given)

        given.register_step_pre_hook(_refuse_step)
        given.register_load_state_dict_pre_hook(without_slots)
        given.register_load_state_dict_post_hook(share)

    def take_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Restore the shared dicts of an optimizer that has loaded a state, and write the loaded options into them."""
        loaded, optimizer.param_groups = optimizer.param_groups, list(self._dicts)
        for group, new in zip(self._dicts, loaded, strict=True):
            group.update(new)
        if self.schedule is not None:
            self.schedule.reapply()

    def keep(self, given: LRScheduler, clock: Callable[[], int], every: int) -> DistributedScheduler:
        """Keep a schedule at this clock, as psd_client.torch.scheduler describes."""
        if self.schedule is not None:
            raise InvalidRequest(
                "scheduler: the optimizer has one already; make one of several by torch's ChainedScheduler or SequentialLR"
            )
        self.schedule = DistributedScheduler(given, clock, every)
        return self.schedule

    def scalars_now(self, own: Groups | None = None) -> list[list[float]]:
        """The scalars for the next push, after moving the schedule to the worker's clock. own: as of `scalars`."""
        if self.schedule is not None:
            self.schedule.follow()
        return self.scalars(own)

    def scalars(self, own: Groups | None = None) -> list[list[float]]:
        """The scalars of a push, by group of this optimizer.

        Args:
            own: the distributed optimizer's param_groups; None: another optimizer is stepped.

        Raises:
            InvalidRequest: an option that is fixed for the job has changed; or the groups, or the parameters in them, are not
                those that were declared.
        """
        specs = self._specs
        for groups in (self._given.param_groups if own is None else own, self._given.param_groups):
            if len(groups) != len(self._dicts):
                raise InvalidRequest("add_param_group: the job has been declared; add all groups before distribute()")
            if any(group is not shared for group, shared in zip(groups, self._dicts, strict=True)):
                raise InvalidRequest(
                    "param_groups: were replaced by other dicts, in the optimizer given to distribute() or in its result; the "
                    "two share them, so that schedulers may hold either. Change what is in them"
                )
        for index, (group, members) in enumerate(zip(self._dicts, self._members, strict=True)):
            if list(map(id, group["params"])) != members:
                raise InvalidRequest(
                    f"param_groups[{index}]['params']: has changed since the job was declared; arrange the groups before "
                    "distribute(). A parameter whose `.grad` is None is not stepped"
                )
            now = group_spec(specs[index], self._always, group)
            declared, flags = set(specs[index].flags), set(now.flags)
            # If momentum becomes 0, its slot is kept; if it was 0 at the declaration, there is no slot.
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
        return [scalar_values(spec, group, index) for index, (spec, group) in enumerate(zip(specs, self._dicts, strict=True))]


def _refuse_step(given: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse a step of the optimizer that was given to `distribute`: it would train this worker's copy only."""
    del args, kwargs
    raise InvalidRequest(
        f"{type(given).__name__}.step: this optimizer was given to psd.distribute(), and steps no more; step its result: "
        "optimizer = psd.distribute(model, optimizer)"
    )
