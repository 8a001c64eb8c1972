"""Train a small recurrent model of a text, character by character, with Keras and Adadelta on several workers.

$ psd-run --shards 2 --workers 2 --checkpoint-dir run examples/keras_text_adadelta.py
$ psd-run --shards 2 --workers 2 --checkpoint-dir run examples/keras_text_adadelta.py --steps 800 --data shakespeare.txt

The text is psd's own licence, unless --data names another, such as tinyshakespeare. A second run on the same --checkpoint-dir
restores model and slots and goes on; tell it a larger number of --steps, and the same text.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
from numpy.typing import NDArray

import psd_client.keras as psd
from psd_client import ConfigError

LICENSE = Path(__file__).parents[1] / "LICENSE"
SYMBOLS = 128  # ASCII; what lies beyond becomes "?"
Codes = NDArray[np.int32]


def read(path: Path) -> Codes:
    """Read a text as numbers."""
    text = path.read_text(encoding="utf-8", errors="replace").encode("ascii", errors="replace")
    return np.frombuffer(text, np.uint8).astype(np.int32)


def build(units: int) -> keras.Model:
    """A model from characters (n, length) to scores of the next ones (n, length, SYMBOLS)."""
    return keras.Sequential(
        [
            keras.layers.Input((None,), dtype="int32"),
            keras.layers.Embedding(SYMBOLS, 32, name="symbols"),
            keras.layers.GRU(units, return_sequences=True, name="memory"),
            keras.layers.Dense(SYMBOLS, name="scores"),
        ]
    )


def batches(text: Codes, rank: int, step: int, size: int, length: int) -> Iterator[tuple[Codes, Codes]]:
    """Pieces of the text, and the same one character on, without end. They follow from rank and step."""
    while True:
        starts = np.random.default_rng((rank, step)).integers(0, len(text) - length, size)
        pieces = text[starts[:, None] + np.arange(length + 1)]
        yield pieces[:, :-1], pieces[:, 1:]
        step += 1


def train(args: argparse.Namespace) -> None:
    """Run one worker."""
    text = read(args.data)
    if len(text) <= args.length + 1:
        sys.exit(f"--data: {args.data} has {len(text)} characters, and a piece takes {args.length + 1}")
    model = build(args.units)
    optimizer = psd.distribute(model, keras.optimizers.Adadelta(args.lr))
    ps = optimizer.ps
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss)
    begun, last = ps.clock, float("nan")
    if begun:
        print(f"restored at step {begun}", flush=True)
    data = batches(text, ps.rank, ps.clock, args.batch_size, args.length)
    while ps.clock < args.steps:
        steps = min(20, args.steps - ps.clock)
        history = model.fit(data, steps_per_epoch=steps, shuffle=False, verbose=0)
        last = history.history["loss"][-1]
        if ps.rank == 0:
            print(f"step {ps.clock:4d} of {args.steps}  loss {last:7.4f}", flush=True)
    if ps.rank == 0:
        print(f"result {json.dumps({'begun': begun, 'steps': ps.clock, 'loss': round(last, 4)})}", flush=True)
    optimizer.close()


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description="Learn a text character by character. Alone, or started by psd-run.")
    parser.add_argument("--data", type=Path, default=LICENSE, metavar="FILE", help="a text (default: psd's licence)")
    parser.add_argument("--steps", type=int, default=400, help="steps of each worker in all (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="pieces per worker and step (default %(default)s)")
    parser.add_argument("--length", type=int, default=32, help="characters of a piece (default %(default)s)")
    parser.add_argument("--units", type=int, default=64, help="of the recurrent layer (default %(default)s)")
    parser.add_argument("--lr", type=float, default=1.0, help="learning rate (default %(default)s)")
    args = parser.parse_args()
    try:
        train(args)
    except ConfigError as error:
        sys.exit(f"{error}\nFor example: psd-run --shards 2 --workers 2 {sys.argv[0]}")


if __name__ == "__main__":
    main()
