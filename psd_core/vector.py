"""The crash-safe store of a shard's part of all vectors: a directory of files, mapped shared.

A batch is one transaction: `kill -9` at any instant leaves all of it, or nothing. How is told in docs/design/vectors.md. This
module owns the files: it makes and locks them, takes space for what C is about to write, and removes what no vector has. Must
not know ranks, messages or checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd_core import _store_file as files
from psd_core import _vector, private_files
from psd_core import _vector_format as form
from psd_core import _vector_program as programs
from psd_core._store_format import ArenaCorrupt, ArenaError, StoreClosed, align
from psd_core._vector_format import BatchForgotten, NoSuchVector, VectorError, VectorPart, VectorSpec
from psd_core._vector_log import LOG_NAME, VectorLog
from psd_core._vector_sessions import WINDOW, BatchName, VectorSessions
from psd_core._vector_snapshot import Piece, VectorSnapshot
from psd_core.vector_checks import as_places, rows_of
from psd_core.vector_operations import DTYPES, STRIPE, VECTORS_MAX, VectorOperation, extent

__all__ = [
    "CRASH_POINTS",
    "LOG_NAME",
    "WINDOW",
    "BatchForgotten",
    "BatchName",
    "Piece",
    "NoSuchVector",
    "VectorError",
    "VectorSnapshot",
    "VectorSpec",
    "VectorStore",
]

CRASH_POINTS = (
    "record", "state", "commit", "staged", "copy", "check", "fold", "entry", "session", "applied", "done",
    "file", "catalog", "unlink",
)  # fmt: skip
"""Names of the steps at which `crash_point` is called: before each store of the protocol. It returns or ends the process."""

_CATALOG = "catalog"


class VectorStore:
    """A shard's part of all vectors. Made by `create` or `open`; closed by `close`.

    Thread-safe: batches, declarations and reads take place one after the other, each whole.

    Raises:
        StoreClosed: from every method, after `close`.
        VectorError: naming the field; nothing has changed.

    Attributes:
        shard, shards: which part.
    """

    def __init__(self, directory: Path, log: files.File, front: form.LogFront, *, is_new: bool, crash_point: Any) -> None:
        """Take over an open and locked log; not for callers."""
        self.shard, self.shards, _ = front
        self._directory = directory
        self._crash_point = crash_point or (lambda _: None)
        self._lock = threading.Lock()
        self._is_snapshot_open = False
        core = _vector.Vectors(
            answers_max=programs.ANSWERS_MAX,
            operands_max=programs.OPERANDS_MAX,
            senders=front.senders,
            capacity=VECTORS_MAX,
            on_store=crash_point,
        )
        self._open: _vector.Vectors | None = core
        self._log = VectorLog(directory, log, front, core, is_new=is_new)
        self._sessions = VectorSessions(core)
        self._parts: dict[str, VectorPart] = {}
        self._arrays: dict[str, NDArray[Any]] = {}
        if is_new:
            private_files.write(directory / _CATALOG, form.catalog_text(()))
        self._recover(core)

    @classmethod
    def create(
        cls,
        directory: str | os.PathLike[str],
        *,
        shard: int,
        shards: int,
        senders: int = 1024,
        crash_point: Callable[[str], None] | None = None,
    ) -> VectorStore:
        """Make an empty store, in a directory that is not there yet.

        Args:
            senders: how many there may be, of each of whose latest session answers are kept.
            crash_point: called at each of CRASH_POINTS.

        Raises:
            ArenaError: there is one. StoreFull: no space; nothing is left of it.
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
            log = files.File(unfinished / LOG_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                log.lock()
                front = form.LogFront(shard, shards, senders)
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
        final.stat()
        with files.lack_of_space(f"no space in {final}"), _all_files():
            log = files.File(final / LOG_NAME, os.O_RDWR)
            try:
                log.lock()
                front = form.LogFront.read(log.read, log.size)
                return cls(final, log, front, is_new=False, crash_point=crash_point)
            except BaseException as error:
                log.close()
                if isinstance(error, ArenaCorrupt):
                    raise type(error)(f"{final}: {error}") from None
                raise

    def close(self, *, remove: bool) -> None:
        """Close the store. Idempotent. remove: delete the directory, too."""
        with self._lock:
            if self._open is None:
                return
            self._open = None
            self._arrays.clear()
            if remove:
                shutil.rmtree(self._directory, ignore_errors=True)
            self._log.close()
            del self._log, self._sessions  # and with them the maps, which hold the lock of the file

    # Vectors.

    def create_vector(self, spec: VectorSpec, name: BatchName | None = None) -> None:
        """Make a vector of zeros. One of the same declaration that is there stays as it is.

        Args:
            name: of this as a batch: what was done once is not done again.

        Raises:
            VectorError: the declaration cannot be, or one of that name has another. StoreFull: no space.
        """
        spec.check()
        with self._used() as core:
            if self._sessions.kept(name) is not None:
                return
            found = self._parts.get(spec.name)
            if found is not None and found.spec != spec:
                raise VectorError(f"{spec.name!r}: it is there as {found.spec}, and asked for as {spec}")
            if found is not None:
                self._run(core, (), name)
                return
            if len(self._parts) == VECTORS_MAX:
                raise VectorError(f"vectors: at most {VECTORS_MAX}")
            taken = {part.number for part in self._parts.values()}
            number = next(n for n in range(VECTORS_MAX) if n not in taken)
            part = VectorPart(spec, number, *extent(spec.size, self.shard, self.shards))
            path = self._directory / self._vector_name(number)
            self._crash_point("file")
            file = files.File(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                nbytes = self._file_bytes(part)
                file.extend(nbytes)
                file.reserve(0, nbytes)
                elements, dtype = part.end - part.begin, DTYPES.index(spec.dtype)
                file.write(_vector.checks_of_zeros(number, elements, dtype), _vector.file_bytes(elements, dtype)[1])
                self._change_catalog(core, [*self._parts.values(), part], name)
            except BaseException:
                if core.applied == core.commit:  # else the record that names the file is to be finished
                    path.unlink(missing_ok=True)
                raise
            finally:
                file.close()

    def drop_vector(self, vector: str, name: BatchName | None = None) -> None:
        """Remove a vector. Raises NoSuchVector."""
        with self._used() as core:
            if self._sessions.kept(name) is not None:
                return
            part = self._part(vector)
            if self._is_snapshot_open:
                raise VectorError(f"{vector!r}: a snapshot is being copied; no vector goes meanwhile")
            self._change_catalog(core, [other for other in self._parts.values() if other is not part], name)

    def vectors(self) -> dict[str, VectorSpec]:
        """The vectors, by name."""
        with self._used():
            return {name: part.spec for name, part in self._parts.items()}

    def specs(self, names: Iterable[str]) -> dict[str, VectorSpec]:
        """Those of these vectors that are there, by name."""
        with self._used():
            return {name: self._parts[name].spec for name in names if name in self._parts}

    @property
    def commits(self) -> int:
        """Number of batches and declarations that have changed anything since the store was made."""
        with self._used() as core:
            return core.commit

    def extent(self, vector: str) -> tuple[int, int]:
        """First element that is here, and the one after the last. Raises NoSuchVector."""
        with self._used():
            part = self._part(vector)
            return part.begin, part.end

    # Batches.

    def run(self, operations: Sequence[VectorOperation], name: BatchName | None = None) -> bytes:
        """Run a batch over the stripes that are here, as one transaction.

        Args:
            name: a batch of this name that was run is answered, and not run again.

        Returns:
            Its answers, see `unpack_answers`; those of one without reductions are empty.

        Raises:
            VectorError: "operations[2], axpy: x: ...". BatchForgotten: it was run, and its answer is no longer kept.
            StoreFull: no space. In each case nothing has changed.
        """
        with self._used() as core:
            answers = self._sessions.kept(name)
            return self._run(core, operations, name) if answers is None else answers

    def answer(self, name: BatchName) -> bytes | None:
        """The answers of a batch that was run, or None. Raises BatchForgotten."""
        with self._used():
            return self._sessions.kept(name)

    def sessions(self) -> dict[int, int]:
        """The sessions, and the largest sequence number of each."""
        with self._used():
            return self._sessions.latest()

    def session_of(self, sender: int) -> int:
        """The latest session of a sender; 0: none is known."""
        with self._used():
            return self._sessions.of_sender(sender)

    # Reads. Each returns the elements that are here, in the order in which they are asked for.

    def read(self, vector: str, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Elements of a range of the whole vector; to its end by default. Raises NoSuchVector; VectorError: start or stop."""
        with self._used():
            part = self._part(vector)
            stop = part.spec.size if stop is None else stop
            if not 0 <= start <= stop <= part.spec.size:
                raise VectorError(f"start and stop: expected 0 <= start <= stop <= {part.spec.size}, got {start} and {stop}")
            begin, end = max(start, part.begin) - part.begin, min(stop, part.end) - part.begin
            out: NDArray[Any] = self._arrays[vector][begin : max(begin, end)].copy()
            return out

    def read_at(self, vector: str, indices: NDArray[Any]) -> NDArray[Any]:
        """Elements by index, (n,) int64|uint64. Raises NoSuchVector; VectorError: an index is out of range."""
        with self._used():
            part = self._part(vector)
            at = as_places("indices", indices, part.spec.size, vector)
            return self._arrays[vector].take(at[(at >= part.begin) & (at < part.end)] - part.begin)

    def read_rows(self, vector: str, rows: NDArray[Any]) -> NDArray[Any]:
        """Rows of a matrix by number, as one run of elements; of a row that two shards share, what is here.

        Raises NoSuchVector; VectorError: it is no matrix, or has no such row.
        """
        with self._used():
            part = self._part(vector)
            width = part.spec.columns
            begins = as_places("rows", rows, rows_of("rows", part.spec), vector) * width
            here = begins[(begins >= part.begin) & (begins + width <= part.end)]
            array = self._arrays[vector]
            if len(here) == len(begins):
                return array.take((here - part.begin)[:, None] + np.arange(width)).reshape(-1)
            at = begins[:, None] + np.arange(width)
            return array.take(at[(at >= part.begin) & (at < part.end)] - part.begin)

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
            parts = tuple(self._parts.values())
            return VectorSnapshot(parts, self._sessions.latest(), self._copy_of_snapshot, self._end_snapshot)

    def _copy_of_snapshot(self, part: VectorPart, first: int, count: int) -> NDArray[Any]:
        begin, end = first * STRIPE, min((first + count) * STRIPE, part.end - part.begin)
        out = np.empty(end - begin, part.spec.dtype)
        with self._used() as core:
            core.copy_of_snapshot(part.number, first, count, out.view(np.uint8))
        return out

    def _end_snapshot(self) -> None:
        with contextlib.suppress(StoreClosed), self._used() as core:
            core.end_snapshot()
            self._is_snapshot_open = False

    # How it is done. Everything below needs the lock.

    @contextlib.contextmanager
    def _used(self) -> Iterator[_vector.Vectors]:
        with self._lock, files.lack_of_space(f"no space for vectors in {self._directory}"):
            if self._open is None:
                raise StoreClosed(f"the vector store {self._directory} has been closed")
            if self._open.applied != self._open.commit:  # the system has failed in the middle of the call before
                self._finish(self._open)
            yield self._open

    def _part(self, vector: str) -> VectorPart:
        part = self._parts.get(vector)
        if part is None:
            raise NoSuchVector(f"vector: there is no {vector!r}")
        return part

    def _run(self, core: _vector.Vectors, operations: Sequence[VectorOperation], name: BatchName | None) -> bytes:
        claim = self._sessions.claim(name)
        program = programs.compiled(operations, self._parts, claim)
        self._log.make_room(program, claim)
        if not program.changes:
            core.run_apart(program.head)
            answers = core.answer(program.head)
        else:
            self._log.write(program)
            if program.functions:
                core.try_record(programs.calls_of(program))
            core.commit_record()
            core.finish()
            answers = core.answer()
            core.set_applied()
        self._sessions.note(claim)
        self._log.shorten()
        return answers

    def _change_catalog(self, core: _vector.Vectors, parts: Sequence[VectorPart], name: BatchName | None) -> None:
        claim = self._sessions.claim(name)
        text = form.catalog_text(parts)
        program = programs.catalog_record(text, claim)
        self._log.make_room(program, claim)
        self._prepare_catalog(text)
        self._log.write(program)
        core.commit_record()
        self._finish(core)

    def _finish(self, core: _vector.Vectors) -> None:
        """Do what the committed record says; may be repeated."""
        text = programs.catalog_in(self._log.record.data)
        if text is not None:
            self._apply_catalog(core, text)
        else:
            core.finish()
        core.answer()
        core.set_applied()
        self._sessions.read()

    def _recover(self, core: _vector.Vectors) -> None:
        """Finish what a process that died was at."""
        self._attach(core, private_files.read(self._directory / _CATALOG))
        problem = core.problem()
        if problem is not None:
            raise ArenaCorrupt(problem)
        whole = self._check_elements(core)
        if core.applied != core.commit:
            self._finish(core)
            self._check_elements(core, but=whole)
        self._log.shorten()
        self._remove_strangers()

    def _check_elements(self, core: _vector.Vectors, but: Set[VectorPart] = frozenset()) -> Set[VectorPart]:
        """Check all vectors but those that were; returns all. Raises ArenaCorrupt."""
        for name, part in self._parts.items():
            stripe = None if part in but else core.damaged(part.number)
            if stripe is not None:
                file, first = self._vector_name(part.number), part.begin + stripe * STRIPE
                end = min(first + STRIPE, part.end)
                raise ArenaCorrupt(
                    f"{file}: the elements {first} to {end} of {name!r} have changed since they were written: "
                    "their checksum does not match"
                )
        return set(self._parts.values())

    def _attach(self, core: _vector.Vectors, text: bytes) -> None:
        """Map the vectors of a catalog that are not mapped yet, and forget the others."""
        parts = form.catalog_of(text, self.shard, self.shards)
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

    def _apply_catalog(self, core: _vector.Vectors, text: bytes) -> None:
        self._crash_point("catalog")
        catalog, unfinished = self._directory / _CATALOG, self._unfinished_catalog
        is_unfinished = unfinished.exists()
        if private_files.read(unfinished if is_unfinished else catalog) != text:
            raise ArenaCorrupt("catalog: it is not the one that the latest batch has made")
        if is_unfinished:
            unfinished.rename(catalog)
        self._attach(core, text)
        self._crash_point("unlink")
        self._remove_strangers()

    def _prepare_catalog(self, text: bytes) -> None:
        """Write the next catalog beside the present one, so that nothing needs space once it is committed."""
        try:
            private_files.write(self._unfinished_catalog, text)
        except BaseException:
            self._unfinished_catalog.unlink(missing_ok=True)
            raise

    @property
    def _unfinished_catalog(self) -> Path:
        return self._directory / (_CATALOG + ".new")

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
        return align(max(_vector.file_bytes(part.end - part.begin, DTYPES.index(part.spec.dtype))[0], 1), 4096)


@contextlib.contextmanager
def _all_files() -> Iterator[None]:
    """Raise ArenaCorrupt for a file that is not there."""
    try:
        yield
    except FileNotFoundError as error:
        raise ArenaCorrupt(f"{error.filename}: it is missing") from None
