"""Train a small DCGAN (Radford et al. 2015) on scikit-learn's digits of 8x8 pixels: two models and two optimizers in one job.

$ psd-run --shards 2 --workers 2 examples/dcgan.py
$ psd-run --shards 2 --workers 2 --aggregation exact --max-restarts 1 examples/dcgan.py

Discriminator and generator are stepped in turn, and each step moves the parameters of one of them. Whose turn it is follows
from the job's clock, and so do the images and the noise of a step. So a process that is killed and started again goes on with
the step that the others are at, and with `--aggregation exact` the job then ends as if nothing had happened. `--plain 2` trains
without psd, in this process, on the batches of two workers.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import small_digits
import torch
from command_line import CommandLine
from torch import nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

import psd_client
import psd_client.torch as psd

NOISE = 16
TURNS = ("discriminator", "generator")


def models() -> dict[str, nn.Module]:
    """Generator of images (n, 1, 8, 8) from noise (n, 16, 1, 1), and discriminator: one number (n, 1, 1, 1) for each image."""
    torch.manual_seed(0)
    generator = nn.Sequential(
        nn.ConvTranspose2d(NOISE, 64, 2, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 1, 4, stride=2, padding=1),
        nn.Tanh(),
    )
    discriminator = nn.Sequential(
        nn.Conv2d(1, 32, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(32, 64, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.LeakyReLU(0.2),
        nn.Conv2d(64, 1, 2),
    )
    return {"generator": generator, "discriminator": discriminator}


def adams(of: Mapping[str, nn.Module], lr: float) -> dict[str, torch.optim.Optimizer]:
    """An optimizer for each model."""
    return {name: torch.optim.Adam(model.parameters(), lr=lr, betas=(0.5, 0.999)) for name, model in of.items()}


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Images (n, 1, 8, 8) from -1 to 1, to train with and to compare with."""
    images = torch.from_numpy(small_digits.load()[0]).reshape(-1, 1, 8, 8).float().div_(8).sub_(1)
    is_held_out = torch.arange(len(images)) % 5 == 0
    return images[~is_held_out], images[is_held_out]


def loss_of(step: int, rank: int, gan: Mapping[str, nn.Module], images: torch.Tensor, size: int) -> torch.Tensor:
    """The loss of one worker in one step, of which everything in it is a function."""
    generator, discriminator = gan["generator"], gan["discriminator"]
    drawn = torch.Generator().manual_seed(1000 * step + rank)
    fake = generator(torch.randn(size, NOISE, 1, 1, generator=drawn))
    if TURNS[step % 2] == "generator":
        return F.softplus(-discriminator(fake)).mean()
    real = images[torch.randint(len(images), (size,), generator=drawn)]
    return F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake.detach())).mean()


def train(
    clock: Callable[[], int],
    gan: Mapping[str, nn.Module],
    optimizers: Mapping[str, Any],
    images: torch.Tensor,
    ranks: Sequence[int],
    args: argparse.Namespace,
    show: Callable[[int, float], None],
) -> None:
    """Make the steps that are left.

    Args:
        clock: says how many the job has made; asked before each step. ranks: of the workers whose batches this process takes.
        show: called after each step with its number, from 1, and the loss.
    """
    while (step := clock()) < args.steps:
        optimizer = optimizers[TURNS[step % 2]]
        optimizer.zero_grad()  # also of what the generator's loss has left in the discriminator
        loss = sum(loss_of(step, rank, gan, images, args.batch_size) for rank in ranks) / len(ranks)
        loss.backward()
        try:
            optimizer.step()
        except psd_client.RolledBack:  # a shard has lost its memory, and the job has gone back to a checkpoint
            optimizer.pull()
        show(step + 1, loss.item())


@torch.no_grad()
def generated(generator: nn.Module, count: int) -> torch.Tensor:
    """Images (count, 1, 8, 8), normalized among themselves as in training, by a copy whose statistics nobody needs."""
    return copy.deepcopy(generator)(torch.randn(count, NOISE, 1, 1, generator=torch.Generator().manual_seed(1)))


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Fréchet distance of two sets of images, by the means and covariances of their pixels; 0 if these are alike."""
    one, other = one.flatten(1).double(), other.flatten(1).double()
    values, vectors = torch.linalg.eigh(one.T.cov())
    root = vectors * values.clamp_min(0).sqrt() @ vectors.T
    common = torch.linalg.eigvalsh(root @ other.T.cov() @ root).clamp_min(0).sqrt().sum()
    return float((one.mean(0) - other.mean(0)).square().sum() + one.T.cov().trace() + other.T.cov().trace() - 2 * common)


def drawing(images: torch.Tensor) -> str:
    """Images side by side, as text."""
    rows = torch.cat([*images[:, 0]], dim=1)
    return "\n".join("".join(" .:+#@"[min(5, int(3 * (value + 1)))] * 2 for value in row) for row in rows.tolist())


def run(args: argparse.Namespace) -> None:
    """Run one worker, or all of them in this process."""
    torch.set_num_threads(1)  # these images are too small for more
    images, held_out = digits()
    gan = models()
    adam = adams(gan, args.lr)

    def show(step: int, loss: float) -> None:
        if step % 50 == 0:
            far = distance(generated(gan["generator"], 500), held_out)
            print(f"step {step:4d} of {args.steps}  generator's loss {loss:.3f}  distance {far:5.2f}", flush=True)

    if args.plain:
        train(itertools.count().__next__, gan, adam, images, range(args.plain), args, show)
    else:
        optimizers = psd.distribute(gan, adam)
        ps = optimizers["generator"].ps
        if ps.clock:
            print(f"goes on with step {ps.clock + 1}", flush=True)
        train(lambda: ps.clock, gan, optimizers, images, [ps.rank], args, show if ps.rank == 0 else lambda *_: None)
        if ps.rank:
            return
    made = generated(gan["generator"], 500)
    print(drawing(made[:6]))
    result = {"steps": args.steps, "distance": distance(made, held_out), "distance_of_digits": distance(images, held_out)}
    print(f"result {json.dumps(result)}", flush=True)


def main() -> None:
    """Read the command line and train."""
    parser = CommandLine("Train a DCGAN on small digits.")
    parser.number("--steps", 600, "steps of the job, of both models together")
    parser.number("--batch-size", 64, "images per worker and step")
    parser.number("--lr", 2e-3, "learning rate of both")
    parser.add_argument(
        "--plain", type=int, metavar="N", help="train without psd, in this process, on the batches of N workers"
    )
    parser.run(run)


if __name__ == "__main__":
    main()
