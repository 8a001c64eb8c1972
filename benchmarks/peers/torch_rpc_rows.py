"""A sparse table by torch.distributed.rpc, over TCP: rank 0 holds the rows, and workers pull and push by index.

Workers do not wait for each other. The rule is written with torch's own indexing, in place.
"""

from __future__ import annotations

import threading

import rows
import torch
import torch.distributed.rpc as rpc
from turns import Turns


class Server:
    """Rows and their sums of squares."""

    def __init__(self, count: int, dim: int, lr: float, eps: float) -> None:
        self._values = torch.zeros(count, dim)
        self._sums = torch.zeros(count, dim)
        self._lr, self._eps = lr, eps
        self._lock = threading.Lock()

    def pull(self, ids: torch.Tensor) -> torch.Tensor:
        """Values of rows."""
        return self._values.index_select(0, ids)

    def push(self, ids: torch.Tensor, grads: torch.Tensor) -> None:
        """Apply Adagrad to rows; ids are distinct."""
        with self._lock:
            self._sums.index_add_(0, ids, grads * grads)
            steps = grads / self._sums.index_select(0, ids).sqrt_().add_(self._eps)
            self._values.index_add_(0, ids, steps, alpha=-self._lr)


_servers: list[Server] = []


def pull(ids: torch.Tensor) -> torch.Tensor:
    """Call the server's pull on behalf of a worker."""
    return _servers[0].pull(ids)


def push(ids: torch.Tensor, grads: torch.Tensor) -> None:
    """Call the server's push on behalf of a worker."""
    _servers[0].push(ids, grads)


def main() -> None:
    """Run the server or a worker."""
    turns = Turns()
    told = turns.arguments
    torch.set_num_threads(told["threads"])
    if told["rank"] < 0:
        shape = rows.Shape(*told["shape"])
        _servers.append(Server(shape.rows, shape.dim, rows.LR, rows.EPS))
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{told['meet']}", rpc_timeout=0, _transports=["uv"], _channels=["basic"]
    )
    rank = told["rank"] + 1
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=told["workers"] + 1, rpc_backend_options=options)
    if rank == 0:
        turns.end_with_input()
        threading.Event().wait()
    turn = rows.Turn(told)
    parts = {id(ids): (torch.from_numpy(ids), torch.from_numpy(grads)) for each in turn.parts for ids, grads in each}

    def step() -> None:
        for ids, _ in turn.next():
            tensors = parts[id(ids)]
            rpc.rpc_sync("rank0", pull, tensors[:1])
            rpc.rpc_sync("rank0", push, tensors)

    def verify(pushes: list[int]) -> str:
        values = rpc.rpc_sync("rank0", pull, (torch.from_numpy(turn.check.ids),))
        return turn.check.difference(values.numpy(), pushes[told["rank"]])

    turns.work(step, verify)
    threading.Event().wait(0.1)
    rpc.shutdown(graceful=False)


if __name__ == "__main__":
    main()
