"""The worker that speaks for a round: its scalars are used for the update. Must not know how gradients are added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

Scalars = tuple[tuple[float, ...], ...]
"""One tuple per group, in the order of the rule's list."""


class Voice(NamedTuple):
    """One worker's say in the scalars of a round. The least one holds: that of the worker that has been in the job longest.

    So the order in which gradients come does not matter, and shards agree that have heard the same workers.

    Attributes:
        since: the clock since which the worker has been there without a gap, as PushHeader.since says it.
        scalars: of one group, or of all.
    """

    since: int
    rank: int
    scalars: Sequence[Any]
