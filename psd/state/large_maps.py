"""Maps the files that a worker shares with the shard. Must not know what lies in them."""

from __future__ import annotations

from psd_core.large_pages import LargeMap


def map_shared(descriptor: int, nbytes: int) -> LargeMap:
    """The first bytes of a memory file, for reading and writing; large pages can hold them. Raises OSError, OverflowError."""
    return LargeMap(descriptor, nbytes)
