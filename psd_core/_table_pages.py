"""Space for a table's partition in large pages, and the next one for rows taken before a push needs it.

To have the system put a large page together takes some milliseconds, on a busy machine tens of them. Must not know what lies in
the pages.
"""

from __future__ import annotations

import contextlib
import threading

from psd_core import _store_file as files
from psd_core._arena import LARGE_PAGE_BYTES
from psd_core._store_format import ArenaError, align
from psd_core._table import ROWS, Partition

_SHARE_MAX = 1 / 128
"""Largest share of the rows that is taken ahead: smaller tables wait, and keep to their bytes a row."""


def take_space(file: files.File, partition: Partition, region: int, have: int, end: int) -> None:
    """Take space in a region from byte `have` of it to byte `end` of the file. Raises StoreFull.

    What is complete with this goes to large pages, where the system has them: in half the time, if it is not reserved.
    """
    start, large = partition.regions[region][0], LARGE_PAGE_BYTES
    for at in range(max(align(start, large), (start + have) // large * large), end - large + 1, large):
        file.reserve(max(at, start + have), 1)  # where all is a hole the kernel refuses
        if not partition.enlarge_page(at):
            break
    file.reserve(start + have, end - start - have)


class PageAhead:
    """Takes the next large page for rows, in a thread of its own.

    Args:
        lock: under which space is noted in the partition.
    """

    def __init__(self, file: files.File, lock: threading.Lock) -> None:
        self._file = file
        self._lock = lock
        self._thread: threading.Thread | None = None
        self._has_ended = False

    def follow(self, partition: Partition) -> None:
        """Begin, if less than a large page is left for rows that are to come. Under the lock.

        Where the system has no room for a thread, the push that needs the space takes it.
        """
        have, used = partition.rows_space()
        if self._has_ended or have * _SHARE_MAX < LARGE_PAGE_BYTES or have - used >= LARGE_PAGE_BYTES:
            return
        if have < partition.regions[ROWS][1] and not (self._thread is not None and self._thread.is_alive()):
            thread = threading.Thread(target=self._take, args=(partition, have), name="psd-table-page", daemon=True)
            with contextlib.suppress(RuntimeError):
                thread.start()
                self._thread = thread  # not before: `end` waits for it, and cannot for one that has not started

    def end(self) -> None:
        """Begin nothing any more, and wait until nothing is under way. Not under the lock."""
        with self._lock:
            self._has_ended = True
            thread = self._thread
        if thread is not None:
            thread.join()

    def _take(self, partition: Partition, have: int) -> None:
        start, size = partition.regions[ROWS]
        end = min(start + size, align(start + have + 1, LARGE_PAGE_BYTES))
        with contextlib.suppress(ArenaError, OSError):  # the push that needs the space says so
            take_space(self._file, partition, ROWS, have, end)
            with self._lock:
                if partition.rows_space()[0] == have:  # else a push could not wait, and has taken it
                    partition.set_backed(ROWS, end - start)
