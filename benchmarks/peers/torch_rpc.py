"""A parameter server by torch.distributed.rpc, synchronous, over TCP; rank 0 is the server, the others are the workers.

The first gradient of a round is kept, the following are added, with the last one SGD is applied and all are answered: the same
work as psd's. Tensors travel without being pickled, large ones in PIECES calls at once, so that sending overlaps receiving.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed.rpc as rpc
import work
from torch.futures import Future
from turns import Turns

PIECES = 8
"""Number of pieces. Of 1 to 32, 8 and 16 take the least CPU time for 100 MB; a single piece takes twice as much, most of it for
fresh pages."""


def cut(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Cut into pieces of at least 1 MiB."""
    return list(tensor.tensor_split(max(1, min(PIECES, tensor.numel() >> 18))))


class Server:
    """The pieces of the parameters, and the open round of each."""

    def __init__(self, size: int, workers: int) -> None:
        self._workers = workers
        self._pieces = cut(torch.zeros(size))
        self._locks = [threading.Lock() for _ in self._pieces]
        self._sums: list[torch.Tensor | None] = [None] * len(self._pieces)
        self._waiting: list[list[Future[torch.Tensor]]] = [[] for _ in self._pieces]

    def push_pull(self, piece: int, gradient: torch.Tensor) -> Future[torch.Tensor]:
        """Push, and return the parameters after the round."""
        future: Future[torch.Tensor] = Future()
        with self._locks[piece]:
            earlier = self._sums[piece]
            total = self._sums[piece] = gradient if earlier is None else earlier.add_(gradient)
            self._waiting[piece].append(future)
            if len(self._waiting[piece]) < self._workers:
                return future
            # Not in place: an answer to the round before may still be on its way out.
            self._pieces[piece] = torch.add(self._pieces[piece], total, alpha=-work.LR)
            waiting, self._waiting[piece], self._sums[piece] = self._waiting[piece], [], None
        for other in waiting:
            other.set_result(self._pieces[piece])
        return future


_servers: list[Server] = []


@rpc.functions.async_execution
def push_pull(piece: int, gradient: torch.Tensor) -> Any:
    """Call the server's push_pull on behalf of a worker."""
    return _servers[0].push_pull(piece, gradient)


def main() -> None:
    """Run a server or a worker."""
    turns = Turns()
    told = turns.arguments
    size, rank = work.size_of(told["model"]), told["rank"]
    torch.set_num_threads(told["threads"])
    if rank == 0:
        _servers.append(Server(size, told["world_size"] - 1))
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{told['meet']}", rpc_timeout=0, _transports=["uv"], _channels=["basic"]
    )
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=told["world_size"], rpc_backend_options=options)
    if rank == 0:
        turns.end_with_input()
        threading.Event().wait()
    gradients = cut(torch.from_numpy(work.gradient(rank - 1, size)))
    parameters = torch.zeros(size)
    views = cut(parameters)

    def step() -> None:
        calls = [rpc.rpc_async("rank0", push_pull, (piece, gradient)) for piece, gradient in enumerate(gradients)]
        for view, call in zip(views, calls, strict=True):
            view.copy_(call.wait())

    turns.work(step, lambda pushes: work.difference(parameters.numpy(), pushes))
    threading.Event().wait(0.1)
    rpc.shutdown(graceful=False)


if __name__ == "__main__":
    main()
