"""Fit y = 2x + 10 with several workers, with NumPy and psd_client alone: one weight, one bias.

$ psd-run --shards 1 --workers 2 examples/linear_regression.py
$ psd-run --shards 1 --workers 2 --consistency async examples/linear_regression.py --steps 500
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

import psd_client


def train(args: argparse.Namespace) -> None:
    """Run one worker."""
    with psd_client.connect() as ps:
        rng = np.random.default_rng(seed=ps.rank)  # each worker has data of its own
        start = {"weight": np.float32(rng.normal()), "bias": np.float32(rng.normal())}
        params = ps.declare(start, optimizer=psd_client.SGD(lr=args.lr))  # the first worker's values are everybody's
        for step in range(1, args.steps + 1):
            x = rng.uniform(-1, 1, size=args.batch_size)
            y = 2 * x + 10 + 0.33 * rng.normal(size=args.batch_size)
            error = params["weight"] * x + params["bias"] - y
            loss = np.mean(error**2)
            params = ps.push_pull({"weight": 2 * np.mean(error * x), "bias": 2 * np.mean(error)})
            if ps.rank == 0 and (step % 20 == 0 or step == args.steps):
                print(
                    f"step {step:4d}  weight {params['weight']:7.4f}  bias {params['bias']:7.4f}  loss {loss:8.4f}", flush=True
                )


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description="Fit a line to noisy points. Alone, or started by psd-run.")
    parser.add_argument("--steps", type=int, default=300, help="steps of each worker (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="points per worker and step (default %(default)s)")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate (default %(default)s)")
    args = parser.parse_args()
    try:
        train(args)
    except psd_client.ConfigError as error:
        sys.exit(f"{error}\nFor example: psd-run --shards 1 --workers 2 {sys.argv[0]}")


if __name__ == "__main__":
    main()
