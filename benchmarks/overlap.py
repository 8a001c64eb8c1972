"""Measures how much of the communication hides behind back-propagation: distribute(..., overlap=True).

    python benchmarks/overlap.py [--transport tcp] [--steps 40] [--json FILE]

A small convnet is trained by one worker with one thread, against one shard. The batch is chosen so that back-propagation takes
about as long as moving gradients and parameters. These take turns, a step each:

    forward, backward   the two parts of computing a gradient; nothing is sent
    communicate         push and pull of the same gradients; nothing is computed
    in turn             a training step without overlap
    overlapped          a training step with it

Synchronously, the forward pass needs all parameters of the step before, and nothing can be sent before the first gradient is
there. So the ideal is the forward pass, then the longer of `backward` and `communicate`, then the tail that nothing can hide:
the last gradients' way there and back, taken as one block's share of `communicate`. Exit status: 1 if the two ways to train do
not end in the same bits; the criterion does not decide.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import _report as report
import torch
from _processes import Shard, cleanly, start_all
from _report import Criterion, ratio
from torch import nn

import psd_client
from psd_client.client import worker_of
from psd_client.torch import DistributedOptimizer, distribute

WARM_UP = 3


def convnet() -> nn.Sequential:
    """A network of about 4.5 million parameters, most of them where back-propagation begins."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128 * 16, 2000), nn.ReLU(), nn.Linear(2000, 100),
    )  # fmt: skip


class Contender:
    """A model with its optimizer and its own shard."""

    def __init__(self, address: str, transport: str, *, overlap: bool) -> None:
        self.model = convnet()
        ps = psd_client.connect(address, 0, 1, transport=transport)
        sgd = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.optimizer: DistributedOptimizer = distribute(self.model, sgd, ps=ps, overlap=overlap)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Compute the loss."""
        self.optimizer.zero_grad()
        return nn.functional.cross_entropy(self.model(images), labels)

    def train(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Make a step."""
        self.forward(images, labels).backward()
        self.optimizer.step()


def seconds(work: Callable[[], Any]) -> float:
    """Measure how long it takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def batch_of(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images, the same for everybody."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn((size, 3, 32, 32), generator=generator), torch.randint(100, (size,), generator=generator)


def main() -> int:
    """Print the figures."""
    parser = report.parser(__doc__, transport="tcp")
    parser.add_argument("--steps", type=int, default=40, help="timed ones of each kind (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    about = report.machine()
    with cleanly() as stack:
        shards = [Shard() for _ in range(3)]
        start_all(stack, shards)
        idle, in_turn, overlapped = (
            Contender(shard.address, args.transport, overlap=index == 2) for index, shard in enumerate(shards)
        )
        stack.callback(lambda: [c.optimizer.close() for c in (idle, in_turn, overlapped)])

        def communicate() -> None:
            idle.optimizer.step()  # the gradients are those of the last `backward`

        size = batch_size(idle, communicate)
        batch = batch_of(size)
        losses: list[torch.Tensor] = []
        works: dict[str, Callable[[], Any]] = {
            "forward": lambda: losses.append(idle.forward(*batch)),
            "backward": lambda: losses.pop().backward(),  # type: ignore[no-untyped-call]
            "communicate": communicate,
            "in turn": lambda: in_turn.train(*batch),
            "overlapped": lambda: overlapped.train(*batch),
        }
        times: dict[str, list[float]] = {name: [] for name in works}
        for step in range(WARM_UP + args.steps):
            for name, work in works.items():
                taken = seconds(work)
                if step >= WARM_UP:
                    times[name].append(taken)
        is_right = all(map(torch.equal, in_turn.model.parameters(), overlapped.model.parameters()))
        blocks = len(worker_of(in_turn.optimizer.ps).parameters.layout.blocks)
    median = {name: statistics.median(found) for name, found in times.items()}
    ideal = median["forward"] + max(median["backward"], median["communicate"]) + median["communicate"] / blocks
    criteria = [Criterion(6, "overlapped / ideal", ratio(median["overlapped"], ideal), 1.15)]
    print(f"convnet, batch of {size}, {blocks} blocks, over {args.transport}; medians of {args.steps} steps")
    print(report.machine_line(about))
    rows = [[name, f"{1e3 * value:.1f}", f"{1e3 * min(times[name]):.1f}"] for name, value in median.items()]
    print("\n" + report.table(["", "ms", "fastest"], [*rows, ["ideal", f"{1e3 * ideal:.1f}", "-"]]))
    print("\n" + report.criteria_table(criteria))
    results = {"machine": about, "transport": args.transport, "batch": size, "blocks": blocks, "median_s": median}
    report.write_json(args.json, results, criteria)
    if not is_right:
        print("WRONG: training with and without overlap does not give the same bits", file=sys.stderr)
    return 0 if is_right else 1


def batch_size(contender: Contender, communicate: Callable[[], None]) -> int:
    """The batch size for which back-propagation takes as long as communicating."""

    def backward(batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        return seconds(contender.forward(*batch).backward)

    few, many = batch_of(8), batch_of(40)
    backward(few)
    communicated = statistics.median(seconds(communicate) for _ in range(5))
    small, large = (statistics.median(backward(batch) for _ in range(5)) for batch in (few, many))
    per_image = max((large - small) / 32, 1e-6)
    return max(1, round(8 + (communicated - small) / per_image))


if __name__ == "__main__":
    sys.exit(main())
