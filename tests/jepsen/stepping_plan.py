"""Plans of armed steps, drawn by a seed: programs that do little else, and shards that revoke them. See plan.py."""

from __future__ import annotations

import random
from dataclasses import replace

from plan import DAMAGE, Plan

STEPPING_SHARE = 0.1
"""Of all plans but those of publications."""

_MODES = ("fast", "quorum-fast", "async", "ssp")


def stepping(source: random.Random, plan: Plan) -> Plan:
    """The same job, of armed steps: without checkpoints, and with nothing in it that they do not carry."""
    mode = source.choice(_MODES)
    kinds = {"shard-lose": "shard-kill", "disk-full": "shard-kill", DAMAGE: "shard-kill"}
    struck = [each for each in plan.faults if not each.kind.startswith("run-")]
    faults = tuple(replace(each, kind=kinds.get(each.kind, each.kind), at=round(each.at / 2, 3)) for each in struck)
    paces = {rank: source.choice((0.014, 0.02, 0.03)) for rank in range(3)}
    changed = {"has_tables": False, "has_vectors": False, "small_disk": False, "ends_dead": False, "is_launched": False}
    made = replace(
        plan,
        lane=source.choice(("shm", "tcp")),
        mode=mode,
        workers=max(plan.workers, 2 if mode.startswith("quorum") else 1),
        size="small",
        checkpoint_steps=0,
        codec="",
        pull="",
        learning=None,
        faults=faults,
        is_stepping=True,
        revoke_s=source.choice((0.0, 0.004, 0.02, 0.05)),
        **changed,
    )
    style = replace(plan.styles[0], barrier_every=0)
    styles = [replace(each, barrier_every=0) for each in plan.styles] + [style] * (made.workers - len(plan.styles))
    return replace(
        made,
        seconds=plan.seconds / 2,  # as a life's numbers last
        styles=tuple(
            replace(each, push_share=source.choice((0.0, 0.0, 0.1)), pace_s=paces[rank]) for rank, each in enumerate(styles)
        ),
    )
