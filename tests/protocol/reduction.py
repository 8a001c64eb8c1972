"""Partial-order reduction: which actions are enough to look at in a state in which no more faults can strike.

In a calm state no call can fail for good: whoever takes part is known to every shard, or is just coming in with nobody beside
it of its rank; nobody is suspended, sleeps, or has the choice; and nothing is under way but calls, the leases of those who
are gone, the patience of steps that wait, and a round's grace, whose end is an event of shard 0 as any call there. Then no
call is given up, and what happens at one shard has no part in what happens at another until a worker has both answers. If
every worker has a call at a shard, nothing new can come to that shard before one of them has been served: what can happen
there next, taken alone, is a persistent set (Godefroid 1996). Every end that can be reached is reached through it.
"""

from __future__ import annotations

from collections.abc import Sequence

from world import DEAD, OFF, ON, Action, State, World


def persistent(world: World, state: State, free: Sequence[Action]) -> Sequence[Action]:
    """As few of the free actions as it takes."""
    if len(free) < 2 or not _is_calm(world, state, free):
        return free
    active = _active(state)
    best = free
    for shard in range(len(state.shards)):
        if all(any(slot == (shard, "op") for slot, _ in state.workers[p].view.calls) for p in active):
            here = [action for action in free if _shard_of(action) == shard]
            if here and len(here) < len(best):
                best = here
    return best


def _active(state: State) -> list[int]:
    return [p for p, mode in enumerate(state.modes) if mode == ON and not state.workers[p].view.ended]


def _is_calm(world: World, state: State, free: Sequence[Action]) -> bool:
    setting, active = world.setting, _active(state)
    if setting.has_schedule or (setting.has_checkpoint and setting.faults) or setting.cuts or setting.reads:
        return False
    if state.late or state.inbox:
        return False
    if any(mode not in (ON, OFF, DEAD) for mode in state.modes) or any(action[0] not in _CALM for action in free):
        return False
    if any(node.view.is_blank or not node.view.is_up for node in state.shards):
        return False
    is_everybody_there = len(active) == sum(mode != OFF for mode in state.modes)
    if setting.aggregation == "exact" and not is_everybody_there and any(node.view.lives > 1 for node in state.shards):
        return False  # a shard may have lost what nobody sends again
    ranks = [world.ranks[process] for process in active]
    return len(set(ranks)) == len(ranks) and all(_is_settled(world, state, process) for process in active)


_CALM = ("deliver", "go", "long", "expire", "grace")


def _is_settled(world: World, state: State, process: int) -> bool:
    """True if no shard will refuse a worker: each has its session, or is about to get it."""
    view, rank = state.workers[process].view, world.ranks[process]
    if view.is_beating or view.sleeps:
        return False
    joining = {slot[0] for slot, number in view.calls if world.requests[number].kind == "join"}
    if joining == {0}:
        return True  # as a new session, with no call anywhere else
    return all(
        shard in joining or (view.session and node.view.live[rank] == view.session) for shard, node in enumerate(state.shards)
    )


def _shard_of(action: Action) -> int:
    return action[2][0] if action[0] == "deliver" else action[1]
