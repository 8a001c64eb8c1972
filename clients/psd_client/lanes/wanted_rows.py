"""Rows that a lane fetches from one shard: requests frame by frame, and answers straight into the arrays that they are for.

Must not know sockets or channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

from psd.contract.errors import InternalError
from psd.contract.rows import TableRows, in_frames, parts_of
from psd.v1 import data_pb2

FRAME_BYTES = 4 << 20
"""Ids and numbers of one frame: while one is under way the shard looks up the next. Of smaller ones each cost two switches
between processes, which was more than it saved."""


class RowsToAsk(NamedTuple):
    """One frame of a request.

    Attributes:
        parts: of the frame. ids: one array for each. is_last: no other follows.
        starts: where the numbers of each part go in attached memory; empty: they come in a message.
    """

    parts: list[data_pb2.RowsPart]
    ids: list[NDArray[Any]]
    is_last: bool
    starts: list[int]

    @property
    def nbytes(self) -> int:
        """Bytes of the ids."""
        return sum(ids.nbytes for ids in self.ids)


class WantedRows:
    """The rows of one call.

    Args:
        whose: the shard, for messages. wanted: C-contiguous arrays; `values` are filled, as their dtype says.
        places: says where they all lie in memory that the shard sees; empty if some do not.

    Attributes:
        requests: the frames to ask for, in order; at least one, though it be empty. answered: how many are there.
        version: the least one of the answers so far. received_bytes: so far.
    """

    def __init__(
        self, whose: str, wanted: Sequence[TableRows], places: Callable[[Sequence[TableRows]], list[int]] = lambda _: []
    ) -> None:
        self._whose = whose
        starts = places(wanted)
        self._frames: list[list[TableRows]] = list(in_frames(wanted, FRAME_BYTES, ids_alone=bool(starts))) or [[]]
        is_one = len(self._frames) == 1 and len(self._frames[0]) == len(starts)
        self.requests = [
            RowsToAsk(
                parts_of(frame),
                [rows.ids for rows in frame],
                frame is self._frames[-1],
                starts if is_one or not starts else places(frame),
            )
            for frame in self._frames
        ]
        self.answered = 0
        self.version: int | None = None
        self.received_bytes = 0

    @property
    def values(self) -> list[NDArray[Any]]:
        """The arrays that are filled."""
        return [rows.values for frame in self._frames for rows in frame]

    def places(self, answer: data_pb2.RowsFrame, nbytes: int) -> list[memoryview]:
        """The memory that the payload of the next answer goes to, piece by piece; then the frame counts as answered."""
        if self.answered == len(self._frames):
            raise InternalError(f"{self._whose}: sent more rows than it was asked for")
        frame, request = self._frames[self.answered], self.requests[self.answered]
        places = [rows.values.data.cast("B") for rows in frame]
        received = sum(place.nbytes for place in places)
        if list(answer.rows) != request.parts or nbytes != (0 if request.starts else received):
            raise InternalError(f"{self._whose}: sent other rows than it was asked for")
        self.version = answer.version if self.version is None else min(self.version, answer.version)
        self.answered += 1
        self.received_bytes += received
        return places if nbytes else []

    def fill(self, answer: data_pb2.RowsFrame, payload: memoryview) -> None:
        """Take the next answer."""
        for place in self.places(answer, payload.nbytes):
            place[:] = payload[: place.nbytes]
            payload = payload[place.nbytes :]

    def complete(self) -> int:
        """The version; raises if an answer is missing."""
        if self.version is None or self.answered < len(self._frames):
            raise InternalError(f"{self._whose}: {len(self._frames) - self.answered} frames of rows are missing in its answer")
        return self.version

    def in_one(self) -> data_pb2.RowsRequest:
        """The whole request, if it is one frame, with the ids."""
        (request,) = self.requests
        return data_pb2.RowsRequest(rows=request.parts, payload=b"".join(ids.data for ids in request.ids), last=True)

    def messages(self, first: data_pb2.RowsRequest) -> Iterator[tuple[data_pb2.RowsRequest, list[NDArray[Any]]]]:
        """The messages of gRPC, each with its ids; `first` begins the first one."""
        for request in self.requests:
            message = data_pb2.RowsRequest(rows=request.parts, last=request.is_last)
            if request is self.requests[0]:
                message.MergeFrom(first)
            yield message, request.ids
