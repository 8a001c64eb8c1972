"""A checkpoint's facts about server-side vectors, and their layout in a shard's `.vectors` file: runs of elements, one behind
the other, those of one vector in their order.

A vector is not part of the job spec, so each part's document names those that there are; all parts name the same, and have each
element once. With them is, for each session, the number of its latest batch: the parts are of one moment if these are equal.
Must not know files, nor stores.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from psd_core.vector import Piece, VectorSpec
from psd_core.vector_operations import extent


class VectorsPart(Protocol):
    """A shard's part of all vectors at the cut, as it hands it over, iterated once.

    Attributes:
        specs: the vectors. sessions: the number of the latest batch, by session.
    """

    specs: tuple[VectorSpec, ...]
    sessions: dict[int, int]

    def __iter__(self) -> Iterator[Piece]: ...


class VectorRun(NamedTuple):
    """The place of a run, and the checksum of its bytes.

    Attributes:
        vector: index in the part's list. first: element of the whole vector. elements: how many.
        start, nbytes: in the part's `.vectors` file.
    """

    vector: int
    first: int
    elements: int
    start: int
    nbytes: int
    crc32: int


def encode_vectors(part: VectorsPart, runs: list[VectorRun]) -> Iterator[memoryview]:
    """Yield the bytes of a `.vectors` file; append to `runs` the place and checksum of each run."""
    numbers = {spec: number for number, spec in enumerate(part.specs)}
    start = 0
    for piece in part:
        view = np.ascontiguousarray(piece.values).data.cast("B")
        runs.append(VectorRun(numbers[piece.spec], piece.start, len(piece.values), start, view.nbytes, zlib.crc32(view)))
        start += view.nbytes
        yield view


def decode_run(spec: VectorSpec, run: VectorRun, data: bytes) -> Piece:
    """A run's elements, as a read-only view of its bytes."""
    return Piece(spec, run.first, np.frombuffer(data, np.dtype(spec.dtype).newbyteorder("<")))


def problem_of_vectors(
    specs: Sequence[VectorSpec], runs: Sequence[VectorRun], nbytes: int, shard_index: int, shard_count: int
) -> str:
    """The first way in which a part's document contradicts itself, in words; empty if it does not."""
    if not all(type(n) is int and n >= 0 for run in runs for n in run):
        return "describes vectors wrongly"
    end = 0
    reached = [extent(spec.size, shard_index, shard_count)[0] for spec in specs]
    for run in runs:
        if run.vector >= len(specs) or run.start != end or run.nbytes != run.elements * specs[run.vector].itemsize:
            return f"describes elements of vectors wrongly: {run}"
        if run.first != reached[run.vector]:
            return f"has element {run.first} of vector {specs[run.vector].name!r} where {reached[run.vector]} is expected"
        reached[run.vector] += run.elements
        end += run.nbytes
    for spec, last in zip(specs, reached, strict=True):
        if last != extent(spec.size, shard_index, shard_count)[1]:
            return f"ends at element {last} of vector {spec.name!r}"
    return f"has vectors that end at {end}, not at {nbytes}" if end != nbytes else ""


def difference_of(parts: Sequence[tuple[Sequence[VectorSpec], Mapping[int, int]]]) -> str:
    """The first way in which the parts of a checkpoint are of different moments, in words; empty if they are of one.

    Args:
        parts: vectors and sessions of each shard. A shard may have forgotten a session that no worker has any more.
    """
    specs, sessions = parts[0]
    for index, (others, latest) in enumerate(parts):
        if sorted(others) != sorted(specs):
            return f"shard {index} has {len(others)} vectors, shard 0 has {len(specs)}, or others"
        for session in sessions.keys() & latest.keys():
            if sessions[session] != latest[session]:
                return (
                    f"shard {index} has run batches up to {latest[session]} of session {session}, and shard 0 up to "
                    f"{sessions[session]}"
                )
    return ""
