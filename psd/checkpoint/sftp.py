"""Files over SFTP, by fsspec and paramiko: written and read without a round trip for each 32 KiB, and renamed.

Only what fsspec lacks, for objects.py. Another package for such URLs, such as sshfs, is used as it is.
"""

from __future__ import annotations

import contextlib
from typing import Any

_PROTOCOLS = frozenset({"sftp", "ssh"})


def is_sftp(file_system: Any) -> bool:
    """True for a file system of fsspec that shows files while they are written, and can rename them."""
    protocol = file_system.protocol
    return not _PROTOCOLS.isdisjoint((protocol,) if isinstance(protocol, str) else protocol)


def is_paramiko(file_system: Any) -> bool:
    """True for fsspec's own file system for SFTP."""
    return is_sftp(file_system) and hasattr(file_system, "ftp") and hasattr(file_system, "client")


def read(file_system: Any, path: str, start: int, stop: int | None) -> bytes:
    """Bytes start to stop of a file; fewer if it ends before."""
    with file_system.ftp.open(path, "rb") as stream:
        size = stream.stat().st_size
        nbytes = max(0, (size if stop is None else min(stop, size)) - start)
        return b"".join(stream.readv([(start, nbytes)])) if nbytes else b""


class Upload:
    """A new file that is being written.

    It has a channel of its own in the connection: paramiko waits for ever if it has read the answer to one of several writes
    while it waited for another file's.
    """

    def __init__(self, file_system: Any, path: str) -> None:
        self._channel = file_system.client.open_sftp()
        try:
            self._file = self._channel.open(path, "wb")
        except BaseException:
            self._channel.close()
            raise
        self._file.set_pipelined(True)

    def write(self, data: bytes | memoryview) -> None:
        """Send more of it."""
        self._file.write(data)

    def close(self) -> None:
        """Wait until the server has all of it."""
        try:
            self._file.close()
        finally:
            self._channel.close()


def rename(file_system: Any, old: str, new: str) -> None:
    """Let a file replace another one: at one instant, if the server can."""
    try:
        file_system.mv(old, new)
    except OSError:
        if not is_paramiko(file_system):
            raise
        with contextlib.suppress(FileNotFoundError):
            file_system.rm_file(new)
        file_system.ftp.rename(old, new)
