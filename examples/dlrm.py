"""Predict clicks by DLRM (Naumov et al. 2019), the model of TorchRec's examples, with its tables of embeddings on the shards.

$ psd-run --shards 2 --workers 2 examples/dlrm.py
$ psd-run --shards 2 --workers 2 --consistency async examples/dlrm.py --data train.txt.gz --rows 200000 --admit-after 3

Each of 26 categories has a table. Their rows, and the counts, which a small network brings to the length of a row, are
multiplied pair by pair, and another network makes a score of the products. `--plain` trains the same model with torch alone, in
this process, where all ids must be known beforehand.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import criteo
import sparse_data
import torch
from command_line import CommandLine
from criteo import KEYS, Clicks
from torch import nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

import psd_client.torch as psd
from psd_client.torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor

EXPECTED_IDS = 10_000


def layers(*sizes: int) -> nn.Sequential:
    """A network whose layers are all followed by ReLU, the last one, too."""
    return nn.Sequential(*(part for above, below in pairwise(sizes) for part in (nn.Linear(above, below), nn.ReLU())))


class DLRM(nn.Module):
    """Scores (n,) of samples with counts (n, 13) and categories."""

    def __init__(self, embeddings: nn.Module, dim: int) -> None:
        super().__init__()
        self.embeddings = embeddings
        generator = torch.random.get_rng_state()
        torch.manual_seed(0)  # so that all start alike
        self.dense_arch = layers(criteo.DENSE, 64, dim)
        self.pairs = torch.triu_indices(1 + len(KEYS), 1 + len(KEYS), offset=1)
        self.over_arch = nn.Sequential(layers(dim + self.pairs.shape[1], 64), nn.Linear(64, 1))
        torch.random.set_rng_state(generator)

    def forward(self, dense: torch.Tensor, features: KeyedJaggedTensor) -> torch.Tensor:
        """Scores, the logarithms of the odds of a click."""
        counts = self.dense_arch(dense)
        rows = self.embeddings(features).values().view(len(dense), len(KEYS), -1)
        vectors = torch.cat([counts[:, None], rows], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.over_arch(torch.cat([counts, products], dim=1)).squeeze(1)


def tables(dim: int) -> list[EmbeddingBagConfig]:
    """A table for each category."""
    return [
        EmbeddingBagConfig(name=f"t_{key}", embedding_dim=dim, num_embeddings=EXPECTED_IDS, feature_names=[key]) for key in KEYS
    ]


class KnownIds(nn.Module):
    """Counterpart of the collection in one process: an EmbeddingBag of torch for each category, and a list of its ids."""

    def __init__(self, features: KeyedJaggedTensor, dim: int) -> None:
        super().__init__()
        self.known = {key: torch.unique(features[key].values()) for key in KEYS}
        self.bags = nn.ModuleDict({key: nn.EmbeddingBag(len(ids), dim, mode="sum") for key, ids in self.known.items()})
        for bag in self.bags.values():
            nn.init.uniform_(bag.weight, -(EXPECTED_IDS**-0.5), EXPECTED_IDS**-0.5)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Rows of each category."""
        given = features.to_dict()
        pooled = [
            self.bags[key](torch.searchsorted(self.known[key], given[key].values()), given[key].offsets()[:-1]) for key in KEYS
        ]
        return KeyedTensor(KEYS, [part.shape[1] for part in pooled], torch.cat(pooled, dim=1))


@torch.no_grad()
def auc(model: DLRM, data: Clicks) -> float:
    """AUC on the rows for testing."""
    model.eval()
    test = torch.arange(data.training_rows, len(data.labels)).split(4096)
    scores = torch.cat([model(*data.batch(rows.numpy())[:2]) for rows in test])
    model.train()
    return sparse_data.auc(data.labels[data.training_rows :], scores.numpy())


def fit(
    model: DLRM, optimizer: torch.optim.Optimizer, data: Clicks, batches: Iterator[sparse_data.Array], shows: bool
) -> tuple[int, float]:
    """Train on batches; return how many there were, and how many a second."""
    steps, started = 0, time.perf_counter()
    for rows in batches:
        dense, features, labels = data.batch(rows)
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(dense, features), labels)  # pulls the rows of all tables at once
        loss.backward()
        optimizer.step()
        steps += 1
        if shows and steps % 50 == 0:
            print(f"step {steps:5d}  loss {loss.item():.4f}", flush=True)
    return steps, steps / (time.perf_counter() - started)


def train(args: argparse.Namespace) -> None:
    """Run one worker."""
    data = criteo.clicks(args.data, args.rows)
    if args.plain:
        embeddings: nn.Module = KnownIds(data.batch(slice(None))[1], args.dim)
    else:
        life = {"admit_after": args.admit_after, "expire_steps": args.expire_steps}
        configs = tables(args.dim)
        embeddings = EmbeddingBagCollection(configs, options={config.name: life for config in configs})
    model = DLRM(embeddings, args.dim)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=args.lr)
    rank, world_size = 0, 1
    if not args.plain:
        optimizer = psd.distribute(model, optimizer)
        rank, world_size = optimizer.rank, optimizer.world_size
    torch.set_num_threads(1)  # more would rather wait for each other, with a model as small as this
    if rank == 0:
        print(f"{data.name}: {data.training_rows} rows for {world_size} workers", flush=True)
    batches = sparse_data.batches(data.training_rows, args.batch_size, args.epochs, rank, world_size)
    steps, steps_per_s = fit(model, optimizer, data, batches, shows=rank == 0)
    if not args.plain:
        optimizer.ps.barrier("trained")
        optimizer.pull()
    if rank == 0:
        result = {"data": data.name, "steps": steps, "auc": round(auc(model, data), 4)}
        print(f"result {json.dumps({**result, 'steps_per_s': round(steps_per_s, 1)})}", flush=True)
    if not args.plain:
        optimizer.close()


def main() -> None:
    """Read the command line and train."""
    parser = CommandLine("Predict clicks by DLRM.")
    parser.add_argument("--data", type=Path, help="a file of Criteo's click logs; without it, rows are generated")
    parser.number("--rows", 10_000, "rows that are read or generated")
    parser.number("--epochs", 3, "passes over the data")
    parser.number("--batch-size", 128, "rows per worker and step")
    parser.number("--dim", 16, "length of a row of the tables")
    parser.number("--lr", 0.02, "learning rate")
    parser.number("--admit-after", 1, "gradients after which an id gets a row")
    parser.number("--expire-steps", 0, "steps after which a row that nobody uses is removed; 0: never")
    parser.add_argument("--plain", action="store_true", help="train with torch alone, in this process")
    parser.run(train)


if __name__ == "__main__":
    main()
