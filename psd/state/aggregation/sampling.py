"""The learners that take part in a round, if only a share of those present does: chosen anew for each round.

The choice is a pure function of the job's layout, the round and who is present: whoever asks, however often, and a shard that
was started again, finds the same. Ranks have an order of their own in each round; the first of those present are chosen, so
that one who is gone is replaced by the next one, and nobody else changes. Takes no lock; must not know gradients or sessions.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from psd.state.aggregation.consistency import ranks_in
from psd.state.workers.membership import Membership


class Sampling:
    """The choice of one job.

    Args:
        share: of those present, above 0 and at most 1; at least one is chosen. seed: the job's layout digest.
    """

    def __init__(self, share: float, seed: bytes, members: Membership) -> None:
        self._share = share
        self._seed = seed
        self._members = members
        self._last = (-1, 0, 0)  # round, present, chosen: one assignment, so that any thread reads what belongs together

    def chosen_in(self, round_: int, committed: int = 0) -> int:
        """Mask of those who are to take part in a round, as of now.

        Args:
            committed: mask of those whose whole gradients the round has; they are counted as present.
        """
        present = self._members.live_in(round_) | committed
        last_round, last_present, chosen = self._last
        if (last_round, last_present) != (round_, present):
            chosen = self._choose(round_, ranks_in(present))
            self._last = round_, present, chosen
        return chosen

    def _choose(self, round_: int, present: Sequence[int]) -> int:
        count = sample_size(self._share, len(present))
        return sum(1 << rank for rank in sorted(present, key=lambda rank: self._place(round_, rank))[:count])

    def _place(self, round_: int, rank: int) -> bytes:
        return hashlib.blake2b(struct.pack("<2Q", round_, rank), key=self._seed, digest_size=8).digest()


def sample_size(share: float, present: int) -> int:
    """Number of those present that take part in a round."""
    return min(present, max(1, round(share * present)))
