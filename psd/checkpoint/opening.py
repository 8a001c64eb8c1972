"""Opens the storage of checkpoints at a path or URL. Must not know what the storages do."""

from __future__ import annotations

from pathlib import Path

from psd.checkpoint.advice import with_advice
from psd.checkpoint.storage import CrashPoint, FileStore, LocalStorage, no_crash
from psd.contract.config import ConfigError
from psd.contract.locations import cause, cleared, shown


def open_storage(url: str, crash_point: CrashPoint = no_crash) -> FileStore:
    """The storage at a URL or local path.

    Raises:
        ConfigError: fsspec does not know such URLs, or lacks the package for them, or the store refuses the connection.
    """
    place = f"checkpoint directory {shown(url)}"
    if not url:
        raise ConfigError("checkpoint directory: expected a path or a URL, got an empty string")
    if "::" in url and "://" not in url:  # a path, which fsspec would take for a chain of URLs
        return LocalStorage(Path(url).expanduser().absolute(), crash_point)
    # Only here: fsspec takes a while to load, and a shard without checkpoints needs none of it.
    from fsspec.implementations.local import LocalFileSystem

    from psd.checkpoint.objects import ObjectStorage, connect

    try:
        file_system, path = connect(url)
    except ImportError as error:
        raise ConfigError(f"{place}: {error}") from error
    except ValueError as error:
        expected = "expected a path or a URL that fsspec knows"
        raise ConfigError(f"{place}: {expected}: {cleared(str(error), url)}") from cause(error, url)
    except Exception as error:  # noqa: BLE001 - such as SFTP, which dials at once: whatever its package raises
        words = with_advice(cleared(str(error), url) or type(error).__name__, url, error)
        raise ConfigError(f"{place}: {words}") from cause(error, url)
    if isinstance(file_system, LocalFileSystem):
        return LocalStorage(Path(path), crash_point)
    return ObjectStorage(file_system, path.rstrip("/"), url, crash_point)


def open_parent(url: str) -> tuple[FileStore, str]:
    """The storage of a file's directory, and the file's name there. Raises what `open_storage` raises."""
    parent, _, file = url.rpartition("/")
    return open_storage(parent or ("/" if url.startswith("/") else ".")), file
