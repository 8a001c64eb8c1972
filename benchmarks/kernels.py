"""Measures the kernels of psd_core on one thread, against a copy of memory in the same pattern and against torch's fused ones.

    python benchmarks/kernels.py [--megabytes 32] [--rounds 30] [--rule adam] [--json FILE]

rules     an update of all blocks as a shard does it: each from its page to the spare one, which then is the page that was free
          last. Bytes are those that must be read and written: gradient, parameters and slots, the latter two twice.
torch     the same update by torch's optimizer, fused where torch has that, in place; how many times faster psd is, as a shard
          does it, and in place, which compares the kernels alone
others    the sums of a round and the finite check, also of gradients in half precision, which the kernels widen as they read
          them; and that widening as a pass of its own, by torch

`bound` is the share of the bandwidth of the copy, by bytes moved; those of SGD and of the sums have limits. The quickest of
some rounds counts, in processor time, and all are measured in turns, so that ratios hold on a busy machine, too. Arrays are
float32 in blocks of 4 MiB, but for gradients whose type is named; with the default they are larger than caches together, with
--megabytes 1 they are not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import _report
import numpy as np
import torch
from numpy.typing import NDArray

import psd_client
import psd_core
from psd.contract.jobspec import GroupSpec
from psd.contract.layout import BLOCK_BYTES_MAX
from psd_client.optimizers import scalar_values, spec_of
from psd_core.optimizer import Optimizer

LENGTH = BLOCK_BYTES_MAX // 4

Array = NDArray[Any]


@dataclass(frozen=True)
class Case:
    """A rule with its numbers and flags."""

    name: str
    optimizer: Optimizer
    gradient: str = "float32"

    @functools.cached_property
    def group(self) -> GroupSpec:
        """The rule with its flags."""
        return spec_of(self.optimizer)

    @functools.cached_property
    def scalars(self) -> tuple[float, ...]:
        """The numbers of the rule."""
        return tuple(scalar_values(self.group, self.optimizer.scalars(), 0))

    @property
    def slots(self) -> int:
        """Number of slots of the rule."""
        return len(self.group.info.slots(self.group.flags))

    @property
    def torch_kind(self) -> str:
        """Torch's optimizer of the same arithmetic; none for gradients in half precision."""
        return type(self.optimizer).__name__ if self.optimizer.is_in_torch and self.gradient == "float32" else ""


CASES = (
    Case("sgd", psd_client.SGD(lr=1e-3)),
    Case("sgd bfloat16", psd_client.SGD(lr=1e-3), "bfloat16"),
    Case("sgd float16", psd_client.SGD(lr=1e-3), "float16"),
    Case("sgd momentum", psd_client.SGD(lr=1e-3, momentum=0.9)),
    Case("adam", psd_client.Adam()),
    Case("adam amsgrad", psd_client.Adam(amsgrad=True)),
    Case("adamw", psd_client.AdamW()),
    Case("adagrad", psd_client.Adagrad(lr=1e-3)),
    Case("rmsprop", psd_client.RMSprop(lr=1e-3)),
    Case("adadelta", psd_client.Adadelta(lr=1e-3)),
    Case("adamax", psd_client.Adamax(lr=1e-3)),
    Case("nadam", psd_client.NAdam(lr=1e-3)),
    Case("ftrl", psd_client.FTRL(lr=1e-2, l1=1e-3, l2=1e-3)),
    Case("lion", psd_client.Lion()),
)

LIMITS = {
    "sgd": 0.9,
    "sgd bfloat16": 0.9,
    "sgd float16": 0.9,
    "sgd momentum": 0.85,
    "accumulate": 0.9,
    "accumulate bfloat16": 0.9,
    "accumulate float16": 0.9,
}
"""Least shares of the bandwidth of a copy."""

FUSED = {"SGD", "Adam", "AdamW", "Adagrad"}
"""Optimizers of torch with a fused kernel on CPUs; the others run as foreach, operation by operation."""


def filled(value: float) -> Array:
    """A block of numbers around a value."""
    block = psd_core.aligned_empty(LENGTH, np.float32)
    block[...] = value * np.random.default_rng(1).uniform(0.5, 1.5, LENGTH)
    return block


def narrowed(block: Array, dtype: str) -> Array:
    """The same numbers in the form in which psd_core takes this type."""
    narrow = torch.from_numpy(block).to(getattr(torch, dtype))
    return (narrow.view(torch.uint16) if narrow.dtype == torch.bfloat16 else narrow).numpy()


