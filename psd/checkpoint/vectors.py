"""A checkpoint's facts about server-side vectors. A chunk has a run of one vector's elements.

Vectors are not part of the job spec, so each part's document names them; all parts name the same. It also has the number of
each session's latest batch: if these are equal, the parts are of one moment. Must not know files or stores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from psd.checkpoint.chunks import ChunkKind, NewChunk
from psd_core.vector import Piece, VectorSpec


class VectorsPart(Protocol):
    """A shard's part of all vectors at the cut; can be iterated once.

    Attributes:
        specs: the vectors. sessions: the number of the latest batch, by session.
    """

    specs: tuple[VectorSpec, ...]
    sessions: dict[int, int]

    def __iter__(self) -> Iterator[Piece]: ...


ELEMENTS = ChunkKind("elements", "vector", lambda spec, chunk: chunk.length * spec.itemsize, is_run=True)


def specs_of(part: VectorsPart | None) -> tuple[VectorSpec, ...]:
    """The vectors in the order of all parts."""
    return tuple(sorted(part.specs)) if part is not None else ()


def vector_chunks(part: VectorsPart | None) -> Iterator[NewChunk]:
    """A shard's part of the vectors as chunks."""
    numbers = {spec: number for number, spec in enumerate(specs_of(part))}
    for spec, start, values in part or ():
        yield NewChunk(ELEMENTS.name, numbers[spec], start, len(values), [values])


def decode_vector(spec: VectorSpec, data: bytes) -> NDArray[Any]:
    """Elements of a vector, as a read-only view of `data`."""
    return np.frombuffer(data, np.dtype(spec.dtype).newbyteorder("<"))


def difference_of(parts: Sequence[tuple[Sequence[VectorSpec], Mapping[int, int]]]) -> str:
    """The first difference between the moments of a checkpoint's parts, in words; empty if all are of one moment.

    Args:
        parts: vectors and sessions of each shard. A shard may have dropped a session that no worker has any more.
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
