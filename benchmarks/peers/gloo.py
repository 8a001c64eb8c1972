"""One worker without any server: gloo's all-reduce of the gradients, then SGD on its own copy of the parameters.

All-reduce works in place, so the gradient is filled in again before each step, outside of its time; psd's stays as it was.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import work
from turns import Turns


def main() -> None:
    """Join, and take turns."""
    turns = Turns()
    told = turns.arguments
    size = work.size_of(told["model"])
    torch.set_num_threads(told["threads"])
    dist.init_process_group("gloo", init_method=f"file://{told['meet']}", rank=told["rank"], world_size=told["world_size"])
    produced = torch.from_numpy(work.gradient(told["rank"], size))
    gradients, parameters = torch.zeros(size), torch.zeros(size)

    def prepare() -> None:
        gradients.copy_(produced)
        dist.barrier()

    def step() -> None:
        dist.all_reduce(gradients)
        parameters.add_(gradients, alpha=-work.LR)

    turns.work(step, lambda pushes: work.difference(parameters.numpy(), pushes), prepare)


if __name__ == "__main__":
    main()
