"""A checkpoint's facts about server-side vectors. A chunk has a run of the elements of one.

A vector is not part of the job spec, so each part's document names those that there are; all parts name the same. With them is,
for each session, the number of its latest batch: the parts are of one moment if these are equal. Must not know files, nor
stores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from psd.checkpoint.chunks import ChunkKind, NewChunk
from psd_core.vector import Piece, VectorSpec


class VectorsPart(Protocol):
    """A shard's part of all vectors at the cut, as it hands it over, iterated once.

    Attributes:
        specs: the vectors. sessions: the number of the latest batch, by session.
    """

    specs: tuple[VectorSpec, ...]
    sessions: dict[int, int]

    def __iter__(self) -> Iterator[Piece]: ...


ELEMENTS = ChunkKind("elements", "vector", lambda spec, chunk: chunk.length * spec.itemsize, is_run=True)


def specs_of(part: VectorsPart | None) -> tuple[VectorSpec, ...]:
    """The vectors in the order in which all parts have them."""
    return tuple(sorted(part.specs)) if part is not None else ()


def vector_chunks(part: VectorsPart | None) -> Iterator[NewChunk]:
    """A shard's part of the vectors as chunks."""
    numbers = {spec: number for number, spec in enumerate(specs_of(part))}
    for spec, start, values in part or ():
        yield NewChunk(ELEMENTS.name, numbers[spec], start, len(values), [values])


def decode_vector(spec: VectorSpec, data: bytes) -> NDArray[Any]:
    """Elements of a vector, as a read-only view of their bytes."""
    return np.frombuffer(data, np.dtype(spec.dtype).newbyteorder("<"))


def difference_of(parts: Sequence[tuple[Sequence[VectorSpec], Mapping[int, int]]]) -> str:
    """The first way in which the parts of a checkpoint are of different moments, in words; empty if they are of one.

    Args:
        parts: vectors and sessions of each shard. A shard may have forgotten a session that no worker has any more.
    """
    specs, sessions = parts[0]
    for index, (others, latest) in enumerate(parts):
        if others != specs:
            return f"shard {index} has {len(others)} vectors, shard 0 has {len(specs)}, or others"
        for session in sessions.keys() & latest.keys():
            if sessions[session] != latest[session]:
                return (
                    f"shard {index} has run batches up to {latest[session]} of session {session}, and shard 0 up to "
                    f"{sessions[session]}"
                )
    return ""
