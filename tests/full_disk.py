"""Disks without room: nothing more can be written, or one call of the system finds none, or fails. They need no rights."""

from __future__ import annotations

import errno
import functools
import io
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_disk(limit: int = 0) -> Iterator[None]:
    """Nothing can be written beyond `limit` bytes of any file; what there is can be read, removed, and changed where mapped."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


_WRITING = ("open", "mkdir", "ftruncate", "posix_fallocate", "pwrite", "rename", "replace", "fsync")
_REMOVING = ("unlink", "rmdir")


@contextmanager
def no_room_at(failing, monkeypatch, error=errno.ENOSPC):
    """The n-th call that could need room finds none; yields the calls that are made. Another error: also removals."""
    names = _WRITING if error == errno.ENOSPC else _WRITING + _REMOVING
    made = []

    os_open = os.open

    def limited(*args, call, **kwargs):
        if call is os_open and not args[1] & os.O_CREAT:  # what is there needs no room
            return call(*args, **kwargs)
        made.append(call)
        if len(made) == failing:
            raise OSError(error, os.strerror(error))
        return call(*args, **kwargs)

    with monkeypatch.context() as patch:
        for owner, name in ((io, "open"), *((os, name) for name in names)):
            patch.setattr(owner, name, functools.partial(limited, call=getattr(owner, name)))
        yield made
