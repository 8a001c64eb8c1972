"""The staleness option, for the age of gradients in async and ssp: its word, and the rules that allow it.

A gradient's *age* is the number of updates of its block since the worker read the parameters from which it was computed.
psd/state/aggregation/staleness.py acts on it. Must not know blocks or messages.
"""

from __future__ import annotations

from psd.contract.arguments import refuse
from psd.contract.errors import InvalidRequest
from psd_core.optimizer import RuleFacts

RATE = "lr"
"""The learning rate is divided by 1 + age (Zhang et al. 2016, arXiv:1511.05950)."""


def parse_staleness(word: str | None) -> str:
    """The staleness that a program asks for; "" for None. InvalidRequest says what was expected."""
    if not isinstance(word, str | None) or word not in (None, "", RATE):
        refuse(InvalidRequest, "staleness", f'"{RATE}" or None', word)
    return word or ""


def check_staleness(name: str, rule: RuleFacts) -> None:
    """Raise InvalidRequest unless a rule can be combined with `name`."""
    if not name:
        return
    if name != RATE:
        raise InvalidRequest(f"groups.staleness: must be {RATE!r} or empty, got {name!r}")
    if "lr" not in rule.scalars or not rule.row.lr_scales_steps:
        reason = "has no lr to divide" if rule.row.lr_scales_steps else "computes the parameters from lr anew at each update"
        raise InvalidRequest(f"groups.staleness: {RATE!r} does not go with rule {rule.name!r}, which {reason}")
