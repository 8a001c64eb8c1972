"""A shard's planes, mapped into a worker: memory with the shard's parameters themselves, which can be read and nothing else.

What lies there stays as it is until the worker's next pull; the shard says with each answer which plane has a block. Must not
know sockets, calls, or who keeps which arrays.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psd.contract.errors import InternalError
from psd.contract.layout import Layout
from psd.v1 import bulk_pb2
from psd_client.lanes.flat import FlatBuffers

PLANES_MAX = 64
"""Most planes that are believed."""


class InPlane(NamedTuple):
    """Where a block was received. plane: index."""

    planes: MappedPlanes
    plane: int


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
        self._mapping = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        self._count = ready.planes
        self._places: dict[int, FlatBuffers] = {}

    def at(self, in_plane: int) -> InPlane:
        """Where a block lies, by what the shard says of it. in_plane: as in PullFrame, not 0. Raises InternalError."""
        if not 0 < in_plane <= self._count:
            raise InternalError(f"in_plane: is {in_plane}, and the shard has {self._count} planes")
        return InPlane(self, in_plane - 1)

    def block(self, plane: int, index: int) -> NDArray[Any]:
        """A block's parameters, read-only."""
        block = self._layout.blocks[index]
        found: NDArray[Any] = np.ndarray((block.length,), block.dtype, self._mapping, self._start(plane, index))
        return found

    def _start(self, plane: int, index: int) -> int:
        return plane * self._plane_bytes + self._starts[index]

    def place(self, plane: int, own: FlatBuffers) -> FlatBuffers | None:
        """The parameters in one plane, as buffers; what lies in no plane is that of `own`. None if a flat space is not there in
        one piece."""
        found = self._places.get(plane)
        if found is None:
            spaces = [self._space(plane, number, memory) for number, memory in enumerate(own.spaces)]
            if any(space is None for space in spaces):
                return None
            found = self._places[plane] = FlatBuffers(self._layout, given=[space for space in spaces if space is not None])
            found.versions, found.steps = own.versions, own.steps
        return found

    def _space(self, plane: int, number: int, own: NDArray[Any]) -> NDArray[Any] | None:
        blocks = [block for block in self._layout.blocks if block.space == number]
        if not any(block.index in self._starts for block in blocks):
            return own
        first = self._start(plane, blocks[0].index) if blocks[0].index in self._starts else -1
        for block in blocks:
            where = self._start(plane, block.index) if block.index in self._starts else -1
            if where < 0 or where != first + block.offset * block.dtype.itemsize:
                return None
        found: NDArray[Any] = np.ndarray(own.shape, own.dtype, self._mapping, first)
        return found


def take_over(lent: Mapping[int, InPlane], own: FlatBuffers) -> None:
    """Copy blocks from planes into buffers."""
    for index, (planes, plane) in lent.items():
        np.copyto(own.block(index), planes.block(plane, index))
