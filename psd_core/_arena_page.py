"""A page of an arena, as whoever writes, pins or reads it has it. Must not know how pages come and go."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd_core._arena import Words
from psd_core._arena_pages import Place
from psd_core._arena_planes import Region


class PageState(enum.Enum):
    """States of a page, which decide the calls that it may be given to."""

    SPARE = "spare"
    PUBLISHED = "published"  # current, or pinned after its time
    FREE = "free"


@dataclass(slots=True, eq=False)
class Page:
    """One version of a block; its arrays are views of the mapping.

    Attributes:
        block: its index.
        parameter: (n,), from a cache line. slots, extra: one (n,) array for each of the shape's, likewise.
        steps: (k,) uint64, updates applied to each segment.
        sessions, clocks: (W,) uint64, the dedup window: per rank, whatever its writer keeps there.
        version: as published; 0 in a spare.
        pins: readers, plus one while the page is current, and one for each page that has its body. Guarded by the arena.
        base: the page whose body this one has; None: its own.
        content: the checksum of the body, once published.
        region: where the parameter lies in a plane, which other processes can read; None: in none.
        sums: of a spare: zeros, to be given to `step_block` by whoever leaves the parameter as that writes it: then it has the
            checksum of the parameter already. None: the parameter is best written by way of the caches.
        state, place, head, body, tails: the arena's.
    """

    block: int
    parameter: NDArray[Any]
    slots: tuple[NDArray[Any], ...]
    extra: tuple[NDArray[Any], ...]
    steps: NDArray[np.uint64]
    sessions: NDArray[np.uint64]
    clocks: NDArray[np.uint64]
    version: int
    pins: int
    state: PageState
    place: Place
    head: Words
    body: Words
    tails: Sequence[NDArray[np.uint8]]
    base: Page | None = None
    content: int = 0
    region: Region | None = None
    sums: NDArray[np.uint8] | None = None

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """The parameter, the slots and what is beside them."""
        return (self.parameter, *self.slots, *self.extra)
