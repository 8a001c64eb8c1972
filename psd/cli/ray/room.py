"""Room on a Ray cluster for a job: reserves it, waits for it, and tells the user meanwhile what is missing.

Knows placement groups and the cluster's resources, but nothing of shards and workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from psd.cli.words.terminal import show
from psd.contract.config import ConfigError

NOTICE_S = 10.0
"""Seconds of waiting after which the user is told what is missing."""

PLACED_S = 600.0
"""Seconds for a job to get its room; a cluster that grows by itself may need minutes."""

_SLICE_S = 1.0
"""Length in seconds of a single wait: Ctrl-C works only between waits, because Ray does not check for signals in one."""


def reserve(ray: Any, bundles: Sequence[Mapping[str, float]], strategy: str = "SPREAD") -> Any:
    """Ask for the placement group of a job. Raises ConfigError if Ray refuses the bundles."""
    try:
        return ray.util.placement_group([dict(bundle) for bundle in bundles], strategy=strategy)
    except ValueError as error:
        raise ConfigError(f"resources: Ray refuses them: {error}") from error


def wait_for(ray: Any, group: Any) -> None:
    """Wait until a placement group has its room, and tell the user what is missing. Raises ConfigError if it takes too long."""
    seconds = 0.0
    while not group.wait(_SLICE_S):
        seconds += _SLICE_S
        if seconds == NOTICE_S:
            show(f"psd: {waiting_text(ray, group)}", is_error=True)
        if seconds >= PLACED_S:
            raise ConfigError(f"the Ray cluster has had no room for this job within {PLACED_S:g} s: {missing(ray, group)}")


def state(ray: Any, group: Any) -> str:
    """PENDING until a group has its room for the first time; CREATED while it has it; RESCHEDULING after the loss of a node."""
    return str(ray.util.placement_group_table(group).get("state"))


def waiting_text(ray: Any, group: Any) -> str:
    """Words that say what a group waits for."""
    return f"waiting for room on the Ray cluster: {missing(ray, group)}"


def missing(ray: Any, group: Any) -> str:
    """Words that say which resources the cluster lacks for a group."""
    return shortage(group.bundle_specs, ray.cluster_resources(), ray.available_resources())


def shortage(bundles: Sequence[Mapping[str, float]], total: Mapping[str, float], free: Mapping[str, float]) -> str:
    """Words that say what a cluster lacks for these bundles: resources, or one node that has enough for a whole bundle.

    Args:
        bundles: resources of each bundle, which must be on one node. total, free: resources of all nodes together.
    """
    wanted: dict[str, float] = {}
    for bundle in bundles:
        for name, count in bundle.items():
            wanted[name] = wanted.get(name, 0.0) + count
    short = [name for name in sorted(wanted) if wanted[name] > free.get(name, 0.0)]
    if short:
        return "; ".join(
            f"{name}: {wanted[name]:g} wanted, {free.get(name, 0.0):g} free of {total.get(name, 0.0):g}" for name in short
        )
    kinds = sorted({", ".join(f"{name}: {count:g}" for name, count in sorted(bundle.items())) for bundle in bundles})
    return f"there is enough in all, but not on single nodes, each of which must have all of one of these: {'; '.join(kinds)}"
