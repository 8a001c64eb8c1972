"""The assignment of a job's processes to its hosts. A host of a job is called a node, and has a number.

    --nnodes 2 --shards 3 --workers 5     node 0: shards 0 and 2, workers 0 to 2     node 1: shard 1, workers 3 and 4

The workers of a node have consecutive ranks, so that a slice of the data is read on one host. Shards go to the nodes in turn,
so that a node has at most one more than another. Pure; knows no addresses.
"""

from __future__ import annotations

from dataclasses import dataclass

from psd.cli.job.actions import Name


@dataclass(frozen=True)
class NodePlaces:
    """The node of each of a job's processes.

    Attributes:
        shards: number of shards. workers: number of workers of each node.
    """

    shards: int
    workers: tuple[int, ...]

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.workers)

    def node_of(self, name: Name) -> int:
        """The node that runs a process."""
        if name.kind == "shard":
            return name.number % self.nodes
        return next(node for node in range(self.nodes) if name.number in self.ranks(node))

    def ranks(self, node: int) -> range:
        """Ranks of a node's workers."""
        first = sum(self.workers[:node])
        return range(first, first + self.workers[node])

    def names(self, node: int) -> list[Name]:
        """A node's processes, its shards first."""
        shards = [Name("shard", index) for index in range(node, self.shards, self.nodes)]
        return [*shards, *(Name("worker", rank) for rank in self.ranks(node))]


def spread(workers: int, nodes: int) -> tuple[int, ...]:
    """Numbers of workers of each node, as equal as possible: the first nodes may have one more."""
    return tuple(workers // nodes + (node < workers % nodes) for node in range(nodes))
