"""The crash-safe store of a shard's part of all vectors: a directory of files, mapped shared.

A batch is one transaction: `kill -9` at any instant leaves all of it, or nothing. How is told in docs/design/vectors.md. This module
owns the files: it makes and locks them, takes space for what C is about to write, and gives back what nobody needs. Must not
know ranks, messages or checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

from psd_core.vector_operations import Operation


class VectorError(ValueError):
    """A batch, a declaration or a read that cannot be; nothing has changed. The message names the field and the limit."""


class UnknownVector(VectorError):
    """A name that no vector has."""


class BatchForgotten(VectorError):
    """A batch was sent again so late that its answer is no longer kept."""


class VectorSpec(NamedTuple):
    """The declaration of a vector.

    Attributes:
        name: 1 to 256 bytes of UTF-8.
        size: elements, >= 1; of a matrix rows * columns.
        dtype: one of DTYPES.
        columns: length of a matrix's rows; 0: it is no matrix.
    """

    name: str
    size: int
    dtype: str = "float64"
    columns: int = 0


class BatchName(NamedTuple):
    """The identity of a batch. `session`: >= 1. `sequence`: >= 1, and growing; the last WINDOW ones of a session are known."""

    session: int
    sequence: int


WINDOW = 8
"""Number of a session's latest batches whose answers are kept."""


class VectorStore:
    """A shard's part of all vectors. Made by `create` or `open`; closed by `close`.

    Thread-safe: batches, declarations and reads take place one after the other, each whole.

    Raises:
        ArenaClosed: from every method, after `close`.
        VectorError: naming the field; nothing has changed.

    Attributes:
        shard, shards: which part.
    """

    shard: int
    shards: int

    @classmethod
    def create(
        cls,
        directory: str | os.PathLike[str],
        *,
        shard: int,
        shards: int,
        sessions_max: int = 4096,
        crash_point: Callable[[str], None] | None = None,
    ) -> VectorStore:
        """Make an empty store, in a directory that is not there yet.

        Args:
            sessions_max: how many sessions' answers are kept.
            crash_point: called at each of CRASH_POINTS.

        Raises:
            ArenaError: there is one. ArenaFull: no space; nothing is left of it.
        """
        raise NotImplementedError

    @classmethod
    def open(cls, directory: str | os.PathLike[str], *, crash_point: Callable[[str], None] | None = None) -> VectorStore:
        """Take over what a process has left, by dying or by `close(remove=False)`; finish the batch that it was at.

        Raises:
            FileNotFoundError: there is none. ArenaBusy: another process has it.
            ArenaCorrupt: a file is not what was written; all are left alone.
        """
        raise NotImplementedError

    def close(self, *, remove: bool) -> None:
        """Close the store. Idempotent. remove: delete the directory, too."""
        raise NotImplementedError

    # Vectors.

    def create_vector(self, spec: VectorSpec, name: BatchName | None = None) -> None:
        """Make a vector of zeros. One of the same declaration that is there stays as it is.

        Args:
            name: of this as a batch: what was done once is not done again.

        Raises:
            VectorError: the declaration cannot be, or one of that name has another. ArenaFull: no space.
        """
        raise NotImplementedError

    def drop_vector(self, vector: str, name: BatchName | None = None) -> None:
        """Remove a vector. Raises UnknownVector."""
        raise NotImplementedError

    def vectors(self) -> dict[str, VectorSpec]:
        """The vectors, by name."""
        raise NotImplementedError

    def extent(self, vector: str) -> tuple[int, int]:
        """First element that is here, and the one after the last. Raises UnknownVector."""
        raise NotImplementedError

    # Batches.

    def run(self, operations: Sequence[Operation], name: BatchName | None = None) -> bytes:
        """Run a batch over the stripes that are here, as one transaction.

        Args:
            name: a batch of this name that was run is answered, and not run again.

        Returns:
            Its answers, see `unpack_answers`; those of one without reductions are empty.

        Raises:
            VectorError: "operations[2], axpy: x: ...". BatchForgotten: it was run, and its answer is no longer kept.
            ArenaFull: no space. In each case nothing has changed.
        """
        raise NotImplementedError

    def answer(self, name: BatchName) -> bytes | None:
        """The answers of a batch that was run, or None. Raises BatchForgotten."""
        raise NotImplementedError

    def sessions(self) -> dict[int, int]:
        """The sessions, and the largest sequence number of each."""
        raise NotImplementedError

    def forget(self, session: int) -> None:
        """Forget a session that sends nothing any more, if it is known."""
        raise NotImplementedError

    # Reads. Each returns the elements that are here, in the order in which they are asked for.

    def read(self, vector: str, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Elements of a range of the whole vector; to its end by default. Raises UnknownVector; VectorError: start or stop."""
        raise NotImplementedError

    def read_at(self, vector: str, indices: NDArray[Any]) -> NDArray[Any]:
        """Elements by index, (n,) int64|uint64. Raises UnknownVector; VectorError: an index is out of range."""
        raise NotImplementedError

    def read_rows(self, vector: str, rows: NDArray[Any]) -> NDArray[Any]:
        """Rows of a matrix by number, as one run of elements; of a row that two shards share, what is here.

        Raises UnknownVector; VectorError: it is no matrix, or has no such row.
        """
        raise NotImplementedError

    # Checkpoints.

    def snapshot(self) -> Iterator[tuple[VectorSpec, int, NDArray[Any]]]:
        """Pieces of all vectors as they are now, whatever batches come meanwhile: declaration, first element, elements."""
        raise NotImplementedError
