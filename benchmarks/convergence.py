"""Measures what staleness costs: accuracy at equal samples, and steps per second, with 4 workers of which one is slow.

    python benchmarks/convergence.py [--data DIR] [--pushes 1500] [--seeds 3] [--only async] [--json FILE]

Trains the ConvNet of examples/mnist.py. All runs end when the workers have pushed so many gradients together; under sync four
of them make one update, and are added up (Adam: averaged), so that the same learning rate suits all modes. A step of a worker
takes --step-ms, of the last one --slow times as long, whatever the machine; so steps/s show who waits for whom.
docs/consistency.md has the figures.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import _report
import torch
from _processes import Shard
from torch.nn import functional as F  # noqa: N812 (its usual name)

import psd_client
import psd_client.torch as psd
from psd.contract.environment import memory_directory
from psd_client.client import worker_of

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import datasets
import mnist

WORKERS = 4
MODES = ("sync", "async", "ssp:3")
RULES = {
    "SGD": (0.01, 0.05, 0.2),
    "SGD, momentum 0.9": (0.001, 0.005, 0.02),
    "Adam": (0.001, 0.01, 0.05),
}
"""Rules and their learning rates: a small one, one that suits sync, and one that is at its edge."""


@dataclass(frozen=True)
class Setting:
    """One run."""

    rule: str
    lr: float
    mode: str
    staleness: str
    seed: int


def settings(seeds: int, only: str) -> list[Setting]:
    """All runs, seed by seed, so that an interrupted measurement has all settings."""
    return [
        Setting(rule, lr, mode, staleness, seed)
        for seed in range(seeds)
        for rule, rates in RULES.items()
        for lr in rates
        for mode in MODES
        for staleness in (("", "lr") if mode == "async" else ("",))
        if only in mode
    ]


def optimizer_of(setting: Setting, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer in torch."""
    if setting.rule == "Adam":
        return torch.optim.Adam(model.parameters(), lr=setting.lr)
    return torch.optim.SGD(model.parameters(), lr=setting.lr, momentum=0.9 if "momentum" in setting.rule else 0.0)


_data: dict[str, Any] = {}


def train(setting: Setting, servers: str, rank: int, args: argparse.Namespace) -> dict[str, float]:
    """Run one worker, in its own process."""
    torch.set_num_threads(1)
    if args.data not in _data:
        _data[args.data] = datasets.load(args.data)
    data = _data[args.data]
    torch.manual_seed(setting.seed)
    model = mnist.ConvNet()
    optimizer = psd.distribute(
        model,
        optimizer_of(setting, model),
        consistency=setting.mode,
        staleness=setting.staleness,
        reduce="mean" if setting.rule == "Adam" else "sum",
        servers=servers,
        rank=rank,
        world_size=WORKERS,
    )
    torch.manual_seed(1000 * setting.seed + rank)
    mine = mnist.batches(data.train_images[rank::WORKERS], data.train_labels[rank::WORKERS], args.batch_size)
    step_s = args.step_ms / 1000 * (args.slow if rank == WORKERS - 1 else 1)
    pause = threading.Event()
    with optimizer.ps as ps:
        until = args.pushes // WORKERS if setting.mode == "sync" else args.pushes
        ps.barrier("begin")
        begun = time.perf_counter()
        while worker_of(ps).parameters.versions[0] < until:
            due = time.perf_counter() + step_s
            images, labels = next(mine)
            optimizer.zero_grad()
            F.nll_loss(model(images), labels).backward()
            pause.wait(max(0.0, due - time.perf_counter()))
            try:
                optimizer.step(batch_size=len(labels))
            except psd_client.NonFiniteGradient:  # training has diverged; the others are not to wait
                accuracy = mnist.accuracy(model, data.test_images, data.test_labels)
                return {"accuracy": accuracy, "seconds": time.perf_counter() - begun, "steps": ps.clock}
        seconds = time.perf_counter() - begun
        steps = ps.clock
        ps.barrier("end")
        optimizer.pull()
        accuracy = mnist.accuracy(model, data.test_images, data.test_labels) if rank == 0 else 0.0
    return {"accuracy": accuracy, "seconds": seconds, "steps": steps}


def measure(setting: Setting, args: argparse.Namespace, pool: ProcessPoolExecutor, memory: Path) -> dict[str, Any]:
    """Measure one run, with a shard of its own and all workers."""
    shard = Shard("--state-dir", str(memory / "state"))
    shard.start()
    shard.wait_ready()
    results = [job.result() for job in [pool.submit(train, setting, shard.address, r, args) for r in range(WORKERS)]]
    shard.end()
    seconds = max(result["seconds"] for result in results)
    steps = sum(result["steps"] for result in results)
    slow = results[-1]["steps"]
    return asdict(setting) | {"accuracy": results[0]["accuracy"], "steps_per_s": steps / seconds, "share_of_slow": slow / steps}


def text(runs: list[dict[str, Any]]) -> str:
    """A table with a row per setting: the mean and the lowest accuracy over its seeds."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["rule"], f"{run['lr']:g}", run["mode"], run["staleness"] or "-"), []).append(run)
    rows = [
        (
            *key,
            f"{statistics.mean(run['accuracy'] for run in found):.1%}",
            f"{min(run['accuracy'] for run in found):.1%}",
            f"{statistics.mean(run['steps_per_s'] for run in found):.0f}",
            f"{statistics.mean(run['share_of_slow'] for run in found):.0%}",
        )
        for key, found in groups.items()
    ]
    headings = ("rule", "lr", "mode", "staleness", "accuracy", "worst seed", "steps/s", "by the slow one")
    return _report.table(headings, rows, words=4)


def main() -> None:
    """Print the figures."""
    parser = _report.parser(__doc__)
    parser.add_argument("--data", default="digits", help="folder with MNIST's four IDX files (default: scikit-learn's digits)")
    parser.add_argument("--pushes", type=int, default=1500, help="gradients of all workers together (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="images per gradient (default %(default)s)")
    parser.add_argument("--step-ms", type=float, default=20, help="a worker's own time per step (default %(default)s)")
    parser.add_argument("--slow", type=float, default=4, help="how many times slower the last worker is (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="runs per setting (default %(default)s)")
    parser.add_argument("--only", default="", help="modes that have this in their name")
    args = parser.parse_args()
    runs = []
    with (
        ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn")) as pool,
        tempfile.TemporaryDirectory(dir=memory_directory(), prefix="psd-benchmark-") as memory,
    ):
        for number, setting in enumerate(planned := settings(args.seeds, args.only), 1):
            runs.append(measure(setting, args, pool, Path(memory)))
            done = runs[-1]
            print(
                f"{number}/{len(planned)} {setting}: {done['accuracy']:.1%}, {done['steps_per_s']:.0f} steps/s",
                file=sys.stderr,
                flush=True,
            )
    print(text(runs))
    _report.write_json(args.json, {"settings": {**vars(args), "json": None}, "runs": runs}, [])


if __name__ == "__main__":
    main()
