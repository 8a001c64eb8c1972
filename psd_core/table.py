"""The crash-safe store of one partition of a sparse table: rows by 64-bit id, in a file of their own, mapped shared.

A push is one transaction: `kill -9` at any instant leaves all of its rows, and the caller's notes, old or new. How is told in
docs/design/tables.md; csrc/table.h has the format. This module owns the file: it makes it, locks it, takes space for what C is
about to write, and gives back what it has left. Must not know rounds, sessions or messages, nor what notes mean.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

import psd_core
from psd_core import _store_file as files
from psd_core import _table
from psd_core import _table_format as form
from psd_core._c_headers import checksum
from psd_core._closed import Closed
from psd_core._store_format import ArenaCorrupt, ArenaError, StoreFull, align
from psd_core._table_arguments import CLOCK_MAX, STEP_MAX, as_history, as_ids, as_out, as_values
from psd_core._table_format import OWN, PUSH_MAX, ROWWISE_ADAGRAD, TableSpec
from psd_core._table_own_rule import RowRule, bound
from psd_core._table_pages import PageAhead, take_space
from psd_core._table_plan import GROWTH_BYTES_MAX, bytes_max, initial_rows, mixed, partition_of
from psd_core._table_snapshot import BATCH_ROWS, HEAD, Mark, Rows, TableSnapshot
from psd_core.row_sums import RowSums

__all__ = [
    "CLOCK_MAX",
    "CRASH_POINTS",
    "OWN",
    "PUSH_MAX",
    "ROWWISE_ADAGRAD",
    "STEP_MAX",
    "Mark",
    "RowRule",
    "RowSums",
    "Rows",
    "TableSnapshot",
    "TableSpec",
    "TableStore",
    "bytes_max",
    "initial_rows",
    "mixed",
]

CRASH_POINTS = ("row", "record", "root", "commit", "flip", "backs", "applied", "done", "index.copy")
"""Names of the steps at which `crash_point` is called: before each store of the protocol. It returns or ends the process."""

_UNIT_BYTES = 65536
if checksum() != _table.RULES_CHECKSUM:
    raise ImportError("psd_core: its tables were built with another rules.py; build them again: pip install --editable .")


class TableStore:
    """The store of one partition. Made by `create` or `open`; closed by `close`.

    Thread-safe: changes come one after the other, and reads go on beside them. A read sees each row whole; one of at most 4096
    ids sees each push whole or not at all.

    Clocks are whatever never falls, from 0 to 2**63 - 1: steps, pushes or time. They tell which rows were used last.

    Raises:
        StoreClosed: from every method, after `close`.
        InvalidArray: naming the argument; nothing has changed.

    Attributes:
        spec: the declaration.
        on_close: called before the store is closed: steps let it go then (TablesCore).
    """

    def __init__(self, file: files.File, path: Path, spec: TableSpec, *, salt: int | None = None, crash_point: Any) -> None:
        """Take over an open and locked file, a new one if there is a salt; not for callers."""
        self.spec = spec
        self._path = path
        self._file = file
        self._given_back = 0
        self._used_since = 0  # no row was used before this clock
        self._snapshot: TableSnapshot | None = None
        self._crash_point = crash_point
        self._partition = partition_of(spec, crash_point)
        self._writing = self._partition.writing
        self._page_ahead = PageAhead(file, self._writing)
        self.on_close: Callable[[], None] | None = None
        size = self._partition.size
        if salt is not None:
            file.extend(size)
            file.reserve(0, form.SUPERBLOCK.nbytes)
            file.write(spec.pack(), 0)
            self._take(0, 0, self._partition.regions[0][1])
        elif file.size < size:
            raise ArenaCorrupt(f"the file has {file.size} bytes, expected {size}: truncated")
        self._scalars = spec.facts.scalars
        self._scalar_names = frozenset(self._scalars)
        problem = self._partition.attach(file.map_large(size), salt is not None, salt or 0)
        if problem is not None:
            raise ArenaCorrupt(problem)
        self._recover_space()

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        spec: TableSpec,
        *,
        salt: int | None = None,
        crash_point: Callable[[str], None] | None = None,
    ) -> TableStore:
        """Make an empty partition, which appears under its name whole.

        Args:
            path: of the file. crash_point: called at each of CRASH_POINTS.
            salt: of the index's hash, 64 bits; random by default, so that nobody can choose ids that collide.

        Raises:
            ArenaError: there is one. StoreFull: no space; nothing is left of it.
        """
        final = Path(path)
        if final.exists():
            raise ArenaError(f"{final} holds a table already")
        unfinished = final.with_name(final.name + ".new")
        with files.lack_of_space(f"no space for a table in {final.parent}"):
            file = files.File(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                file.lock()
                salt = int.from_bytes(os.urandom(8), "little") if salt is None else salt
                store = cls(file, final, spec, salt=salt, crash_point=crash_point)
                unfinished.rename(final)
            except BaseException:
                file.close()
                unfinished.unlink(missing_ok=True)
                raise
        return store

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, crash_point: Callable[[str], None] | None = None) -> TableStore:
        """Take over the partition that a process has left, by dying or by `close(remove=False)`. Looks at all of its rows.

        Raises:
            FileNotFoundError: there is none. ArenaBusy: another process has it.
            ArenaCorrupt: the file is not what was written; it is left alone.
        """
        final = Path(path)
        with files.lack_of_space(f"no space in {final.parent}"):
            file = files.File(final, os.O_RDWR)
            try:
                file.lock()
                return cls(file, final, form.read_spec(file.read, file.size), crash_point=crash_point)
            except BaseException as error:
                file.close()
                if isinstance(error, ArenaCorrupt):
                    raise type(error)(f"{final}: {error}") from None
                raise

    def close(self, *, remove: bool) -> None:
        """Close the store. Idempotent. remove: delete the file, too.

        The file stays locked until reads that are under way have ended: the mapping holds the lock.

        Raises:
            OSError: the file cannot be deleted; the store is closed all the same.
        """
        self._page_ahead.end()
        if self.on_close is not None:
            self.on_close()
        with self._writing:
            if isinstance(self._partition, Closed):
                return
            try:
                if remove:
                    self._path.unlink(missing_ok=True)
            finally:
                self._file.close()
                self._partition = cast(_table.Partition, Closed(self._path))

    # Rows.

    def read(
        self, ids: NDArray[Any], out: NDArray[np.float32] | None = None, *, clock: int | None = None
    ) -> NDArray[np.float32]:
        """Values of rows; those that nobody has trained are computed, and not stored.

        Args:
            ids: (n,) int64|uint64.
            out: (n, dim) float32, C-contiguous, to be overwritten; a new one by default.
            clock: of this use. None counts no use: for readers and evaluation.

        Returns:
            `out`.
        """
        keys = as_ids(ids)
        out = as_out(out, len(keys), self.spec.dim)
        self._partition.read(keys, out, None, False, -1 if clock is None else clock)
        return out

    def read_rows(self, ids: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Whole rows (n, width), value and slots, caught up, and which of them are stored; counts no use."""
        keys = as_ids(ids)
        out, found = as_out(None, len(keys), self.spec.layout.width), np.empty(len(keys), np.uint8)
        self._partition.read(keys, out, found, True, -1)
        return out, found.view(np.bool_)

    def push(
        self,
        ids: NDArray[Any],
        grads: NDArray[Any],
        scalars: Mapping[str, float],
        *,
        scale: float = 1.0,
        clock: int | None = None,
        notes: NDArray[np.uint64] | None = None,
        distinct: bool = False,
        own: RowRule | None = None,
        more: tuple[NDArray[Any], NDArray[Any]] | None = None,
        is_held: bool = False,
    ) -> None:
        """Apply the rule to rows, as the table's next step; one transaction.

        Gradients of one id are summed in the order in which they come; then the rule is applied to the row once, as at the
        table's step, by `scale` times the sum. A row that is not there begins with its initial value. At the limit of memory
        old rows make room, or new ones are dropped and counted, as the spec has it.

        Args:
            ids: (n,) int64|uint64, at most the spec's push_max.
            grads: (n, dim) float32|float16|uint16 (bfloat16).
            scalars: one number for each of the rule's.
            clock: of this use; the step by default.
            notes: all of them, as they are to be with this push; by default as they are.
            distinct: no id comes twice; saves sorting them out.
            own: the rule, if the spec's is OWN; it has no scalars but what it knows itself.
            more: ids and gradients that follow these, as if they stood in the same arrays; not with `distinct`.
            is_held: the caller has called `hold`; the push takes effect with `commit`.

        Raises:
            StoreFull, MemoryError: no space; nothing has changed.
        """
        if (own is not None) != (self.spec.rule == OWN):
            raise ValueError(f"own: expected a rule if, and only if, the table's is {OWN!r}, which is {self.spec.rule!r}")
        if scalars.keys() != self._scalar_names:
            raise ValueError(f"scalars: expected {', '.join(self._scalars)}, got {', '.join(scalars)}")
        numbers = tuple(map(float, map(scalars.__getitem__, self._scalars)))
        values = as_values("grads", grads, len(ids), self.spec.dim)
        how: dict[str, Any] = {"scalars": numbers, "scale": scale, "distinct": distinct, "whole": False}
        if more is not None:
            how["more_ids"] = as_ids(more[0])
            how["more_values"] = as_values("more", more[1], len(more[0]), self.spec.dim)
        self._change(ids, values, clock, notes, own, is_held, **how)

    def write(
        self,
        ids: NDArray[Any],
        rows: NDArray[Any],
        *,
        clock: int | NDArray[np.uint64] | None = None,
        notes: NDArray[np.uint64] | None = None,
        step: int | None = None,
        history: NDArray[np.float64] | None = None,
        is_held: bool = False,
    ) -> None:
        """Store whole rows (n, width), value and slots, as one transaction. Of repeated ids the last counts.

        Args:
            ids, notes, is_held: as for `push`.
            clock: of the last use, of all rows, the step by default; or of each, by which the table's own clock does not move.
            step: what the table's step is from now on, where rows are restored; by default as it is.
            history: that of the rows' snapshot, in place of what the table has; only where rows catch up, with `step`. The
                last number of a row says which step it is at.

        Raises:
            StoreFull, MemoryError: no space; nothing has changed.
        """
        values = as_values("rows", rows, len(ids), self.spec.layout.width)
        clocks = None
        if step is not None and not 0 <= step <= STEP_MAX:
            raise psd_core.InvalidArray(f"step: expected 0 to {STEP_MAX}, got {step}")
        if isinstance(clock, np.ndarray):
            if clock.dtype != np.uint64 or clock.shape != (len(ids),):
                raise psd_core.InvalidArray(f"clock: expected {len(ids)} uint64, got {clock.shape} of {clock.dtype}")
            clocks, clock = clock, int(clock.max(initial=0))
        if history is not None and len(history) > 0:
            history = as_history(history, len(self._scalars) if self.spec.catches_up else None)
        how = {"scalars": (), "scale": 1.0, "distinct": False, "whole": True, "step": -1 if step is None else step}
        how["history"] = history
        self._change(ids, values, clock, notes, None, is_held, clocks=clocks, **how)

    def _change(
        self,
        ids: NDArray[Any],
        values: NDArray[np.float32],
        clock: int | None,
        notes: NDArray[np.uint64] | None,
        own: RowRule | None,
        is_held: bool,
        **how: Any,
    ) -> None:
        keys = as_ids(ids)
        count = len(keys) + len(how.get("more_ids", ()))
        if notes is not None and (notes.dtype != np.uint64 or notes.shape != (self.spec.notes,)):
            raise psd_core.InvalidArray(f"notes: expected {self.spec.notes} uint64, got {notes.shape} of {notes.dtype}")
        if not is_held:
            self.hold(count, 1 if how.get("history") is None else len(how["history"]))
        try:
            clock = self._partition.step + (not how["whole"]) if clock is None else clock
            if count and (how["whole"] or clock < self._used_since):
                self._used_since = 0
            if own is not None:
                how["own"] = bound(own, self.spec, self._partition.step + 1, count)
            self._partition.push(keys, values, clock=clock, notes=notes, **how)
            if not is_held:
                self.commit()
        finally:
            if not is_held:
                self.let_go()

    # Changes of several stores together: all are held, then all pushes are made, then all are committed, which cannot fail.

    def hold(self, n: int, entries: int = 1) -> None:
        """Keep everybody else from changing the store until `let_go`, and take room for a push of n ids, or a write.

        Args:
            entries: of the history that is written.

        Raises:
            StoreFull: no space; the store is not held.
        """
        if n > self.spec.push_max:
            raise psd_core.InvalidArray(f"ids: expected at most {self.spec.push_max} in a push, got {n}")
        self._writing.acquire()
        try:
            self._make_room(n, entries)
        except BaseException:
            self._writing.release()
            raise

    def commit(self) -> None:
        """Let the push or write that was made since `hold` take effect. Nothing fails here: it has been made."""
        partition = self._partition
        created = partition.commit()
        if created:
            self._page_ahead.follow(partition)
        if partition.is_moving:
            self._move_on(1 + created // 400)

    def let_go(self) -> None:
        """End what `hold` has begun. What was not committed has changed nothing, but that rows were evicted to make room."""
        self._writing.release()

    def _move_on(self, steps: int) -> None:
        """Let the index grow by some steps, each of 1024 buckets: so it has grown when a tenth more rows have come.

        If there is no space for that now, a later push says so: the one before this has been made.
        """
        with contextlib.suppress(StoreFull, OSError):
            for _ in range(steps):
                if self._partition.is_moving:
                    self._make_room(0)
                    self._move(0)

    def reserve(self, rows: int) -> None:
        """Let the index grow at once to what so many rows more will need, rather than with them."""
        with self._writing:
            self._make_room(0)
            if self._partition.must_move(min(rows, self.spec.max_rows)):
                self._move(min(rows, self.spec.max_rows))
                while self._partition.is_moving:
                    self._make_room(0)
                    self._move(0)

    def remove(self, ids: NDArray[Any]) -> int:
        """Remove rows; returns how many there were. Each 2048 ids are a transaction."""
        keys = np.unique(as_ids(ids))
        removed = 0
        for start in range(0, len(keys), _table.REMOVED_MAX):
            with self._writing:
                self._make_room(0)
                removed += self._partition.discard(keys[start : start + _table.REMOVED_MAX])
        return removed

    def expire(self, clock: int, age: int) -> None:
        """Remove the rows that were not used for more than `age` clocks, a few at a time. StoreFull: some may be gone.

        Costs next to nothing where none can be so old.
        """
        while clock - age > self._used_since:
            with self._writing:
                self._make_room(0)
                if not self._partition.expire(clock, age):
                    self._used_since = max(clock - age, self._partition.used_since)

    def walk(self) -> Iterator[Rows]:
        """All rows as they lie, in no order that means anything; one there throughout comes once, others may or may not."""
        tag = 0
        while tag < 1 << 32:
            heads, rows = np.empty(BATCH_ROWS, HEAD), np.empty((BATCH_ROWS, self.spec.layout.width), np.float32)
            count, tag = self._partition.walk(tag, heads, rows)
            if count:
                yield Rows(heads[:count], rows[:count])

    def snapshot(self, since: Mark | None = None) -> TableSnapshot:
        """Begin a snapshot of the partition as it is now; one at a time, and to be closed.

        Args:
            since: mark of an earlier snapshot: only rows that were written or used after it, and the ids of those removed. If
                more were removed since than are remembered, about a quarter of the limit of rows, the snapshot is full.

        Raises:
            ArenaError: another one is not closed.
        """
        with self._writing:
            partition = self._partition
            if self._snapshot is not None and not self._snapshot.is_closed:
                raise ArenaError(f"{self._path}: a snapshot is under way")
            self._snapshot = TableSnapshot(
                partition, self._writing, self.spec.layout.width, self.spec.notes, len(self._scalars), since
            )
            return self._snapshot

    def notes(self) -> NDArray[np.uint64]:
        """A copy of the caller's notes; zeros in a new partition."""
        out = np.empty(self.spec.notes, np.uint64)
        with self._writing:
            self._partition.notes(out)
        return out

    def counters(self) -> dict[str, int]:
        """Numbers of the partition.

        Returns:
            Its step, version and clock; the rows that there are, and that were created, evicted, expired, removed or refused;
            gradients of ids not admitted; and, since it was opened, reads of rows, and those among them that found one.
        """
        with self._writing:
            return dict(self._partition.counters())

    @property
    def moves_untrained(self) -> bool:
        """True if steps have changed rows that nobody has trained, by weight decay say: where rows catch up."""
        return self._partition.fresh_moves

    @property
    def used_bytes(self) -> int:
        """Memory or disk space that the file takes."""
        return self._file.used_bytes

    # Space.

    def _make_room(self, n: int, entries: int = 0) -> None:
        """Take space for a push of n ids and entries of the log, and let the index grow so far that it takes them."""
        partition = self._partition
        while True:
            while (lack := partition.lack(n, entries)) is not None:
                self._take(*lack)
            if not n or not partition.must_move(n):
                return
            self._move(n)

    def _take(self, region: int, have: int, need: int) -> None:
        start, size = self._partition.regions[region]
        step = max(_UNIT_BYTES, min(have // 32, GROWTH_BYTES_MAX))
        end = start + min(size, max(align(need, _UNIT_BYTES), have + align(step, _UNIT_BYTES)))
        take_space(self._file, self._partition, region, have, end)
        self._partition.set_backed(region, end - start)

    def _move(self, n: int) -> None:
        self._partition.move(n)
        region, nbytes = self._partition.behind()
        if not self._partition.is_moving:
            self._give_back(region, 0, nbytes)
            self._given_back = 0
        elif nbytes - self._given_back >= GROWTH_BYTES_MAX:
            # The first buckets may hold entries that found the last ones full.
            end = nbytes // _UNIT_BYTES * _UNIT_BYTES
            self._give_back(region, max(self._given_back, _UNIT_BYTES), end)
            self._given_back = end

    def _give_back(self, region: int, begin: int, end: int) -> None:
        start, size = self._partition.regions[region]
        if not self._file.release(start + begin, end - begin):
            self._partition.clear(start + begin, end - begin)
        elif (begin, end) == (0, size):
            self._partition.set_backed(region, 0)

    def _recover_space(self) -> None:
        """Note, after opening, what has space; to take it again would fill the holes behind a step of growth."""
        while (lack := self._partition.lack(0)) is not None:
            region, have, need = lack
            if self._partition.is_backed_at_opening(region):
                self._partition.set_backed(region, need)
            else:
                self._take(region, have, need)
        if not self._partition.is_moving:
            region, nbytes = self._partition.behind()
            self._give_back(region, 0, nbytes)
