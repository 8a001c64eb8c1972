"""A snapshot of vectors: those of one moment, while batches go on.

Must not know of files or checkpoints: who writes these takes pieces from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

from psd_core._vector_format import VectorPart, VectorSpec
from psd_core.vector_operations import STRIPE

_PIECE_STRIPES = 128


class Piece(NamedTuple):
    """Elements of a vector, from `start` on of the whole one."""

    spec: VectorSpec
    start: int
    values: NDArray[Any]


class VectorSnapshot:
    """The vectors of one moment. An iterator of pieces, once; a context manager, which ends it.

    Stripes that a batch writes to before they were copied are saved in ordinary memory meanwhile.

    Attributes:
        specs: the vectors. sessions: the sessions, and the largest sequence number of each.
    """

    def __init__(
        self,
        parts: Sequence[VectorPart],
        sessions: dict[int, int],
        copy: Callable[[VectorPart, int, int], NDArray[Any]],
        end: Callable[[], None],
    ) -> None:
        """Begin; not for callers."""
        self.specs = tuple(part.spec for part in parts)
        self.sessions = sessions
        self._parts, self._copy, self._end = parts, copy, end

    def __iter__(self) -> Iterator[Piece]:
        """Pieces of all vectors, at most 4 MiB each, those of one vector in their order."""
        for part in self._parts:
            stripes = -(-(part.end - part.begin) // STRIPE)
            for first in range(0, stripes, _PIECE_STRIPES):
                values = self._copy(part, first, min(_PIECE_STRIPES, stripes - first))
                yield Piece(part.spec, part.begin + first * STRIPE, values)

    def __enter__(self) -> VectorSnapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the snapshot, and free what was saved for it. Idempotent."""
        end, self._end = self._end, lambda: None
        end()
