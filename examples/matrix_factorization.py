"""Recommend by matrix factorization, with NumPy and psd_client alone: a table of users and one of items.

$ psd-run --shards 2 --workers 2 examples/matrix_factorization.py
$ psd-run --shards 2 --workers 4 --consistency async examples/matrix_factorization.py --data ratings.dat

A rating is predicted as the mean of all, plus a number of the user, plus a number of the item, plus the product of their
factors. Users and items keep their ids, whatever these are: a row begins when it is first trained. `--plain` trains without
psd, in this process.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import sparse_data
from command_line import CommandLine
from one_process import OneProcess
from sparse_data import Array

import psd_client


def predicted(users: Array, items: Array) -> Array:
    """Deviations (n,) from the mean rating, of rows (n, 1 + factors): the first number of each is its own."""
    return users[:, 0] + items[:, 0] + (users[:, 1:] * items[:, 1:]).sum(axis=1)


def gradients(users: Array, items: Array, deviations: Array, l2: float) -> tuple[Array, Array]:
    """Gradients by the rows, of half the squared error, regularized, as means over the batch."""
    error = (predicted(users, items) - deviations)[:, None]
    ones = np.ones_like(error)
    by_users = error * np.hstack([ones, items[:, 1:]]) + l2 * users
    by_items = error * np.hstack([ones, users[:, 1:]]) + l2 * items
    return by_users / len(error), by_items / len(error)


def train(args: argparse.Namespace) -> None:
    """Run one worker."""
    data = sparse_data.ratings(args.data)
    known, hidden = np.flatnonzero(~data.is_test), np.flatnonzero(data.is_test)
    mean = data.ratings[known].mean()
    rule = {"dim": 1 + args.factors, "optimizer": psd_client.Adagrad(lr=args.lr), "init": psd_client.Normal(std=0.1)}
    tables = [psd_client.Table("users", seed=1, **rule), psd_client.Table("items", seed=2, **rule)]
    with OneProcess({"users": data.users, "items": data.items}) if args.plain else psd_client.connect() as ps:
        ps.declare({}, optimizer=None, tables=tables)
        users, items = ps.tables["users"], ps.tables["items"]

        def rmse(rows: Array) -> float:
            deviations = predicted(users.pull(data.users[rows]), items.pull(data.items[rows]))
            error = (mean + deviations).clip(data.ratings.min(), data.ratings.max()) - data.ratings[rows]
            return float(np.sqrt(np.mean(error**2)))

        if ps.rank == 0:
            print(f"{data.name}: {len(known)} ratings for {ps.world_size} workers, {len(hidden)} for testing")
        steps_per_epoch = len(known) // (args.batch_size * ps.world_size)
        seconds = 0.0
        for step, part in enumerate(
            sparse_data.batches(len(known), args.batch_size, args.epochs, ps.rank, ps.world_size), start=1
        ):
            rows = known[part]
            who, what = data.users[rows], data.items[rows]
            started = time.perf_counter()
            by_users, by_items = gradients(users.pull(who), items.pull(what), data.ratings[rows] - mean, args.l2)
            ps.push_pull({}, tables={"users": (who, by_users), "items": (what, by_items)})
            seconds += time.perf_counter() - started
            if ps.rank == 0 and step % steps_per_epoch == 0:
                print(f"epoch {step // steps_per_epoch:3d} of {args.epochs}  test RMSE {rmse(hidden):.4f}", flush=True)
        ps.barrier("trained")
        if ps.rank == 0:
            result = {
                "data": data.name,
                "steps": step,
                "train_rmse": round(rmse(known), 4),
                "test_rmse": round(rmse(hidden), 4),
                "steps_per_s": round(step / seconds, 1),
            }
            print(f"result {json.dumps(result)}", flush=True)


def main() -> None:
    """Read the command line and train."""
    parser = CommandLine("Matrix factorization of ratings.")
    parser.add_argument("--data", type=Path, help="ratings.dat of MovieTweetings; without it, ratings are generated")
    parser.number("--epochs", 10, "passes over the data")
    parser.number("--batch-size", 100, "ratings per worker and step")
    parser.number("--factors", 8, "factors of each user and item")
    parser.number("--lr", 0.1, "learning rate")
    parser.number("--l2", 0.3, "weight of the squares of the rows")
    parser.add_argument("--plain", action="store_true", help="train in this process, without psd")
    parser.run(train)


if __name__ == "__main__":
    main()
