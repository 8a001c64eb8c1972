"""The search: every state that can be reached with so many faults, each once; and walks at random through larger worlds.

In layers: first what happens without a fault, then with one, and so on; within a layer depth first. A state that was reached
with fewer faults has seen everything that can follow. So what is found first is found with as few faults as it takes.
"""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from invariants import Invariants
from reduction import persistent
from restored_worlds import Restores
from world import ON, Action, State, World

DEPTH_MAX = 300
"""Actions, of which no run has so many unless a worker goes in circles."""

WALK_MAX = 3000
"""Actions of one walk."""

FAULTS_SHARE = 1 / 15
LATE_SHARE = 1 / 2
"""Probabilities: of a fault, where one may strike; that a message which was lost comes late."""

LOOKS_AT_CLOCK = 64
"""States after which the search looks at the clock."""

REPORT_S = 30.0

Chain = tuple[Any, Action] | None
"""The actions that lead to a state, the last one first."""


class Finding(NamedTuple):
    """A broken invariant: the actions that lead there from the beginning, and what is wrong."""

    actions: tuple[Action, ...]
    wrong: tuple[str, ...]


class Explorer:
    """One search. The same arguments lead to the same states in the same order, but for `seconds`.

    Args:
        report: is told from time to time how far it is. findings_max: ends when it has so many. seconds: of CPU at most;
            states_max: to look at at most; 0: until all is seen. seed: of the order in which faults are tried, so that a search
            that is cut short has seen some of everything.

    Attributes:
        world: that is searched. states, steps: that were found; taken. depth: of the longest path. findings.
        strikes: by number of faults, the states in which the last of them has just struck: how many there are, and how many
            have been followed to all their ends.
    """

    def __init__(
        self,
        world: World,
        *,
        report: Callable[[str], None] = lambda _: None,
        findings_max: int = 1,
        seconds: float = 0.0,
        states_max: int = 0,
        seed: int = 0,
    ) -> None:
        self.world = world
        self._invariants = Invariants(world)
        self._restores = Restores(world, lambda other: Explorer(other, states_max=world.setting.restores))
        self._report = report
        self._findings_max = findings_max
        self._random = random.Random(seed)
        self._began = self._reported = self._now = time.process_time()
        self._until = self._began + seconds if seconds else math.inf
        self._states_max = states_max or math.inf
        self._budget = world.setting.budget
        self._seen: dict[int, int] = {}
        self._stacks: list[list[tuple[State, Chain, int]]] = [[] for _ in range(self._budget + 1)]
        self.states = self.steps = self.depth = 0
        self.strikes: list[tuple[int, int]] = []
        self.findings: list[Finding] = []
        self._kinds: set[str] = set()  # of findings, whatever the numbers in them

    def run(self) -> None:
        """Until everything is seen, or the findings are enough, or the time is over."""
        state, chain = self.set_up()
        self._seen[hash(state)] = 0
        self._stacks[0].append((state, chain, 0))
        for layer, stack in enumerate(self._stacks):
            self._random.shuffle(stack)
            self.strikes.append((len(stack), 0))
            while stack:
                self.strikes[-1] = (self.strikes[-1][0], max(self.strikes[-1][1], self.strikes[-1][0] - len(stack)))
                state, chain, depth = stack.pop()
                if self._seen[hash(state)] < layer:
                    continue  # reached since with fewer faults
                if depth > DEPTH_MAX:
                    self._find(chain, ["the world does not come to an end"])
                else:
                    self._expand(state, chain, depth, layer)
                if len(self.findings) >= self._findings_max or self.states >= self._states_max or self._is_late():
                    return
            self.strikes[-1] = (self.strikes[-1][0],) * 2
            self._report(self.summary())

    def _is_late(self) -> bool:
        """True if the time is over; to look at the clock is not cheap."""
        if self.states % LOOKS_AT_CLOCK == 0:
            self._now = time.process_time()
            if self._now - self._reported > REPORT_S:
                self._reported = self._now
                self._report(self.summary())
        return self._now > self._until

    def set_up(self) -> tuple[State, Chain]:
        """All workers have joined, declared and pulled, one after the other; steps and cuts that are early are
        made and announced."""
        world = self.world
        state, chain = world.initial(), None
        for process in range(len(world.setting.programs)):
            while not (state.workers[process].view.options or state.workers[process].view.is_begun):
                free = [
                    a for a, cost in world.options(state) if not cost and a[:2] in (("start", process), ("deliver", process))
                ]
                if not free:
                    break  # the last one has set all going
                result = world.take(state, free[0])
                assert not result.wrong, result.wrong
                state, chain = result.state, (chain, free[0])
        assert all(state.modes[p] == ON and state.workers[p].view.is_begun for p in range(len(world.setting.programs)))
        while behind := [p for p in range(len(world.setting.programs)) if self._is_early(state, p)]:
            free = [a for a, cost in world.options(state, with_faults=False) if not cost and _process_of(a) in behind]
            result = world.take(state, free[0])
            assert not result.wrong, result.wrong
            state, chain = result.state, (chain, free[0])
        for _ in range(world.setting.early_cuts):
            result = world.take(state, ("announce", 0))
            assert not result.wrong, result.wrong
            state, chain = result.state, (chain, ("announce", 0))
        return state, chain

    def _is_early(self, state: State, process: int) -> bool:
        """True if a worker has yet to make a step that comes before all others."""
        return state.workers[process].view.clock < self.world.setting.early_steps

    def walk(self, seed: int) -> None:
        """Follow one run to its end: in each state an action that is drawn, mostly one that is no fault."""
        drawn = random.Random(seed)
        state, chain = self.set_up()
        left = self._budget
        for depth in range(WALK_MAX):
            options, free = self._look(state, chain, depth, with_faults=left > 0)
            kinds: dict[str, list[tuple[Action, int]]] = {}
            for action, cost in options:
                if cost:
                    kinds.setdefault(str(action[3] if action[0] == "deliver" else action[0]), []).append((action, cost))
            if self.findings or not options:
                return
            is_fault = kinds and (not free or drawn.random() < FAULTS_SHARE)
            action, cost = drawn.choice(kinds[drawn.choice(sorted(kinds))]) if is_fault else (drawn.choice(free), 0)
            result = self.world.take(state, action)
            if result.lost and cost < left and "late" in self.world.setting.faults and drawn.random() < LATE_SHARE:
                action, cost = ("+late", action), cost + 1
                result = self.world.take(state, action)
            self.steps += 1
            left -= cost
            state, chain = result.state, (chain, action)
            if result.wrong:
                self._find(chain, result.wrong)
                return
        self._find(chain, ["the world does not come to an end"])

    def _look(
        self, state: State, chain: Chain, depth: int, *, with_faults: bool
    ) -> tuple[list[tuple[Action, int]], list[Action]]:
        """The actions that are possible, with their costs, and those that cost nothing; finds what is wrong."""
        self.states += 1
        self.depth = max(self.depth, depth)
        options = self.world.options(state, with_faults=with_faults)
        free = [action for action, cost in options if not cost]
        if not any(self._invariants.must_happen(state, action) for action in free):
            options += [(action, 0) for action in self.world.overdue(state)]
            free += self.world.overdue(state)
        wrong = self._invariants.check(state, free)
        if self.world.setting.restores:
            wrong += self._restores.check(state, self._invariants.sure(state))
        if wrong:
            self._find(chain, wrong)
            return [], []
        return options, free

    def _expand(self, state: State, chain: Chain, depth: int, layer: int) -> None:
        is_last = layer == self._budget
        options, free = self._look(state, chain, depth, with_faults=not is_last)
        if is_last and options:
            options = [(action, 0) for action in persistent(self.world, state, free)]
        while options:
            action, cost = options.pop()
            result = self.world.take(state, action)
            self.steps += 1
            if result.wrong:
                self._find((chain, action), result.wrong)
                continue
            after = layer + cost
            if result.lost and after < self._budget and "late" in self.world.setting.faults:
                options.append((("+late", action), cost + 1))
            key = hash(result.state)
            known = self._seen.get(key)
            if known is None or known > after:
                self._seen[key] = after
                self._stacks[after].append((result.state, (chain, action), depth + 1))

    def _find(self, chain: Chain, wrong: Any) -> None:
        kind = re.sub(r"[0-9]+(, [0-9]+)*,?", "N", str(sorted(wrong)))
        if kind not in self._kinds:
            self._kinds.add(kind)
            self.findings.append(Finding(actions_of(chain), tuple(wrong)))

    def summary(self) -> str:
        """How far the search is."""
        automata = (*self.world.workers, *self.world.shards)
        return (
            f"{self._now - self._began:6.0f} s: {self.states} states, {self.steps} steps, depth {self.depth}; {self.extent()}; "
            f"the processes have {[len(automaton.nodes) for automaton in automata]} states, after "
            f"{sum(automaton.runs for automaton in automata)} events of real code"
        )

    def extent(self) -> str:
        """What of the whole has been seen."""
        parts = []
        for faults, (count, followed) in enumerate(self.strikes):
            if followed == count:
                parts.append(f"{faults} faults: everything")
            else:
                parts.append(f"{faults} faults: {followed} of the {count} states in which the last one has struck")
        parts += [f"{faults} faults: nothing" for faults in range(len(self.strikes), self._budget + 1)]
        return ", ".join(parts)


def _process_of(action: Action) -> int:
    """The worker whose call an action goes on with; -1: none."""
    return action[1] if action[0] == "deliver" else action[2][0] if action[0] == "go" else -1


def actions_of(chain: Chain) -> tuple[Action, ...]:
    """The actions, the first one first."""
    found = []
    while chain is not None:
        chain, action = chain
        found.append(action)
    return tuple(reversed(found))
