"""A sparse table in Ray: an actor holds the rows, worker actors pull and push.

This process drives them and counts as all workers, which do not wait for each other within a step. The rule is written with
NumPy's indexing, in place.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import ray
import rows
from turns import Turns


@ray.remote
class Server:
    """Rows and their sums of squares."""

    def __init__(self, count: int, dim: int) -> None:
        self._values = np.zeros((count, dim), np.float32)
        self._sums = np.zeros((count, dim), np.float32)

    def pid(self) -> int:
        """Process id of the server."""
        return os.getpid()

    def pull(self, ids: rows.Array) -> rows.Array:
        """Values of rows."""
        return self._values[ids]

    def push(self, ids: rows.Array, grads: rows.Array) -> None:
        """Apply Adagrad to rows; ids are distinct."""
        total = self._sums[ids] + grads * grads
        self._sums[ids] = total
        self._values[ids] -= np.float32(rows.LR) * grads / (np.sqrt(total) + np.float32(rows.EPS))


@ray.remote
class Worker:
    """One worker."""

    def __init__(self, server: Any, told: dict[str, Any]) -> None:
        self._server, self._turn = server, rows.Turn(told)
        self._rank = told["rank"]

    def step(self) -> None:
        """Pull and push."""
        for ids, grads in self._turn.next():
            ray.get(self._server.pull.remote(ids))
            ray.get(self._server.push.remote(ids, grads))

    def difference(self, pushes: list[int]) -> str:
        """The fault of the rows."""
        values = ray.get(self._server.pull.remote(self._turn.check.ids))
        return self._turn.check.difference(values, pushes[self._rank])


def main() -> None:
    """Take turns."""
    turns = Turns()
    told = turns.arguments
    shape = rows.Shape(*told["shape"])
    ray.init(
        num_cpus=told["workers"] + 1,
        object_store_memory=400_000_000,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.path.dirname(os.path.abspath(__file__))}},  # noqa: PTH100, PTH120
    )
    server = Server.remote(shape.rows, shape.dim)
    workers = [Worker.remote(server, {**told, "rank": rank}) for rank in range(told["workers"])]
    pid = ray.get(server.pid.remote())
    ray.get([worker.difference.remote([0] * told["workers"]) for worker in workers])

    def verify(pushes: list[int]) -> str:
        return "; ".join(filter(None, ray.get([worker.difference.remote(pushes) for worker in workers])))

    turns.work(lambda: ray.get([worker.step.remote() for worker in workers]), verify, server_pids=[pid])
    ray.shutdown()


if __name__ == "__main__":
    main()
