"""Records of the jobs that run on this machine, by which psdctl finds them without being told addresses.

Each job of a user has a file in a directory that only this user can open. It belongs to the process that runs the job: psd-run,
or the program that has started shards of its own. The process removes it at the end; if it is killed, the record stays, and is
known for dead by the process's id and start time, since others may get the id. Whoever looks removes the records of the dead.

A record has the paths of certificates and tokens, never what is in them. Must not know what jobs do, nor who reads of them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import stat
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from psd.contract.config import ConfigError, parse_servers
from psd.contract.environment import jobs_directory
from psd.contract.locations import shown
from psd_core import private_files
from psd_core.private_files import NotOurs

_SUFFIX, _NEW = ".json", ".new"

_ABANDONED_S = 60.0
"""Age from which a file that was not completed counts as abandoned: its process was killed as it wrote it."""

_STARTED_AT = 18
"""Place of a process's start time among the numbers that follow its state in /proc/PID/stat, proc(5)."""

_NO_TEXT = ("servers", "workers", "command", "started_at", "pid")


@dataclass(frozen=True)
class JobRecord:
    """A job of this machine.

    Attributes:
        name: name of the job, the id of its run. servers: addresses of the shards, in their order. workers: number of workers.
        command: the words of the program, without secrets in URLs. directory: where it was started.
        started_at: seconds since 1970. pid: the process that runs the job.
        dashboard: address of the dashboard that psd-run has started; empty: none. log_dir: that of psd-run; empty: none.
        tls_ca, tls_cert, tls_key, token_file: a client's files for these shards; empty: none.
    """

    name: str
    servers: tuple[str, ...]
    workers: int
    command: tuple[str, ...]
    directory: str
    started_at: float
    pid: int
    dashboard: str = ""
    log_dir: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    token_file: str = ""


def new_record(name: str, servers: tuple[str, ...], workers: int, command: tuple[str, ...], **more: str) -> JobRecord:
    """A record of a job that this process runs, from now on. more: further fields of JobRecord."""
    try:
        directory = str(Path.cwd())
    except OSError:  # it has been removed
        directory = ""
    return JobRecord(name, servers, workers, tuple(map(shown, command)), directory, time.time(), os.getpid(), **more)


def run_id_of(program: str) -> str:
    """A new unique name for a run, with the name of its program, a path or a module, in it."""
    stem = re.sub(r"[^A-Za-z0-9_.]+", "-", Path(program).stem).strip("-")[:32]
    return f"{stem or 'job'}-{secrets.token_hex(6)}"


class JobEntry:
    """A record in the directory, until `remove`; of this process alone, not of its forked children.

    Raises:
        NotOurs: the directory is not private to this user, so that nothing is written. OSError: writing fails.
    """

    def __init__(self, record: JobRecord) -> None:
        self._record = record
        directory = jobs_directory()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(directory)
        _sweep(directory)
        self._path = directory / f"{secrets.token_hex(8)}{_SUFFIX}"  # the job's next run may have its name, and must stay
        self._write()

    def change(self, **fields: Any) -> None:
        """Change fields of the record. Raises OSError if writing fails."""
        self._record = replace(self._record, **fields)
        self._write()

    def remove(self) -> None:
        """Remove the record. Idempotent; does nothing in a forked child, and ignores errors: it dies with the process."""
        if os.getpid() == self._record.pid:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _write(self) -> None:
        """Write all of it under another name, so that nobody reads a part."""
        pid = self._record.pid
        content = {**asdict(self._record), "life": _life_of(pid), "processes": _processes()}
        new = self._path.with_suffix(_NEW)
        try:
            private_files.write(new, json.dumps(content).encode())
            new.replace(self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                new.unlink()
            raise


def running_jobs() -> list[JobRecord]:
    """The jobs of this user that run on this machine, the oldest first, each once: of several psd-runs of a job, the one
    that was ready first, which leads the others. Removes the records of jobs that have ended.

    Raises:
        NotOurs: the directory of the records is not private to this user, so that none is believed. OSError: it cannot be read.
    """
    directory = jobs_directory()
    try:
        _check_private(directory)
    except FileNotFoundError:
        return []
    found: dict[str, JobRecord] = {}
    for record in sorted(_sweep(directory), key=lambda record: (record.started_at, record.name)):
        found.setdefault(record.name, record)
    return list(found.values())


def _check_private(directory: Path) -> None:
    """Raise NotOurs unless it is a directory of this user that nobody else can open."""
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotOurs(f"{directory} is not a directory")
    if found.st_uid != os.geteuid():
        raise NotOurs(f"{directory} belongs to user {found.st_uid}, and this process is user {os.geteuid()}'s")
    if found.st_mode & 0o077:
        raise NotOurs(f"{directory} can be opened by other users; chmod 700, or name another directory in PSD_JOBS_DIR")


def _sweep(directory: Path) -> list[JobRecord]:
    """The records of living jobs; the others are removed."""
    found = []
    for path in directory.iterdir():
        with contextlib.suppress(OSError):  # removed meanwhile, or another user's file: not believed, and not touched
            if path.suffix == _NEW and time.time() - path.lstat().st_mtime > _ABANDONED_S:
                path.unlink()
            if path.suffix == _SUFFIX:
                content = _content(path)
                if not _lives(content):
                    path.unlink()
                elif (record := _record_of(content)) is not None:
                    found.append(record)
    return found


def _content(path: Path) -> dict[str, Any]:
    """The object in a file; an empty one if there is none. Raises OSError."""
    try:
        content = json.loads(private_files.read(path))
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _lives(content: dict[str, Any]) -> bool:
    """True if the process that has written a record lives, or cannot be seen from here, as it is in another container."""
    pid, life = content.get("pid"), content.get("life")
    if not (type(pid) is int and isinstance(life, str)):
        return False
    return content.get("processes") != _processes() or _life_of(pid) == life


def _record_of(content: dict[str, Any]) -> JobRecord | None:
    """The record in a file; None if it is of another container, whose addresses mean other shards here, or of another form,
    which another version of psd may have written."""
    if content["processes"] != _processes():
        return None
    given = {name: content.get(name) for name in JobRecord.__dataclass_fields__}
    is_text = all(isinstance(value, str) for name, value in given.items() if name not in _NO_TEXT)
    command, workers, started_at = given["command"], given["workers"], given["started_at"]
    if not (is_text and type(workers) is int and isinstance(started_at, float) and math.isfinite(started_at)):
        return None
    if not (isinstance(command, list) and all(isinstance(word, str) for word in command)):
        return None
    try:
        found: dict[str, Any] = {**given, "servers": parse_servers(content["servers"]), "command": tuple(command)}
    except (KeyError, ConfigError):
        return None
    return JobRecord(**found)


def _life_of(pid: int) -> str | None:
    """Words that tell a living process from all others that have had its id; None if there is none, empty if the system tells
    no more than that."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (OSError, ValueError):
        return None if Path("/proc/self/stat").exists() else _signalled(pid)
    return None if state in b"ZX" else f"{boot} {rest[_STARTED_AT].decode()}"


def _signalled(pid: int) -> str | None:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return None
    except PermissionError:
        pass
    return ""


def _processes() -> str:
    """Identity of the namespace in which process ids have a meaning; empty if the system has none."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
