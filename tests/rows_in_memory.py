"""A worker whose tables are arrays in memory, for tests of what embeddings make of rows and gradients."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from psd_client.lanes.daemon_threads import Crew
from psd_client.torch.tables import Tables
from psd_client.worker.worker import Turn

IDS = 50


class RowsInMemory:
    """Tables whose rows of the ids 0 to IDS - 1 are arrays. Keeps what was asked for.

    Args:
        dims: of the tables.
    """

    def __init__(self, *dims: int, mode: str = "sync") -> None:
        generator = np.random.default_rng(0)
        self.rows = [generator.normal(size=(IDS, dim)).astype(np.float32) for dim in dims]
        self.parameters = SimpleNamespace(layout=SimpleNamespace(spec=SimpleNamespace(consistency=SimpleNamespace(mode=mode))))
        self.clock = self.times_gone_back = 0
        self.pulls: list[tuple[dict[int, list[int]], bool]] = []
        self.error: Exception | None = None
        self.turn: Turn | None = None
        self.background = Crew("background")

    def take_turn(self, turn: Turn) -> None:
        """See FlatCalls."""
        turn.before, self.turn = self.turn, turn

    def pull_rows(self, wanted, *, counts_no_use=False, turn=None):
        self.pulls.append(({table: sorted(map(int, ids)) for table, ids in wanted.items()}, counts_no_use))
        if self.error is not None:
            raise self.error
        return {table: self.rows[table][ids.astype(np.int64)] for table, ids in wanted.items()}

    def weight(self, table: int = 0) -> torch.Tensor:
        """A copy of the rows."""
        return torch.from_numpy(self.rows[table].copy())

    def join(self, *embeddings):
        """Tables for embeddings, in this order, a table for each name."""
        members = {}
        for embedding in embeddings:
            members.setdefault(embedding.spec.name, []).append(embedding)
        return Tables(self, members)


def dense(tables: Tables, dim: int, table: int = 0) -> torch.Tensor:
    """What has been collected for one table, as a dense gradient."""
    total = torch.zeros(IDS, dim)
    ids, gradients = tables.gradients().get(table, (np.empty(0, np.uint64), np.empty((0, dim), np.float32)))
    assert len(set(ids.tolist())) == len(ids)
    total[torch.from_numpy(ids.astype(np.int64))] = torch.from_numpy(gradients.copy())
    return total
