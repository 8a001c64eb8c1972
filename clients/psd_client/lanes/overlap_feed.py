"""A push that is still being computed: a block is sent as soon as all its tensors have a gradient.

Of the blocks that are ready, the first one of the model is sent first: back-propagation makes it last, and the next forward
pass needs it first. There is a new feed for each push. Back-propagation calls `ready`, and then `finish`. The lanes' threads
take the blocks; a call that is repeated takes them again from the first one on. Must not know what computes gradients, or how
they travel.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd.contract.layout import Block, Layout
from psd.contract.rows import TableRows
from psd_client.lanes.daemon_threads import End

Outgoing = tuple[Block, NDArray[np.bool_] | None]
"""A block, and a mask of its segments that have a gradient; None: all have."""


class Aborted(Exception):
    """Raised if the push will not be completed, because its computation has failed."""


class Feed:
    """The blocks of one push, as they become ready.

    Attributes:
        is_finished: True once nothing is computed any more. present: (tensors,) which have a gradient then; None: all.
        tables: by shard, the gradients of rows, once finished; empty if no shard has any.
        ended: set when its push has ended, with or without an error.
        in_background: True if the program does not wait for its push when the feed is finished.
        before: as in psd_client.worker.worker.Turn.
    """

    def __init__(self, layout: Layout, *, in_background: bool = False) -> None:
        self.in_background = in_background
        self.before: Any = None
        self.is_finished = False
        self.present: NDArray[np.bool_] | None = None
        self.tables: Sequence[Sequence[TableRows]] = ()
        self.ended: threading.Event = End()
        self._layout = layout
        self._changed = threading.Condition()
        self._given: list[list[Outgoing]] = [[] for _ in range(layout.shard_count)]
        self._waiting: list[list[tuple[int, int, Outgoing]]] = [[] for _ in range(layout.shard_count)]  # heaps
        self._is_aborted = False
        self._blocks_of: dict[int, list[Block]] = {}
        self._lacking: dict[int, int] = {}
        for block in layout.blocks:
            if block.trained:
                self._lacking[block.index] = len(block.segment_tensors)
                for tensor in block.segment_tensors.tolist():
                    self._blocks_of.setdefault(tensor, []).append(block)

    def ready(self, tensor: int) -> None:
        """Note that a tensor's gradient is there, and stays unchanged until the round has closed. Call it once for a tensor."""
        with self._changed:
            for block in self._blocks_of.get(tensor, ()):
                self._lacking[block.index] -= 1
                if self._lacking[block.index] == 0:
                    self._put(block, None)
                    self._changed.notify_all()

    def finish(self, present: NDArray[np.bool_] | None, tables: Sequence[Sequence[TableRows]] = ()) -> None:
        """Note that no other tensor will be ready. `present`: (tensors,) which have a gradient; the others are zeros in the
        buffers. tables: the value of the attribute."""
        with self._changed:
            for block in self._layout.blocks:
                if self._lacking.get(block.index):
                    self._put(block, None if present is None else present[block.segment_tensors])
                    self._lacking[block.index] = 0
            self.present, self.tables = present, tables
            self.is_finished = True
            self._changed.notify_all()

    def abort(self) -> None:
        """Give up the push; calls that wait for its blocks get Aborted."""
        with self._changed:
            self._is_aborted = True
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until the feed is finished; Aborted after `abort`."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_finished or self._is_aborted)
            if self._is_aborted:
                raise Aborted

    def given(self) -> dict[int, NDArray[np.bool_] | None]:
        """The blocks that were sent, by index, with a mask of the segments that have a gradient; None: all have."""
        with self._changed:
            return {block.index: present for given in self._given for block, present in given}

    def take(self, blocks: Sequence[Block]) -> Iterator[Outgoing]:
        """Yield the blocks of one shard, each when it is ready. If called again, yields them in the same order.

        Raises:
            Aborted: `abort` was called.
        """
        for number, block in enumerate(blocks):
            shard = self._layout.shard_of(block.index)
            given, waiting = self._given[shard], self._waiting[shard]
            with self._changed:
                while len(given) <= number and not waiting and not self._is_aborted:
                    self._changed.wait()
                if self._is_aborted:
                    raise Aborted
                if len(given) <= number:
                    given.append(heapq.heappop(waiting)[-1])
            yield given[number]

    def _put(self, block: Block, present: NDArray[np.bool_] | None) -> None:
        first = int(block.segment_tensors[0])  # blocks are numbered by group and dtype, wherever these are in the model
        heapq.heappush(self._waiting[self._layout.shard_of(block.index)], (first, block.index, (block, present)))
