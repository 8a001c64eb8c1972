"""The tables' stores of one shard's process, whose transactions tell the history what they bring.

The process may die before and after each transaction of Python's. A step in C commits to all tables in one call, through which
no exception may pass: dying between two of its stores is to have, when the call is over, the files that there were at that
moment. Within one transaction of Python's nobody dies here: tests/core kills in there. Must not know calls or blocks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

from published import History, notes_of
from setting import Setting

from psd_core.table import TableStore


class Killed(BaseException):
    """The process dies here."""


class WatchedTables:
    """Of one shard's process, in all its lives.

    Args:
        crash_point: called where the process may die; raises Killed if it does.
    """

    def __init__(self, setting: Setting, index: int, history: History, crash_point: Callable[[str], None]) -> None:
        self._ids = setting.ids[index : index + 1]
        self._history = history
        self._crash_point = crash_point
        self._stores: Sequence[TableStore] = ()
        self._is_in_step = False
        self._left: list[tuple[str, dict[int, bytes]]] = []  # the files at the moment at which the process has died in a step

    def watch(self, stores: Sequence[TableStore]) -> None:
        """Have the stores of a new life, or of a new job, tell the history what each transaction has brought."""
        self._stores = stores
        for table, store in enumerate(stores):
            self._watch(table, store)

    def _watch(self, table: int, store: TableStore) -> None:
        commit = store.commit

        def watched() -> None:
            self._crash_point("table.before")
            commit()
            self._note(table)
            self._crash_point("table.after")

        store.commit = watched  # type: ignore[method-assign]
        self._note(table)

    def _note(self, table: int) -> None:
        store = self._stores[table]
        self._history.on_commit(table, int(notes_of(store)[0]), store.read(self._ids)[0])

    def on_store(self, name: str) -> None:
        """C is about to store something that matters after a kill. Raises nothing."""
        if self._is_in_step and not self._left:
            try:
                self._crash_point(name)
            except Killed:
                self._left = [(str(store._path), dict(_pieces(str(store._path)))) for store in self._stores]

    def watching_step(self, call: Callable[[], int]) -> int:
        """The outcome of a call in which a step may commit rows."""
        before = [int(notes_of(store)[0]) for store in self._stores]
        self._is_in_step = True
        try:
            outcome = call()
        finally:
            self._is_in_step = False
        if self._left:
            raise Killed
        for table, store in enumerate(self._stores):
            if int(notes_of(store)[0]) != before[table]:
                self._note(table)
        return outcome

    def end_life(self) -> None:
        """The process has died, and its stores are closed."""
        self._stores = ()
        for path, pieces in self._left:
            fd = os.open(path, os.O_RDWR)
            try:
                for at, piece in list(_pieces(path)):
                    os.pwrite(fd, bytes(len(piece)), at)
                for at, piece in pieces.items():
                    os.pwrite(fd, piece, at)
            finally:
                os.close(fd)
        self._left = []


def _pieces(path: str) -> Iterator[tuple[int, bytes]]:
    """What a file has that is no hole, each piece with its place."""
    fd = os.open(path, os.O_RDONLY)
    try:
        size, end = os.fstat(fd).st_size, 0
        while end < size:
            try:
                begin = os.lseek(fd, end, os.SEEK_DATA)
            except OSError:  # nothing but a hole follows
                return
            end = os.lseek(fd, begin, os.SEEK_HOLE)
            yield begin, os.pread(fd, end - begin, begin)
    finally:
        os.close(fd)
