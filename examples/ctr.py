"""Predict clicks by DeepFM (Guo et al. 2017): categories as embeddings in a table, dense layers as tensors, one step for both.

$ psd-run --shards 2 --workers 2 examples/ctr.py
$ psd-run --shards 2 --workers 2 --consistency async examples/ctr.py --data dataset_diabetes.zip
$ psd-run --shards 2 --workers 2 examples/ctr.py --data open-bandit/random/women

A row has, for one value of one column, a weight and some factors. The score is the sum of the weights, plus the products of
all pairs of the columns' factors, plus what a small network makes of these. `--plain` trains the same model with torch alone,
in this process, where all categories must be known beforehand.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import sparse_data
import torch
from command_line import CommandLine
from sparse_data import Array, Categories
from torch import nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

import psd_client
import psd_client.torch as psd

STD = 0.01


class DeepFM(nn.Module):
    """Scores (n,) of rows with ids (n, columns), by an embedding whose first number is the weight, the others factors."""

    def __init__(self, embedding: nn.Module, columns: int, factors: int) -> None:
        super().__init__()
        self.embedding = embedding
        generator = torch.random.get_rng_state()
        torch.manual_seed(0)  # so that all start alike
        self.deep = nn.Sequential(nn.Linear(columns * factors, 64), nn.ReLU(), nn.Linear(64, 1))
        torch.random.set_rng_state(generator)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Scores, the logarithms of the odds of a click."""
        rows = self.embedding(ids)
        weights, factors = rows[..., 0], rows[..., 1:]
        pairs = (factors.sum(dim=1) ** 2 - (factors**2).sum(dim=1)).sum(dim=1) / 2
        return weights.sum(dim=1) + pairs + self.deep(factors.flatten(1)).squeeze(1)


class KnownIds(nn.Module):
    """Counterpart of psd's Embedding in one process: torch's own, and a sorted list of all ids."""

    def __init__(self, ids: torch.Tensor, dim: int) -> None:
        super().__init__()
        self.register_buffer("known", torch.unique(ids))
        self.rows = nn.Embedding(len(self.known), dim)
        nn.init.normal_(self.rows.weight, std=STD)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows (..., dim) of ids."""
        return self.rows(torch.searchsorted(self.known, ids))


@torch.no_grad()
def auc(model: DeepFM, ids: torch.Tensor, data: Categories) -> float:
    """AUC on the rows for testing."""
    model.eval()
    test = torch.from_numpy(np.flatnonzero(data.is_test))
    scores = torch.cat([model(ids[rows]) for rows in test.split(4096)])
    model.train()
    return sparse_data.auc(data.labels[test.numpy()], scores.numpy())


def fit(
    model: DeepFM, optimizer: torch.optim.Optimizer, data: Categories, ids: torch.Tensor, batches: Iterator[Array], shows: bool
) -> tuple[int, float]:
    """Train on batches of the rows that are not for testing; return how many there were, and how many a second."""
    known, labels = np.flatnonzero(~data.is_test), torch.from_numpy(data.labels)
    steps, seconds = 0, 0.0
    for part in batches:
        rows = torch.from_numpy(known[part])
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(ids[rows]), labels[rows])
        loss.backward()
        optimizer.step()  # pushes the gradients of rows and of dense layers, pulls the latter
        seconds += time.perf_counter() - started
        steps += 1
        if shows and steps % 50 == 0:
            print(f"step {steps:5d}  loss {loss.item():.4f}", flush=True)
    return steps, steps / seconds


def train(args: argparse.Namespace) -> None:
    """Run one worker."""
    data = sparse_data.categories(args.data)
    ids = torch.from_numpy(data.ids.view(np.int64))
    dim = 1 + args.factors
    embedding = KnownIds(ids, dim) if args.plain else psd.Embedding("categories", dim, init=psd_client.Normal(std=STD))
    model = DeepFM(embedding, ids.shape[1], args.factors)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=args.lr)
    rank, world_size = 0, 1
    if not args.plain:
        optimizer = psd.distribute(model, optimizer)
        rank, world_size = optimizer.rank, optimizer.world_size
    torch.set_num_threads(1)  # more would rather wait for each other, with a model as small as this
    count = np.count_nonzero(~data.is_test)
    if rank == 0:
        print(f"{data.name}: {count} rows of {ids.shape[1]} columns for {world_size} workers", flush=True)
    batches = sparse_data.batches(count, args.batch_size, args.epochs, rank, world_size)
    steps, steps_per_s = fit(model, optimizer, data, ids, batches, shows=rank == 0)
    if not args.plain:
        optimizer.ps.barrier("trained")
        optimizer.pull()
    if rank == 0:
        result = {"data": data.name, "steps": steps, "auc": round(auc(model, ids, data), 4)}
        print(f"result {json.dumps({**result, 'steps_per_s': round(steps_per_s, 1)})}", flush=True)
    if not args.plain:
        optimizer.close()


def main() -> None:
    """Read the command line and train."""
    parser = CommandLine("Predict clicks by DeepFM.")
    parser.add_argument(
        "--data", type=Path, help="diabetes130's zip, or a folder of open-bandit; without it, rows are generated"
    )
    parser.number("--epochs", 3, "passes over the data")
    parser.number("--batch-size", 128, "rows per worker and step")
    parser.number("--factors", 8, "factors of each category")
    parser.number("--lr", 0.02, "learning rate")
    parser.add_argument("--plain", action="store_true", help="train with torch alone, in this process")
    parser.run(train)


if __name__ == "__main__":
    main()
