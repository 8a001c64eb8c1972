"""Explores the protocol: the real client and the real shards, in every order of events that a small world allows.

    make check-protocol              # everything with one fault; with two, and at random, what PROTOCOL_SECONDS of CPU allow
    python tests/protocol/check_protocol.py --only sync-fast --faults 2 --seconds 600

Two workers and two shards, and at random three of each; messages are lost, repeated and late, processes die, stall and return,
programs call again after errors, or call with another gradient; some jobs have tables beside their tensors. Where a world
says so, push_pulls travel as armed steps (fake_steps.py, step_serving.py), and shards also revoke them. setting.py says
what is explored, world.py what may happen, explorer.py in which order, programs.py and invariants.py what must hold; planted.py
has defects that it must find. green.py lets the client's threads run one at a time. A finding is told as the numbered events
that lead to it; the exit status is 1 if there is one. If there is none, the last line of a search says how much has been seen:
with each number of faults, everything, or what follows some of them.

Worlds with cuts have many more states, because heartbeats bring news to each shard at any moment. With one fault a smaller one
is seen whole in their place: one step of each worker, and a cut that is announced before it; or two cuts of a single shard.
With two faults it is the larger world again, where what happens without a fault is looked at first.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import green
import shard_process
import worker_process
from explorer import Explorer
from fake_steps import Wires
from setting import FAULTS, OF_STEPS, Setting
from stories import story
from world import World

_OF_CUTS = frozenset({"lose", "kill", "die", "timeout"})

_PUBLISHED: Mapping[str, Any] = {"is_published": True, "aggregation": "exact", "quorum": 1}

_OF_LEARNERS: Mapping[str, Any] = {"aggregation": "exact", "successor": "look_push_pull", "job": {"grace": 1.0}}
"""Of a world of learners, which ask for the job's clock, and whose rounds wait on after their quorum."""

_FRAGMENTS: Mapping[str, Any] = {"parts": 2, "blocks": 3, "quorum": 1, "programs": ("look_push_pull",) * 2, **_OF_LEARNERS}

_ONE_STEP = {"steps": 1, "early_cuts": 1}
"""Of a world with cuts that is seen whole. Its workers are in the midst of their only pushes when the cut is announced, and
hear of it at any moment. So a cut may come between the parts of a push; what is held for a cut are successors' pushes alone."""

_ONE_SHARD = {"shards": 1, "blocks": 1, "early_cuts": 2, "restores": 0}
"""Which of two cuts is the later one does not depend on how many shards take part."""

_ONE_ROUND = {"steps": 1, "faults": frozenset({"die", "kill", "cut"})}
"""Of worlds of fragments that are seen whole, in 19,275 states each: a round has its quorum, waits on, and may close without
the other learner, which then comes late; in this round a learner or a shard dies, or a push breaks off."""

_ONE_BLOCK = {"shards": 1, "blocks": 1}
"""Of a world with residuals that is seen whole, in 14,530 states: each block has its own, which no other has a part in."""

