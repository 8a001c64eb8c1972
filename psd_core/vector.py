"""The crash-safe store of a shard's part of all vectors: a directory of files, mapped shared.

A batch is one transaction: `kill -9` at any instant leaves all of it, or nothing. How is told in docs/design/vectors.md. This
module owns the files: it makes and locks them, takes space for what C is about to write, and removes what no vector has. Must not
know ranks, messages or checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psd_core import _arena_file as files
from psd_core import _vector
from psd_core import _vector_format as form
from psd_core import _vector_program as programs
from psd_core._arena_format import ArenaClosed, ArenaCorrupt, ArenaError, align
from psd_core._vector_format import BatchForgotten, UnknownVector, VectorError, VectorPart, VectorSpec
from psd_core.vector_operations import DTYPES, STRIPE, Operation

__all__ = [
    "CRASH_POINTS",
    "WINDOW",
    "BatchForgotten",
    "BatchName",
    "UnknownVector",
    "VectorError",
    "VectorSpec",
    "VectorStore",
]

CRASH_POINTS = (
    "record", "state", "commit", "staged", "copy", "fold", "entry", "session", "applied", "done", "file", "catalog", "unlink",
)  # fmt: skip
"""Names of the steps at which `crash_point` is called: before each store of the protocol. It returns or ends the process."""

WINDOW = _vector.ENTRIES - 1
"""Number of a session's latest batches whose answers are kept."""

_LOG, _RECORD, _CATALOG = "log", "record", "catalog"
_CONTROL, _SESSIONS, _PARTIALS, _SUMS, _STAGING, _ANSWERS = range(6)
_RECORD_BYTES_KEPT = 1 << 28  # of a larger one the space goes back after the batch
_PIECE_STRIPES = 1024


class BatchName(NamedTuple):
    """The identity of a batch. `session`: >= 1. `sequence`: >= 1, and growing; the last WINDOW ones of a session are known."""

    session: int
    sequence: int


