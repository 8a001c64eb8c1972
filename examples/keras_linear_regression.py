"""Fit y = 2x + 10 with Keras and several workers: the model with which distributed TensorFlow is usually taught.

$ psd-run --shards 1 --workers 2 examples/keras_linear_regression.py
$ psd-run --shards 1 --workers 2 examples/keras_linear_regression.py --mode async
$ psd-run --shards 1 --workers 2 --checkpoint-dir run --checkpoint-secs 60 examples/keras_linear_regression.py

The last line stores a checkpoint every minute and one at the end; given again, it goes on where the checkpoint is. All workers
run the same lines: none is chief. docs/migrating.md has this script beside its TensorFlow 1 original.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

import psd_client.keras as psd
from psd_client import ConfigError


def batches(rank: int, step: int, size: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Noisy points, without end. They follow from rank and step, so that a run that goes on has new ones."""
    while True:
        rng = np.random.default_rng((rank, step))
        x = rng.uniform(-1, 1, size=(size, 1)).astype(np.float32)
        yield x, 2 * x + 10 + 0.33 * rng.standard_normal(x.shape).astype(np.float32)
        step += 1


def train(args: argparse.Namespace) -> None:
    """Run one worker."""
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, name="line")])
    optimizer = psd.distribute(model, keras.optimizers.SGD(args.lr), consistency=args.mode)  # the first worker's values, or
    ps = optimizer.ps  # those of the checkpoint, are everybody's
    model.compile(optimizer=optimizer, loss="mse")
    if ps.clock:
        print(f"continues at step {ps.clock}", flush=True)
    data = batches(ps.rank, ps.clock, args.batch_size)
    while ps.clock < args.steps:
        steps = min(20, args.steps - ps.clock)
        history = model.fit(data, steps_per_epoch=steps, shuffle=False, verbose=0)
        weight, bias = (float(values.item()) for values in model.get_weights())
        if ps.rank == 0:
            loss = history.history["loss"][-1]
            print(f"step {ps.clock:4d}  weight {weight:7.4f}  bias {bias:7.4f}  loss {loss:8.4f}", flush=True)
    optimizer.close()


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description="Fit a line to noisy points with Keras. Alone, or started by psd-run.")
    parser.add_argument("--mode", help="sync, async or ssp:S (default: what psd-run says, or sync)")
    parser.add_argument("--steps", type=int, default=300, help="steps of each worker in all (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="points per worker and step (default %(default)s)")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate (default %(default)s)")
    args = parser.parse_args()
    try:
        train(args)
    except ConfigError as error:
        sys.exit(f"{error}\nFor example: psd-run --shards 1 --workers 2 {sys.argv[0]}")


if __name__ == "__main__":
    main()
