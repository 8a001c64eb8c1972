"""Logistic regression on sparse rows, with NumPy and psd_client alone: one weight a feature, in a table of dim 1.

$ psd-run --shards 2 --workers 4 examples/sparse_lr.py
$ psd-run --shards 2 --workers 4 --consistency async examples/sparse_lr.py --data farm-ads-vect.gz --epochs 10 --batch-size 1
$ psd-run --shards 2 --workers 4 examples/sparse_lr.py --data a9a --test a9a.t --rule ftrl

A step moves only the weights of the features in its batch. To compare with: `--dense` keeps all weights in one dense tensor
instead, and `--plain` trains without psd, in this process.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import sparse_data
from command_line import CommandLine
from one_process import OneProcess
from sparse_data import Array, SparseRows

import psd_client

BIAS = 0
"""The id of a feature that all rows have; those of files begin with 1."""


def scores(weights: Array, rows: SparseRows) -> Array:
    """Each row's sum of weights times values, without the bias; `weights` has one for each of `rows.ids`."""
    of_row = np.repeat(np.arange(len(rows.labels)), np.diff(rows.starts))
    return np.bincount(of_row, weights * rows.values, len(rows.labels))


def gradients(weights: Array, bias: float, rows: SparseRows) -> tuple[Array, float]:
    """Gradients of the mean logistic loss: by the weight of each of `rows.ids`, and by the bias."""
    error = 1 / (1 + np.exp(-scores(weights, rows) - bias)) - rows.labels
    error /= len(rows.labels)
    return np.repeat(error, np.diff(rows.starts)) * rows.values, float(error.sum())


class TableWeights:
    """Weights in a table: the ids of a batch are pulled, their gradients pushed. An id that comes twice travels once."""

    def __init__(self, ps: Any, optimizer: psd_client.Optimizer) -> None:
        self._ps = ps
        ps.declare({}, optimizer=None, tables=[psd_client.Table("weights", dim=1, optimizer=optimizer)])
        self._table = ps.tables["weights"]

    def of(self, ids: Array) -> tuple[Array, float]:
        """Weights of features, and the bias."""
        weights = self._table.pull(np.append(ids, BIAS))[:, 0]
        return weights[:-1], float(weights[-1])

    def push(self, ids: Array, by_weight: Array, by_bias: float, next_ids: Array | None) -> None:
        """Make one step, and have the weights of the next one come in the same round trip."""
        if next_ids is not None:
            self._table.prefetch(np.append(next_ids, BIAS))
        grads = np.append(by_weight, by_bias).astype(np.float32)
        self._ps.push_pull({}, tables={"weights": (np.append(ids, BIAS), grads[:, None])})


class DenseWeights:
    """Weights in a dense tensor with a place for every id, all of which travel both ways in each step."""

    def __init__(self, ps: Any, optimizer: psd_client.Optimizer, size: int) -> None:
        self._ps = ps
        self._grads = np.zeros(size, np.float32)
        self._weights = ps.declare({"weights": self._grads}, optimizer=optimizer, copy=False)["weights"]

    def of(self, ids: Array) -> tuple[Array, float]:
        """Weights of features, and the bias."""
        return self._weights[ids], float(self._weights[BIAS])

    def push(self, ids: Array, by_weight: Array, by_bias: float, next_ids: Array | None) -> None:
        """Make one step; all weights come back anyway."""
        del next_ids
        self._grads[:] = 0
        np.add.at(self._grads, ids, by_weight)
        self._grads[BIAS] = by_bias
        self._weights = self._ps.push_pull({"weights": self._grads})["weights"]


def train(args: argparse.Namespace) -> None:
    """Run one worker."""
    name, rows, test = sparse_data.sparse_rows(args.data, args.test)
    size = 1 + max(int(rows.ids.max()), int(test.ids.max()))
    rules = {
        "adagrad": psd_client.Adagrad(lr=args.lr),
        "ftrl": psd_client.FTRL(lr=args.lr, beta=args.beta, l1=args.l1, l2=args.l2),
    }
    with OneProcess({"weights": np.arange(size)}) if args.plain else psd_client.connect() as ps:
        weights = DenseWeights(ps, rules[args.rule], size) if args.dense else TableWeights(ps, rules[args.rule])
        if ps.rank == 0:
            print(
                f"{name}: {len(rows.labels)} rows for {ps.world_size} workers, {len(test.labels)} for testing, {size} features"
            )
        before = ps.stats()
        steps, seconds = 0, 0.0
        drawn = sparse_data.batches(len(rows.labels), args.batch_size, args.epochs, ps.rank, ps.world_size)
        taken = (rows.take(batch) for batch in islice(drawn, args.steps))
        mine = next(taken, None)
        while mine is not None:
            following = next(taken, None)
            started = time.perf_counter()
            next_ids = None if following is None else following.ids
            weights.push(mine.ids, *gradients(*weights.of(mine.ids), mine), next_ids)
            seconds += time.perf_counter() - started
            mine, steps = following, steps + 1
        after = ps.stats()
        moved = sum(after[count] - before[count] for count in ("sent_bytes", "received_bytes")) / steps
        ps.barrier("trained")
        if ps.rank == 0:
            if args.dense:
                ps.pull()
            of_features, bias = weights.of(test.ids)
            result = {
                "data": name,
                "steps": steps,
                "auc": round(sparse_data.auc(test.labels, scores(of_features, test) + bias), 4),
                "bytes_per_step": round(moved),
                "dense_bytes_per_step": 2 * 4 * size,
                "steps_per_s": round(steps / seconds, 1),
            }
            print(f"result {json.dumps(result)}", flush=True)


def main() -> None:
    """Read the command line and train."""
    parser = CommandLine("Logistic regression on sparse rows.")
    parser.add_argument("--data", type=Path, help="libsvm file, plain or gzipped; without it, rows are generated")
    parser.add_argument("--test", type=Path, help="libsvm file of rows for testing; without it, every fifth row of --data")
    parser.number("--epochs", 3, "passes over the data")
    parser.add_argument("--steps", type=int, help="steps of each worker at most")
    parser.number("--batch-size", 1, "rows per worker and step")
    parser.add_argument("--rule", choices=("adagrad", "ftrl"), default="adagrad", help="update rule (default %(default)s)")
    parser.number("--lr", 0.05, "learning rate")
    parser.number("--beta", 1.0, "FTRL's beta")
    parser.number("--l1", 0.0, "FTRL's weight of the sum of absolute values")
    parser.number("--l2", 0.0, "FTRL's weight of the sum of squares")
    parser.add_argument("--dense", action="store_true", help="keep the weights in a dense tensor instead of a table")
    parser.add_argument("--plain", action="store_true", help="train in this process, without psd")
    parser.run(train, "psd-run --shards 2 --workers 4")


if __name__ == "__main__":
    main()
