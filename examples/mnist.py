"""Train a small ConvNet on MNIST with several workers: the network of Ray's parameter-server example.

$ psd-run --shards 2 --workers 2 examples/mnist.py
$ psd-run --shards 2 --workers 2 --consistency async examples/mnist.py --steps 200 --data DIR

Without --data, MNIST is downloaded; without a network, scikit-learn's digits take its place.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator

import datasets
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

import psd_client.torch as psd
from psd_client import ConfigError


class ConvNet(nn.Module):
    """One convolution of 3 channels, one linear layer; 1,960 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, kernel_size=3)
        self.fc = nn.Linear(192, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Log-probabilities (n, 10) of the classes."""
        features = F.relu(F.max_pool2d(self.conv(images), 3))
        return F.log_softmax(self.fc(features.flatten(1)), dim=1)


def batches(images: torch.Tensor, labels: torch.Tensor, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Shuffled batches, epoch after epoch, without end."""
    while True:
        for rows in torch.randperm(len(images)).split(size):
            yield images[rows], labels[rows]


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of the images that the model classifies rightly."""
    return (model(images).argmax(dim=1) == labels).float().mean().item()


def train(args: argparse.Namespace) -> None:
    """Run one worker."""
    data = datasets.load(args.data)
    torch.manual_seed(0)  # a synchronous run can be repeated
    model = ConvNet()
    sgd = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    # As in Ray's example the workers' gradients are added up, so that a synchronous step goes as far as an asynchronous one of
    # each worker.
    optimizer = psd.distribute(model, sgd, reduce="sum")
    rank, world_size = optimizer.ps.rank, optimizer.ps.world_size

    torch.manual_seed(rank)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    mine = batches(data.train_images[rank::world_size], data.train_labels[rank::world_size], args.batch_size)
    if rank == 0:
        print(f"{data.name}: {len(data.train_labels)} images for {world_size} workers, {len(data.test_labels)} for testing")

    seconds, begun_at = 0.0, optimizer.ps.clock
    if rank == 0 and begun_at:
        print(f"goes on after step {begun_at}", flush=True)
    while (step := optimizer.ps.clock + 1) <= args.steps:  # the job's steps: this process may have been started again
        started = time.perf_counter()
        images, labels = next(mine)
        optimizer.zero_grad()
        loss = F.nll_loss(model(images), labels)
        loss.backward()
        optimizer.step(batch_size=len(labels))
        seconds += time.perf_counter() - started
        if rank == 0 and (step % 10 == 0 or step == args.steps):
            share = accuracy(model, data.test_images[:1024], data.test_labels[:1024])
            bar = ("#" * (20 * step // args.steps)).ljust(20, ".")
            print(f"[{bar}] step {step:4d} of {args.steps}  accuracy {share:6.1%}  loss {loss.item():.3f}", flush=True)

    optimizer.ps.barrier("trained")
    optimizer.pull()
    if rank == 0:
        share = accuracy(model, data.test_images, data.test_labels)
        result = {
            "data": data.name,
            "steps": args.steps,
            "accuracy": round(share, 4),
            "steps_per_s": round((args.steps - begun_at) / seconds, 1) if seconds else 0.0,
        }
        print(f"result {json.dumps(result)}", flush=True)
    optimizer.close()


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description="Train a small ConvNet on MNIST. Alone, or started by psd-run.")
    parser.add_argument("--steps", type=int, default=400, help="steps of each worker (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=128, help="images per worker and step (default %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-2, help="learning rate (default %(default)s)")
    parser.add_argument(
        "--momentum",
        type=float,
        default=0.0,
        help="SGD's momentum (default %(default)s); above 0.5 it may diverge in async mode",
    )
    parser.add_argument("--data", help="folder of MNIST's four files, or 'digits', scikit-learn's (default: downloads MNIST)")
    args = parser.parse_args()
    try:
        train(args)
    except (ConfigError, FileNotFoundError) as error:
        sys.exit(f"{error}\nFor example: psd-run --shards 2 --workers 2 {sys.argv[0]}")


if __name__ == "__main__":
    main()
