"""The block store: where a shard's parameters and slots live, and how an update replaces them.

A block is a small transaction. An update reads the block's current *page* and writes a spare one; `publish` makes the spare
current in one step. Whoever has pinned the old page goes on reading it, whole and unchanged; it is reused when the last pin is
gone. So a pull never blocks an update and never sees half of one.

`Store` is the interface; `HeapStore` keeps pages in ordinary memory. Must not know versions, rounds, workers or rules.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from psd.contract.layout import Block
from psd_core import aligned_empty

SPARE_PAGES_MAX = 8
"""Free pages kept per size. A spare is in use only while an update runs or a reader holds an old page, so a few are enough."""


@dataclass(eq=False)
class Page:
    """One version of a block.

    Attributes:
        parameter: (n,) master dtype. slots: one (n,) array per slot of the rule.
        steps: (k,) uint64, updates applied to each segment.
        pins: readers, plus one while the page is current; guarded by the store.
    """

    parameter: NDArray[Any]
    slots: tuple[NDArray[Any], ...]
    steps: NDArray[np.uint64]
    pins: int = field(default=1)


class Store(Protocol):
    """What a shard asks of its memory. Methods are thread-safe; one caller at a time updates a block (its lock)."""

    def allocate(self, block: Block, slot_count: int) -> Page:
        """An unpublished page for a new block: slots and steps zero, the parameter left to the caller."""
        ...

    def spare(self, page: Page) -> Page:
        """A page of the same shape to write the next version to; its contents are undefined."""
        ...

    def publish(self, old: Page | None, new: Page) -> None:
        """Make `new` the current page in place of `old`."""
        ...

    def pin(self, page: Page) -> Page:
        """Keep a current page readable until `unpin`."""
        ...

    def unpin(self, page: Page) -> None:
        """Give a pinned page back."""
        ...

    def lend_accumulator(self, block: Block) -> NDArray[Any]:
        """An (n,) array with undefined contents, to sum a round's gradients in."""
        ...

    def return_accumulator(self, accumulator: NDArray[Any]) -> None:
        """Give a lent accumulator back."""
        ...


class HeapStore:
    """Pages in ordinary memory, gone with the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pages: dict[tuple[object, ...], list[Page]] = {}
        self._accumulators: dict[tuple[object, ...], list[NDArray[Any]]] = {}

    def allocate(self, block: Block, slot_count: int) -> Page:
        """See Store."""
        slots = tuple(aligned_empty(block.length, block.dtype) for _ in range(slot_count))
        for slot in slots:
            slot.fill(0)
        return Page(aligned_empty(block.length, block.dtype), slots, np.zeros(len(block.segment_ends), np.uint64))

    def spare(self, page: Page) -> Page:
        """See Store."""
        with self._lock:
            free = self._pages.get(self._kind(page))
            if free:
                spare = free.pop()
                spare.pins = 1
                return spare
        n, dtype = page.parameter.size, page.parameter.dtype
        return Page(aligned_empty(n, dtype), tuple(aligned_empty(n, dtype) for _ in page.slots), np.empty_like(page.steps))

    def publish(self, old: Page | None, new: Page) -> None:
        """See Store."""
        del new  # it holds the pin of the current page from birth
        if old is not None:
            self.unpin(old)

    def pin(self, page: Page) -> Page:
        """See Store."""
        with self._lock:
            page.pins += 1
        return page

    def unpin(self, page: Page) -> None:
        """See Store."""
        with self._lock:
            page.pins -= 1
            if page.pins == 0:
                free = self._pages.setdefault(self._kind(page), [])
                if len(free) < SPARE_PAGES_MAX:
                    free.append(page)

    def lend_accumulator(self, block: Block) -> NDArray[Any]:
        """See Store."""
        with self._lock:
            free = self._accumulators.get((block.length, block.dtype.str))
            if free:
                return free.pop()
        return aligned_empty(block.length, block.dtype)

    def return_accumulator(self, accumulator: NDArray[Any]) -> None:
        """See Store."""
        with self._lock:
            self._accumulators.setdefault((accumulator.size, accumulator.dtype.str), []).append(accumulator)

    @staticmethod
    def _kind(page: Page) -> tuple[object, ...]:
        return (page.parameter.size, page.parameter.dtype.str, len(page.slots), page.steps.size)
