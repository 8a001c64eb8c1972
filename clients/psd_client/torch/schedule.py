"""A torch learning-rate scheduler at the job's clock, not at the number of this process's steps.

The two differ if a worker was restarted, has fallen behind, or has gone back to a checkpoint with its job. The scheduler is
then stepped until it reaches the clock, from its beginning if the clock has gone back, so that its numbers have the same bits
as in an undisturbed run. 100,000 steps take a second.

Must not know connections, gradients or shards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Protocol
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from psd.contract.arguments import whole_number
from psd.contract.errors import InvalidRequest


class Owner(Protocol):
    """The distributed optimizer that a scheduler belongs to."""

    def keep_schedule(self, given: LRScheduler, every: int) -> DistributedScheduler:
        """Use the schedule's learning rates in every push."""


_owners: WeakKeyDictionary[torch.optim.Optimizer, ReferenceType[Owner]] = WeakKeyDictionary()


def register(owner: Owner, *optimizers: torch.optim.Optimizer) -> None:
    """Register optimizers. Schedulers that are built on them then belong to `owner`."""
    for optimizer in optimizers:
        _owners[optimizer] = ref(owner)


def scheduler(given: LRScheduler, *, every: int = 1) -> DistributedScheduler:
    """Keep a schedule of learning rates at the job's clock, also after this process has restarted.

        schedule = psd.scheduler(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10_000))

    A worker that is restarted, joins a running job, falls behind, or goes back to a checkpoint with its job then has exactly
    the learning rates of the step at which it continues. The program calls `step()` as usual, after optimizer.step(); the next
    optimizer.step() makes up for missing calls.

    Args:
        given: a scheduler in its initial state, built on the optimizer that `distribute` returned or on the one passed to it.
            To use several schedulers, combine them with torch's ChainedScheduler or SequentialLR. Not ReduceLROnPlateau.
        every: number of optimizer steps for each step of the scheduler. For a schedule in epochs: the number of steps in an
            epoch, the same on all workers.

    Raises:
        TypeError: this is not a scheduler of torch.optim.lr_scheduler.
        InvalidRequest: the scheduler cannot be moved to any clock, has been stepped, or belongs to another optimizer.
    """
    _check(given)
    if whole_number(InvalidRequest, "every", every) < 1:
        raise InvalidRequest(f"every: must be at least 1, got {every}")
    found = _owners.get(given.optimizer)
    owner = found() if found is not None else None
    if owner is None:
        raise InvalidRequest("scheduler: its optimizer is neither distribute()'s result nor the one that was given to it")
    return owner.keep_schedule(given, every)


