"""Measures operations on server-side vectors against NumPy's in this process, for the same bytes on the same cores.

    python benchmarks/vectors.py [--elements 25000000] [--shards 2] [--history 10] [--rounds 5]

Bandwidths are bytes that the operation must read and write, divided by the fastest of all rounds; psd and NumPy take turns.
NumPy computes the halves of its arrays in two threads. `two loops` is one direction of L-BFGS from a history of pairs: by the
shards as lbfgs does it, all dot products in one pass and then one combination; by NumPy as the two loops, whose bytes are
others. `small` batches have vectors of 10 elements. Results are compared with NumPy's. Exit status: 1 if psd failed or was
wrong; the criteria do not decide.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import _report as report
import numpy as np
from _processes import Shard, start_all
from _report import Criterion, ratio

import psd_client

SMALL_CALLS = 300


def seconds(call: Callable[[], Any]) -> float:
    """Time of one call."""
    begun = time.monotonic()
    call()
    return time.monotonic() - begun


class InProcess:
    """The same operations by NumPy, each array in two halves."""

    def __init__(self, size: int, history: int) -> None:
        self._pool = ThreadPoolExecutor(2)
        self._halves = slice(0, size // 2), slice(size // 2, size)
        rng = np.random.default_rng(0)
        base = rng.standard_normal(size)
        self.x, self.y = base.copy(), base[::-1].copy()
        self.scratch = np.empty(size)
        self.pairs = [(np.roll(base, 1 + i), np.roll(base, 100 + i)) for i in range(history)]

    def both(self, call: Callable[[slice], Any]) -> list[Any]:
        """Results of both halves, side by side."""
        return list(self._pool.map(call, self._halves))

    def dot(self, x: Any, y: Any) -> float:
        """The product, by BLAS."""
        return float(sum(self.both(lambda half: np.dot(x[half], y[half]))))

    def axpy(self, alpha: float, x: Any, y: Any) -> None:
        """y += alpha * x, in place."""

        def half_of(half: slice) -> None:
            np.multiply(x[half], alpha, out=self.scratch[half])
            np.add(y[half], self.scratch[half], out=y[half])

        self.both(half_of)

    def two_loops(self) -> None:
        """A direction from the history; what it is does not matter here."""
        direction = self.y.copy()
        for s, y in reversed(self.pairs):
            self.axpy(1e-9 * self.dot(s, direction), y, direction)
        for s, y in self.pairs:
            self.axpy(1e-9 * self.dot(y, direction), s, direction)


class OnShards:
    """The same operations by the shards."""

    def __init__(self, ps: psd_client.ParameterServer, local: InProcess) -> None:
        size = len(local.x)
        self.ps = ps
        self.x, self.y = ps.vector("x", size), ps.vector("y", size)
        self.x.put(local.x)
        self.y.put(local.y)
        self.direction = ps.vector("direction", size)
        self.basis = [ps.vector(f"{name}.{i}", size) for i in range(len(local.pairs)) for name in "sy"]
        for vector, values in zip(self.basis, [values for pair in local.pairs for values in pair], strict=True):
            vector.put(values)
        self.small = ps.vector("small", 10)

    def two_loops(self) -> None:
        """All dot products of history and gradient, and a combination of them."""
        basis = [*self.basis, self.y]
        with self.ps.batch() as b:
            products = b.gram(basis)
        coefficients = (1e-9 * products.value[-1]).tolist()
        self.direction.combine(coefficients, basis)

    def one(self) -> None:
        """A batch of one small operation."""
        self.small.axpy(0.5, self.small)

    def twenty(self) -> None:
        """A batch of 20 of them."""
        with self.ps.batch() as b:
            for _ in range(20):
                b.axpy(self.small, 0.5, self.small)


def measure(args: Namespace) -> dict[str, Any]:
    """The fastest of all rounds of each operation."""
    local = InProcess(args.elements, args.history)
    with ExitStack() as stack:
        shards = [Shard(index=index, count=args.shards) for index in range(args.shards)]
        start_all(stack, shards)
        ps = stack.enter_context(psd_client.connect([shard.address for shard in shards], 0, 1))
        far = OnShards(ps, local)
        far.y.axpy(0.5, far.x)
        before = local.y.copy()
        np.testing.assert_array_equal(far.y.pull(), before + 0.5 * local.x)
        np.testing.assert_allclose(far.x.norm2(), np.linalg.norm(local.x), rtol=1e-12)
        n, m = 8 * args.elements, args.history
        operations: dict[str, tuple[Callable[[], Any], int, Callable[[], Any], int]] = {
            "dot": (lambda: far.x.dot(far.y), 2 * n, lambda: local.dot(local.x, local.y), 2 * n),
            "axpy": (lambda: far.y.axpy(1e-9, far.x), 3 * n, lambda: local.axpy(1e-9, local.x, local.y), 3 * n),
            "two loops": (far.two_loops, (4 * m + 3) * n, local.two_loops, (10 * m + 2) * n),
        }
        best: dict[str, list[float]] = {name: [1e9, 1e9] for name in operations}
        for number in range(args.rounds):
            report.progress(f"round {number + 1} of {args.rounds}")
            for name, (theirs, _, ours, _) in operations.items():
                best[name] = [min(best[name][0], seconds(theirs)), min(best[name][1], seconds(ours))]
        found = {
            name: {"psd_s": best[name][0], "numpy_s": best[name][1],
                   "psd_gb_s": far_bytes / best[name][0] / 1e9, "numpy_gb_s": near_bytes / best[name][1] / 1e9}
            for name, (_, far_bytes, _, near_bytes) in operations.items()
        }  # fmt: skip
        small = {"one": 1e9, "twenty": 1e9}
        for _ in range(SMALL_CALLS):
            small = {"one": min(small["one"], seconds(far.one)), "twenty": min(small["twenty"], seconds(far.twenty))}
    return {"operations": found, "small": small}


def main() -> int:
    """Print the figures."""
    parser = report.parser(__doc__, shards=2)
    parser.add_argument("--elements", type=int, default=25_000_000, help="of each vector (default: %(default)s)")
    parser.add_argument("--history", type=int, default=10, help="pairs of L-BFGS (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of which the fastest counts (default: %(default)s)")
    args = parser.parse_args()
    about = report.machine()
    found = measure(args)
    print(f"{args.elements} float64 over {args.shards} shards; the fastest of {args.rounds} rounds")
    print(report.machine_line(about) + "\n")
    rows, checked = [], []
    for name, figures in found["operations"].items():
        share = ratio(figures["psd_gb_s"], figures["numpy_gb_s"])
        rows.append([name, *(report.number(figures[key]) for key in ("psd_s", "numpy_s", "psd_gb_s", "numpy_gb_s"))])
        checked.append(Criterion(4, f"{name}: bandwidth, psd / NumPy", share, 0.7, at_least=True))
    print(report.table(["", "psd s", "NumPy s", "psd GB/s", "NumPy GB/s"], rows))
    small = found["small"]
    print(f"\nsmall batches: one operation {small['one'] * 1e3:.2f} ms, twenty {small['twenty'] * 1e3:.2f} ms")
    checked.append(Criterion(4, "a batch of twenty small operations / one", ratio(small["twenty"], small["one"]), 1.3))
    return report.conclude(args.json, {"machine": about, **found}, checked, {}, is_failed=False)


if __name__ == "__main__":
    sys.exit(main())
