"""The frames of one call, as a worker sends them: checks their order, and makes blocks and requests for rows of them.

The same for all carriers: a carrier receives and parses frames, and may have memory of the worker's to which they refer. Must
not know how frames travel, nor what is done with blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeAlias

from psd.contract.errors import InvalidRequest, PsdError
from psd.rim.bulk_memory import WorkerMemory
from psd.rim.calls import Frame
from psd.rim.data_plane import LENT_BYTES_MIN, PushedBlock, RowsFrames

Memory: TypeAlias = Callable[[], WorkerMemory]
"""A function that returns the worker's attached memory; raises InvalidRequest without any."""


def no_memory() -> NoReturn:
    """Refuse a frame that refers to memory."""
    raise InvalidRequest("in_memory: nothing is attached to this connection")


class SentFrames:
    """The frames of one call.

    Args:
        frames: as received; an error in place of one that cannot be parsed. They may go on with the frames of the next call.
        memory: for frames that refer to attached memory. rank: the worker's who has attached it.
    """

    def __init__(self, frames: Iterator[Any], memory: Memory = no_memory, rank: int = 0) -> None:
        self._frames = frames
        self._memory = memory
        self._rank = rank
        self._first: Frame

    def head(self, field: str) -> Any:
        """The head of the first frame. Call it first."""
        item = next(self._frames, None)
        if item is None:
            raise InvalidRequest(f"{field}: the stream ended before the first frame")
        if isinstance(item, PsdError):
            raise item
        self._first = item
        if not self._first.head.HasField(field):
            raise InvalidRequest(f"{field}: the first frame of a call must have it")
        return self._first.head

    def blocks(self) -> Iterator[PushedBlock]:
        """Yield the blocks of a push, up to its last frame."""
        frame = self._first
        memory: WorkerMemory | None = None
        while True:
            head, payload, is_own = frame
            if head.in_memory:
                if head.rows or head.present or head.already:
                    raise InvalidRequest("in_memory: stands on a frame that has a block of its own")
                memory = memory or self._memory()
                yield from self._named(head, head.in_memory_present, payload, memory, memory.gradient)
            elif head.HasField("block"):
                numbers: Sequence[memoryview] = ()
                if head.rows_at:
                    memory = memory or self._memory()
                    numbers = memory.rows(head.rows, head.rows_at)
                is_lent = is_own and (len(head.rows) > 0 or payload.nbytes >= LENT_BYTES_MIN)
                yield PushedBlock(
                    head.block, head.present, payload, is_lent, False, head.rows, head.more, numbers, head.already
                )
            elif payload.nbytes or head.present or head.rows:
                raise InvalidRequest("block: absent, but the frame has a payload")
            elif head.already:
                raise InvalidRequest("already: stands on a frame without a block")
            elif frame is not self._first and not head.last:
                raise InvalidRequest("block: absent from a frame that is neither the first nor the last of its push")
            if head.last:
                return
            frame = self._next("push")

    def initial_blocks(self) -> Iterator[PushedBlock]:
        """Yield the blocks of initial values, up to the last frame or the end of the stream."""
        frame: Frame | None = self._first
        while frame is not None:
            head, payload, _ = frame
            if head.in_memory:
                memory = self._memory()
                yield from self._named(head, (), payload, memory, memory.values)
            elif head.HasField("block"):
                yield PushedBlock(head.block, b"", payload)
            elif payload.nbytes:
                raise InvalidRequest("block: absent, but the frame has a payload")
            elif frame is not self._first:
                raise InvalidRequest("block: absent from a frame that is not the first")
            frame = None if head.last else self._next("caller", may_end=True)

    def rows(self) -> RowsFrames:
        """Yield the frames of a request for rows, up to its last."""
        frame = self._first
        while True:
            head, payload, _ = frame
            yield head.rows, payload, self._memory().rows(head.rows, head.rows_at) if head.rows_at else ()
            if head.last:
                return
            frame = self._next("pull", "read")

    def _next(self, *only_on_first: str, may_end: bool = False) -> Any:
        """The next frame; None at the end of the stream if that may come before the last frame."""
        item = next(self._frames, None)
        if item is None:
            if may_end:
                return None
            raise InvalidRequest("last: the stream ended before the last frame")
        if isinstance(item, PsdError):
            raise item
        for field in only_on_first:
            if item.head.HasField(field):
                raise InvalidRequest(f"{field}: stands on a frame that is not the first")
        return item

    def _named(
        self,
        head: Any,
        present: Sequence[bytes],
        payload: memoryview,
        memory: WorkerMemory,
        values_of: Callable[[int], memoryview],
    ) -> list[PushedBlock]:
        """Blocks that lie in attached memory."""
        blocks, count = head.in_memory, len(head.in_memory)
        if head.HasField("block"):
            raise InvalidRequest("in_memory: stands on a frame that has a block of its own")
        if count > memory.block_count:
            raise InvalidRequest(f"in_memory: names {count} blocks, and the job has {memory.block_count}")
        if payload.nbytes:
            raise InvalidRequest(f"in_memory: the blocks lie in memory, but there are {payload.nbytes} bytes of payload")
        if len(present) not in (0, count):
            raise InvalidRequest(f"in_memory_present: has {len(present)} entries for {count} blocks")
        # These blocks came together, in no order. The first call that reads a block applies its complete round: so each
        # worker begins at another block, and they share the work.
        begin = count * self._rank // memory.world_size
        found = []
        for following, i in enumerate((*range(begin, count), *range(begin)), 1):
            bits = present[i] if present else b""
            values = memoryview(b"") if bits and not any(bits) else values_of(blocks[i])
            is_lent = values.nbytes >= LENT_BYTES_MIN
            found.append(PushedBlock(blocks[i], bits, values, is_lent=is_lent, is_followed=following < count))
        return found
