"""Flat buffers: a worker's gradients or parameters, laid out as the shards hold them.

One aligned array per flat space; tensors are views into it, blocks are slices of it. So whole blocks move between a buffer and
the wire, and nothing is done per tensor or per element. The memory is the worker's own, or a segment that shards on the same
machine see, too. Must not know sockets, clocks or frameworks.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

import psd_core
from psd.contract import frames
from psd.contract.errors import InvalidTensor
from psd.contract.layout import Layout
from psd_client.lanes.held import HeldParameters
from psd_client.lanes.rows_memory import ROWS_BYTES
from psd_client.lanes.segment import Segment, aligned
from psd_core import codecs, deltas

SCANNED_BYTES_FOR_TWO = 8 << 20
logger = logging.getLogger("psd_client")


class Mismatch(Exception):
    """Raised if what has changed for a reader does not fit what it has; a full read helps."""


class FlatBuffers:
    """Memory for every tensor of a job, zero at first. Unused pages cost nothing.

    Args:
        segment: shared memory to use; None: ordinary memory.
        of_gradients: True: for gradients, in their dtypes, which may have 16 bits. Static tensors then get empty views.
        given: memory to use for each space; None: it is made here.

    Attributes:
        layout: the job's layout.
        spaces: one 1-D array per flat space of the layout, in its order; empty ones for static spaces without memory.
        views: one array per tensor of the spec, in its order: a view into its space, in the tensor's shape. A tensor without
            elements has an array of its own, of the master's dtype.
        segment: as given. starts: offset of each space in it, in bytes; 0 for a space that is not in it.
        versions: PullFrame.version of what was received, by block of the layout, and then by tables' block; 0 before. Steps
            (steps.py) write there themselves.
        steps: PullFrame.steps by block, if a slot was received. contents: PullFrame.content by block, for a reader.
        codecs: by block of the layout, the codec in which it is received; "": as it is, or as a difference.
        on_received: called, in any thread, with the index of each block that was received; may be None.
        held: what differences are added to; None: none are expected.
        base: buffers of the same layout that have what a reader is told changes to; None: these.
        maps_planes: blocks may be received in planes of a shard (mapped_planes.py) in place of these buffers.
        lent: by block, the plane in which it was received last, as buffers; not there: in these buffers.
        of_plane: indices of the blocks that lie in a plane of a shard; empty: these buffers are none.
        is_filled: False if nothing was written to what may lie in planes since `discard`.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        segment: Segment | None = None,
        of_gradients: bool = False,
        given: Sequence[NDArray[Any]] | None = None,
    ) -> None:
        self.layout = layout
        self.segment = segment
        self.starts: list[int] = []
        self.spaces: list[NDArray[Any]] = []
        tensors = layout.spec.tensors
        self.views: list[NDArray[Any]] = [np.zeros(t.shape if t.size == 0 else (0,), dtype=t.master_dtype) for t in tensors]
        for number, space in enumerate(layout.spaces):
            is_there = not of_gradients or not layout.spec.groups[space.group].is_static
            dtype = space.gradient_dtype if of_gradients else space.dtype
            memory, start = (given[number], 0) if given is not None else self._memory(space.size if is_there else 0, dtype)
            self.spaces.append(memory)
            self.starts.append(start if is_there else 0)
            if is_there:
                for tensor, begin in zip(space.tensors.tolist(), space.starts.tolist(), strict=True):
                    spec = tensors[tensor]
                    self.views[tensor] = memory[begin : begin + spec.size].reshape(spec.shape)
        count = len(layout.blocks) + (layout.shard_count if layout.spec.tables else 0)
        self.versions = array("Q", bytes(8 * count))
        self.steps: dict[int, Sequence[int]] = {}
        self.contents: dict[int, int] = {}
        self.codecs = ["" if block.has_differences else block.pull_codec for block in layout.blocks]
        self.on_received: Callable[[int], None] | None = None
        self.held: HeldParameters | None = None
        self.base: FlatBuffers | None = None
        self.maps_planes = False
        self.lent: dict[int, FlatBuffers] = {}
        self.of_plane: frozenset[int] = frozenset()
        self.is_filled = True
        of_buffers = [group.is_of_buffers for group in layout.spec.groups]
        spaces = zip(layout.spaces, self.spaces, strict=True)
        self._looked_at = [
            (space, memory) for space, memory in spaces if space.dtype.kind == "f" and not of_buffers[space.group]
        ]
        self._scanner: ThreadPoolExecutor | None = None
        self._blocks = [self.spaces[block.space][block.offset : block.offset + block.length] for block in layout.blocks]

    def _memory(self, size: int, dtype: np.dtype[Any]) -> tuple[NDArray[Any], int]:
        if self.segment is not None:
            return self.segment.zeros(size, dtype)
        return psd_core.aligned_zeros(size, dtype), 0

    @property
    def looked_at(self) -> list[NDArray[Any]]:
        """The spaces in which `first_nonfinite` looks."""
        return [memory for _, memory in self._looked_at]

    def block(self, index: int) -> NDArray[Any]:
        """The slice of block `index` of the layout."""
        return self._blocks[index]

    def place_of(self, index: int) -> FlatBuffers:
        """The buffers in which block `index` was received last: these, or those of a plane."""
        return self.lent.get(index, self)

    def take_over(self) -> None:
        """Copy what was received in planes into these buffers."""
        for index, place in self.lent.items():
            np.copyto(self._blocks[index], place.block(index))
        self.lent.clear()
        self.is_filled = True

    def discard(self, place: FlatBuffers) -> None:
        """Give the memory of the spaces back that `place`, a plane of these, has in their stead."""
        for own, found in zip(self.spaces, place.spaces, strict=True):
            if own is not found and self.segment is not None:
                self.segment.discard(own)
        self.is_filled = False

    def read_in(self, codecs: list[str]) -> None:
        """Receive blocks in these codecs from now on; what was received in others is known no more."""
        for index, (before, codec) in enumerate(zip(self.codecs, codecs, strict=True)):
            if before != codec:
                self.contents.pop(index, None)
        self.codecs = codecs

    def fill(self, index: int, payload: memoryview, base: int, version: int) -> None:
        """Set block `index` to what a PullFrame has brought: in the block's codec, or as it is. base, version: as there.

        Raises:
            InvalidTensor: the payload is neither.
        """
        self.contents.pop(index, None)
        if base and self.held is not None:
            self.held.add(index, payload, base, version, self._blocks[index])
            return
        codec, target = self.codecs[index], self._blocks[index]
        if not codec or payload.nbytes == target.nbytes:
            target[...] = frames.numbers(payload, target.dtype, len(target), f"block {index}")
            self._keep(index, version)
            return
        try:
            codecs.decode(codec, payload, target)
        except codecs.InvalidEncoding as error:
            raise InvalidTensor(f"block {index}: payload in {codec}: {error}") from None

    def fill_changes(self, index: int, delta: memoryview, check: int) -> None:
        """Change block `index` by a delta to what `contents` of the base says of it.

        Args:
            check: deltas.check of the values that result.

        Raises:
            Mismatch: the block was another, or the delta is wrong; its values are undefined now.
        """
        self.contents.pop(index, None)
        if self.base is not None:
            np.copyto(self._blocks[index], self.base.block(index))
        try:
            deltas.apply(delta, self._blocks[index])
        except codecs.InvalidEncoding as error:
            raise Mismatch(f"block {index}: {error}") from None
        if deltas.check(self._blocks[index]) != check:
            raise Mismatch(f"block {index}: changed by what it was sent it is not what it should be")

    def _keep(self, index: int, version: int) -> None:
        if self.held is not None and self.layout.blocks[index].has_differences:
            self.held.keep(index, self._blocks[index], version)

    def receive(
        self, index: int, nbytes: int, read_into: Callable[[memoryview], None], base: int = 0, version: int = 0
    ) -> None:
        """Set block `index` to a payload of so many bytes, which `read_into` writes into the memory that it is given. base,
        version: as in PullFrame.

        Raises:
            InvalidTensor: the block has another number of bytes, or the payload is wrong.
        """
        target = self._blocks[index]
        if nbytes == target.nbytes and not base:
            read_into(target.data.cast("B"))
            self._keep(index, version)
            return
        if nbytes != self.layout.blocks[index].pulled_nbytes and not (base and nbytes == 0):
            raise InvalidTensor(f"block {index}: payload has {nbytes} bytes, expected {target.nbytes}")
        payload = np.empty(nbytes, np.uint8).data
        read_into(payload)
        self.fill(index, payload, base, version)

    def received(self, index: int, version: int) -> None:
        """Note that block `index` has been received, or that a tables' block has that version."""
        self.versions[index] = version
        if self.on_received is not None and index < len(self._blocks):
            self.on_received(index)

    def pieces(self, index: int) -> Iterator[tuple[int, slice]]:
        """The pieces of block `index`: for each, the tensor's index in the spec, and the slice of its elements, in C order."""
        block = self.layout.blocks[index]
        space = self.layout.spaces[block.space]
        end = 0
        for tensor, following in zip(block.segment_tensors.tolist(), block.segment_ends.tolist(), strict=True):
            begin, end = end, following
            first = block.offset + begin - int(space.starts[np.searchsorted(space.tensors, tensor)])
            yield tensor, slice(first, first + end - begin)

    def present_but(self, missing: Sequence[int]) -> NDArray[np.bool_] | None:
        """A mask (tensors,) of the tensors that have a gradient, if `missing` have none; None if all have one."""
        if not missing:
            return None
        present = np.ones(len(self.views), np.bool_)
        present[list(missing)] = False
        return present

    def zero_absent(self, present: NDArray[np.bool_]) -> int:
        """Zero the tensors that are not present, though others of their space are; return how many they are."""
        spaces = [space.tensors for space in self.layout.spaces if present[space.tensors].any()]
        absent = [tensor for tensors in spaces for tensor in tensors[~present[tensors]].tolist()]
        for tensor in absent:
            self.views[tensor][...] = 0
        return len(absent)

    def squares(self, present: NDArray[np.bool_] | None = None) -> int | None:
        """The sum of the squares of all trained tensors; see psd_core.square_sum. present: as of `first_nonfinite`."""
        spaces = zip(self.layout.spaces, self.spaces, strict=True)
        trained = [
            memory
            for space, memory in spaces
            if not self.layout.spec.groups[space.group].is_static and (present is None or present[space.tensors].any())
        ]
        return psd_core.total_squares(map(psd_core.square_sum, trained))

    def first_nonfinite(self, present: NDArray[np.bool_] | None = None) -> str | None:
        """Name of the first tensor, in the order of the layout, that holds NaN or infinity; None if all are finite. Groups of
        buffers are not checked.

        Args:
            present: (tensors,) bool: spaces in which no tensor is present are left out; None: all are present.
        """
        for space, memory in self._looked_at:
            if present is not None and not present[space.tensors].any():
                continue
            if memory.nbytes < SCANNED_BYTES_FOR_TWO:
                element = psd_core.first_nonfinite(memory)
            else:
                element = self._first_nonfinite(memory)
            if element >= 0:
                tensor = int(space.tensors[np.searchsorted(space.starts, element, side="right") - 1])
                return self.layout.spec.tensors[tensor].name
        return None

    def _first_nonfinite(self, memory: NDArray[Any]) -> int:
        """Run psd_core.first_nonfinite in two threads: on large memory it takes milliseconds, for which every step waits."""
        if self._scanner is None:
            self._scanner = ThreadPoolExecutor(1, thread_name_prefix="psd-scan")
        middle = memory.size // 2
        second = self._scanner.submit(psd_core.first_nonfinite, memory[middle:])
        first = psd_core.first_nonfinite(memory[:middle])
        found = second.result()
        return first if first >= 0 or found < 0 else found + middle


def share_memory(layout: Layout, places: int = 1, *, is_reader: bool = False) -> Segment | None:
    """A segment for a job's gradients, and their encoded form if it has one, for `places` copies of its parameters, and for
    rows; for a reader the parameters alone. None if the system has none."""
    trained = [space for space in layout.spaces if not layout.spec.groups[space.group].is_static]
    nbytes = sum(aligned(space.size * space.dtype.itemsize) for space in layout.spaces) * places
    forms = 2 if layout.spec.compression.push else 1
    if not is_reader:
        nbytes += sum(aligned(space.size * space.gradient_dtype.itemsize) for space in trained) * forms
        nbytes += 2 * ROWS_BYTES if layout.spec.tables else 0
    try:
        return Segment(nbytes)
    except OSError as error:
        logger.warning("psd: gradients and parameters are not shared with the shards on this machine: %s", error)
        return None
