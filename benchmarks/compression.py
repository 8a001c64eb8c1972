"""Measures what compression costs in accuracy, and what it costs or saves in time on one machine.

    python benchmarks/compression.py [--only accuracy|step] [--seeds 3] [--epochs 15] [--rounds 10] [--steps 5] [--json FILE]

Accuracy: two workers train a small net on scikit-learn's digits, synchronously, with each codec, with and without error
feedback, then with each form of pulls, alone and with pushes in the same, on half of the images; the other half tests it. Means
over the seeds, in points beside float32.

Step: the dense step of one worker and one shard over loopback TCP, 25.6 million parameters, as it is and compressed, which take
turns in one run; the ratios are the figures to compare. What each has computed is verified. Exit status: 1 if psd failed or was
wrong. docs/compression.md has the figures.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import _contenders as contenders
import _report as report
import numpy as np
import torch
from _processes import Shard, cleanly, start_all
from _report import ratio
from _turns import Match
from torch.nn import functional as F  # noqa: N812 (its usual name)

import psd_client
import psd_client.torch as psd

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import small_digits

WORKERS = 2
BATCH = 32
LR = 0.05
CODECS = ("bf16", "fp16", "int8", "int4", "int4log", "topk:0.01", "sign")
WITH, AT_RANDOM, NEAREST = "feedback", "none, at random", "none, nearest"
"""The kinds of error feedback, and of rounding without it."""

PULLS = ("bf16", "fp16", "int8", "int4", "int4log")
PULLED, BOTH_WAYS = "pull", "compress and pull"
"""Kinds of trainings in which parameters come back compressed."""

POINTS = 0.5
"""Points by which int8 and int4 may be less accurate than float32."""


class Setting(NamedTuple):
    """One training."""

    codec: str
    kind: str

    @property
    def job(self) -> dict[str, Any]:
        """Its keywords."""
        if not self.codec:
            return {}
        if self.kind in (PULLED, BOTH_WAYS):
            return {"pull": self.codec, **({"compress": self.codec} if self.kind == BOTH_WAYS else {})}
        rounding = "stochastic" if self.kind == AT_RANDOM else "nearest"
        return {"compress": self.codec, "error_feedback": self.kind == WITH, "rounding": rounding}


def settings(codecs: Sequence[str]) -> list[Setting]:
    """All that there are of these codecs: two round nothing."""
    found = [Setting("", "")]
    for codec in codecs:
        rounds = codec != "sign" and not codec.startswith("topk")
        found += [Setting(codec, kind) for kind in (WITH, *([AT_RANDOM] if rounds else []), NEAREST)]
        found += [Setting(codec, kind) for kind in (PULLED, BOTH_WAYS) if codec in PULLS]
    return found


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Pixels and labels."""
    return small_digits.load()


def net(seed: int) -> torch.nn.Sequential:
    """The model: some 26,000 parameters."""
    torch.manual_seed(seed)
    linear, tanh = torch.nn.Linear, torch.nn.Tanh
    return torch.nn.Sequential(linear(64, 128), tanh(), linear(128, 128), tanh(), linear(128, 10))


