"""Measures what a worker over shared memory could save if it read a shard's pages instead of a copy of them.

    python benchmarks/mapped_pages.py [--blocks 25] [--rounds 15] [--json FILE]

Today the shard copies each block from its page into memory of the worker's, and most programs copy it from there. Here are the
parts of that, and of what would take its place, for blocks of 4 MiB in memory files:

    update         psd's SGD kernel, from one page to another; and with the next part, block by block, as a shard does both
    to segment     page to the worker's memory, by the shard
    to program     the worker's memory to the program's; with copy=False, or for who reads the flat buffers, it is not made
    from page      page to the program's memory, by a worker that has mapped the shard's file once
    remap          a worker maps the new pages where it had mapped the old ones, so that arrays stay where they are: page tables
                   filled at once, and by the first access to each memory page; either with that access

Times are processor time of one thread, the least of all rounds, in turns. What was copied and mapped is verified. Beside them
is the share of ResNet-50's numbers whose tensors lie in one block each: those alone could be lent where they lie. Linux only.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

import _report as report
import numpy as np
from numpy.typing import NDArray
from peers import work

import psd_core
from psd.contract.jobspec import Consistency, GroupSpec, JobSpec, TensorSpec
from psd.contract.layout import BLOCK_BYTES_MAX, Layout

MAP_FIXED = 0x10
LR = 2.0**-10
Floats = NDArray[np.float32]


class Pages:
    """A file with two pages for each block, as shadow paging has them, and a worker's mapping of one of these for each.

    Attributes:
        halves: the pages that are written in even steps and in odd ones. mapped: what the worker has mapped, read-only.
    """

    def __init__(self, blocks: int) -> None:
        self._blocks, self._size = blocks, blocks * BLOCK_BYTES_MAX
        self._fd = os.memfd_create("pages")
        os.ftruncate(self._fd, 2 * self._size)
        whole = np.frombuffer(mmap.mmap(self._fd, 2 * self._size), np.float32)
        whole[...] = 1
        self.halves = np.split(whole, 2)
        self._mmap = ctypes.CDLL(None, use_errno=True).mmap
        self._mmap.restype = ctypes.c_void_p
        self._mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
        self._base = self._map(None, self._size, 0, 0)
        self.mapped: Floats = np.frombuffer((ctypes.c_char * self._size).from_address(self._base), np.float32)

    def _map(self, where: int | None, size: int, flags: int, offset: int) -> int:
        found = int(self._mmap(where, size, mmap.PROT_READ, mmap.MAP_SHARED | flags, self._fd, offset))
        if found == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), "mmap")
        return found

    def remap(self, half: int, flags: int) -> None:
        """Map the pages of one half, block by block, where the others were."""
        for start in range(0, self._size, BLOCK_BYTES_MAX):
            self._map(self._base + start, BLOCK_BYTES_MAX, MAP_FIXED | flags, half * self._size + start)


def share_in_one_block(model: str) -> float:
    """The share of a model's numbers whose tensors lie in one block each, on one shard."""
    shapes = work.shapes_of(model)
    tensors = tuple(TensorSpec(str(number), shape) for number, shape in enumerate(shapes))
    layout = Layout(JobSpec(1, tensors, (GroupSpec(),), Consistency.parse("sync")), 1)
    pieces = np.bincount(np.concatenate([block.segment_tensors for block in layout.blocks]))
    sizes = np.array([np.prod(shape) for shape in shapes])
    return float(sizes[pieces == 1].sum() / sizes.sum())


def update(before: Floats, after: Floats, grad: Floats) -> None:
    """Apply SGD from one page to another."""
    ends, touched, steps = np.array([grad.size], np.uint32), np.ones(1, np.uint8), np.zeros(1, np.uint64)
    how = {"weight": 1, "scale": 1, "segment_ends": ends, "touched": touched, "steps_in": steps, "steps_out": steps}
    psd_core.step_block("sgd", before, after, [], [], None, grad, **how, scalars=[LR, 0, 0, 0], flags=())


def measure(blocks: int, rounds: int) -> dict[str, float]:
    """Processor seconds of each part."""
    pages = Pages(blocks)
    grad = np.ones(pages.mapped.size, np.float32)
    segment, program = np.frombuffer(mmap.mmap(-1, grad.nbytes), np.float32), np.zeros(grad.size, np.float32)
    newest = 0

    def step(*, copies: bool) -> None:
        nonlocal newest
        before, after = pages.halves[newest], pages.halves[1 - newest]
        for start in range(0, grad.size, BLOCK_BYTES_MAX // 4):
            block = slice(start, start + BLOCK_BYTES_MAX // 4)
            update(before[block], after[block], grad[block])
            if copies:
                np.copyto(segment[block], after[block])
        newest = 1 - newest

    def remap(flags: int) -> None:
        for half in (1 - newest, newest):
            pages.remap(half, flags)
            pages.mapped[:: mmap.PAGESIZE // 4].max()

    works = {
        "update": lambda: step(copies=False),
        "update, to segment": lambda: step(copies=True),
        "to segment": lambda: np.copyto(segment, pages.halves[newest]),
        "to program": lambda: np.copyto(program, segment),
        "from page": lambda: np.copyto(program, pages.halves[newest]),
        "remap, filled": lambda: remap(mmap.MAP_POPULATE),
        "remap, by access": lambda: remap(0),
    }
    seconds = report.in_turns(works, rounds=rounds)
    for name in ("remap, filled", "remap, by access"):
        seconds[name] /= 2  # each maps two halves
    expected = np.float32(1 - 2 * LR * (rounds + 1))
    for name, values in (("to segment", segment), ("to program", program), ("from page", program), ("remap", pages.mapped)):
        if not (values == expected).all():
            raise SystemExit(f"{name}: not all numbers are {expected}")
    return seconds


def main() -> int:
    """Print the figures."""
    parser = report.parser(__doc__, rounds=15)
    parser.add_argument("--blocks", type=int, default=25, help="of 4 MiB (default: %(default)s)")
    args = parser.parse_args()
    if min(args.blocks, args.rounds) < 1:
        parser.error("--blocks, --rounds: expected at least 1")
    if not hasattr(mmap, "MAP_POPULATE"):
        print("mapped_pages.py cannot run here: it needs Linux", file=sys.stderr)
        return 2
    about = report.machine()
    seconds = measure(args.blocks, args.rounds)
    share = share_in_one_block("resnet50")
    print(f"{args.blocks} blocks of 4 MiB, processor time of one thread\n{report.machine_line(about)}\n")
    rows = [[name, report.number(1e3 * s, 1), report.number(s / seconds["to segment"])] for name, s in seconds.items()]
    print(report.table(["", "ms", "x to segment"], rows))
    print(f"\nIn tensors that lie in one block each: {share:.0%} of ResNet-50's numbers")
    figures = {"machine": about, "seconds": seconds, "share_in_one_block": share}
    return report.conclude(args.json, figures, [], {}, is_failed=False)


if __name__ == "__main__":
    sys.exit(main())
