"""The search: every state that can be reached with so many faults, each once.

In layers: first what happens without a fault, then with one, and so on; within a layer depth first. A state that was reached
with
fewer faults has seen everything that can follow. So what is found first is found with as few faults as it takes.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from invariants import Invariants
from reduction import persistent
from world import ON, Action, State, World

DEPTH_MAX = 300
"""Actions, of which no run has so many unless a worker goes in circles."""

Chain = tuple[Any, Action] | None
"""The actions that lead to a state, the last one first."""


class Finding(NamedTuple):
    """A broken invariant: the actions that lead there from the beginning, and what is wrong."""

    actions: tuple[Action, ...]
    wrong: tuple[str, ...]


class Explorer:
    """One search.

    Args:
        report: is told from time to time how far it is. findings_max: ends when it has so many.

    Attributes:
        states, steps: that were found; taken. depth: of the longest path. findings.
    """

    def __init__(
        self,
        world: World,
        *,
        report: Callable[[str], None] = lambda _: None,
        findings_max: int = 1,
        seconds: float = 0.0,
        is_shortest: bool = False,
    ) -> None:
        self._world = world
        self._invariants = Invariants(world)
        self._report = report
        self._findings_max = findings_max
        self._is_shortest = is_shortest
        self._began = time.process_time()
        self._reported = self._began
        self._until = self._began + seconds if seconds else None
        self._seen: dict[int, int] = {}
        self.states = self.steps = self.depth = 0
        self.is_complete = True
        self.findings: list[Finding] = []
        self._kinds: set[str] = set()  # of findings, whatever the numbers in them

    def run(self) -> None:
        """Until everything is seen, or the findings are enough."""
        state, chain = self.set_up()
        budget = self._world.setting.budget
        layers: list[deque[tuple[State, Chain, int]]] = [deque() for _ in range(budget + 1)]
        layers[0].append((state, chain, 0))
        self._seen[hash(state)] = 0
        for layer, stack in enumerate(layers):
            while stack:
                state, chain, depth = stack.popleft() if self._is_shortest else stack.pop()
                if depth > DEPTH_MAX:
                    self._find(chain, ["the world does not come to an end"])
                    continue
                if self._seen[hash(state)] < layer:
                    continue  # reached since with fewer faults
                self._expand(state, chain, depth, layer, layers)
                if len(self.findings) >= self._findings_max:
                    return
                if self._until is not None and time.process_time() > self._until:
                    self.is_complete = False
                    return
            self._report(self.summary(layer, layers))

    def set_up(self) -> tuple[State, Chain]:
        """All workers have joined, declared and pulled; one after the other."""
        world = self._world
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
        return state, chain

    def _expand(self, state: State, chain: Chain, depth: int, layer: int, layers: list[list[Any]]) -> None:
        self.states += 1
        self.depth = max(self.depth, depth)
        budget = self._world.setting.budget
        options = [(action, cost) for action, cost in self._world.options(state) if layer + cost <= budget]
        free = [action for action, cost in options if not cost]
        wrong = self._invariants.check(state, free)
        if wrong:
            self._find(chain, wrong)
            return
        if layer == budget:
            free = persistent(self._world, state, free)
            options = [(action, 0) for action in free]
        while options:
            action, cost = options.pop()
            result = self._world.take(state, action)
            self.steps += 1
            if result.wrong:
                self._find((chain, action), result.wrong)
                continue
            if result.lost and "late" in self._world.setting.faults and layer + cost < budget:
                options.append((("+late", action), cost + 1))
            known = self._seen.get(hash(result.state))
            after = layer + cost
            if known is None or known > after:
                self._seen[hash(result.state)] = after
                layers[after].append((result.state, (chain, action), depth + 1))
        now = time.process_time()
        if now - self._reported > 10:
            self._reported = now
            self._report(self.summary(layer, layers))

    def _find(self, chain: Chain, wrong: Any) -> None:
        kind = re.sub(r"[0-9]+(, [0-9]+)*,?", "N", str(sorted(wrong)))
        if kind not in self._kinds:
            self._kinds.add(kind)
            self.findings.append(Finding(actions_of(chain), tuple(wrong)))

    def summary(self, layer: int, layers: list[list[Any]]) -> str:
        """How far the search is."""
        nodes = [len(a.nodes) for a in (*self._world.workers, *self._world.shards)]
        runs = sum(a.runs for a in (*self._world.workers, *self._world.shards))
        return (
            f"{time.process_time() - self._began:6.0f} s: {layer} faults: {self.states} states, {self.steps} steps, "
            f"depth {self.depth}, {[len(stack) for stack in layers]} to see; the processes have {nodes} states, "
            f"after {runs} events of real code"
        )


def actions_of(chain: Chain) -> tuple[Action, ...]:
    """The actions, the first one first."""
    found = []
    while chain is not None:
        chain, action = chain
        found.append(action)
    return tuple(reversed(found))
