"""Ray at its best: one server actor, W worker actors, gradients and parameters as objects in Ray's shared memory.

As in Ray's parameter-server example, but with one flat array instead of a list, which Ray shares without pickling; the server
reads the gradients where they lie and updates in place, piece by piece in its cache; each worker copies the new parameters
into memory of its own, as every other system does. This process drives all of them and counts as all workers.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import ray
import work
from numpy.typing import NDArray
from turns import Turns

_PIECE = 1 << 16


@ray.remote
class Server:
    """The server actor, with the parameters."""

    def __init__(self, size: int) -> None:
        self._parameters = np.zeros(size, np.float32)
        self._scratch = np.empty(_PIECE, np.float32)

    def pid(self) -> int:
        """Process id of the server."""
        return os.getpid()

    def apply(self, *gradients: NDArray[np.float32]) -> NDArray[np.float32]:
        """Sum, and apply SGD; return the parameters, which Ray copies into an object."""
        for start in range(0, self._parameters.size, _PIECE):
            piece = self._parameters[start : start + _PIECE]
            total = self._scratch[: piece.size]
            np.copyto(total, gradients[0][start : start + _PIECE])
            for gradient in gradients[1:]:
                total += gradient[start : start + _PIECE]
            total *= np.float32(work.LR)
            piece -= total
        return self._parameters


@ray.remote
class Worker:
    """One worker."""

    def __init__(self, rank: int, size: int) -> None:
        self._gradient = work.gradient(rank, size)
        self._parameters = np.zeros(size, np.float32)

    def step(self, parameters: NDArray[np.float32]) -> NDArray[np.float32]:
        """Take the parameters over; return the gradient, which Ray copies into an object."""
        np.copyto(self._parameters, parameters)
        return self._gradient


def main() -> None:
    """Take turns."""
    turns = Turns()
    told: dict[str, Any] = turns.arguments
    size = work.size_of(told["model"])
    ray.init(
        num_cpus=told["world_size"] + 1,
        object_store_memory=max(400_000_000, 16 * size * (told["world_size"] + 2)),
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.path.dirname(os.path.abspath(__file__))}},  # noqa: PTH100, PTH120
    )
    server = Server.remote(size)
    workers = [Worker.remote(rank, size) for rank in range(told["world_size"])]
    pid = ray.get(server.pid.remote())
    parameters = ray.put(np.zeros(size, np.float32))

    def step() -> None:
        nonlocal parameters
        gradients = [worker.step.remote(parameters) for worker in workers]
        parameters = server.apply.remote(*gradients)
        ray.wait([parameters], fetch_local=False)

    turns.work(step, lambda pushes: work.difference(ray.get(parameters), pushes), server_pids=[pid])
    ray.shutdown()


if __name__ == "__main__":
    main()
