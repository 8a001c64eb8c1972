"""The reader's end of one bulk connection: asks for blocks of one cut, and takes them as they come, or as what has changed.

Where the shard sees the reader's memory it writes the blocks there. Must not know cuts, versions or how the connection was
opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from psd.contract.errors import InternalError
from psd.contract.wire import Kind
from psd.v1 import bulk_pb2, control_pb2, data_pb2
from psd_client.lanes.bulk_connection import BulkClient
from psd_client.lanes.flat import FlatBuffers, Mismatch
from psd_client.lanes.transport import Call


class ReadingCaller(NamedTuple):
    """A reader that asks for a connection.

    Attributes:
        incarnation: of the shard. request: for OpenReads.
    """

    incarnation: int
    request: control_pb2.OpenReadsRequest


class ReadingClient(BulkClient):
    """One open connection of a reader to one shard; as BulkClient."""

    def read(self, request: data_pb2.ReadRequest, awaited: Mapping[int, int], parameters: FlatBuffers, call: Call) -> set[int]:
        """Receive blocks of one cut into the parameters; return the digests of workers' positions in the answer.

        Args:
            awaited: bytes of the blocks that are asked for, by index.

        Raises:
            Mismatch: what has changed does not fit what there was; all other blocks are received.
        """
        message = bulk_pb2.BulkCall(method=bulk_pb2.BULK_METHOD_READ, timeout_s=call.timeout_s, read=request)
        message.into_memory = self._has(parameters)
        if message.into_memory and self._attached is not None:
            self._receiving = parameters
            message.place = self._attached.index(parameters)
            for index in awaited:
                parameters.contents.pop(index, None)
        traffic = self._traffic
        traffic.under_way = (), parameters, awaited, traffic.sent_bytes, traffic.received_bytes
        with self._under_way(call):
            self._stream.send(Kind.CALL, message.SerializeToString())
            answer = _Answer(parameters, dict(awaited))
            while True:
                kind, head, payload_bytes = self._stream.receive()
                if kind is Kind.ANSWER and not message.into_memory:
                    self._take(answer, self._parsed(data_pb2.PullFrame, head), payload_bytes)
                elif kind is Kind.REPLY:
                    break
                elif kind is not Kind.ALIVE:
                    self._raise(kind, head)
            if message.into_memory:
                self._written(answer, self._parsed(bulk_pb2.BulkReply, head))
            if answer.missing:
                raise self._wrong(f"{len(answer.missing)} blocks are missing in its answer")
        if answer.mismatch is not None:
            raise answer.mismatch
        return answer.positions

    def _take(self, answer: _Answer, frame: data_pb2.PullFrame, nbytes: int) -> None:
        """Take a block whose values, or what has changed in them, are the next bytes."""
        parameters, block = answer.parameters, frame.block
        nbytes_max = answer.missing.pop(block, None)
        if nbytes_max is None or nbytes > nbytes_max or nbytes == 0:
            raise self._wrong(f"sent {nbytes} bytes of block {block}, {nbytes_max or 0} were asked for")
        if frame.delta_check or nbytes < nbytes_max:
            payload = np.empty(nbytes, np.uint8).data
            self._stream.read_into(payload)
            if frame.delta_check:
                try:
                    parameters.fill_changes(block, payload, frame.delta_check)
                except Mismatch as error:
                    answer.mismatch = error
                    return
            else:
                parameters.fill(block, payload, 0, frame.version)
        else:
            parameters.contents.pop(block, None)
            self._stream.read_into(parameters.block(block).data.cast("B"))
        self._traffic.received_bytes += nbytes
        answer.has(block, frame.version, frame.content, frame.positions)

    def _written(self, answer: _Answer, reply: bulk_pb2.BulkReply) -> None:
        """Take the blocks that the shard has written."""
        if not len(reply.blocks) == len(reply.versions) == len(reply.contents):
            raise self._wrong(
                f"wrote {len(reply.blocks)} blocks, {len(reply.versions)} versions, {len(reply.contents)} contents"
            )
        for block, version, content in zip(reply.blocks, reply.versions, reply.contents, strict=True):
            nbytes = answer.missing.pop(block, None)
            if nbytes is None:
                raise self._wrong(f"wrote block {block}, which was not asked for")
            self._traffic.received_bytes += nbytes
            answer.has(block, version, content, reply.positions)

    def _wrong(self, what: str) -> InternalError:
        return InternalError(f"shard {self._shard} at {self._address}: {what}")


class _Answer:
    """An answer that is being received.

    Attributes:
        missing: bytes of the blocks that have not come yet, by index. positions: as `ReadingClient.read` returns them.
        mismatch: the last one.
    """

    def __init__(self, parameters: FlatBuffers, missing: dict[int, int]) -> None:
        self.parameters = parameters
        self.missing = missing
        self.positions: set[int] = set()
        self.mismatch: Mismatch | None = None

    def has(self, block: int, version: int, content: int, positions: int) -> None:
        """Note what a block is that has come."""
        if positions:
            self.positions.add(positions)
        self.parameters.contents[block] = content
        self.parameters.received(block, version)
