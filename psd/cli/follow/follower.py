"""The loop of psdctl follow: pulls each new version of a job, has it written, and the command told.

What is lacking in the directory is made good at each turn: the newest version that is there, `latest`, of which version the
command was told. So a follower that was killed, or found no room, goes on where it was. Must not know options or terminals.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from psd.cli.follow.ending import EndListener
from psd.cli.follow.formats import Format, PulledVersion
from psd.cli.follow.runner import CommandRunner
from psd.cli.follow.versions import FollowedDirectory, FollowedVersion
from psd.contract.config import ConfigError
from psd.contract.errors import (
    CheckpointFailed,
    CutMissed,
    Draining,
    JobOver,
    NotDeclared,
    Overloaded,
    PsdError,
    ShardUnavailable,
    WaitTimeout,
)
from psd_client import Reader, connect
from psd_client.wanted_tensors import matching

LOOK_S = 1.5
"""Seconds that a pull waits for a new version at a time; then the follower looks whether the job is over. See ASK_S."""

RECONNECT_S = 5.0
"""Seconds for which a call is tried again before the follower says that the shards do not answer."""

RETRY_S = 5.0
"""Seconds between two attempts to write where there is no room."""

NEVER_S = 86_400.0
"""Seconds after which the connection explains a wait by itself: the follower has its own words."""

_AGAIN = (WaitTimeout, NotDeclared, CutMissed, Draining, Overloaded)
"""Errors that say that there is no new version yet."""


def reader_of(servers: Sequence[str], job: str, files: Mapping[str, str], transport: str = "auto") -> Reader:
    """A reader for a follower.

    Args:
        job: name of the job; empty: whatever the shards serve. files: as arguments of Credentials.
    """
    return connect(
        list(servers),
        role="reader",
        run_id=job,
        transport=transport,
        wait_timeout=LOOK_S,
        retry_timeout=RECONNECT_S,
        report_after=NEVER_S,
        tls_ca=files["tls_ca"],
        tls_cert=files["tls_cert"],
        tls_key=files["tls_key"],
        token_file=files["token_file"],
    )


class FollowReport(Protocol):
    """Listener to what a follower does."""

    def written(self, version: FollowedVersion, nbytes: int, took_s: float) -> None:
        """Tell that a version is there: the bytes of its files, and the seconds since its transfer began."""
        ...

    def ended(self, version: FollowedVersion, status: int) -> None:
        """Tell that the command has ended; a negative status is that of a signal. Called in a thread of its own."""
        ...

    def trouble(self, text: str) -> None:
        """Tell what does not work, and is tried again."""
        ...

    def over(self, text: str) -> None:
        """Tell why there is nothing to do."""
        ...


class JobFollower:
    """Follows one job into one directory. A context manager: at its end the command is ended, if it runs.

    Args:
        reader: of the job. listener: hears of its end while the follower does not ask.
        is_over: asks whether the job is over; called a few times a minute.
        command: words of the command; empty: there is none.
        patterns: names of tensors, or patterns as in fnmatch; empty: all. every: write only the versions that are multiples of
            this, or the first after one; keep: versions that are kept.
        patience_s: seconds without an answer from the shards after which `follow` gives up.
    """

    def __init__(
        self,
        reader: Reader,
        listener: EndListener,
        is_over: Callable[[], bool],
        directory: FollowedDirectory,
        form: Format,
        command: Sequence[str],
        report: FollowReport,
        *,
        patterns: Sequence[str] = (),
        every: int = 1,
        keep: int = 3,
        patience_s: float = 600.0,
    ) -> None:
        self._reader = reader
        reader.name = f"follow {directory.path.name[:200]} at {reader.name}"
        self._listener = listener
        self._is_over = is_over
        self._directory = directory
        self._form = form
        self._report = report
        self._patterns = list(patterns)
        self._every = every
        self._keep = keep
        self._patience_s = patience_s
        self._job = directory.job
        self._told = directory.told
        self._arrays: dict[str, NDArray[Any]] | None = None  # reused: fresh memory costs more than the copy
        self._dtypes: dict[str, str] = {}
        self._heard_at = time.monotonic()
        self._runner: CommandRunner | None = None
        if command:
            lock, place = directory.command_lock, directory.directory_of
            self._runner = CommandRunner(command, lock, place, self._on_wait, self._on_end)

    def __enter__(self) -> JobFollower:
        return self

    def __exit__(self, *_: object) -> None:
        if self._runner is not None:
            self._runner.stop()

    def follow(self) -> bool:
        """Follow until the job is over. Returns False if the shards have not answered for too long.

        Raises:
            ConfigError: the directory, or a name, does not belong to this job. PsdError: the shards refuse.
        """
        while True:
            with self._listener.busy():
                is_delivered = self._deliver()
                if not is_delivered:
                    time.sleep(RETRY_S)
            if not is_delivered:
                continue
            newest = self._directory.newest
            is_known = newest is not None and newest.timeline == self._reader.timeline
            # The first pull may find the job on a later timeline; then the next one asks for its newest version.
            after = newest.version if newest is not None and (is_known or not self._reader.job) else None
            try:
                pulled = self._pull(None if after is None else (after // self._every + 1) * self._every - 1)
            except JobOver as error:
                self._report.over(str(error))
                break
            except _AGAIN:
                self._heard_at = time.monotonic()
                if self._has_ended():
                    self._pull_last(after)
                    break
            except ShardUnavailable as error:
                if self._has_ended():
                    break
                if time.monotonic() - self._heard_at > self._patience_s:
                    self._report.trouble(f"no answer for {self._patience_s:g} s, so the job is over, or away: {error}")
                    self._end()
                    return False
                self._report.trouble(f"{error}; trying again")
            else:
                self._heard_at = time.monotonic()
                if self._is_other_job():
                    break
                with self._listener.busy():
                    if not self._write(pulled):
                        time.sleep(RETRY_S)
        self._end()
        return True

    def once(self) -> bool:
        """Write the newest version, if it is not there, and have the command told. Returns False if that failed."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                pulled = self._pull(None)
                break
            except (*_AGAIN, ShardUnavailable) as error:
                if time.monotonic() > deadline or self._has_ended():
                    self._report.trouble(str(error))
                    return False
        is_written = self._write(pulled) and self._deliver()
        self._end()
        return is_written and (self._runner is None or self._runner.status in (None, 0))

    def _pull(self, newer_than: int | None) -> PulledVersion:
        """The next version. newer_than: as in Reader.pull."""
        reader = self._reader
        if not self._dtypes:
            self._dtypes = reader.dtypes
            self._directory.check_job(reader.job)
        if self._arrays is None:
            names = list(self._form.names(self._wanted()))
            tensors = reader.pull(names=names, newer_than=newer_than, timeout=LOOK_S)
            self._arrays = tensors
        else:
            tensors = reader.pull(out=self._arrays, newer_than=newer_than, timeout=LOOK_S)
        return PulledVersion(reader.job, reader.timeline, tensors.version, tensors, self._dtypes, tensors.meta, tensors.digest)

    def _wanted(self) -> list[str]:
        """The tensors that the patterns name."""
        if not self._dtypes:
            raise ConfigError("--names: the job has no tensors; tables and vectors are not followed")
        names = list(self._dtypes)
        return names if not self._patterns else [names[index] for index in sorted(matching(self._patterns, names))]

    def _pull_last(self, after: int | None) -> None:
        """Write the version with which the job has ended, if it is not there."""
        try:
            pulled = self._pull(after)
        except PsdError:
            return
        if not self._is_other_job():
            self._write(pulled)

    def _is_other_job(self) -> bool:
        """True if the shards serve another job by now."""
        job, self._job = self._job, self._job or self._reader.job
        if job in ("", self._reader.job):
            return False
        self._report.over(f"the shards serve another job now, {self._reader.job!r}")
        return True

    def _has_ended(self) -> bool:
        if self._is_other_job():
            return True
        if is_over := bool(self._listener.heard) or self._is_over():
            self._report.over(self._listener.heard or "the job is over")
        return is_over

    def _write(self, pulled: PulledVersion) -> bool:
        """Write a version; False, and tell why, if that fails."""
        version = FollowedVersion(pulled.timeline, pulled.version)
        if version == self._directory.newest:
            self._report.over(f"{version.name} is there already")
            return True
        began = time.monotonic()
        try:
            files = self._form.files(pulled)
            more = {"format": self._form.word, "meta": pulled.meta_in_json, "digest": pulled.digest}
            nbytes = self._directory.write(version, pulled.job, files, more)
        except (OSError, CheckpointFailed) as error:
            self._report.trouble(f"{error}; trying again with the newest version")
            return False
        self._report.written(version, nbytes, time.monotonic() - began)
        return True

    def _deliver(self) -> bool:
        """Have `latest` lead to the newest version, the command told of it, and old ones removed; False if that fails."""
        newest = self._directory.newest
        if newest is None:
            return True
        try:
            self._directory.link(newest)
            if self._runner is not None and newest != self._told:
                self._runner.offer(newest)
                self._told = newest
            self._directory.prune(self._keep, self._runner.used if self._runner is not None else ())
        except (OSError, CheckpointFailed) as error:
            self._report.trouble(f"{error}; trying again")
            return False
        return True

    def _end(self) -> None:
        """Have the command told of the newest version, and wait for it."""
        self._deliver()
        if self._runner is not None:
            self._runner.finish()
            self._deliver()

    def _on_wait(self) -> None:
        self._report.trouble("what was started for an earlier version still runs; the command waits for its end")

    def _on_end(self, version: FollowedVersion, status: int) -> None:
        self._report.ended(version, status)
        try:
            self._directory.note_told(version, status)
        except CheckpointFailed as error:
            self._report.trouble(f"{error}; the command may be told of {version.name} again")