class Pages:
    """Blocks of parameters and slots, and a spare one, as in the arena."""

    def __init__(self, blocks: int, arrays: int) -> None:
        self.current = [[filled(0.1) for _ in range(arrays)] for _ in range(blocks)]
        self.spare = [filled(0.1) for _ in range(arrays)]

    def update(self, apply: Callable[[Sequence[Array], Sequence[Array], int], None]) -> None:
        """Replace each block by the output of `apply`."""
        for index, page in enumerate(self.current):
            apply(page, self.spare, index)
            self.current[index], self.spare = self.spare, page


def copy(before: Sequence[Array], after: Sequence[Array], index: int) -> None:
    """Copy each block, as the reference."""
    del index
    for source, target in zip(before, after, strict=True):
        np.copyto(target, source)


def stepper(case: Case, gradients: Sequence[Array]) -> Callable[[Sequence[Array], Sequence[Array], int], None]:
    """A step of the kernel for one block: a lone contribution, at a step that is not the first."""
    ends, touched = np.array([LENGTH], np.uint32), np.ones(1, np.uint8)
    steps_in, steps_out = np.full(1, 5, np.uint64), np.zeros(1, np.uint64)

    def apply(before: Sequence[Array], after: Sequence[Array], index: int) -> None:
        psd_core.step_block(
            case.group.rule,
            before[0],
            after[0],
            before[1:],
            after[1:],
            None,
            gradients[index],
            weight=1.0,
            scale=1.0,
            segment_ends=ends,
            touched=touched,
            steps_in=steps_in,
            steps_out=steps_out,
            scalars=case.scalars,
            flags=case.group.flags,
        )

    return apply


def torch_step(case: Case, gradients: Sequence[Array]) -> Callable[[], object]:
    """The same step in torch, in place."""
    params = [torch.nn.Parameter(torch.from_numpy(filled(0.1))) for _ in gradients]
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = torch.from_numpy(gradient)
    kind = getattr(torch.optim, case.torch_kind)
    how = {"fused": True} if case.torch_kind in FUSED else {"foreach": True}
    return kind(params, **how, **case.optimizer.option_values()).step


def measure_rule(case: Case, blocks: int, rounds: int) -> dict[str, Any]:
    """Measure one row of the first table."""
    gradients = [narrowed(filled(0.01), case.gradient) for _ in range(blocks)]
    pages, copied, fixed = (Pages(blocks, 1 + case.slots) for _ in range(3))
    apply = stepper(case, gradients)
    works: dict[str, Callable[[], object]] = {"psd": lambda: pages.update(apply), "copy": lambda: copied.update(copy)}
    if case.torch_kind:
        works["in place"] = lambda: [apply(page, page, index) for index, page in enumerate(fixed.current)] and None
        works["torch"] = torch_step(case, gradients)
    seconds = _report.in_turns(works, rounds=rounds)
    bytes_per_element = 8 * (1 + case.slots) + gradients[0].itemsize
    moved = blocks * LENGTH * bytes_per_element
    copy_bytes_per_s = blocks * BLOCK_BYTES_MAX * 2 * (1 + case.slots) / seconds["copy"]
    return {
        "rule": case.name,
        "bytes_per_element": bytes_per_element,
        "bytes_per_s": moved / seconds["psd"],
        "copy_bytes_per_s": copy_bytes_per_s,
        "bound": moved / seconds["psd"] / copy_bytes_per_s,
        "times_faster_than_torch": seconds["torch"] / seconds["psd"] if case.torch_kind else None,
        "times_faster_in_place": seconds["torch"] / seconds["in place"] if case.torch_kind else None,
        "torch": ("fused" if case.torch_kind in FUSED else "foreach") if case.torch_kind else None,
    }


