"""A process as an automaton: its states are found by running the real code, each event in each state once.

A state is a node: an equivalence class of histories by the process's key, with one history that leads there. A live process
stands at one node at a time; to go on from another node one is started anew and given that node's history. So what the world's
states are made of costs the real code's time once, and a table look-up ever after. Must not know what events mean.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

LIVE_MAX = 400
"""Live processes that are kept."""


class Process(Protocol):
    """What an automaton runs."""

    def apply(self, event: Any, *, is_known: bool = False) -> Any:
        """Let an event happen; what it has led to, unless that is known."""
        ...

    def view(self) -> Any:
        """What others need to know of the state."""
        ...

    def key(self, view: Any) -> bytes:
        """What the state is known by."""
        ...

    def end(self) -> None:
        """Let go of everything."""
        ...


class Node:
    """A state of the process.

    Attributes:
        number: of all nodes of the automaton. view: see Process. parent, event: the history that leads here.
    """

    __slots__ = ("edges", "event", "number", "parent", "view")

    def __init__(self, number: int, view: Any, parent: Node | None, event: Any) -> None:
        self.number = number
        self.view = view
        self.parent = parent
        self.event = event
        self.edges: dict[Any, tuple[Node, Any]] = {}

    def __repr__(self) -> str:
        return f"<node {self.number}>"


class Automaton:
    """The states of one process that have been found. `make` starts the process.

    Attributes:
        runs: events that the real code was given, those of repeated histories included.
    """

    def __init__(self, make: Callable[[], Process]) -> None:
        self._make = make
        self._live: OrderedDict[Node, Process] = OrderedDict()
        self._by_key: dict[bytes, Node] = {}
        self.nodes: list[Node] = []
        self.runs = 0
        process = make()
        self.root = self._node(process, None, None)
        self._keep(self.root, process)

    def _node(self, process: Process, parent: Node | None, event: Any) -> Node:
        view = process.view()
        key = process.key(view)
        node = self._by_key.get(key)
        if node is None:
            node = self._by_key[key] = Node(len(self.nodes), view, parent, event)
            self.nodes.append(node)
        return node

    def step(self, node: Node, event: Any) -> tuple[Node, Any]:
        """Where an event leads from a node, and what it has led to."""
        found = node.edges.get(event)
        if found is None:
            process = self._at(node)
            self.runs += 1
            told = process.apply(event)
            after = self._node(process, node, event)
            found = node.edges[event] = (after, told)
            self._keep(after, process)
        return found

    def _at(self, node: Node) -> Process:
        """A live process that stands at the node; nobody else's."""
        process = self._live.pop(node, None)
        if process is not None:
            return process
        events: list[Any] = []
        while node.parent is not None:
            events.append(node.event)
            node = node.parent
        process = self._make()
        for event in reversed(events):
            process.apply(event, is_known=True)
            self.runs += 1
        return process

    def _keep(self, node: Node, process: Process) -> None:
        if node in self._live:
            process.end()
            return
        self._live[node] = process
        if len(self._live) > LIVE_MAX:
            self._live.popitem(last=False)[1].end()

    def history(self, node: Node) -> list[Any]:
        """The events that lead to a node."""
        events: list[Any] = []
        while node.parent is not None:
            events.append(node.event)
            node = node.parent
        return events[::-1]

    def close(self) -> None:
        """End all live processes."""
        while self._live:
            self._live.popitem()[1].end()
