"""The frames of a worker's calls, the same for all carriers: makes them from flat buffers and rows, and takes received ones.

Where the shard sees memory of this process, frames name what lies there (in_memory, rows_at), and its numbers do not travel.
Must not know channels, sockets or calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from psd.contract import frames
from psd.contract.errors import InternalError
from psd.contract.layout import Block
from psd.contract.rows import TableRows, in_frames, parts_of, payload_of, tables_present
from psd.contract.vector_batches import payload_parts
from psd.v1 import data_pb2, vectors_pb2
from psd_client.lanes.flat import FlatBuffers
from psd_client.lanes.transport import GradientPart, Traffic

FRAME_BYTES = 4 << 20
"""Bytes of ids and values in a frame of a request for rows: while one is sent, the shard looks up the next. Smaller ones were
slower: each costs two switches between processes."""

_FRAMES, _AHEAD = data_pb2.SmallPush.FRAMES_FIELD_NUMBER, data_pb2.SmallPush.AHEAD_FIELD_NUMBER
"""Numbers of the fields of SmallPush, and of SmallAnswer."""

_ROWS_ALONE = data_pb2.RowsRequest()

Places = Callable[[Sequence[TableRows]], list[int]]
"""A function that returns the offsets of rows' values in memory that the shard sees; empty if some lie elsewhere."""


class OutFrame(NamedTuple):
    """A frame to send.

    Attributes:
        message: without payload. payload: its pieces. nbytes: bytes of all its numbers and ids, whether they travel or not.
    """

    message: Any
    payload: Sequence[NDArray[Any]]
    nbytes: int

    def joined(self) -> bytes:
        """The frame as gRPC sends it."""
        return frames.join(self.message.SerializeToString(), *self.payload)


def push_frames(part: GradientPart, places: Places = lambda _: [], *, in_memory: bool = False) -> Iterator[OutFrame]:
    """The frames of one push: blocks, then rows. Waits for blocks that are still being computed.

    in_memory: the shard sees the buffers. One frame then names all blocks, if none is still computed.
    """
    header: data_pb2.PushHeader | None = part.header
    has_rows = part.tables_block is not None
    if in_memory and part.feed is None and part.blocks:
        message = data_pb2.PushFrame(push=header, in_memory=[block.index for block in part.blocks], last=not has_rows)
        sent = part.blocks
        if part.present is not None:
            message.in_memory_present.extend([frames.present_bits(part.present[block.segment_tensors]) for block in sent])
            sent = [block for block in sent if part.has(block)]
        for each in part.outgoing() if part.encoding is not None else ():
            part.sent(*each)
        yield OutFrame(message, (), sum([block.pushed_nbytes for block in sent]))
        header = None
    else:
        left = len(part.blocks)
        for block, present in part.outgoing():
            left -= 1
            message = data_pb2.PushFrame(push=header, last=not (left or has_rows))
            header = None
            if block.index in part.already:
                message.block, message.already = block.index, True
                yield OutFrame(message, (), 0)
                continue
            bits = b"" if present is None else frames.present_bits(present)
            is_plain = present is None and part.encoding is None
            values = [part.buffers.block(block.index)] if is_plain else part.sent(block, present)
            if in_memory:
                message.in_memory.append(block.index)
                message.in_memory_present.append(bits)
            else:
                message.block, message.present = block.index, bits
            yield OutFrame(message, () if in_memory else values, sum([array.nbytes for array in values]))
    if part.tables_block is None:
        return
    outgoing = part.outgoing_rows()
    framed = in_placed_frames(outgoing, frames.FRAME_BYTES_MAX, places)
    for rows, starts in framed:
        is_last = rows is framed[-1][0]
        message = data_pb2.PushFrame(
            push=header, block=part.tables_block, rows=parts_of(rows), rows_at=starts, more=not is_last, last=is_last
        )
        if is_last:
            message.present = tables_present(outgoing, len(part.buffers.layout.spec.tables))
        nbytes = sum([piece.ids.nbytes + piece.values.nbytes for piece in rows])
        yield OutFrame(message, [piece.ids for piece in rows] if starts else payload_of(rows), nbytes)
        header = None