SETTINGS = (
    Setting("sync-fast"),
    Setting("sync-exact", aggregation="exact"),
    Setting("quorum", quorum=1),
    Setting("async", consistency="async"),
    Setting("ssp", consistency="ssp:1"),
    Setting("push-then-pull", programs=("push_then_pull", "push_pull")),
    Setting("push-then-pull-exact", aggregation="exact", programs=("push_then_pull", "push_pull")),
    Setting("push-only-exact", aggregation="exact", programs=("push_only", "push_pull")),
    Setting("barrier", programs=("push_only_barrier", "push_pull_barrier"), successor="push_pull_barrier"),
    Setting(
        "barrier-exact",
        aggregation="exact",
        programs=("push_only_barrier", "push_pull_barrier"),
        successor="push_pull_barrier",
    ),
    Setting("sum", programs=("push_pull_sum",) * 2, successor="push_pull_sum", steps=1),
    Setting("stop", programs=("stop_push_pull", "push_pull"), successor="stop_push_pull", steps=3),
    Setting("stop-exact", aggregation="exact", programs=("stop_push_pull", "push_pull"), successor="stop_push_pull", steps=3),
    Setting("schedule", has_schedule=True),
    Setting("slow-heartbeats", has_slow_beats=True, faults=frozenset({"kill", "stall", "timeout"})),
    Setting("parts", parts=2, blocks=3),
    Setting("parts-exact", parts=2, blocks=3, aggregation="exact"),
    Setting("parts-mistaken", parts=2, blocks=3, successor="push_pull_own_turns", faults=frozenset({"die", "stall"})),
    Setting("fragments", small=_ONE_ROUND, **_FRAGMENTS),
    Setting("residuals", has_residuals=True, small=_ONE_BLOCK),
    Setting("residuals-exact", has_residuals=True, aggregation="exact"),
    Setting("residuals-async", has_residuals=True, consistency="async"),
    Setting("residuals-back", has_residuals=True, has_checkpoint=True, faults=frozenset({"blank", "lose"})),
    Setting("residuals-fragments", has_residuals=True, small=_ONE_ROUND, **_FRAGMENTS),
    Setting("tables", tables=2),
    Setting("tables-exact", tables=2, aggregation="exact"),
    Setting("tables-async", tables=2, consistency="async"),
    Setting("cuts-async", consistency="async", cuts=1, restores=200, faults=_OF_CUTS, small=_ONE_STEP),
    Setting("cuts-ssp", consistency="ssp:1", cuts=1, restores=200, faults=_OF_CUTS, small=_ONE_STEP),
    Setting("cuts-sync", cuts=1, restores=200, faults=_OF_CUTS, small={"steps": 1}),
    Setting("cuts-tables-async", consistency="async", tables=1, cuts=1, restores=200, faults=_OF_CUTS, small=_ONE_STEP),
    Setting("two-cuts", consistency="async", cuts=2, restores=200, faults=frozenset({"die"}), small=_ONE_SHARD),
    Setting("readers", consistency="async", reads=1, faults=_OF_CUTS),
    Setting("publications", programs=("put",), successor="put", reads=2, **_PUBLISHED),
    Setting("lost-disks", faults=frozenset({"blank", "die", "lose"})),
)
"""Each with two steps of each worker. Slow heartbeats and lost disks are much to see, and have few other faults beside them.
Those with cuts, fragments or residuals are too large to be seen whole with a fault: with one, what they have as `small` is."""

_OF_ARMED = frozenset(FAULTS) - {"blank", "twice"} | frozenset(OF_STEPS)

_ARMED = Setting("", has_armed=True, early_steps=2, steps=3, faults=_OF_ARMED, saves=False, small={"shards": 1})
"""Whose workers are armed when the search begins: each has made two steps, and makes one more. With a fault it is searched
with one shard of two blocks. Seen whole so, in seconds to a minute of CPU each: 7,054 states with rounds, 3,781 with a
quorum, 1,710 and 1,740 without rounds and with a bound, 8,701 to 13,380 with barriers, sums, and pulls of their own; with
rows 1,201 and 1,984 of one worker, and 23,053 and 44,866 of two, without rounds and with them. Those with cuts of two
workers, or the end of a job, are larger: with rounds and a cut there are 3,532 states in which a fault has just struck."""

_ROWS: Mapping[str, Any] = {"tables": 1, "blocks": 1, "shards": 1, "rows_max": 2}
"""Of worlds whose steps bring rows, and may bring one that needs room, which no step has."""

_ROWS_OF_ONE: Mapping[str, Any] = {**_ROWS, "programs": ("push_pull",), "steps": 4}
"""Likewise of one worker. Its second new row takes the place of the first one."""

_STOPPED: Mapping[str, Any] = {"programs": ("push_pull_stop", "push_pull"), "successor": "push_pull_stop", "steps": 5}

