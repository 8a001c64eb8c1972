"""A worker's memory file, mapped into the shard: it holds the gradients of its pushes and receives its parameters.

Makes every check that keeps the shard's accesses within the file, and the file at its size: it must be sealed against
shrinking, or its owner could make the shard fault. Its contents may change at any time; that harms only its owner's values.
Must not know sockets or calls.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd.contract.errors import InvalidRequest
from psd.contract.layout import Layout
from psd.contract.rows import DTYPES, row_bytes_of
from psd.state.large_maps import map_shared
from psd.v1 import bulk_pb2, data_pb2

NONCE_BYTES = 16
SPACE_ALIGN_BYTES = 64
PLACES_MAX = 4


class WorkerMemory:
    """One attached file.

    Args:
        fd: the file's descriptor; the caller closes it afterwards.
        attach: the message with the places of the spaces. layout: the job's. has_gradients: False for a reader.

    Raises:
        InvalidRequest: the file is not as `attach` says, or not sealed, or a space does not fit.

    Attributes:
        nonce: the file's first bytes. layout_digest, world_size, block_count: those of the job for which it was attached.
    """

    def __init__(self, fd: int, attach: bulk_pb2.BulkAttach, layout: Layout, *, has_gradients: bool = True) -> None:
        self._check_file(fd, attach.size)
        gradient_dtypes = [space.gradient_dtype for space in layout.spaces]
        dtypes = [space.dtype for space in layout.spaces]
        gradients: list[int | None] = [None] * len(dtypes)
        if has_gradients:
            gradients = self._checked("gradient_starts", attach.gradient_starts, gradient_dtypes, attach.size, layout)
        elif attach.gradient_starts:
            raise InvalidRequest(f"gradient_starts: has {len(attach.gradient_starts)} entries, but a reader has no gradients")
        places = [
            self._checked("parameter_starts", starts, dtypes, attach.size, layout)
            for starts in _places(attach.parameter_starts, len(dtypes))
        ]
        try:
            self._bytes = memoryview(map_shared(fd, attach.size))
        except (OSError, OverflowError) as error:
            raise InvalidRequest(f"size: {attach.size} bytes cannot be mapped: {error}") from error
        self.nonce = bytes(self._bytes[:NONCE_BYTES])
        self.layout_digest = layout.digest
        self.world_size = layout.spec.world_size
        self.block_count = len(layout.blocks)
        self._layout = layout
        self._dims = [table.dim for table in layout.spec.tables]
        self._gradients = self._spaces(gradients, gradient_dtypes)
        self._parameters = [self._spaces(place, dtypes) for place in places]
        self._gradient_views: dict[int, memoryview] = {}
        self._parameter_views: dict[tuple[int, int], NDArray[Any]] = {}

    @staticmethod
    def _check_file(fd: int, size: int) -> None:
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:
            raise InvalidRequest("shared memory: expected a memory file (memfd), got another kind of descriptor") from None
        if not seals & fcntl.F_SEAL_SHRINK:
            raise InvalidRequest("size: the file must be sealed against shrinking (F_SEAL_SHRINK)")
        actual = os.fstat(fd).st_size
        if not NONCE_BYTES <= size <= actual:
            raise InvalidRequest(f"size: is {size}, expected {NONCE_BYTES} to {actual}, the file's size")

    @staticmethod
    def _checked(
        field: str, starts: Sequence[int], dtypes: Sequence[np.dtype[Any]], size: int, layout: Layout
    ) -> list[int | None]:
        if len(starts) != len(layout.spaces):
            raise InvalidRequest(f"{field}: has {len(starts)} entries, expected one per flat space, {len(layout.spaces)}")
        checked: list[int | None] = []
        for start, dtype, space in zip(starts, dtypes, layout.spaces, strict=True):
            is_static = layout.spec.groups[space.group].is_static
            if start == 0 and is_static and field == "gradient_starts":
                checked.append(None)
                continue
            end = start + space.size * dtype.itemsize
            if start < SPACE_ALIGN_BYTES or start % SPACE_ALIGN_BYTES or end > size:
                raise _out_of_range(f"{field}: a space", start, end, size, SPACE_ALIGN_BYTES)
            checked.append(start)
        return checked

    def _spaces(self, starts: Sequence[int | None], dtypes: Sequence[np.dtype[Any]]) -> list[NDArray[Any] | None]:
        return [
            None if start is None else np.ndarray((space.size,), dtype, self._bytes, start)
            for start, dtype, space in zip(starts, dtypes, self._layout.spaces, strict=True)
        ]

    def gradient(self, block: int) -> memoryview:
        """The gradient of a block of the job, in its codec; InvalidRequest if there is no such block."""
        view = self._gradient_views.get(block)
        if view is None:
            view = self._block(self._gradients, block).data.cast("B")
            view = self._gradient_views[block] = view[: self._layout.blocks[block].pushed_nbytes]
        return view

    def values(self, block: int) -> memoryview:
        """The initial values of a block of the job; the worker has written them into the first place for parameters."""
        return self.parameter(block, 0).data.cast("B")

    def parameter(self, block: int, place: int) -> NDArray[Any]:
        """The memory for the parameters of a block of the job, in one of the places for parameters."""
        view = self._parameter_views.get((block, place))
        if view is None:
            if place >= len(self._parameters):
                raise InvalidRequest(f"place: is {place}, but {len(self._parameters)} are attached")
            view = self._parameter_views[block, place] = self._block(self._parameters[place], block)
        return view

    @property
    def place_count(self) -> int:
        """Number of places for parameters."""
        return len(self._parameters)

    @property
    def whole(self) -> memoryview:
        """All of it."""
        return self._bytes

    def rows(self, parts: Sequence[data_pb2.RowsPart], starts: Sequence[int]) -> list[memoryview]:
        """The memory for the values of each part; `starts` are their offsets in the file, in bytes."""
        if len(starts) != len(parts):
            raise InvalidRequest(f"rows_at: has {len(starts)} entries for {len(parts)} parts")
        found, size = [], len(self._bytes)
        for part, start in zip(parts, starts, strict=True):
            end = start + part.rows * row_bytes_of(part, self._dims)
            align = DTYPES[part.dtype].itemsize
            if start < SPACE_ALIGN_BYTES or start % align or end > size:
                raise _out_of_range("rows_at: rows", start, end, size, align)
            found.append(self._bytes[start:end])
        return found

    def _block(self, spaces: list[NDArray[Any] | None], index: int) -> NDArray[Any]:
        if not 0 <= index < len(self._layout.blocks):
            raise InvalidRequest(f"blocks: {index} is no block of the job, which has {len(self._layout.blocks)}")
        block = self._layout.blocks[index]
        space = spaces[block.space]
        if space is None:
            raise InvalidRequest(f"blocks: {index} belongs to static group {block.group}, to which nothing is pushed")
        return space[block.offset : block.offset + block.length]


def _out_of_range(what: str, start: int, end: int, size: int, align: int) -> InvalidRequest:
    return InvalidRequest(
        f"{what} from byte {start} to {end} must begin at a multiple of {align}, at least {SPACE_ALIGN_BYTES}, and end within "
        f"{size}"
    )


def _places(starts: Sequence[int], spaces: int) -> Sequence[Sequence[int]]:
    """The starts of the spaces' parameters, for each place."""
    count = len(starts) // spaces if spaces else 1
    if len(starts) != count * spaces or not 1 <= count <= PLACES_MAX:
        expected = f"one per flat space, {spaces}, for each of 1 to {PLACES_MAX} places"
        raise InvalidRequest(f"parameter_starts: has {len(starts)} entries, expected {expected}")
    return [starts[place * spaces : (place + 1) * spaces] for place in range(count)]
