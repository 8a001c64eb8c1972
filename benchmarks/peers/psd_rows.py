"""One worker of psd with sparse tables: pulls the rows of a step's ids and pushes gradients, over a given transport."""

from __future__ import annotations

import numpy as np
import rows
from turns import Turns

import psd_client
from psd_client.client import worker_of

CHUNK = 20_000
"""Rows that are made in one push."""


def main() -> None:
    """Join, and take turns."""
    turns = Turns()
    told = turns.arguments
    turn = rows.Turn(told, as_drawn=not told.get("is_distinct"), in_one=told.get("in_one", False))
    where = told["servers"], told["rank"], told["workers"]
    adagrad = psd_client.Adagrad(lr=rows.LR, eps=rows.EPS)
    names = [f"t{number:02}" for number in range(turn.shape.tables)]
    with psd_client.connect(*where, transport=told["transport"], wait_timeout=120) as ps:
        tables = [psd_client.Table(name, dim=turn.shape.dim, optimizer=adagrad) for name in names]
        ps.declare({}, None, consistency=told["consistency"], reduce="sum", tables=tables)
        worker = worker_of(ps)  # as the faces of frameworks do: all tables' rows in one round trip

        # So that all rows exist, as they do elsewhere: gradients of zero leave the rule's sums as they are.
        for start in range(0, turn.shape.rows, CHUNK * told["workers"]):
            ids = np.arange(start, min(turn.shape.rows, start + CHUNK * told["workers"]))[told["rank"] :: told["workers"]]
            ps.push({}, tables={name: (ids, np.zeros((len(ids), turn.shape.dim), np.float32)) for name in names})

        def step() -> None:
            parts = turn.next()
            worker.pull_rows({number: ids for number, (ids, _) in enumerate(parts)})
            if told.get("fetches_ahead", True):
                worker.prefetch_rows({number: ids for number, (ids, _) in enumerate(turn.following())})
                ps.push_pull({}, tables=dict(zip(names, parts, strict=True)))
            else:
                ps.push({}, tables=dict(zip(names, parts, strict=True)))

        def verify(pushes: list[int]) -> str:
            ps.barrier(f"after {sum(pushes)} pushes")
            return turn.check.difference(ps.tables[names[0]].pull(turn.check.ids), pushes[told["rank"]])

        turns.work(step, verify)


if __name__ == "__main__":
    main()