def measure_others(blocks: int, rounds: int) -> list[dict[str, Any]]:
    """Measure a round's work besides its rule, and the workers' work."""
    accs, grads = [filled(0.1) for _ in range(blocks)], [filled(0.1) for _ in range(blocks)]
    copied = Pages(blocks, 1)
    wide = [torch.from_numpy(block) for block in accs]
    halves = {kind: [narrowed(block, kind) for block in grads] for kind in ("bfloat16", "float16")}
    torch_halves = {kind: [torch.from_numpy(block).view(getattr(torch, kind)) for block in halves[kind]] for kind in halves}

    def each(kernel: Callable[[Array, Array], object], grads: list[Array]) -> Callable[[], None]:
        return lambda: [kernel(acc, grad) for acc, grad in zip(accs, grads, strict=True)] and None

    def accumulate(acc: Array, grad: Array) -> None:
        psd_core.accumulate(acc, grad, 1e-3)

    def scaled_copy(acc: Array, grad: Array) -> None:
        psd_core.scaled_copy(acc, grad, 0.5)

    def first_nonfinite(_: Array, grad: Array) -> None:
        psd_core.first_nonfinite(grad)

    works: dict[str, tuple[int, Callable[[], object]]] = {}
    for kernel, others in ((accumulate, 8), (scaled_copy, 4), (first_nonfinite, 0)):  # bytes beside the gradient's
        works[kernel.__name__] = others + 4, each(kernel, grads)
        for kind, blocks_of_kind in halves.items():
            works[f"{kernel.__name__} {kind}"] = others + 2, each(kernel, blocks_of_kind)
    works |= {
        "accumulate after the check": (
            12,
            each(lambda acc, grad: (psd_core.first_nonfinite(grad), psd_core.accumulate(acc, grad)), grads),
        ),
        "widen bfloat16 (torch)": (6, lambda: torch._foreach_copy_(wide, torch_halves["bfloat16"])),
        "widen float16 (torch)": (6, lambda: torch._foreach_copy_(wide, torch_halves["float16"])),
    }
    timed = {name: work for name, (_, work) in works.items()}
    seconds = _report.in_turns({**timed, "copy": lambda: copied.update(copy)}, rounds=rounds)
    copy_bytes_per_s = blocks * BLOCK_BYTES_MAX * 2 / seconds["copy"]
    return [
        {
            "kernel": name,
            "bytes_per_element": nbytes,
            "bytes_per_s": blocks * LENGTH * nbytes / seconds[name],
            "bound": blocks * LENGTH * nbytes / seconds[name] / copy_bytes_per_s,
        }
        for name, (nbytes, _) in works.items()
    ]


def criteria(rules: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[_report.Criterion]:
    """Criteria for kernels that must keep up with a copy of memory."""
    bounds = {row["rule"]: row["bound"] for row in rules} | {row["kernel"]: row["bound"] for row in others}
    names = [name for name in LIMITS if name in bounds]
    return [_report.Criterion(5, f"{name}: bandwidth / of a copy", bounds[name], LIMITS[name], at_least=True) for name in names]


def text(rules: list[dict[str, Any]], others: list[dict[str, Any]]) -> str:
    """Tables of the figures."""
    rows = [
        (
            row["rule"],
            row["bytes_per_element"],
            f"{row['bytes_per_s'] / 1e9:.1f}",
            f"{row['copy_bytes_per_s'] / 1e9:.1f}",
            f"{row['bound']:.2f}",
            f"{row['times_faster_than_torch']:.2f}" if row["torch"] else "-",
            f"{row['times_faster_in_place']:.2f}" if row["torch"] else "-",
            row["torch"] or "",
        )
        for row in rules
    ]
    more = [(r["kernel"], r["bytes_per_element"], f"{r['bytes_per_s'] / 1e9:.1f}", f"{r['bound']:.2f}") for r in others]
    return "\n\n".join(
        [
            _report.table(
                ("rule", "bytes per element", "GB/s", "copy GB/s", "bound", "times torch's speed", "in place", "torch"), rows
            ),
            _report.table(("kernel", "bytes per element", "GB/s", "bound"), more),
        ]
    )


def main() -> None:
    """Print the figures."""
    parser = _report.parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=32, help="MiB of parameters (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=30, help="of which the quickest counts (default %(default)s)")
    parser.add_argument("--rule", default="", help="only rules with this in their name")
    args = parser.parse_args()
    torch.set_num_threads(1)
    blocks = max((args.megabytes << 20) // BLOCK_BYTES_MAX, 1)
    rules = [measure_rule(case, blocks, args.rounds) for case in CASES if args.rule in case.name]
    others = measure_others(blocks, args.rounds)
    result = {"torch": torch.__version__, "megabytes": args.megabytes, "rules": rules, "others": others}
    checked = criteria(rules, others)
    print(text(rules, others) + "\n\n" + _report.criteria_table(checked))
    _report.write_json(args.json, result, checked)


if __name__ == "__main__":
    main()
