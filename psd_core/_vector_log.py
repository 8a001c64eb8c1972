"""The files that batches go through: the log, and the record of the batch that is being run.

Owns their space and their maps. Must not know what a record says.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd_core import _store_file as files
from psd_core import _vector
from psd_core._store_format import ArenaCorrupt, align
from psd_core._vector_format import LogFront
from psd_core._vector_program import ANSWERS_MAX, Program
from psd_core._vector_sessions import Claim
from psd_core.vector_operations import STRIPE

LOG_NAME, RECORD_NAME = "log", "record"

_CONTROL, _SESSIONS, _PARTIALS, _SUMS, _STAGING, _ANSWERS = range(6)  # regions, as in csrc/vector.h
_UNIT_BYTES = 65536
_RECORD_BYTES_KEPT = 1 << 28  # of a larger one the space goes back after the batch


class VectorLog:
    """The log and the record of a store. Needs the store's lock."""

    def __init__(self, directory: Path, log: files.File, front: LogFront, core: _vector.Vectors, *, is_new: bool) -> None:
        """Take over an open and locked log."""
        self._log, self._core = log, core
        self._regions = core.regions
        self._backed = [0] * len(self._regions)
        self._entries: dict[tuple[int, int], int] = {}  # of each slot and entry, the bytes that have space
        size = sum(self._regions[-1])
        if is_new:
            log.extend(size)
            superblock = front.pack()
            log.reserve(0, len(superblock))
            log.write(superblock, 0)
        elif log.size < size:
            raise ArenaCorrupt(f"log: it has {log.size} bytes, expected {size}: truncated")
        for region in (_CONTROL, _SESSIONS):
            self._take(region, self._regions[region][1])
        core.attach_log(log.map_shared(0, size))
        self._record = files.File(directory / RECORD_NAME, os.O_RDWR | os.O_CREAT)
        self._map_record(max(self._record.size, _UNIT_BYTES))

    def close(self) -> None:
        """Close the files. The lock goes with the last map."""
        self._record.close()
        self._log.close()

    def make_room(self, program: Program, claim: Claim) -> None:
        """Take space for all that a batch will write but to vectors. Raises StoreFull."""
        if program.answers:
            self._take(_PARTIALS, self._regions[_PARTIALS][1] * program.answers // ANSWERS_MAX)
            self._take(_SUMS, self._regions[_SUMS][1])
        self._take(_STAGING, program.staging * STRIPE * 8)
        if claim.session:
            entry, nbytes = (claim.slot, claim.sequence % _vector.ENTRIES), max(1, program.answers) * _vector.ANSWER_MAX
            if self._entries.get(entry, 0) < nbytes:
                number = claim.slot * _vector.ENTRIES + entry[1]
                self._log.reserve(self._regions[_ANSWERS][0] + number * self._core.answer_bytes, nbytes)
                self._entries[entry] = align(nbytes, 4096)
        if program.changes and program.size > len(self._map):
            self._map_record(align(program.size + program.size // 8, _UNIT_BYTES))

    def write(self, program: Program) -> None:
        """Write the record, for which there is room."""
        self._core.write_record(program.head, program.parts, program.size, is_complete=not program.functions)

    @property
    def record(self) -> NDArray[np.uint8]:
        """The record."""
        return self._map

    def shorten(self) -> None:
        """Give back the space of a large record that nobody needs any more."""
        if len(self._map) > _RECORD_BYTES_KEPT:
            self._map_record(_UNIT_BYTES)
            self._record.extend(_UNIT_BYTES)

    def _take(self, region: int, nbytes: int) -> None:
        if nbytes > self._backed[region]:
            start, size = self._regions[region]
            nbytes = min(size, align(nbytes, _UNIT_BYTES))
            self._log.reserve(start + self._backed[region], nbytes - self._backed[region])
            self._backed[region] = nbytes

    def _map_record(self, nbytes: int) -> None:
        before = self._record.size
        try:
            if before < nbytes:
                self._record.extend(nbytes)
            self._record.reserve(0, nbytes)
            mapping: Any = self._record.map_shared(0, nbytes)
        except BaseException:
            self._record.extend(before)  # or what was found would be taken, and the next process would want all of it
            raise
        self._core.attach_record(mapping)
        self._map: NDArray[np.uint8] = np.frombuffer(mapping, np.uint8)
