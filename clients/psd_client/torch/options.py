"""The rules that correspond to torch's optimizers, and their options, by torch's names.

Decides which classes and options psd has, and what goes with overlap, and refuses the others by name. Imports no torch: it
looks at names and values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from psd.contract.environment import job_defaults
from psd.contract.errors import InvalidRequest
from psd.contract.keywords import JobKeywords
from psd_core.optimizer import option_of
from psd_core.rules import CLASSES, RULES

_CLASSES = {kind.__name__: kind for kind in CLASSES if kind.is_in_torch}

_IGNORED = {"foreach", "fused"}
"""Options that choose between torch's kernels for the same arithmetic. The shards have their own, so any value is right."""


def rule_of(kind: type, optim: ModuleType) -> tuple[str, tuple[str, ...]]:
    """The rule of a class of torch.optim, and the flags that the class implies.

    Raises:
        TypeError: another class, or a subclass of one; the message names it.
    """
    for name, ours in _CLASSES.items():
        if kind is getattr(optim, name):
            return ours.rule, ours.always
    shown = f"{'torch.optim' if kind.__module__.startswith('torch.optim.') else kind.__module__}.{kind.__qualname__}"
    for base in kind.__mro__:
        if base.__name__ in _CLASSES and base is getattr(optim, base.__name__):
            raise TypeError(
                f"{shown} is a subclass of torch.optim.{base.__name__}, and the shards cannot run its code; "
                f"supported: {base.__name__} itself"
            )
    raise TypeError(
        f"{shown} is not supported yet; supported: {', '.join(_CLASSES)}; for a rule of your own see psd_client.CustomRule"
    )


def check_options(rule: str, options: Mapping[str, Any], index: int) -> None:
    """Raise InvalidRequest if an option is set that the shards would not honour."""
    info = RULES[rule]
    honoured = {*map(option_of, info.scalars), *info.flags, *info.constants}
    for option, value in options.items():
        if option not in honoured | _IGNORED and value:
            raise InvalidRequest(f"param_groups[{index}]: {option}={value!r} is not supported by psd; leave it off")


def has_slots(state: Mapping[str, Any]) -> str | None:
    """The first slot in a parameter's state, or None if no step has written any.

    Adagrad makes its slots when it is built; they do not count before the first step.
    """
    if float(state.get("step", 1)) == 0:
        return None
    return next((slot for slot, value in state.items() if value is not None), None)


def check_no_slots(states: Iterable[Mapping[str, Any]], what: str) -> None:
    """Raise InvalidRequest if there are slots, because they would be lost. what: begins the message."""
    for state in states:
        slot = has_slots(state)
        if slot:
            raise InvalidRequest(
                f"{what} holds {slot!r}, which would be lost: the shards keep the slots themselves; give its state_dict() to "
                "load_state_dict() of what distribute() returns"
            )


def check_overlap(overlap: bool | str, job: JobKeywords) -> None:
    """Raise InvalidRequest if `overlap` is no such word, or does not go with the job's keywords."""
    mode = job_defaults().consistency_of(job.get("consistency"))
    if overlap not in (False, True, "forward"):
        raise InvalidRequest(f'overlap: must be False, True or "forward", got {overlap!r}')
    if overlap == "forward" and mode.mode != "async":
        raise InvalidRequest(
            f'overlap: "forward" is for consistency="async", where parameters may be old; this job is {str(mode)!r}'
        )
    if overlap and job.get("clip_norm") is not None and not mode.has_rounds:
        raise InvalidRequest(
            f"overlap: not with clip_norm under consistency={str(mode)!r}, where each push is clipped by its own norm, which "
            'is known only when back-propagation has ended; leave one of them out, or use consistency="sync"'
        )
    if overlap and job.get("nan_policy") == "skip":
        raise InvalidRequest('overlap: not with nan_policy="skip", which looks at the whole gradient before anything is sent')
