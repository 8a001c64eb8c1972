"""One worker of a local cluster: reads a function from standard input, calls it, and sends back what it returns or raises.

The owner holds the other end of standard input; when it closes, this process ends, with every process that it has started. Must
not know who the owner is, nor what the function does. psd_client/local.py is the owner's side.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from types import TracebackType
from typing import Any, BinaryIO

import cloudpickle


def _end_with(owner: BinaryIO) -> None:
    while owner.read(4096):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _call(task: bytes) -> Any:
    path, call = cloudpickle.loads(task)
    sys.path[:] = path
    fn, args, kwargs = cloudpickle.loads(call)
    return fn(*args, **kwargs)


def _theirs(error: BaseException) -> TracebackType | None:
    """The error's traceback without the frames of this module."""
    found = error.__traceback__
    while found is not None and found.tb_frame.f_code.co_filename == __file__:
        found = found.tb_next
    return found


def _sendable(error: BaseException) -> bytes:
    """The pickled error, if it can be sent and read again; else empty."""
    try:
        data: bytes = cloudpickle.dumps(error)
        cloudpickle.loads(data)
    except Exception:  # noqa: BLE001 - whatever classes of others raise
        return b""
    return data


def main() -> int:
    """Serve one call; returns the exit status."""
    owner = os.fdopen(os.dup(0), "rb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    size = int.from_bytes(owner.read(8), "little")
    task = bytearray()
    while len(task) < size and (data := owner.read(size - len(task))):
        task += data
    threading.Thread(target=_end_with, args=(owner,), daemon=True).start()
    try:
        reply = cloudpickle.dumps((None, _call(bytes(task))))
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - it is the caller's
        sys.last_value = error  # so that connections end as those of a program that has failed
        error.__traceback__ = _theirs(error)
        shown = "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
        reply = cloudpickle.dumps((shown, _sendable(error)))
    with os.fdopen(int(sys.argv[1]), "wb") as result:
        result.write(reply)
    return 0 if getattr(sys, "last_value", None) is None else 1


if __name__ == "__main__":
    sys.exit(main())
