"""Versions of blocks that readers have, kept for a while, so that newer ones can be told by what has changed.

They are pages that stay pinned, so keeping one copies nothing: the next update writes to another page anyway. They are known by
their checksums: so it does not matter which timeline or process gave a version its number. Where an update finds no room, all
are let go. Thread-safe. Must not know requests, the arena or who reads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psd.state import locks
from psd.state.aggregation.outgoing import write_rounded
from psd_core import deltas

WORTH = 0.75
"""Share of a block's bytes up to which a delta is sent. A longer one takes longer to make and apply than a usual link takes."""

SAMPLE = deltas.CHUNK
"""Elements that are compared first, in a few places of a block: where all of it has changed by much, no more is looked at."""


class Told(NamedTuple):
    """A block, told by what has changed. delta: as in psd_core.deltas. check: deltas.check of the newer values."""

    delta: NDArray[np.uint8]
    check: int


@dataclass(eq=False)
class _Kept:
    values: NDArray[Any]
    release: Callable[[], None]
    users: int = 0  # that read the values
    is_over: bool = False  # once the last user has gone, it is released
    lock: threading.Lock = field(default_factory=lambda: locks.new(locks.Level.LEAF))
    told: dict[tuple[str, int], Told | None] = field(default_factory=dict)  # the newest one


class KeptVersions:
    """The kept versions of one shard's blocks.

    Args:
        versions_max: most of each block; 0: none are kept.
    """

    def __init__(self, versions_max: int) -> None:
        self._versions_max = versions_max
        self._lock = locks.new(locks.Level.LEAF)
        self._kept: dict[int, dict[int, _Kept]] = {}

    def keep(self, block: int, content: int, values: NDArray[Any], release: Callable[[], None]) -> None:
        """Keep the parameters (n,) of a block that a reader gets; the version that was asked for longest ago goes.

        Args:
            content: checksum of their page. release: called, by any thread, when they may change: perhaps at once.
        """
        over: list[_Kept] = []
        new = _Kept(values, release)
        with self._lock:
            kept = self._kept.setdefault(block, {})
            if content in kept:
                over.append(new)
                new = kept.pop(content)
            kept[content] = new
            over += [kept.pop(oldest) for oldest in list(kept)[: max(0, len(kept) - self._versions_max)]]
            over = self._unused(over)
        for each in over:
            each.release()

    def forget(self, *, for_ever: bool = False) -> bool:
        """Let go of all versions; False if there were none. for_ever: keep none from now on."""
        with self._lock:
            if for_ever:
                self._versions_max = 0
            kept, self._kept = self._kept, {}
            all_kept = [each for versions in kept.values() for each in versions.values()]
            over = self._unused(all_kept)
        for each in over:
            each.release()
        return bool(all_kept)

    @staticmethod
    def _unused(over: list[_Kept]) -> list[_Kept]:
        """Those that can be released now; the others are when their last user has gone."""
        for each in over:
            each.is_over = True
        return [each for each in over if not each.users]

    def told(self, block: int, held: int, content: int, values: NDArray[Any], codec: str) -> Told | None:
        """Tell what has changed in a block since a version that its reader holds; None if that is not kept, or too much has.

        Args:
            held, content: checksums of the pages of the older version, and of the newer one. values: (n,) those of the newer.
            codec: in which the reader holds the parameters, and is to have them.
        """
        if held == content:
            return Told(deltas.unchanged(len(values)), deltas.check(rounded(values, codec)))
        with self._lock:
            kept = self._kept.get(block, {}).get(held)
            if kept is None:
                return None
            kept.users += 1
        try:
            with kept.lock:  # others wait for what the first reader has asked for
                if (codec, content) not in kept.told:
                    kept.told = {(codec, content): _told(rounded(kept.values, codec), rounded(values, codec), codec)}
                return kept.told[codec, content]
        finally:
            with self._lock:
                kept.users -= 1
                is_over = kept.is_over and not kept.users
            if is_over:
                kept.release()


def rounded(values: NDArray[Any], codec: str) -> NDArray[Any]:
    """The values as a reader has them."""
    if not codec:
        return values
    target = np.empty_like(values)
    write_rounded(values, codec, target)
    return target


def _told(old: NDArray[Any], new: NDArray[Any], codec: str) -> Told | None:
    most = WORTH * (new.nbytes / 2 if codec else new.nbytes)
    sample = np.concatenate([np.arange(at, min(at + SAMPLE, len(new))) for at in {0, len(new) // 3, len(new) * 2 // 3}])
    if deltas.encode(old[sample], new[sample], int(most * len(sample) / len(new))) is None:
        return None
    delta = deltas.encode(old, new, int(most))
    return None if delta is None else Told(delta, deltas.check(new))
