"""Plans of publications, drawn by a seed: publishers, readers and relays, and the faults that strike them. See plan.py."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from plan import LANES, LINKS, OF_READERS, Fault, Plan, Publishing, draw, drawn_fault
from stepping_plan import STEPPING_SHARE, stepping

SHARE = 0.15
"""Of all plans, those of publications."""

PUTS_BETWEEN = 5
"""Before each kill of a trial that is to have so many: 200 kills are 1000 publications."""


def draw_any(seed: int, *, may_mount: bool = False, may_learn: bool = False) -> Plan:
    """The plan of a seed, as `draw` has it, or one of publications, or of armed steps."""
    plan = draw(seed, may_mount=may_mount, may_learn=may_learn)
    source = random.Random(f"publications {seed}")
    if source.random() < SHARE:
        return _publishing(source, plan)
    of_steps = random.Random(f"steps {seed}")
    return stepping(of_steps, plan) if of_steps.random() < STEPPING_SHARE else plan


def _publishing(source: random.Random, plan: Plan) -> Plan:
    """Publications on as many shards, by one or two ranks."""
    ranks, readers, relays = source.choice((1, 1, 1, 2)), source.choice((1, 2, 3)), source.choice((0, 0, 1, 2))
    steps = plan.checkpoint_steps
    made = Plan(
        plan.seed,
        plan.lane,
        "exact",
        ranks,
        plan.shards,
        lease_s=plan.lease_s,
        wait_s=3.0,
        retry_s=3.0,
        checkpoint_steps=20 * steps,
        named=True,
        seconds=source.choice((4.0, 8.0)),
        publishing=Publishing(readers, relays, source.choice((0.005, 0.02, 0.1))),
    )
    faults = [publishing_fault(source, made) for _ in range(source.choice((1, 2, 4, 8)))]
    return replace(made, faults=tuple(sorted(faults, key=lambda fault: fault.at)))


def publishing_fault(source: random.Random, plan: Plan, kinds: Sequence[str] = ()) -> Fault:
    """A fault of publications, of these kinds, or of any."""
    assert plan.publishing is not None
    at_shards = ("shard-kill", "shard-kill", "shard-stop", "shard-terminate", "shard-lose")
    kind = source.choice(kinds or source.choice((at_shards, ("worker-kill", "worker-stop"), OF_READERS, LINKS)))
    if kind.startswith("relay") and not plan.publishing.relays:
        kind = kind.replace("relay", "reader")
    first = {"reader": plan.workers, "relay": plan.workers + plan.publishing.readers}.get(kind.split("-")[0], 0)
    clients = plan.workers + plan.publishing.readers + plan.publishing.relays
    count = {"worker": plan.workers, "reader": plan.publishing.readers, "relay": plan.publishing.relays}
    rank = first + source.randrange(count.get(kind.split("-")[0], clients))
    seconds = 0.0 if kind == "link-half-open" else source.choice((0.1, 0.5, 1.5))
    return drawn_fault(source, plan, kind, rank=-1 if kind.startswith("shard") else rank, seconds=seconds)


def publications_under_kills(seed: int, kills: int, seconds: float) -> Plan:
    """So many kills of shards, publishers, relays and readers, after PUTS_BETWEEN puts each, in so many seconds at most."""
    source = random.Random(seed)
    plan = Plan(
        seed,
        source.choice(LANES),
        "exact",
        1,
        2,
        lease_s=10.0,
        wait_s=3.0,
        retry_s=20.0,
        named=True,
        seconds=seconds,
        publishing=Publishing(3, 2, 0.005, PUTS_BETWEEN),
    )
    kinds = ("shard-kill", "shard-kill", "worker-kill", "relay-kill", "reader-kill")
    faults = tuple(replace(publishing_fault(source, plan, kinds), at=0.0, seconds=0.1) for _ in range(kills))
    return replace(plan, faults=faults)
