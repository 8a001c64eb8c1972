"""Ends connections that the program has not closed: when it drops them, and when it ends, by an exception or not.

Must not know what a worker does before that.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import sys
import threading
import weakref
from multiprocessing import parent_process
from multiprocessing import util as multiprocessing_util
from multiprocessing.process import BaseProcess
from typing import Protocol


class Endable(Protocol):
    """A connection that can be ended."""

    @property
    def seat(self) -> tuple[tuple[str, ...], int] | None:
        """The shards' addresses and the rank; None once it has ended."""

    def close(self, error: BaseException | None = None) -> None:
        """End the connection: as finished, or as failed if there is an `error`. Idempotent."""

    def abort_turn(self) -> None:
        """Release the threads of a push whose gradient nobody will complete."""


class ChildFailed(Exception):
    """An exception has ended a child of multiprocessing."""


_open_workers: weakref.WeakSet[Endable] = weakref.WeakSet()
_child_error: ChildFailed | None = None


def remember(worker: Endable) -> None:
    """Close this worker at the end of the program."""
    _open_workers.add(worker)
    if parent_process() is not None:  # multiprocessing's children skip atexit, but not this
        multiprocessing_util.Finalize(None, _close_all, exitpriority=1)


def remembered() -> list[Endable]:
    """Connections that this process has made and not dropped; some may have ended."""
    return list(_open_workers)


def close_in_thread(worker: Endable) -> None:
    """Close a worker that the program has dropped, perhaps right after a push.

    It does so in a thread of its own, because Python frees objects anywhere, also in a thread that holds one of gRPC's locks.
    """
    with contextlib.suppress(RuntimeError):  # the interpreter exits, and atexit has closed all workers
        threading.Thread(target=worker.close, name="psd-leave").start()


@atexit.register
def _close_all() -> None:
    """Close all connections at the end of the program."""
    # Set while multiprocessing ends a child by an exception; set for good when an exception has ended the main program.
    error = sys.exc_info()[1] or getattr(sys, "last_value", None) or _child_error
    for worker in list(_open_workers):
        worker.close(error)


def _begin_end() -> None:
    global _child_error  # noqa: PLW0603 - a program has one end
    if _has_failed_as_child():
        _child_error = ChildFailed()
    for worker in list(_open_workers):
        worker.abort_turn()


def _has_failed_as_child() -> bool:
    """True in a child of multiprocessing that an exception has ended.

    From Python 3.13 on a child runs its functions for the end after the exception was handled. Then only multiprocessing's own
    function further up the stack knows of the exception.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not BaseProcess._bootstrap.__code__:  # type: ignore[attr-defined]  # noqa: SLF001
        frame = frame.f_back
    return frame is not None and frame.f_locals.get("exitcode") != 0


# A program that ends in the middle of back-propagation: its executors wait for their threads, which wait for blocks, before
# atexit's functions run. Python has no public name for what comes earlier.
threading._register_atexit(_begin_end)  # type: ignore[attr-defined]  # noqa: SLF001
