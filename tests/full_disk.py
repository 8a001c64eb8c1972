"""A disk on which nothing more can be written, by a limit of this process's own on files: it needs no rights."""

from __future__ import annotations

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
