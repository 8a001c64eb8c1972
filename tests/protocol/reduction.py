"""Partial-order reduction: which actions are enough to look at in a state in which no more faults can strike.

In a calm state (everybody who takes part is known everywhere, and nothing is under way but calls) no call fails, so none is
given up, and what happens at one shard has no part in what happens at another until a worker has both answers. If every worker
has a call at a shard, then nothing new can come to that shard before one of them has been served: what can happen there next,
taken alone, is a persistent set (Godefroid 1996). Every end that can be reached is reached through it.
"""

from __future__ import annotations

from collections.abc import Sequence

from world import DEAD, OFF, ON, Action, State, World


def persistent(world: World, state: State, free: Sequence[Action]) -> Sequence[Action]:
    """As few of the free actions as it takes."""
    if len(free) < 2 or not _is_calm(world, state, free):
        return free
    active = [p for p, mode in enumerate(state.modes) if mode == ON and not state.workers[p].view.ended]
    best = free
    for shard in range(len(state.shards)):
        if all(any(slot == (shard, "op") for slot, _ in state.workers[p].view.calls) for p in active):
            here = [action for action in free if _shard_of(action) == shard]
            if here and len(here) < len(best):
                best = here
    return best


def _is_calm(world: World, state: State, free: Sequence[Action]) -> bool:
    if world.setting.has_schedule or state.late or state.inbox:
        return False
    if any(mode not in (ON, OFF, DEAD) for mode in state.modes):
        return False
    if any(action[0] not in ("deliver", "go") for action in free):
        return False
    for process, mode in enumerate(state.modes):
        view = state.workers[process].view
        if mode != ON or view.ended:
            continue
        if view.is_beating or view.sleeps:
            return False
        if view.session and any(node.view.live[world.ranks[process]] != view.session for node in state.shards):
            return False
    return True


def _shard_of(action: Action) -> int:
    return action[2][0] if action[0] == "deliver" else action[1]
