"""What compressed gradients carry, in worlds whose workers keep residuals: which push has which numbers, and whether it may.

Each process has two lanes in every block, and its gradient is the same power of 4 in both. The codec sends one number of a
block: the lane with more in it, which has the gradient's own power and what the lane has kept of earlier ones; the other lane
keeps all. So a push has one lane of its process, its highest power is its name, and the rest is a residual. Must not know
shards or workers.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from setting import GRADIENTS_MAX, LANES, counts_in, gradient_of


class Payload(NamedTuple):
    """What one push has brought into a block: the lane, and the numbers of the process's gradients that were in it."""

    process: int
    lane: int
    numbers: tuple[int, ...]

    @property
    def gradient(self) -> int:
        """The push's own."""
        return gradient_of(self.process, self.numbers[-1])


def lanes_of(gradient: int, width: int) -> NDArray[np.float32]:
    """A block of a gradient; width: of the block."""
    process, number = divmod(gradient, GRADIENTS_MAX)
    found = np.zeros(width, np.float32)
    found[LANES * process : LANES * (process + 1)] = 4.0**number
    return found


def payloads_of(total: NDArray[np.float32]) -> list[Payload]:
    """The pushes by which a block has changed; raises AssertionError if no pushes of several processes have that sum."""
    found = []
    for place in np.flatnonzero(total).tolist():
        process, lane = divmod(place, LANES)
        counts = counts_in(float(total[place]))
        assert max(counts.values()) == 1, f"process {process} has taken its residual twice: {counts}"
        assert all(payload.process != process for payload in found), f"process {process} has sent more than its codec does"
        found.append(Payload(process, lane, tuple(counts)))
    return found


def gradients_sent(payload: bytes) -> set[int]:
    """The gradients that are in an encoded block."""
    value, place = struct.unpack("<fH", payload[4:])
    return {gradient_of(place // LANES, number) for number in counts_in(value)}


def may_have_sent(counted: Sequence[Payload]) -> bool:
    """True if error feedback leads to these pushes of a process: each has all that its lane has kept since it was sent last.

    Of a push that has not counted it is not known whether the block was encoded; what that has taken of the residual is gone.
    """
    known: Mapping[int, tuple[int, frozenset[int]]] = {
        payload.numbers[-1]: (payload.lane, frozenset(payload.numbers)) for payload in counted
    }
    kept: set[tuple[frozenset[int], ...]] = {(frozenset(),) * LANES}
    for number in range(max(known) + 1):
        after = set()
        for lanes in kept:
            full = [lane | {number} for lane in lanes]
            sent = max(range(LANES), key=lambda lane: (_total(full[lane]), -lane))
            rest = tuple(frozenset() if lane == sent else full[lane] for lane in range(LANES))
            if number not in known:
                after |= {lanes, rest}
            elif known[number] == (sent, full[sent]):
                after.add(rest)
        kept = after
    return bool(kept)


def _total(numbers: frozenset[int]) -> int:
    return sum(4**number for number in numbers)
