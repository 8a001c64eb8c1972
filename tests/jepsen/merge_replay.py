"""Learners merged by direction: the merges that they were told of, replayed, must lead to the parameters of the end.

Such a merge scales each difference by a factor that depends on all differences of its round, and on what was merged before. So
parameters hold no counts; but a replay in double precision knows what each step must come to, and one that counts twice, in a
round or in two, comes to something else. A difference of which nobody knows whether it counts does if it is in the parameters;
in which round, is tried. If the job went back to a checkpoint, or may have, there is nothing to replay.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from learner_cells import LearnerCells
from numpy.typing import NDArray

MOMENTUM = 0.5
"""Of the outer rule, where the merge needs one."""

WEIGHT_UNIT = 2.0**-20
"""Of a learner's weight, for each step of one token."""

WAYS_MAX = 200
"""To place differences that may have counted in rounds. Where there are more, nothing is said."""

NEAR, NEARLY_ZERO = 0.01, 1e-3
"""By what share, and by how much beside it, a step may be off: differences may have travelled compressed."""

Merges = dict[int, "list[Part]"]
"""By clock, the differences of the round."""


@dataclass(frozen=True)
class Part:
    """A difference in a merge: its steps, and its weight. That is the number of steps, of one token each, since the one before;
    it has those, too, that were then mixed over."""

    numbers: tuple[int, ...]
    weight: float


@dataclass
class Recorded:
    """Of one fragment, whose turn it is at each `count`th clock.

    Attributes:
        merges: of which learners were told. unplaced: differences that count, each with the first clock at which it may.
    """

    turn: int
    count: int
    merges: Merges = field(default_factory=dict)
    unplaced: list[tuple[Part, int]] = field(default_factory=list)

    def ways(self) -> Iterator[Merges]:
        """All merges that there may have been, the likely ones first; nothing if they are too many."""
        last = max(self.merges, default=0)
        spans = [range(first, max(last + 1, first + self.count)) for _, first in self.unplaced]
        own = [[clock for clock in span if clock % self.count == self.turn] for span in spans]
        if math.prod(len(clocks) for clocks in own) > WAYS_MAX:
            return
        for clocks in itertools.product(*own):
            merges = {clock: list(parts) for clock, parts in self.merges.items()}
            for (part, _), clock in zip(self.unplaced, clocks, strict=True):
                merges.setdefault(clock, []).append(part)
            yield merges


def differing(cells: LearnerCells, merge: str, recorded: Recorded, values: NDArray[np.float32]) -> str:
    """What is other in a fragment than its merges lead to, in words; "" if nothing is, or it cannot be known."""
    rows = -values.reshape(-1, cells.cells)
    least, most = rows.min(axis=0)[: cells.numbers], rows.max(axis=0)[: cells.numbers]
    nearest: tuple[int, str] | None = None
    for merges in recorded.ways():
        expected = replayed(cells, merge, merges)[: cells.numbers]
        slack = NEAR * expected + NEARLY_ZERO
        wrong = np.flatnonzero((least < expected - slack) | (most > expected + slack))
        if not len(wrong):
            return ""
        if nearest is None or len(wrong) < nearest[0]:
            first = int(wrong[0])
            text = f"step {first} has come to {least[first]:g} to {most[first]:g}, and should have to {expected[first]:g}"
            nearest = len(wrong), f"{text}; {len(wrong)} steps are wrong, in the nearest of all ways"
    return nearest[1] if nearest is not None else ""


def replayed(cells: LearnerCells, merge: str, merges: Mapping[int, Sequence[Part]]) -> NDArray[np.float64]:
    """(cells,) by how much a fragment of zeros has become smaller in the end."""
    total, momentum = np.zeros(cells.cells), np.zeros(cells.cells)
    for _, parts in sorted(merges.items()):
        differences = [cells.total(cells.cells, part.numbers).astype(np.float64) for part in parts]
        weights = np.array([part.weight for part in parts])
        shares = weights / weights.sum()
        if merge == "rda":
            norms = [np.linalg.norm(each) for each in differences]
            direction = sum(share * each / norm for share, each, norm in zip(shares, differences, norms, strict=True))
            total += float(shares @ norms) * direction / np.linalg.norm(direction)
            continue
        corrected = [_corrected(each, (1 - MOMENTUM) * momentum) for each in differences]
        momentum = MOMENTUM * momentum + shares @ np.array(corrected)
        total += momentum
    return total


def _corrected(difference: NDArray[np.float64], momentum: NDArray[np.float64]) -> NDArray[np.float64]:
    """HeLoCo: turned towards the momentum, as all differences are nearly orthogonal to it, and none is opposed."""
    length, pace = np.linalg.norm(difference), np.linalg.norm(momentum)
    if not pace:
        return difference
    cosine = float(difference @ momentum / (length * pace))
    assert cosine > 0
    if cosine >= 0.2:
        return difference
    turned = min((1 - cosine) * length / (length + pace), 1.0)
    direction = (1 - turned) * difference / length + turned * momentum / pace
    found: NDArray[np.float64] = length * direction / np.linalg.norm(direction)
    return found