ARMED = (
    _ARMED.but(name="armed-sync"),
    _ARMED.but(name="armed-quorum", quorum=1),
    _ARMED.but(name="armed-async", consistency="async"),
    _ARMED.but(name="armed-ssp", consistency="ssp:1"),
    _ARMED.but(name="armed-push-then-pull", programs=("push_then_pull", "push_pull")),
    _ARMED.but(
        name="armed-barrier", programs=("push_only_barrier", "push_pull_barrier"), successor="push_pull_barrier", shards=1
    ),
    _ARMED.but(name="armed-sum", programs=("push_pull_sum",) * 2, successor="push_pull_sum", shards=1),
    _ARMED.but(name="armed-stop", **_STOPPED),
    _ARMED.but(name="armed-schedule", has_schedule=True),
    _ARMED.but(name="armed-beats", has_slow_beats=True, shards=1, faults=frozenset({"kill", "stall", "timeout", *OF_STEPS})),
    _ARMED.but(name="armed-floors", early_steps=1, steps=4, shards=1, blocks=1, faults=frozenset({"die", *OF_STEPS})),
    _ARMED.but(name="armed-cuts", consistency="async", cuts=1, shards=1, faults=frozenset({"pause", *_OF_CUTS, *OF_STEPS})),
    _ARMED.but(name="armed-cuts-sync", cuts=1, shards=1, faults=frozenset({"pause", *_OF_CUTS, *OF_STEPS})),
    _ARMED.but(
        name="armed-readers",
        consistency="async",
        reads=1,
        shards=1,
        programs=("push_pull",),
        faults=frozenset({"pause", *_OF_CUTS, *OF_STEPS}),
    ),
    _ARMED.but(name="armed-lost-disks", shards=1, faults=frozenset({"blank", "die", "lose", *OF_STEPS})),
    _ARMED.but(name="armed-rows-async", consistency="async", **_ROWS),
    _ARMED.but(name="armed-rows-sync", **_ROWS),
    _ARMED.but(name="armed-rows-tables", consistency="async", **{**_ROWS_OF_ONE, "tables": 2}),
    _ARMED.but(
        name="armed-rows-cuts",
        consistency="async",
        cuts=1,
        faults=frozenset({"crash", "pause", *_OF_CUTS, *OF_STEPS}),
        **{**_ROWS, "programs": ("push_pull",)},
    ),
)
"""Worlds with fast aggregation whose push_pulls travel as armed steps. All other ones never arm: `steps_of` says why."""

_LARGE = Setting("", shards=3, blocks=4, steps=4, programs=("push_pull",) * 3, budget=6, faults=frozenset(FAULTS) - {"blank"})
_LARGE_ARMED = _LARGE.but(has_armed=True, faults=_LARGE.faults | {*OF_STEPS})
_MIXED = ("push_then_pull", "push_pull", "push_only")

WALKS = (
    _LARGE.but(name="sync", programs=_MIXED),
    _LARGE.but(name="quorum", quorum=2),
    _LARGE.but(name="exact", aggregation="exact", programs=_MIXED),
    _LARGE.but(name="exact-quorum", aggregation="exact", quorum=2),
    _LARGE.but(name="norms", aggregation="exact", job={"clip_norm": 1e30}),
    _LARGE.but(name="norms-quorum", aggregation="exact", quorum=2, job={"clip_norm": 1e30}),
    _LARGE.but(name="async", consistency="async", programs=_MIXED),
    _LARGE.but(name="ssp:0", consistency="ssp:0"),
    _LARGE.but(name="ssp:2", consistency="ssp:2"),
    _LARGE.but(name="barrier", programs=("push_pull_barrier",) * 3, successor="push_pull_barrier"),
    _LARGE.but(name="sum", programs=("push_pull_sum",) * 3, successor="push_pull_sum"),
    _LARGE.but(name="stop", programs=("stop_push_pull", "push_pull", "push_pull"), steps=5),
    _LARGE.but(name="parts", parts=2),
    _LARGE.but(name="parts-exact", parts=2, aggregation="exact"),
    _LARGE.but(name="parts-mistaken", parts=2, aggregation="exact", successor="push_pull_own_turns"),
    _LARGE.but(name="parts-quorum", parts=3, quorum=2),
    _LARGE.but(name="fragments", parts=3, quorum=2, programs=("look_push_pull",) * 3, **_OF_LEARNERS),
    _LARGE.but(name="residuals", has_residuals=True, programs=_MIXED),
    _LARGE.but(name="residuals-quorum", has_residuals=True, quorum=2),
    _LARGE.but(name="residuals-exact", has_residuals=True, aggregation="exact", programs=_MIXED),
    _LARGE.but(name="residuals-async", has_residuals=True, consistency="async", programs=_MIXED),
    _LARGE.but(
        name="residuals-fragments",
        has_residuals=True,
        parts=3,
        quorum=2,
        programs=("look_push_pull",) * 3,
        **_OF_LEARNERS,
    ),
    _LARGE.but(name="tables", tables=2),
    _LARGE.but(name="tables-exact", tables=2, aggregation="exact"),
    _LARGE.but(name="tables-async", tables=2, consistency="async"),
    _LARGE_ARMED.but(name="armed-sync-large"),
    _LARGE_ARMED.but(name="armed-quorum-large", quorum=2),
    _LARGE_ARMED.but(name="armed-async-large", consistency="async"),
    _LARGE_ARMED.but(name="armed-ssp-large", consistency="ssp:2"),
)
"""Larger worlds, through which to walk at random. So large a norm is measured, and never clips."""

