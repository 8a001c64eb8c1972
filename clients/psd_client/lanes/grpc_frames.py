"""The gRPC lane's messages for blocks: makes frames from flat buffers, and writes received frames into buffers.

Must not know channels or calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from psd.contract import frames
from psd.contract.errors import InternalError
from psd.contract.layout import Block
from psd.contract.rows import in_frames, parts_of, payload_of, tables_present
from psd.contract.vector_batches import payload_parts
from psd.v1 import data_pb2, vectors_pb2
from psd_client.lanes.flat import FlatBuffers
from psd_client.lanes.transport import GradientPart
from psd_client.lanes.wanted_rows import WantedRows

_FRAMES, _AHEAD = data_pb2.SmallPush.FRAMES_FIELD_NUMBER, data_pb2.SmallPush.AHEAD_FIELD_NUMBER
"""Numbers of the fields of SmallPush, and of SmallAnswer."""

PushMessage = tuple[data_pb2.PushFrame, list[NDArray[Any]]]


def push_messages(part: GradientPart) -> Iterator[PushMessage]:
    """The frames of one push as messages, each with the pieces of its payload."""
    header: data_pb2.PushHeader | None = part.header
    left = len(part.blocks)
    for block, present in part.outgoing():
        left -= 1
        message = data_pb2.PushFrame(push=header, block=block.index, last=left == 0 and part.tables_block is None)
        if present is not None:
            message.present = frames.present_bits(present)
        yield message, part.sent(block, present)
        header = None
    if part.tables_block is None:
        return
    outgoing = part.outgoing_rows()
    frames_of_rows = in_frames(outgoing) or [[]]
    for rows in frames_of_rows:
        is_last = rows is frames_of_rows[-1]
        message = data_pb2.PushFrame(push=header, block=part.tables_block, rows=parts_of(rows), more=not is_last, last=is_last)
        if is_last:
            message.present = tables_present(outgoing, len(part.buffers.layout.spec.tables))
        yield message, payload_of(rows)
        header = None


def small_push(messages: Sequence[PushMessage], ahead: WantedRows | None) -> bytes:
    """A SmallPush: all messages of a push, and the request for rows ahead, if any. Copies each value once."""
    parts = [(_FRAMES, message.SerializeToString(), payload) for message, payload in messages]
    if ahead is not None:
        ((request, ids),) = ahead.messages(data_pb2.RowsRequest())
        parts.append((_AHEAD, request.SerializeToString(), ids))
    return frames.join_nested(parts)


def initial_frames(first: data_pb2.InitializeFrame, blocks: Sequence[Block], values: FlatBuffers) -> Iterator[bytes]:
    """The frames that provide initial values; `first` is merged into the first one."""
    if not blocks:
        yield first.SerializeToString()
    for block in blocks:
        message = data_pb2.InitializeFrame()
        if block is blocks[0]:
            message.CopyFrom(first)
        message.block = block.index
        yield frames.join(message.SerializeToString(), values.block(block.index))


def vector_frames(batch: vectors_pb2.VectorBatch, pieces: Sequence[NDArray[Any]]) -> Iterator[bytes]:
    """The frames of a batch on vectors, with its payload."""
    message = vectors_pb2.VectorFrame(batch=batch)
    for piece in payload_parts(pieces):
        for at in range(0, len(piece), frames.FRAME_BYTES_MAX):
            yield frames.join(message.SerializeToString(), piece[at : at + frames.FRAME_BYTES_MAX])
            message = vectors_pb2.VectorFrame()


class BlockAnswer:
    """The blocks of one answer, as they arrive.

    Args:
        whose: the shard, for error messages. awaited: bytes of the blocks that were asked for, by index; 0 for the tables'
            block, which sends only a version. parameters: the buffers that get the blocks; None: none do.

    Attributes:
        positions: digests of the workers' positions in the frames so far.
    """

    def __init__(self, whose: str, awaited: Mapping[int, int], parameters: FlatBuffers | None) -> None:
        self.received_bytes = 0
        self.positions: set[int] = set()
        self._whose = whose
        self._awaited = dict(awaited)
        self._parameters = parameters
        self._reply: data_pb2.PushReply | None = None

    def take_all(self, reply: bytes, ahead: WantedRows | None) -> None:
        """Take a SmallAnswer; write the rows that were asked for ahead, if any, into `ahead`."""
        for field, data in frames.split_nested(reply, "SmallAnswer", len(self._awaited) + 2):
            if field == _FRAMES:
                self.take_frame(data)
            elif field == _AHEAD and ahead is not None:
                head, payload = frames.split(data, "RowsFrame")
                ahead.fill(data_pb2.RowsFrame.FromString(head), payload)

    def take_frame(self, frame: bytes | memoryview) -> None:
        """Take one received frame."""
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
            if nbytes:
                self._parameters.fill(message.block, payload)
            if message.steps:
                self._parameters.steps[message.block] = message.steps
            self._parameters.received(message.block, message.version)
            self.received_bytes += payload.nbytes

    def complete(self) -> data_pb2.PushReply | None:
        """The push's reply, if there was one; InternalError if a block is missing."""
        if self._awaited:
            raise InternalError(f"{self._whose}: {len(self._awaited)} blocks are missing in its answer")
        return self._reply
