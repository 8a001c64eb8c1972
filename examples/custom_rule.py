"""Train with an update rule of your own: softmax regression on handwritten digits by Yogi (examples/yogi.py), in NumPy.

$ psd-run --shards 2 --workers 2 --rule yogi:Yogi examples/custom_rule.py
$ psd-run --shards 2 --workers 2 --rule yogi:Yogi --consistency async examples/custom_rule.py --steps 100

Without --rule the shards refuse the job: they run only the code that whoever starts them has listed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import small_digits
from command_line import CommandLine
from numpy.typing import NDArray

import psd_client

Array = NDArray[Any]


def probabilities(params: Mapping[str, Array], images: Array) -> Array:
    """Probabilities of the ten digits, (n, 10), for images (n, 64)."""
    scores = images @ params["weight"] + params["bias"]
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return scores / scores.sum(axis=1, keepdims=True)


def gradients(params: Mapping[str, Array], images: Array, labels: Array) -> dict[str, Array]:
    """Gradients of the mean cross-entropy."""
    error = probabilities(params, images)
    error[np.arange(len(labels)), labels] -= 1
    error /= len(labels)
    return {"weight": images.T @ error, "bias": error.sum(axis=0)}


def train(args: argparse.Namespace) -> None:
    """Run one worker."""
    images, labels = small_digits.load()
    images = (images / 16).astype(np.float32)
    is_test = np.arange(len(labels)) % 5 == 0
    with psd_client.connect() as ps:
        rng = np.random.default_rng(seed=ps.rank)
        start = {"weight": np.zeros((64, 10), np.float32), "bias": np.zeros(10, np.float32)}
        params = ps.declare(start, optimizer=psd_client.CustomRule("yogi:Yogi", lr=args.lr))
        mine = np.flatnonzero(~is_test)[ps.rank :: ps.world_size]
        for step in range(1, args.steps + 1):
            rows = rng.choice(mine, args.batch_size, replace=False)
            # Numbers travel with each push, so any schedule works; one that follows the clock goes on after a restart.
            ps.param_groups[0]["lr"] = args.lr * 0.995**ps.clock
            params = ps.push_pull(gradients(params, images[rows], labels[rows]), weight=len(rows))
            if ps.rank == 0 and (step % 50 == 0 or step == args.steps):
                share = np.mean(probabilities(params, images[is_test]).argmax(axis=1) == labels[is_test])
                print(f"step {step:4d} of {args.steps}  accuracy {share:6.1%}", flush=True)
        ps.barrier("trained")
        if ps.rank == 0:
            share = np.mean(probabilities(ps.pull(), images[is_test]).argmax(axis=1) == labels[is_test])
            print(f"result {json.dumps({'steps': args.steps, 'accuracy': round(float(share), 4)})}", flush=True)


def main() -> None:
    """Read the command line and train."""
    parser = CommandLine("Train with an update rule of your own.")
    parser.number("--steps", 300, "steps of each worker")
    parser.number("--batch-size", 64, "images per worker and step")
    parser.number("--lr", 0.02, "learning rate")
    parser.run(train, "psd-run --shards 2 --workers 2 --rule yogi:Yogi")


if __name__ == "__main__":
    main()