SETUP_ACTIONS = 13
"""At the beginning of each story: both workers join and declare."""


@contextmanager
def exploring(setting: Setting) -> Iterator[World]:
    """A world to explore."""
    logging.disable(logging.CRITICAL)
    try:
        with green.green(*worker_process.stand_ins(), *shard_process.stand_ins()):
            world = World(setting)
            try:
                yield world
            finally:
                world.close()
                Wires.close()
    finally:
        logging.disable(logging.NOTSET)


def explore(
    setting: Setting,
    seconds: float = 0.0,
    *,
    states_max: int = 0,
    seed: int = 0,
    report: Callable[[str], None] = lambda _: None,
) -> tuple[Explorer, list[str]]:
    """Search for so many seconds of CPU or states, or until all is seen; what was found, as stories."""
    with exploring(setting) as world:
        explorer = Explorer(world, report=report, seconds=seconds, states_max=states_max, seed=seed)
        explorer.run()
        setup_actions = SETUP_ACTIONS if len(setting.programs) > 1 else 0
        told = [
            "\n".join((*finding.wrong, *story(world, finding.actions, from_step=setup_actions)))
            for finding in explorer.findings
        ]
        return explorer, told


def walk(setting: Setting, seeds: Iterable[int]) -> tuple[Explorer, list[str]]:
    """Walk through a world at random, once for each seed, until something is found: the story of it."""
    with exploring(setting) as world:
        explorer = Explorer(world)
        for seed in seeds:
            explorer.walk(seed)
            if explorer.findings:
                finding = explorer.findings[0]
                return explorer, ["\n".join((f"seed {seed}", *finding.wrong, *story(world, finding.actions, from_step=0)))]
        return explorer, []


def main() -> int:
    parser = argparse.ArgumentParser(description="Explore what can happen to psd's protocol.")
    parser.add_argument("--only", metavar="NAME", help=f"one of: {', '.join(setting.name for setting in (*SETTINGS, *ARMED))}")
    parser.add_argument("--faults", type=int, default=2, help="that may strike in one run, at most (default: 2)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="of CPU for each setting with two faults or more; 0, and with one: until all is seen (default: 60)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order in which faults are tried (default: 0)")
    args = parser.parse_args()
    settings = [setting for setting in (*SETTINGS, *ARMED) if args.only in (None, setting.name)]
    walks = [setting for setting in WALKS if args.only in (None, setting.name)]
    if not settings and not walks:
        parser.error(f"--only: there is no setting {args.only!r}")
    is_sound = True
    # With fewer faults first, although more include them: what follows the last fault can be reduced, and has an end.
    for setting, faults in itertools.product(settings, range(1, args.faults + 1)):
        say(f"== {setting.name}, {faults} faults")
        world = setting.with_one_fault() if faults == 1 else setting.but(budget=faults)
        explorer, told = explore(world, args.seconds if faults > 1 else 0.0, seed=args.seed, report=say)
        say(f"{explorer.states} states, {explorer.steps} steps, depth {explorer.depth}, {len(told)} findings; seen with")
        say(f"{explorer.extent()}")
        for text in told:
            say(text)
            is_sound = False
    for setting in walks:
        say(f"== walks, {setting.name}")
        explorer, told = walk(setting, _seeds(args.seed, args.seconds))
        say(f"{explorer.states} states, depth {explorer.depth}, {len(told)} findings")
        for text in told:
            say(text)
            is_sound = False
    return 0 if is_sound else 1


def _seeds(first: int, seconds: float) -> Iterator[int]:
    """Numbers from the first on, for so many seconds of CPU."""
    until = time.process_time() + seconds
    return itertools.takewhile(lambda _: time.process_time() < until, itertools.count(first))


def say(text: str) -> None:
    """Tell at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
