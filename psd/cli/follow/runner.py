"""The command of psdctl follow: one run at a time, for the newest version; those that came meanwhile are passed over.

A thread starts it and waits for it. It is a process group of its own, so that all of it can be ended, and holds a locked file
open: a follower that was killed, and is started again, waits until what it had started has ended, too. Must not know shards,
nor what is in a version's directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from psd.cli.follow.versions import FollowedVersion

ENDING_S = 10.0
"""Seconds that the command has to end by SIGTERM before it is killed."""

NOT_STARTED = 127
"""The status that shells report for a command that cannot be started."""


class CommandRunner:
    """Runs a command for one version after the other, with PSD_VERSION and PSD_DIR in its environment.

    Args:
        words: the command. lock: descriptor of a file that is locked while the command runs.
        place: returns the directory of a version.
        on_wait: called if the command of an earlier follower still runs. on_end: called with a version and the command's
            status, negative for a signal, when it has ended by itself. Both in the runner's thread.

    Attributes:
        status: the last status; None: it has not ended yet.
    """

    def __init__(
        self,
        words: Sequence[str],
        lock: int,
        place: Callable[[FollowedVersion], Path],
        on_wait: Callable[[], object],
        on_end: Callable[[FollowedVersion, int], object],
    ) -> None:
        self.status: int | None = None
        self._words = list(words)
        self._lock = lock
        self._place = place
        self._on_wait = on_wait
        self._on_end = on_end
        self._changed = threading.Condition()
        self._pending: FollowedVersion | None = None
        self._running: FollowedVersion | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="psd-follow-command", daemon=True)
        self._thread.start()

    @property
    def used(self) -> list[str]:
        """Names of the versions that the command uses, or will use next."""
        with self._changed:
            return [version.name for version in (self._running, self._pending) if version is not None]

    def offer(self, version: FollowedVersion) -> None:
        """Run the command for this version as soon as it does not run; one that was offered before and waits is passed over."""
        with self._changed:
            self._pending = version
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait until the command has run for the version that was offered last."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending is None and self._running is None)

    def stop(self) -> None:
        """End the command, if it runs, and start it no more."""
        with self._changed:
            self._is_stopping = True
            self._pending = None
            self._changed.notify_all()
            process = self._process
        if process is not None:
            for signum in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signum)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(ENDING_S)
                    break
        # Else it waits for the command of an earlier follower.
        if process is not None or self._running is None:
            self._thread.join(ENDING_S)

    def _run(self) -> None:
        self._wait_for_earlier()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending is not None or self._is_stopping)
                if self._is_stopping:
                    return
                assert self._pending is not None
                self._running, self._pending = self._pending, None
            status = self._run_once(self._running)
            with self._changed:
                is_stopping = self._is_stopping
                self._process = None
            if not is_stopping:
                self.status = status
                self._on_end(self._running, status)
            with self._changed:
                self._running = None
                self._changed.notify_all()

    def _wait_for_earlier(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._on_wait()
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def _run_once(self, version: FollowedVersion) -> int:
        environ = {**os.environ, "PSD_VERSION": str(version.version), "PSD_DIR": str(self._place(version))}
        try:
            with self._changed:
                if self._is_stopping:
                    return NOT_STARTED
                self._process = process = subprocess.Popen(  # noqa: S603 - what the user asked for
                    self._words, env=environ, stdin=subprocess.DEVNULL, pass_fds=(self._lock,), start_new_session=True
                )
        except OSError:
            return NOT_STARTED
        return process.wait()
