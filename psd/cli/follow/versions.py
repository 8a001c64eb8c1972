"""The directory of psdctl follow: one directory for each version, and `latest`, a link to the newest.

    version-00001200/          model.safetensors, version.json, ...: whole and on disk, from the moment that it has this name
    latest                     a symbolic link to the newest
    .version-00001200.tmp/     is being written, or was, by a process that was killed
    .gone-...                  is being removed
    .told.json                 the last version of which the command was told, and with which status it ended
    .lock, .command-lock       locked by the process that follows, and while its command runs

After a job has gone back to a checkpoint it counts its versions anew; these are called timeline-00001-version-00001000, and
are newer than all of the timeline before. A name never stands for other values: a directory is of one job, and nothing that has
a name is written again. Must not know shards, formats or commands.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psd.checkpoint.storage import Chunk, CrashPoint, LocalStorage, no_crash
from psd.contract.config import ConfigError

VERSION_FILE = "version.json"
LATEST = "latest"

_LOCK, _COMMAND_LOCK, _TOLD, _GONE, _TEMPORARY = ".lock", ".command-lock", ".told.json", ".gone-", ".tmp"
_NAME = re.compile(r"(?:timeline-(\d{5,})-)?version-(\d{8,})")


@dataclass(frozen=True, order=True)
class FollowedVersion:
    """A version in the directory; later ones are greater."""

    timeline: int
    version: int

    @property
    def name(self) -> str:
        """The name of its directory."""
        timeline = f"timeline-{self.timeline:05}-" if self.timeline else ""
        return f"{timeline}version-{self.version:08}"


class FollowedDirectory:
    """The directory of one follower, which it keeps for itself until `close`. A context manager.

    Args:
        path: the directory; made if needed. crash_point: as in storage.py.

    Raises:
        ConfigError: it cannot be used, another process follows into it, or something else is called "latest" in it.

    Attributes:
        path: absolute. job: name of the job whose versions it has; empty: it has none.
        command_lock: descriptor of a file that the command inherits, and that is locked while it runs.
    """

    def __init__(self, path: str, crash_point: CrashPoint = no_crash) -> None:
        self.path = Path(path).absolute()
        self.job = ""
        self._crash_point = crash_point
        self._storage = LocalStorage(self.path, crash_point)
        self._locks = contextlib.ExitStack()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = self._open_lock(_LOCK)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"--to: another psdctl follow writes to {self.path}") from None
            self.command_lock = self._open_lock(_COMMAND_LOCK)
            self._check_link()
            self._clear()
            self._versions = self._found()
        except OSError as error:
            self._locks.close()
            raise ConfigError(f"--to: cannot use {self.path}: {error.strerror or error}") from error
        except BaseException:
            self._locks.close()
            raise

    @property
    def newest(self) -> FollowedVersion | None:
        """The newest version; None: there is none."""
        return max(self._versions, default=None)

    @property
    def told(self) -> FollowedVersion | None:
        """The last version of which the command was told; None: it was told of none, or has not ended."""
        try:
            said = json.loads((self.path / _TOLD).read_bytes())
            return FollowedVersion(int(said["timeline"]), int(said["version"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def directory_of(self, version: FollowedVersion) -> Path:
        """The path of a version."""
        return self.path / version.name

    def note_told(self, version: FollowedVersion, status: int) -> None:
        """Note that the command has ended. Raises CheckpointFailed if there is no room for that."""
        said = {"timeline": version.timeline, "version": version.version, "status": status}
        self._storage.write("", _TOLD, [json.dumps(said).encode()])

    def write(self, version: FollowedVersion, job: str, files: Mapping[str, Iterable[Chunk]], more: Mapping[str, Any]) -> int:
        """Write a version, durably. After an error there is nothing of it. more: what its version.json has beside.

        Returns:
            The bytes of its files.

        Raises:
            ConfigError: the directory has versions of another job. CheckpointFailed, OSError: writing fails.
        """
        self.check_job(job)
        temporary = f".{version.name}{_TEMPORARY}"
        place = LocalStorage(self.path / temporary, self._crash_point)
        try:
            for file, chunks in files.items():
                place.write("", file, chunks)
            sizes = place.files("")
            said = {
                "job": job,
                "version": version.version,
                "timeline": version.timeline,
                "time": time.time(),
                "bytes": sizes,
                **more,
            }
            place.write("", VERSION_FILE, [json.dumps(said, indent=1).encode() + b"\n"])
            self._crash_point(f"rename {version.name}")
            (self.path / temporary).rename(self.directory_of(version))
        except BaseException:
            shutil.rmtree(self.path / temporary, ignore_errors=True)
            raise
        self.job = job
        self._versions.add(version)
        self._storage.sync("")
        return sum(sizes.values())

    def link(self, version: FollowedVersion) -> None:
        """Let `latest` lead to a version; does nothing if it does. Raises OSError, CheckpointFailed."""
        latest = self.path / LATEST
        if latest.is_symlink() and latest.readlink() == Path(version.name):
            return
        new = self.path / f".{LATEST}{_TEMPORARY}"
        with contextlib.suppress(FileNotFoundError):
            new.unlink()
        self._crash_point("link latest")
        new.symlink_to(version.name)
        try:
            self._crash_point("rename latest")
            new.replace(latest)
        except BaseException:
            new.unlink()
            raise
        self._storage.sync("")

    def check_job(self, job: str) -> None:
        """Raise ConfigError if the directory has versions of another job."""
        if self.job not in ("", job):
            raise ConfigError(
                f"--to: {self.path} has versions of job {self.job!r}, and this is job {job!r}; name another directory"
            )

    def prune(self, keep: int, used: Collection[str]) -> None:
        """Remove all but the newest `keep` versions, and those whose names are used. Errors are raised as OSError."""
        for version in sorted(self._versions)[:-keep]:
            if version.name not in used:
                gone = self.path / f"{_GONE}{version.name}-{secrets.token_hex(4)}"
                self._crash_point(f"remove {version.name}")
                self.directory_of(version).rename(gone)
                self._versions.discard(version)
                shutil.rmtree(gone, ignore_errors=True)

    def close(self) -> None:
        """Let go of the directory. Idempotent."""
        self._locks.close()

    def __enter__(self) -> FollowedDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_lock(self, name: str) -> int:
        descriptor = os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._locks.callback(os.close, descriptor)
        return descriptor

    def _check_link(self) -> None:
        latest = self.path / LATEST
        if latest.exists() and not latest.is_symlink():
            raise ConfigError(f"--to: {latest} is not a link, so it is none of psdctl follow's")

    def _clear(self) -> None:
        """Remove what a process that was killed has left."""
        for entry in self.path.iterdir():
            name = entry.name
            is_temporary = name.endswith(_TEMPORARY) and _NAME.fullmatch(name[1 : -len(_TEMPORARY)])
            if name.startswith(_GONE) or (name.startswith(".") and is_temporary):
                shutil.rmtree(entry)
            elif name == f".{LATEST}{_TEMPORARY}":
                entry.unlink()

    def _found(self) -> set[FollowedVersion]:
        """The versions that are there. ConfigError if they are of several jobs."""
        found = set()
        for entry in self.path.iterdir():
            match = _NAME.fullmatch(entry.name)
            said = _version_said(entry) if match else None
            if match is None or said is None:
                continue
            version = FollowedVersion(int(match[1] or 0), int(match[2]))
            if (said.get("timeline"), said.get("version")) != (version.timeline, version.version):
                continue
            self.check_job(str(said.get("job")))
            self.job = str(said.get("job"))
            found.add(version)
        return found


def _version_said(directory: Path) -> dict[str, Any] | None:
    """Content of a version's file; None: there is none, so the directory is somebody else's."""
    try:
        said = json.loads((directory / VERSION_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    return said if isinstance(said, dict) else None
