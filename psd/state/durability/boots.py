"""The identity of the machine's present boot, which lasts until it goes down: Linux' boot id, or what another system has like
it. Must not know what depends on it.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SESSION = b"kern.bootsessionuuid"
_SESSION_BYTES = 64
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, and nothing is made there
_IN_MEMORY = b"in memory"


def boot_id(directory: Path) -> bytes:
    """Bytes that identify this boot of the machine, for files in a directory; empty if the system does not tell."""
    try:
        return _BOOT_ID.read_bytes().strip()
    except OSError:
        pass
    return _boot_session() or (_IN_MEMORY if _is_in_memory(directory) else b"")


def _boot_session() -> bytes:
    """The identity of the boot on macOS; empty elsewhere."""
    found, size = ctypes.create_string_buffer(_SESSION_BYTES), ctypes.c_size_t(_SESSION_BYTES)
    try:
        failed = ctypes.CDLL(None).sysctlbyname(_SESSION, found, ctypes.byref(size), None, ctypes.c_size_t(0))
    except (OSError, AttributeError):
        return b""
    return b"" if failed else found.value


def _is_in_memory(directory: Path) -> bool:
    """True if files there are lost when the machine goes down, so that those that exist are of this boot."""
    try:
        return directory.stat().st_dev == _SHARED_MEMORY.stat().st_dev != Path("/").stat().st_dev
    except OSError:
        return False