class DistributedScheduler(LRScheduler):
    """A scheduler whose position is the job's clock; made by `scheduler`. Its other attributes are the given one's.

    Args:
        given: a scheduler in its initial state.
        clock: returns the worker's clock.
        every: number of optimizer steps for each step of the scheduler.
    """

    def __init__(self, given: LRScheduler, clock: Callable[[], int], every: int) -> None:
        # Not the base's __init__, which makes a first step: `given` has made it.
        self._given = given
        self._clock = clock
        self._every = every
        self._position = 0
        self._is_stale = False
        self._steps_since = 0  # of the optimizer, since the program has called `step`
        self._start = _copied(given.state_dict(), given)
        groups = given.optimizer.param_groups
        self._options = [{name: _value(option) for name, option in group.items() if name != "params"} for group in groups]
        self._moved = {"lr"}
        self._mark = _mark(given)
        given.optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001 - else torch warns of the steps made here
        self.follow()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._given, name)

    def step(self, epoch: int | None = None) -> None:
        """Bring the learning rates to the job's clock, as optimizer.step() itself does before it pushes.

        Raises:
            InvalidRequest: an epoch is given; or the optimizer has made more than `every` steps since the last call, which
                shows that the schedule counts something other than the job's steps.
        """
        if epoch is not None:
            raise InvalidRequest("scheduler.step: takes no epoch; the position is the job's clock")
        steps, self._steps_since = self._steps_since, 0
        if steps > self._every:
            raise InvalidRequest(
                f"scheduler.step: came after {steps} steps of the optimizer, and every is {self._every}; a schedule in epochs "
                "needs scheduler(..., every=steps of an epoch), the same on all workers"
            )
        self.follow()

    def on_optimizer_step(self) -> None:
        """Note that the optimizer has made a step."""
        self._steps_since += 1

    def follow(self) -> None:
        """Bring the learning rates to the job's clock.

        Raises:
            InvalidRequest: the program has stepped the given scheduler itself.
        """
        if self._mark != _mark(self._given):
            raise InvalidRequest(
                "scheduler: the given one was stepped by the program; call step() of what psd_client.torch.scheduler() returned"
            )
        target = self._clock() // self._every
        if target < self._position or self._is_stale:
            self._rewind()
        while self._position < target:
            self._advance()

    def reapply(self) -> None:
        """Set the options that the schedule controls again, for instance after load_state_dict has replaced them."""
        self._is_stale = True
        self.follow()

    def get_last_lr(self) -> list[Any]:
        """The learning rates at the job's clock."""
        self.follow()
        return self._given.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """The position, for information only: the job's clock determines it."""
        return {"last_epoch": self._position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Ignore the state: the job's clock determines the position."""
        del state_dict
        self.follow()

    def _advance(self) -> None:
        groups = self._given.optimizer.param_groups
        before = [dict(group) for group in groups]
        self._given.step()
        for old, new in zip(before, groups, strict=True):
            self._moved.update(name for name in new if new[name] is not old.get(name))
        self._mark = _mark(self._given)
        self._position += 1

    def _rewind(self) -> None:
        """Move the scheduler back to the beginning."""
        self._given.load_state_dict(_copied(self._start, self._given))
        for group, options in zip(self._given.optimizer.param_groups, self._options, strict=True):
            for name in self._moved & options.keys():
                if isinstance(group[name], torch.Tensor):
                    group[name].copy_(options[name])
                else:
                    group[name] = _value(options[name])
        self._mark = _mark(self._given)
        self._position, self._is_stale = 0, False


def _check(given: Any) -> None:
    """Raise TypeError or InvalidRequest unless the scheduler can be moved to any clock."""
    if isinstance(given, DistributedScheduler) or not isinstance(given, LRScheduler):
        raise TypeError(f"scheduler: expected one of torch.optim.lr_scheduler, got {given!r}")
    for part in _parts(given):
        if isinstance(part, ReduceLROnPlateau):
            raise InvalidRequest(
                "scheduler: ReduceLROnPlateau follows what this worker has measured, not the clock, so that a worker that is "
                "started again cannot know where the others are. Use a schedule of steps; or step a ReduceLROnPlateau on all "
                "workers with the same numbers, and store it by save_client_state"
            )
        steps = getattr(part, "last_epoch", 0)
        if steps > 0:
            raise InvalidRequest(
                f"scheduler: {type(part).__name__} has been stepped {steps} times; pass it as it is at the job's step 0, "
                "without loading a state: it is brought to the job's clock"
            )


def _parts(scheduler: Any) -> Iterator[Any]:
    """The scheduler, and the schedulers that it combines."""
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _parts(part)


def _mark(scheduler: Any) -> list[Any]:
    """The counters that each step of the scheduler changes."""
    return [(vars(part).get("last_epoch"), vars(part).get("_step_count")) for part in _parts(scheduler)]


def _copied(state: dict[str, Any], scheduler: LRScheduler) -> dict[str, Any]:
    """A copy of the scheduler's state, which its steps do not change."""
    shared = [part for found in _parts(scheduler) for part in (found, found.optimizer)]
    return copy.deepcopy(state, {id(part): part for part in shared})


def _value(option: Any) -> Any:
    """The option's value; a copy if it can be changed in place."""
    return option.clone() if isinstance(option, torch.Tensor) else option