def small_push(messages: Sequence[OutFrame], ahead: WantedRows | None) -> bytes:
    """A SmallPush: all frames of a push, and the request for rows ahead, if any. Copies each value once."""
    parts = [(_FRAMES, frame.message.SerializeToString(), frame.payload) for frame in messages]
    if ahead is not None:
        (request,) = ahead.requests
        parts.append((_AHEAD, request.message.SerializeToString(), request.payload))
    return frames.join_nested(parts)


def initial_frames(
    first: data_pb2.InitializeFrame, blocks: Sequence[Block], values: FlatBuffers, *, in_memory: bool = False
) -> Iterator[OutFrame]:
    """The frames that provide initial values; `first` is merged into the first one. in_memory: the shard sees the values."""
    message = data_pb2.InitializeFrame(last=in_memory or len(blocks) < 2)
    message.MergeFrom(first)
    if in_memory or not blocks:
        message.in_memory.extend([block.index for block in blocks])
        yield OutFrame(message, (), sum([block.nbytes for block in blocks]))
        return
    for block in blocks:
        message.block, message.last = block.index, block is blocks[-1]
        yield OutFrame(message, [values.block(block.index)], block.nbytes)
        message = data_pb2.InitializeFrame()


def in_placed_frames(rows: Sequence[TableRows], nbytes_max: int, places: Places) -> list[tuple[list[TableRows], list[int]]]:
    """Frames of rows, at least one, each with its values' offsets in shared memory; then only the ids are sent."""
    starts = places(rows)
    framed = in_frames(rows, nbytes_max, ids_alone=bool(starts)) or [[]]
    if not starts or (len(framed) == 1 and len(framed[0]) == len(starts)):
        return [(frame, starts) for frame in framed]
    return [(frame, places(frame)) for frame in framed]


class WantedRows:
    """The rows of one call.

    Args:
        whose: the shard, for error messages. wanted: C-contiguous arrays; `values` are filled, in their dtype.
        first: merged into the first request. places: finds values in attached memory; by default none lie there.

    Attributes:
        requests: the frames to ask for, in order; at least one, perhaps empty. answered: how many were answered.
        version: the lowest version in the answers so far. received_bytes: bytes of values received so far.
    """

    def __init__(
        self,
        whose: str,
        wanted: Sequence[TableRows],
        first: data_pb2.RowsRequest = _ROWS_ALONE,
        places: Places = lambda _: [],
    ) -> None:
        self._whose = whose
        framed = in_placed_frames(wanted, FRAME_BYTES, places)
        self._frames = [frame for frame, _ in framed]
        self.requests: list[OutFrame] = []
        for frame, starts in framed:
            is_last = frame is self._frames[-1]
            message = data_pb2.RowsRequest(rows=parts_of(frame), rows_at=starts, last=is_last)
            if not self.requests:
                message.MergeFrom(first)
            ids: list[NDArray[Any]] = [rows.ids for rows in frame]
            self.requests.append(OutFrame(message, ids, sum([piece.nbytes for piece in ids])))
        self.answered = 0
        self.version: int | None = None
        self.received_bytes = 0

    @property
    def values(self) -> list[NDArray[Any]]:
        """The arrays that are filled."""
        return [rows.values for frame in self._frames for rows in frame]

    def places(self, answer: data_pb2.RowsFrame, nbytes: int) -> list[memoryview]:
        """The memory for the payload of the next answer, piece by piece. Counts the frame as answered."""
        if self.answered == len(self._frames):
            raise InternalError(f"{self._whose}: sent more rows than it was asked for")
        frame, request = self._frames[self.answered], self.requests[self.answered].message
        received = sum([rows.values.nbytes for rows in frame])
        if answer.rows != request.rows or nbytes != (0 if request.rows_at else received):
            raise InternalError(f"{self._whose}: sent other rows than it was asked for")
        self.version = answer.version if self.version is None else min(self.version, answer.version)
        self.answered += 1
        self.received_bytes += received
        return [rows.values.data.cast("B") for rows in frame] if nbytes else []

    def fill(self, answer: data_pb2.RowsFrame, payload: memoryview) -> None:
        """Write the next answer's payload into the arrays."""
        for place in self.places(answer, payload.nbytes):
            place[:] = payload[: place.nbytes]
            payload = payload[place.nbytes :]

    def complete(self) -> int:
        """The version; InternalError if an answer is missing."""
        if self.version is None or self.answered < len(self._frames):
            raise InternalError(f"{self._whose}: {len(self._frames) - self.answered} frames of rows are missing in its answer")
        return self.version


