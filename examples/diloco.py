"""A character transformer trained in several ways of being together: each step, every 50 steps, in fragments, without waiting.

$ python examples/diloco.py
$ python examples/diloco.py --mode sync,streaming --data shakespeare.txt --steps 1000

Each mode learns from equally many characters: --learners times --steps batches, or as many steps of one process with the
batches of all ("single"). The losses are of a text that nobody has learned from. diloco.png shows them by tokens (characters),
by time and by the bytes that a learner has sent and received. docs/far-apart.md says what the modes are.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import characters
import matplotlib.pyplot as plt
import torch
from command_line import CommandLine

import psd_client
import psd_client.torch as psd

NESTEROV = psd_client.SGD(lr=0.7, momentum=0.9, nesterov=True)

Options = dict[str, Any]
MODES: dict[str, Callable[[argparse.Namespace], Options]] = {
    "single": lambda _: {},
    "sync": lambda _: {},
    "diloco": lambda args: {"local": psd.Local(args.every, NESTEROV)},
    "streaming": lambda args: {"local": psd.Local(args.every, NESTEROV, fragments=8, delay=min(5, args.every // 8))},
    "decoupled": lambda args: {
        "local": psd.Local(f"auto:{args.every}", NESTEROV, fragments=8, delay=min(5, args.every // 8), merge="rda"),
        "quorum": max(1, args.learners // 2),
        "grace": "auto",
    },
    "async": lambda args: {"local": psd.Local(args.every, psd_client.SGD(lr=1 / args.learners)), "consistency": "async"},
}
"""Options of psd.distribute in each mode. Without rounds each learner's difference counts alone, and momentum would add up."""


def train(mode: str, args: argparse.Namespace) -> list[tuple[int, float, int, float]]:
    """Train one learner; tokens of all learners so far, seconds, bytes of this one, and the loss, now and then."""
    torch.set_num_threads(1)
    text = characters.read(args.data)
    model = characters.model_of(text, args.seed)
    optimizer = psd.distribute(model, torch.optim.AdamW(model.parameters(), args.lr), **MODES[mode](args))
    ps, share = optimizer.ps, args.learners // optimizer.world_size
    ps.barrier("begin")
    begun = time.perf_counter()
    curve = []
    for step in range(1, args.steps + 1):
        batch = torch.cat(
            [
                characters.pieces(text.train, args.batch_size, model.context, 1000 * step + optimizer.rank + one)
                for one in range(share)
            ]
        )
        optimizer.zero_grad()
        characters.loss_of(model, batch).backward()
        optimizer.step()
        if step % args.evaluate == 0 or step == args.steps:
            if step == args.steps:
                optimizer.pull()
            stats, seconds = ps.stats(), time.perf_counter() - begun
            tokens = step * args.learners * args.batch_size * model.context
            if ps.rank == 0:
                loss = characters.validation_loss(model, text)
                curve.append((tokens, seconds, stats["sent_bytes"] + stats["received_bytes"], loss))
                print(f"{mode:10} step {step:5d}  tokens {tokens:9d}  loss {loss:.4f}  bytes {curve[-1][2]:,}", flush=True)
    optimizer.close()
    return curve


def draw(curves: dict[str, list[tuple[int, float, int, float]]], path: Path) -> None:
    """Save a picture of the losses."""
    axes = ("tokens", "seconds", "bytes of a learner")
    figure, places = plt.subplots(1, len(axes), figsize=(12, 3.5), layout="constrained", sharey=True)
    for mode, curve in curves.items():
        *columns, losses = zip(*curve, strict=True)
        for place, column in zip(places, columns, strict=True):
            place.plot(column, losses, label=mode)
    for place, label in zip(places, axes, strict=True):
        place.set(xlabel=label)
    places[2].set_xscale("log")
    places[0].set(ylabel="loss")
    places[0].legend()
    figure.savefig(path, dpi=150)


def compare(args: argparse.Namespace) -> None:
    """Train in each mode, on shards and learners of its own."""
    text = characters.read(args.data)
    print(f"{text.name}: {len(text.train)} characters to learn from, {len(text.alphabet)} different ones")
    curves = {}
    for mode in args.mode:
        with psd_client.local(shards=args.shards, workers=1 if mode == "single" else args.learners) as cluster:
            curves[mode] = cluster.run(train, mode, args)[0]
    draw(curves, args.picture)
    print(f"\n{'mode':10} {'loss':>7} {'seconds':>8} {'bytes of a learner':>20}")
    for mode, curve in curves.items():
        _, seconds, moved, loss = curve[-1]
        print(f"{mode:10} {loss:7.4f} {seconds:8.1f} {moved:20,}")
    print(f"result {json.dumps({mode: curve[-1] for mode, curve in curves.items()})}")


def modes(text: str) -> list[str]:
    """Convert an argument of the type "sync,diloco"."""
    found = text.split(",")
    for mode in found:
        if mode not in MODES:
            raise argparse.ArgumentTypeError(f"there is no {mode!r}; there are {', '.join(MODES)}")
    return found


def main() -> None:
    """Read the command line, train and draw."""
    parser = CommandLine("A character transformer, trained by learners that are together in several ways.")
    parser.add_argument("--mode", type=modes, default=list(MODES), help=f"one or several of {','.join(MODES)} (default all)")
    parser.add_argument("--data", type=Path, help="a text file; without it, a text is generated")
    parser.add_argument("--picture", type=Path, default=Path("diloco.png"), help="where it is saved (default %(default)s)")
    parser.number("--learners", 4, "how many of them")
    parser.number("--shards", 2, "processes that hold the parameters")
    parser.number("--steps", 250, "of each learner")
    parser.number("--every", 50, "local steps between two exchanges")
    parser.number("--batch-size", 8, "pieces of the text in a learner's batch")
    parser.number("--evaluate", 50, "steps between two evaluations")
    parser.number("--lr", 3e-3, "learning rate of AdamW")
    parser.number("--seed", 1, "of the model")
    parser.run(compare, "python")


if __name__ == "__main__":
    main()
