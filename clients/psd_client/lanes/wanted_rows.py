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


Places = Callable[[Sequence[TableRows]], list[int]]
"""Says where the numbers of rows lie in memory that the shard sees; nothing if some of them do not."""


def in_placed_frames(rows: Sequence[TableRows], nbytes_max: int, places: Places) -> list[tuple[list[TableRows], list[int]]]:
    """Rows in frames, at least one, each with where its numbers lie; ids alone travel where they do."""
    starts = places(rows)
    framed = in_frames(rows, nbytes_max, ids_alone=bool(starts)) or [[]]
    if not starts or (len(framed) == 1 and len(framed[0]) == len(starts)):
        return [(frame, starts) for frame in framed]
    return [(frame, places(frame)) for frame in framed]


class RowsToAsk(NamedTuple):
    """One frame of a request.

    Attributes:
        parts: of the frame. ids: one array for each. is_last: no other follows. nbytes: of the ids.
        starts: where the numbers of each part go in attached memory; empty: they come in a message.
    """

    parts: list[data_pb2.RowsPart]
    ids: list[NDArray[Any]]
    is_last: bool
    nbytes: int
    starts: list[int]


class WantedRows:
    """The rows of one call.

    Args:
        whose: the shard, for messages. wanted: C-contiguous arrays; `values` are filled, as their dtype says.
        places: of these; by default they lie where the shard does not see them.

    Attributes:
        requests: the frames to ask for, in order; at least one, though it be empty. answered: how many are there.
        version: the least one of the answers so far. received_bytes: so far.
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
        """The memory that the payload of the next answer goes to, piece by piece; then the frame counts as answered."""
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
        """Take the next answer."""
        for place in self.places(answer, payload.nbytes):
            place[:] = payload[: place.nbytes]
            payload = payload[place.nbytes :]

    def complete(self) -> int:
        """The version; raises if an answer is missing."""
        if self.version is None or self.answered < len(self._frames):
            raise InternalError(f"{self._whose}: {len(self._frames) - self.answered} frames of rows are missing in its answer")
        return self.version

    def write_to(self, message: data_pb2.RowsRequest) -> None:
        """Write the whole request, which is one frame, into an empty message."""
        (request,) = self.requests
        message.rows.extend(request.parts)
        message.payload = b"".join([ids.data for ids in request.ids])
        message.last = True

    def messages(self, first: data_pb2.RowsRequest) -> Iterator[tuple[data_pb2.RowsRequest, list[NDArray[Any]]]]:
        """The messages of gRPC, each with its ids; `first` begins the first one."""
        for request in self.requests:
            message = data_pb2.RowsRequest(rows=request.parts, last=request.is_last)
            if request is self.requests[0]:
                message.MergeFrom(first)
            yield message, request.ids