def vector_frames(batch: vectors_pb2.VectorBatch, pieces: Sequence[NDArray[Any]]) -> Iterator[bytes]:
    """The frames of a batch on vectors, with its payload."""
    message = vectors_pb2.VectorFrame(batch=batch)
    for piece in payload_parts(pieces):
        for at in range(0, len(piece), frames.FRAME_BYTES_MAX):
            yield frames.join(message.SerializeToString(), piece[at : at + frames.FRAME_BYTES_MAX])
            message = vectors_pb2.VectorFrame()


class BlockAnswer:
    """The blocks of one answer over gRPC.

    Args:
        whose: the shard, for error messages. awaited: bytes of the blocks that were asked for, by index; 0 for the tables'
            block, which sends only a version. parameters: the buffers that get the blocks; None: none do. traffic: counts
            payload bytes. ahead: gets the rows that were asked for, too.

    Attributes:
        positions: digests of the workers' positions in the frames.
    """

    def __init__(
        self,
        whose: str,
        awaited: Mapping[int, int],
        parameters: FlatBuffers | None,
        traffic: Traffic,
        ahead: WantedRows | None = None,
    ) -> None:
        self.positions: set[int] = set()
        self._whose = whose
        self._awaited = dict(awaited)
        self._parameters = parameters
        self._traffic = traffic
        self._ahead = ahead
        self._reply: data_pb2.PushReply | None = None

    def take(self, received: Iterable[bytes | memoryview]) -> BlockAnswer:
        """Take all frames; InternalError if a block is missing."""
        for frame in received:
            self.take_frame(frame)
        if self._awaited:
            raise InternalError(f"{self._whose}: {len(self._awaited)} blocks are missing in its answer")
        return self

    def take_small(self, answer: bytes) -> BlockAnswer:
        """Take a SmallAnswer likewise."""
        for field, data in frames.split_nested(answer, "SmallAnswer", len(self._awaited) + 2):
            if field == _FRAMES:
                self.take_frame(data)
            elif field == _AHEAD and self._ahead is not None:
                head, payload = frames.split(data, "RowsFrame")
                self._ahead.fill(data_pb2.RowsFrame.FromString(head), payload)
                self._traffic.received_bytes += self._ahead.received_bytes
        return self.take(())

    def take_frame(self, frame: bytes | memoryview) -> None:
        """Take one frame."""
        head, payload = frames.split(frame, "PullFrame")
        try:
            message = data_pb2.PullFrame.FromString(head)
        except DecodeError as error:
            raise InternalError(f"{self._whose}: an answer is no PullFrame: {error}") from None
        if message.HasField("push"):
            self._reply = message.push
            return
        nbytes = self._awaited.pop(message.block, None)
        if nbytes is None:
            raise InternalError(f"{self._whose}: block {message.block} was not asked for")
        if message.positions:
            self.positions.add(message.positions)
        if self._parameters is not None:
            if message.delta_check:
                self._parameters.fill_changes(message.block, payload, message.delta_check)
            elif nbytes:
                self._parameters.fill(message.block, payload, message.base, message.version)
            if message.content:
                self._parameters.contents[message.block] = message.content
            if message.steps:
                self._parameters.steps[message.block] = message.steps
            self._parameters.received(message.block, message.version)
            self._traffic.received_bytes += payload.nbytes

    @property
    def reply(self) -> data_pb2.PushReply:
        """The push's reply, which came with the blocks."""
        if self._reply is None:
            raise InternalError(f"{self._whose}: the answer to a push_pull has no push reply")
        return self._reply
