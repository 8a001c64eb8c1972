"""Rows that a lane fetches from one shard: makes the requests, frame by frame, and writes answers straight into the arrays.

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
"""Bytes of a frame's ids and values: while one is sent, the shard looks up the next. Smaller ones were slower: each costs two
switches between processes."""


Places = Callable[[Sequence[TableRows]], list[int]]
"""A function that returns the offsets of rows' values in memory that the shard sees; empty if some lie elsewhere."""


def in_placed_frames(rows: Sequence[TableRows], nbytes_max: int, places: Places) -> list[tuple[list[TableRows], list[int]]]:
    """Frames of rows, at least one, each with its values' offsets in shared memory; then only the ids are sent."""
    starts = places(rows)
    framed = in_frames(rows, nbytes_max, ids_alone=bool(starts)) or [[]]
    if not starts or (len(framed) == 1 and len(framed[0]) == len(starts)):
        return [(frame, starts) for frame in framed]
    return [(frame, places(frame)) for frame in framed]


class RowsToAsk(NamedTuple):
    """One frame of a request.

    Attributes:
        parts: the frame's parts. ids: one array for each part. is_last: True if no frame follows. nbytes: bytes of the ids.
        starts: the offset of each part's values in attached memory; empty: they are received in a message.
    """

    parts: list[data_pb2.RowsPart]
    ids: list[NDArray[Any]]
    is_last: bool
    nbytes: int
    starts: list[int]


class WantedRows:
    """The rows of one call.

    Args:
        whose: the shard, for error messages. wanted: C-contiguous arrays; `values` are filled, in their dtype.
        places: finds values in attached memory; by default none lie there.

    Attributes:
        requests: the frames to ask for, in order; at least one, perhaps empty. answered: how many were answered.
        version: the lowest version in the answers so far. received_bytes: bytes of values received so far.
    """

    def __init__(self, whose: str, wanted: Sequence[TableRows], places: Places = lambda _: []) -> None:
        self._whose = whose
        framed = in_placed_frames(wanted, FRAME_BYTES, places)
        self._frames = [frame for frame, _ in framed]
        self.requests: list[RowsToAsk] = []
        for frame, starts in framed:
            ids: list[NDArray[Any]] = [rows.ids for rows in frame]
            nbytes = sum([piece.nbytes for piece in ids])
            self.requests.append(RowsToAsk(parts_of(frame), ids, frame is self._frames[-1], nbytes, starts))
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
        frame, request = self._frames[self.answered], self.requests[self.answered]
        received = sum([rows.values.nbytes for rows in frame])
        if list(answer.rows) != request.parts or nbytes != (0 if request.starts else received):
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

    def write_to(self, message: data_pb2.RowsRequest) -> None:
        """Write the request, which must be one frame, into an empty message."""
        (request,) = self.requests
        message.rows.extend(request.parts)
        message.payload = b"".join([ids.data for ids in request.ids])
        message.last = True

    def messages(self, first: data_pb2.RowsRequest) -> Iterator[tuple[data_pb2.RowsRequest, list[NDArray[Any]]]]:
        """The messages for gRPC, each with its ids; `first` is merged into the first one."""
        for request in self.requests:
            message = data_pb2.RowsRequest(rows=request.parts, last=request.is_last)
            if request is self.requests[0]:
                message.MergeFrom(first)
            yield message, request.ids