class VectorStore:
    """A shard's part of all vectors. Made by `create` or `open`; closed by `close`.

    Thread-safe: batches, declarations and reads take place one after the other, each whole.

    Raises:
        ArenaClosed: from every method, after `close`.
        VectorError: naming the field; nothing has changed.

    Attributes:
        shard, shards: which part.
    """

    def __init__(self, directory: Path, log: files.File, front: form.Superblock, *, is_new: bool, crash_point: Any) -> None:
        """Take over an open and locked log; not for callers."""
        self.shard, self.shards, sessions_max = front
        self._directory, self._log = directory, log
        self._crash_point = crash_point or (lambda _: None)
        self._lock = threading.Lock()
        self._is_snapshot_open = False
        self._core: _vector.Vectors | None = _vector.Vectors(
            answers_max=programs.ANSWERS_MAX,
            operands_max=programs.OPERANDS_MAX,
            sessions_max=sessions_max,
            capacity=form.VECTORS_MAX,
            on_store=crash_point,
        )
        core = self._core
        regions = self._regions = core.regions
        size = sum(regions[-1])
        self._backed = [0] * len(regions)
        self._entries: dict[tuple[int, int], int] = {}  # of each slot and entry, the bytes that have space
        self._record = files.File(directory / _RECORD, os.O_RDWR | os.O_CREAT)
        if is_new:
            log.extend(size)
            log.reserve(0, form.SUPERBLOCK_BYTES)
            log.write(front.pack(), 0)
            self._write_catalog(b"[]")
        elif log.size < size:
            raise ArenaCorrupt(f"log: it has {log.size} bytes, expected {size}: truncated")
        for region in (_CONTROL, _SESSIONS):
            self._take(region, regions[region][1])
        core.attach_log(log.map_shared(0, size))
        self._map_record(max(self._record.size, 4096))
        self._slots = {session: slot for slot, session in enumerate(core.sessions()) if session}
        self._free = [slot for slot, session in reversed(list(enumerate(core.sessions()))) if not session]
        self._parts: dict[str, VectorPart] = {}
        self._arrays: dict[str, NDArray[Any]] = {}
        self._recover()

    @classmethod
    def create(
        cls,
        directory: str | os.PathLike[str],
        *,
        shard: int,
        shards: int,
        sessions_max: int = 1024,
        crash_point: Callable[[str], None] | None = None,
    ) -> VectorStore:
        """Make an empty store, in a directory that is not there yet.

        Args:
            sessions_max: how many sessions' answers are kept.
            crash_point: called at each of CRASH_POINTS.

        Raises:
            ArenaError: there is one. ArenaFull: no space; nothing is left of it.
        """
        if not 0 <= shard < shards:
            raise VectorError(f"shard: expected 0 to {shards - 1}, got {shard}")
        final = Path(directory)
        if final.exists():
            raise ArenaError(f"{final} holds vectors already")
        unfinished = final.with_name(final.name + ".new")
        shutil.rmtree(unfinished, ignore_errors=True)
        with files.lack_of_space(f"no space for vectors in {final.parent}"):
            unfinished.mkdir(mode=0o700, parents=True)
            log = files.File(unfinished / _LOG, os.O_RDWR | os.O_CREAT)
            try:
                log.lock()
                front = form.Superblock(shard, shards, sessions_max)
                store = cls(unfinished, log, front, is_new=True, crash_point=crash_point)
                unfinished.rename(final)
            except BaseException:
                log.close()
                shutil.rmtree(unfinished, ignore_errors=True)
                raise
        store._directory = final
        return store

    @classmethod
    def open(cls, directory: str | os.PathLike[str], *, crash_point: Callable[[str], None] | None = None) -> VectorStore:
        """Take over what a process has left, by dying or by `close(remove=False)`; finish the batch that it was at.

        Raises:
            FileNotFoundError: there is none. ArenaBusy: another process has it.
            ArenaCorrupt: a file is not what was written; all are left alone.
        """
        final = Path(directory)
        with files.lack_of_space(f"no space in {final}"):
            log = files.File(final / _LOG, os.O_RDWR)
            try:
                log.lock()
                front = form.unpack_superblock(log.read(form.SUPERBLOCK_BYTES, 0))
                return cls(final, log, front, is_new=False, crash_point=crash_point)
            except BaseException as error:
                log.close()
                if isinstance(error, ArenaCorrupt):
                    raise ArenaCorrupt(f"{final}: {error}") from None
                raise

    def close(self, *, remove: bool) -> None:
        """Close the store. Idempotent. remove: delete the directory, too."""
        with self._lock:
            if self._core is None:
                return
            self._core = None
            self._arrays.clear()
            if remove:
                shutil.rmtree(self._directory, ignore_errors=True)
            self._record.close()
            self._log.close()

    def sync(self) -> None:
        """Have all that was written reach the disk, if the files lie on one. Returns when it has."""
        with self._used():
            for name in (*(self._vector_name(part.number) for part in self._parts.values()), _RECORD, _CATALOG, _LOG):
                file = files.File(self._directory / name, os.O_RDWR)
                file.sync()
                file.close()

    # Vectors.

    def create_vector(self, spec: VectorSpec, name: BatchName | None = None) -> None:
        """Make a vector of zeros. One of the same declaration that is there stays as it is.

        Args:
            name: of this as a batch: what was done once is not done again.

        Raises:
            VectorError: the declaration cannot be, or one of that name has another. ArenaFull: no space.
        """
        spec.check()
        with self._used() as core:
            if self._known(name) is not None:
                return
            found = self._parts.get(spec.name)
            if found is not None and found.spec != spec:
                raise VectorError(f"{spec.name!r}: it is there as {found.spec}, and asked for as {spec}")
            if found is not None:
                self._run(core, (), name)
                return
            if len(self._parts) == form.VECTORS_MAX:
                raise VectorError(f"vectors: at most {form.VECTORS_MAX}")
            taken = {part.number for part in self._parts.values()}
            number = next(n for n in range(form.VECTORS_MAX) if n not in taken)
            part = VectorPart(spec, number, *form.extent(spec.size, self.shard, self.shards))
            path = self._directory / self._vector_name(number)
            self._crash_point("file")
            file = files.File(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            try:
                nbytes = self._file_bytes(part)
                file.extend(nbytes)
                file.reserve(0, nbytes)
                self._change_catalog(core, [*self._parts.values(), part], name)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            finally:
                file.close()

    def drop_vector(self, vector: str, name: BatchName | None = None) -> None:
        """Remove a vector. Raises UnknownVector."""
        with self._used() as core:
            if self._known(name) is not None:
                return
            part = self._part(vector)
            if self._is_snapshot_open:
                raise VectorError(f"{vector!r}: a snapshot is being copied; no vector goes meanwhile")
            self._change_catalog(core, [other for other in self._parts.values() if other is not part], name)

    def vectors(self) -> dict[str, VectorSpec]:
        """The vectors, by name."""
        with self._used():
            return {name: part.spec for name, part in self._parts.items()}

    def extent(self, vector: str) -> tuple[int, int]:
        """First element that is here, and the one after the last. Raises UnknownVector."""
        with self._used():
            part = self._part(vector)
            return part.begin, part.end

    # Batches.

    def run(self, operations: Sequence[Operation], name: BatchName | None = None) -> bytes:
        """Run a batch over the stripes that are here, as one transaction.

        Args:
            name: a batch of this name that was run is answered, and not run again.

        Returns:
            Its answers, see `unpack_answers`; those of one without reductions are empty.

        Raises:
            VectorError: "operations[2], Axpy: x: ...". BatchForgotten: it was run, and its answer is no longer kept.
            ArenaFull: no space. In each case nothing has changed.
        """
        with self._used() as core:
            answers = self._known(name)
            return self._run(core, operations, name) if answers is None else answers

    def answer(self, name: BatchName) -> bytes | None:
        """The answers of a batch that was run, or None. Raises BatchForgotten."""
        with self._used():
            return self._known(name)

    def sessions(self) -> dict[int, int]:
        """The sessions, and the largest sequence number of each."""
        with self._used() as core:
            return {session: max(core.sequences(slot)) for session, slot in self._slots.items()}

    def forget(self, session: int) -> None:
        """Forget a session that sends nothing any more, if it is known."""
        with self._used() as core:
            slot = self._slots.pop(session, None)
            if slot is not None:
                core.clear_session(slot)
                self._free.append(slot)

    # Reads. Each returns the elements that are here, in the order in which they are asked for.

    def read(self, vector: str, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Elements of a range of the whole vector; to its end by default. Raises UnknownVector; VectorError: start or stop."""
        with self._used():
            part = self._part(vector)
            stop = part.spec.size if stop is None else stop
            if not 0 <= start <= stop <= part.spec.size:
                raise VectorError(f"start and stop: expected 0 <= start <= stop <= {part.spec.size}, got {start} and {stop}")
            begin, end = max(start, part.begin) - part.begin, min(stop, part.end) - part.begin
            return self._array(part)[begin : max(begin, end)].copy()

    def read_at(self, vector: str, indices: NDArray[Any]) -> NDArray[Any]:
        """Elements by index, (n,) int64|uint64. Raises UnknownVector; VectorError: an index is out of range."""
        with self._used():
            part = self._part(vector)
            at = programs.whole_numbers("indices", indices, part.spec.size)
            return self._array(part)[at[(at >= part.begin) & (at < part.end)] - part.begin]

    def read_rows(self, vector: str, rows: NDArray[Any]) -> NDArray[Any]:
        """Rows of a matrix by number, as one run of elements; of a row that two shards share, what is here.

        Raises UnknownVector; VectorError: it is no matrix, or has no such row.
        """
        with self._used():
            part = self._part(vector)
            width = part.spec.columns
            if not width:
                raise VectorError(f"{vector!r}: it is no matrix")
            begins = programs.whole_numbers("rows", rows, part.spec.size // width) * width
            here = begins[(begins >= part.begin) & (begins + width <= part.end)]
            array = self._array(part)
            if len(here) == len(begins):
                return array[(here - part.begin)[:, None] + np.arange(width)].reshape(-1)
            at = begins[:, None] + np.arange(width)
            return array[at[(at >= part.begin) & (at < part.end)] - part.begin]

    # Checkpoints.

    def snapshot(self) -> VectorSnapshot:
        """Vectors as they are now, whatever batches come meanwhile; one at a time. No vector is dropped until it ends.

        Raises:
            VectorError: there is one.
        """
        with self._used() as core:
            if self._is_snapshot_open:
                raise VectorError("snapshot: there is one already")
            core.begin_snapshot()
            self._is_snapshot_open = True
            return VectorSnapshot(self, tuple(self._parts.values()))

    def _copy_of_snapshot(self, part: VectorPart, first: int, count: int) -> NDArray[Any]:
        begin, end = first * STRIPE, min((first + count) * STRIPE, part.end - part.begin)
        out = np.empty(end - begin, part.spec.dtype)
        with self._used() as core:
            core.copy_of_snapshot(part.number, first, count, out.view(np.uint8))
        return out

    def _end_snapshot(self) -> None:
        with contextlib.suppress(ArenaClosed), self._used() as core:
            core.end_snapshot()
            self._is_snapshot_open = False

    # How it is done. Everything below needs the lock.

    @contextlib.contextmanager
    def _used(self) -> Iterator[_vector.Vectors]:
        with self._lock:
            if self._core is None:
                raise ArenaClosed(f"{self._directory} has been closed")
            yield self._core

    def _part(self, vector: str) -> VectorPart:
        part = self._parts.get(vector)
        if part is None:
            raise UnknownVector(f"vector: there is no {vector!r}")
        return part

    def _array(self, part: VectorPart) -> NDArray[Any]:
        return self._arrays[part.spec.name]

    def _known(self, name: BatchName | None) -> bytes | None:
        if name is None:
            return None
        for field, value in zip(BatchName._fields, name, strict=True):
            if not isinstance(value, int) or not 1 <= value < 1 << 63:
                raise VectorError(f"{field}: expected a whole number from 1 to 2**63 - 1, got {value!r}")
        slot = self._slots.get(name.session)
        if slot is None or self._core is None:
            return None
        sequences = self._core.sequences(slot)
        if name.sequence in sequences:
            return self._core.kept(slot, name.sequence)
        if name.sequence <= max(sequences) - WINDOW:
            raise BatchForgotten(f"sequence: {name.sequence} is too old; the latest one of its session is {max(sequences)}")
        return None

    def _slot(self, name: BatchName | None) -> dict[str, int]:
        if name is None:
            return {}
        slot = self._slots.get(name.session)
        if slot is None:
            if not self._free:
                raise VectorError(f"session: at most {len(self._slots)} are known, and {name.session} is not among them")
            slot = self._free[-1]
            if self._core is not None:
                self._core.clear_session(slot)
        return {"slot": slot, "session": name.session, "sequence": name.sequence}

    def _remember(self, who: dict[str, int]) -> None:
        if who and who["session"] not in self._slots:
            self._slots[who["session"]] = self._free.pop()

    def _run(self, core: _vector.Vectors, operations: Sequence[Operation], name: BatchName | None) -> bytes:
        who = self._slot(name)
        program = programs.compiled(operations, self._parts, **who)
        self._make_room(program, who)
        if not program.changes:
            core.run_apart(program.head)
            answers = core.answer(program.head)
        else:
            self._write_record(program)
            if program.functions:
                core.try_record(_calls_of(program))
            core.commit_record()
            core.finish()
            answers = core.answer()
            core.set_applied()
            self._shorten_record()
        self._remember(who)
        return answers

    def _change_catalog(self, core: _vector.Vectors, parts: Sequence[VectorPart], name: BatchName | None) -> None:
        who = self._slot(name)
        program = programs.catalog_record(form.catalog_text(parts), **who)
        self._make_room(program, who)
        self._write_record(program)
        core.commit_record()
        self._apply_catalog(bytes(program.parts[0][1]))
        core.answer()
        core.set_applied()
        self._remember(who)

    def _make_room(self, program: programs.Program, who: dict[str, int]) -> None:
        with files.lack_of_space(f"no space for a batch in {self._directory}"):
            if program.answers:
                self._take(_PARTIALS, self._regions[_PARTIALS][1] * program.answers // programs.ANSWERS_MAX)
                self._take(_SUMS, self._regions[_SUMS][1])
            self._take(_STAGING, program.staging * STRIPE * 8)
            if who:
                entry = who["slot"], who["sequence"] % _vector.ENTRIES
                nbytes = max(1, program.answers) * _vector.ANSWER_MAX
                if self._entries.get(entry, 0) < nbytes and self._core is not None:
                    start = self._regions[_ANSWERS][0] + (entry[0] * _vector.ENTRIES + entry[1]) * self._core.answer_bytes
                    self._log.reserve(start, nbytes)
                    self._entries[entry] = align(nbytes, 4096)
            if program.changes and program.size > self._record_bytes:
                self._map_record(align(program.size + program.size // 8, 65536))

    def _take(self, region: int, nbytes: int) -> None:
        if nbytes > self._backed[region]:
            start, size = self._regions[region]
            nbytes = min(size, align(nbytes, 65536))
            self._log.reserve(start + self._backed[region], nbytes - self._backed[region])
            self._backed[region] = nbytes

    def _map_record(self, nbytes: int) -> None:
        if self._record.size < nbytes:
            self._record.extend(nbytes)
        self._record.reserve(0, nbytes)
        self._record_bytes = nbytes
        self._record_map = np.frombuffer(self._record.map_shared(0, nbytes), np.uint8)
        if self._core is not None:
            self._core.attach_record(self._record_map)

    def _shorten_record(self) -> None:
        if self._record_bytes > _RECORD_BYTES_KEPT:
            self._map_record(65536)
            self._record.extend(65536)

    def _write_record(self, program: programs.Program) -> None:
        self._record_map[: len(program.head)] = np.frombuffer(program.head, np.uint8)
        for at, array in program.parts:
            whole = self._record_map[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
            whole[...] = array

    def _recover(self) -> None:
        """Finish what a process that died was at."""
        core = self._core
        if core is None:
            return
        self._attach(form.catalog_of((self._directory / _CATALOG).read_bytes(), self.shard, self.shards))
        if core.applied != core.commit:
            if core.applied + 1 != core.commit:
                raise ArenaCorrupt("applied: it is neither commit nor the one before")
            problem = core.problem()
            if problem is not None:
                raise ArenaCorrupt(problem)
            head = programs.head_of(self._record_map.data)
            if head.is_catalog:
                self._apply_catalog(self._record_map[programs.RECORD_BYTES : head.size].tobytes())
            else:
                core.finish()
            core.answer()
            core.set_applied()
            self._slots = {session: slot for slot, session in enumerate(core.sessions()) if session}
            self._free = [slot for slot, session in reversed(list(enumerate(core.sessions()))) if not session]
        self._shorten_record()
        self._remove_strangers()

    def _attach(self, parts: dict[str, VectorPart]) -> None:
        """Map the vectors of a catalog that are not mapped yet, and forget the others."""
        core = self._core
        if core is None:
            return
        for name in [name for name, part in self._parts.items() if parts.get(name) != part]:
            core.detach_vector(self._parts.pop(name).number)
            del self._arrays[name]
        for name, part in parts.items():
            if name not in self._parts:
                path, nbytes = self._directory / self._vector_name(part.number), self._file_bytes(part)
                file = files.File(path, os.O_RDWR)
                if file.size < nbytes:
                    raise ArenaCorrupt(f"{path.name}: it has {file.size} bytes, expected {nbytes}: truncated")
                mapping = file.map_shared(0, nbytes)
                file.close()
                files.populate(mapping, 0, nbytes)
                self._arrays[name] = np.frombuffer(mapping, part.spec.dtype, part.end - part.begin)
                core.attach_vector(part.number, mapping, part.end - part.begin, DTYPES.index(part.spec.dtype))
                self._parts[name] = part

    def _apply_catalog(self, text: bytes) -> None:
        """Do what the record says; may be repeated."""
        self._crash_point("catalog")
        self._write_catalog(text)
        self._attach(form.catalog_of(text, self.shard, self.shards))
        self._crash_point("unlink")
        self._remove_strangers()

    def _write_catalog(self, text: bytes) -> None:
        unfinished = self._directory / (_CATALOG + ".new")
        unfinished.write_bytes(text)
        unfinished.rename(self._directory / _CATALOG)

    def _remove_strangers(self) -> None:
        known = {self._vector_name(part.number) for part in self._parts.values()}
        for path in self._directory.glob("vector-*"):
            if path.name not in known:
                path.unlink()

    @staticmethod
    def _vector_name(number: int) -> str:
        return f"vector-{number}"

    @staticmethod
    def _file_bytes(part: VectorPart) -> int:
        return align(max(part.end - part.begin, 1) * part.spec.itemsize, 4096)


class VectorSnapshot:
    """The vectors of one moment. An iterator of pieces, once; a context manager, which ends it.

    Stripes that a batch writes to before they were copied are saved in ordinary memory meanwhile.

    Attributes:
        specs: the vectors.
    """

    def __init__(self, store: VectorStore, parts: Sequence[VectorPart]) -> None:
        """Begin; not for callers."""
        self.specs = tuple(part.spec for part in parts)
        self._store, self._parts = store, parts

    def __iter__(self) -> Iterator[tuple[VectorSpec, int, NDArray[Any]]]:
        """Pieces: the declaration, the first element of the piece in the whole vector, the elements."""
        for part in self._parts:
            stripes = -(-(part.end - part.begin) // STRIPE)
            for first in range(0, stripes, _PIECE_STRIPES):
                count = min(_PIECE_STRIPES, stripes - first)
                yield part.spec, part.begin + first * STRIPE, self._store._copy_of_snapshot(part, first, count)  # noqa: SLF001

    def __enter__(self) -> VectorSnapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the snapshot, and free what was saved for it. Idempotent."""
        self._store._end_snapshot()  # noqa: SLF001


def _calls_of(program: programs.Program) -> Callable[[int, int, Callable[[int, int], bytes]], NDArray[np.uint8]]:
    def call(number: int, n: int, block: Callable[[int, int], bytes]) -> NDArray[np.uint8]:
        user = program.functions[number]
        blocks = [np.frombuffer(block(i, n * dtype.itemsize), dtype) for i, dtype in enumerate(user.inputs)]
        result = np.asarray(user.function(*blocks))
        if not np.can_cast(result.dtype, user.dtype, "safe") or result.shape not in ((), (1,), (n,)):
            raise VectorError(
                f"function: expected {n} of {user.dtype} to be returned, got {result.dtype} of shape {result.shape}"
            )
        return np.ascontiguousarray(np.broadcast_to(result, (n,)), user.dtype).view(np.uint8)

    return call
