"""A shard's planes, mapped into a worker: memory with the shard's parameters themselves, which can be read and nothing else.

What lies there stays as it is until the worker's next pull; the shard says with each answer which plane has a block. Must not
know sockets, calls, or who keeps which arrays.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd.contract.errors import InternalError
from psd.contract.layout import Layout
from psd.v1 import bulk_pb2
from psd_client.lanes.flat import FlatBuffers
from psd_core.large_pages import LargeMap

PLANES_MAX = 64
"""Number of planes up to which a shard is believed."""


class MappedPlanes:
    """The planes of the only shard of a job.

    Args:
        descriptor: of the file; the caller closes it. ready: says where parameters lie.

    Raises:
        InternalError: the shard's message does not fit the file or the layout. OSError: there is no memory to map it.

    Attributes:
        blocks: indices of the blocks that may lie there.
    """

    def __init__(self, descriptor: int, ready: bulk_pb2.BulkReady, layout: Layout) -> None:
        self._layout = layout
        self._plane_bytes = ready.plane_bytes
        self._starts = {block: start - 1 for block, start in enumerate(ready.plane_starts) if start}
        self.blocks = frozenset(self._starts)
        nbytes = ready.planes * ready.plane_bytes
        ends = [start + layout.blocks[block].nbytes for block, start in self._starts.items() if block < len(layout.blocks)]
        if (
            not 0 < ready.planes <= PLANES_MAX
            or len(ready.plane_starts) != len(layout.blocks)
            or max(ends, default=0) > ready.plane_bytes
            or os.fstat(descriptor).st_size < nbytes
        ):
            raise InternalError("the shard's planes are not as its message says")
        self._spaces = {space: start for space in range(len(layout.spaces)) if (start := self._start_of(space)) is not None}
        self._mapping = LargeMap(descriptor, nbytes, is_read_only=True)
        self._count = ready.planes
        self._places: dict[int, FlatBuffers] = {}

    def _start_of(self, space: int) -> int | None:
        """Offset of a flat space in a plane; None if it is never there."""
        blocks = [block for block in self._layout.blocks if block.space == space]
        if not any(block.index in self._starts for block in blocks):
            return None
        first = self._starts.get(blocks[0].index, 0)
        if any(self._starts.get(block.index) != first + block.offset * block.dtype.itemsize for block in blocks):
            raise InternalError(f"plane_starts: space {space} is not in one piece")
        return first

    def place(self, in_plane: int, own: FlatBuffers) -> FlatBuffers:
        """The parameters in one plane, as buffers, read-only; what lies in no plane is that of `own`, always the same ones.

        in_plane: as in PullFrame, not 0. Raises InternalError.
        """
        if not 0 < in_plane <= self._count:
            raise InternalError(f"in_plane: is {in_plane}, and the shard has {self._count} planes")
        found = self._places.get(in_plane)
        if found is None:
            found = self._places[in_plane] = FlatBuffers(
                self._layout, given=[self._space(in_plane - 1, number, memory) for number, memory in enumerate(own.spaces)]
            )
            found.versions, found.steps, found.of_plane = own.versions, own.steps, self.blocks
        return found

    def _space(self, plane: int, number: int, own: NDArray[Any]) -> NDArray[Any]:
        if number not in self._spaces:
            return own
        start = plane * self._plane_bytes + self._spaces[number]
        found: NDArray[Any] = np.ndarray(own.shape, own.dtype, memoryview(self._mapping), start)
        return found