def accuracy(setting: Setting, seed: int, epochs: int) -> float:
    """The share of the test images, in percent, that a job gets right."""
    images, labels = digits()
    order = np.random.default_rng(seed).permutation(len(labels))
    inputs, targets = torch.tensor(images[order] / 16, dtype=torch.float32), torch.tensor(labels[order])
    half = len(labels) // 2
    with cleanly() as stack:
        shard = Shard("--insecure")
        start_all(stack, [shard])

        def work(rank: int) -> float:
            model = net(seed)
            sgd = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
            with psd_client.connect(shard.address, rank, WORKERS) as ps:
                optimizer = psd.distribute(model, sgd, ps=ps, **setting.job)
                for step in range(epochs * half // (BATCH * WORKERS)):
                    drawn = np.random.default_rng([seed, step, rank]).integers(0, half, BATCH)
                    optimizer.zero_grad()
                    F.cross_entropy(model(inputs[drawn]), targets[drawn]).backward()
                    optimizer.step()
            return float((model(inputs[half:]).argmax(1) == targets[half:]).double().mean()) * 100

        with ThreadPoolExecutor(WORKERS) as pool:
            return next(iter(list(pool.map(work, range(WORKERS)))))


def trainings(codecs: Sequence[str], seeds: int, epochs: int) -> tuple[list[dict[str, Any]], list[report.Criterion]]:
    """Train with each setting, and print the table."""
    torch.set_num_threads(1)
    found: dict[Setting, list[float]] = {}
    for setting in settings(codecs):
        report.progress(" ".join(setting) or "float32")
        found[setting] = [accuracy(setting, seed, epochs) for seed in range(seeds)]
    plain = statistics.mean(found[Setting("", "")])

    def points(codec: str, kind: str) -> str:
        values = found.get(Setting(codec, kind))
        return "-" if values is None else f"{statistics.mean(values) - plain:+.2f}"

    kinds = (WITH, AT_RANDOM, NEAREST)
    rows = [[codec, *(points(codec, kind) for kind in kinds)] for codec in codecs]
    print(f"Digits, {WORKERS} workers, sync, means of {seeds} seeds; float32: {plain:.2f} %; points beside it\n")
    print(report.table(["codec", *kinds], rows))
    rows = [[codec, *(points(codec, kind) for kind in (PULLED, BOTH_WAYS))] for codec in codecs if codec in PULLS]
    print("\nParameters come back in the form; pushes with feedback\n")
    print(report.table(["codec", PULLED, BOTH_WAYS], rows))
    asked = [Setting(codec, kind) for codec in ("int8", "int4") if codec in codecs for kind in (WITH, PULLED, BOTH_WAYS)]
    losses = {setting: plain - statistics.mean(found[setting]) for setting in asked}
    checked = [report.Criterion(5, f"{' '.join(setting)}, points lost", loss, POINTS) for setting, loss in losses.items()]
    return [{**setting._asdict(), "accuracy": values} for setting, values in found.items()], checked


def steps(model: str, rounds: int, steps: int) -> tuple[list[dict[str, Any]], list[report.Criterion], Match]:
    """Time the dense step, and print the table."""
    pairs = (("int8", "bf16"), ("int4", "bf16"), ("int8", "int8"), ("int4", "int4"))
    forms = ({}, {"compress": "int8"}, *({"compress": compress, "pull": pull} for compress, pull in pairs))
    with cleanly() as stack:
        match = Match(stack)
        for form in forms:
            name = " ".join(("psd tcp", *form.values()))
            match.add(name, contenders.psd("tcp", 1, 1, model, **form))
        found = match.run(rounds, steps)
        match.close()
    median_s = {contender.name: statistics.median(contender.seconds) for contender in found}
    plain = median_s.get("psd tcp")
    rows = [
        [name, report.number(1e3 * median, 1), report.number(1e3 * min(c.seconds), 1), report.number(ratio(median, plain))]
        for (name, median), c in zip(median_s.items(), found, strict=True)
    ]
    print(f"\n{model}, W = 1, S = 1, loopback TCP; medians of {rounds * steps} steps\n")
    print(report.table(["system", "ms/step", "fastest", "x float32"], rows))
    checked = [report.Criterion(4, "a step over loopback TCP, int8 / float32", ratio(median_s.get("psd tcp int8"), plain), 1.0)]
    return [{"system": c.name, "steps_s": c.seconds} for c in found], checked, match


def main() -> int:
    """Print the figures."""
    parser = report.parser(__doc__, rounds=10, steps=5)
    parser.add_argument("--only", choices=["accuracy", "step"], help="half of it (default: both)")
    parser.add_argument("--codecs", type=report.some_of(CODECS), default=list(CODECS), help="of the trainings (default: all)")
    parser.add_argument("--seeds", type=int, default=3, help="of the trainings (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=15, help="of a training (default: %(default)s)")
    parser.add_argument("--model", default="resnet50", help="of the step, as in step.py (default: %(default)s)")
    args = parser.parse_args()
    about = report.machine()
    print(report.machine_line(about) + "\n")
    figures: dict[str, Any] = {"machine": about}
    checked: list[report.Criterion] = []
    left_out: dict[str, str] = {}
    is_failed = False
    if args.only != "step":
        figures["accuracy"], checked = trainings(args.codecs, args.seeds, args.epochs)
    if args.only != "accuracy":
        figures["steps"], more, match = steps(args.model, args.rounds, args.steps)
        checked += more
        left_out, is_failed = match.left_out, bool(match.failed)
    return report.conclude(args.json, figures, checked, left_out, is_failed=is_failed)


if __name__ == "__main__":
    sys.exit(main())
