"""A worker of psd-run --on ray: an actor that runs the worker's program, each time it is told to, on the node that Ray chose.

Each run of the program is called a life. Calls may overtake each other on the way to an actor that Ray has just restarted: so a
life that was stopped before it began does not begin, and a later life ends earlier ones. Must not know shards, nor why a worker
is run again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from psd.cli.processes.watchdog import Watchdog


class WorkerProcess:
    """An actor that runs one worker's program on a node. `run` is called for each life; lives are numbered from 1."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._life = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        """Prefix of its lines in Ray's logs."""
        return f"worker {self._rank}"

    def ready(self) -> None:
        """Return when Ray has placed and started this actor."""

    def run(
        self, life: int, command: Sequence[str], script: Mapping[str, bytes], environ: Mapping[str, str], _ready: None
    ) -> int:
        """Run the worker's command to its end; return its status, negative for a signal.

        Args:
            life: number of this life. command: the words to run; if `script` is given, the first word is the script.
            script: texts of the script and of the files beside it, by name; empty if the command needs none.
            environ: variables in addition to this actor's own.
        """
        self.stop(life - 1, 0.0)
        with tempfile.TemporaryDirectory(prefix="psd-run-") as folder:
            words = list(command)
            for name, text in script.items():
                (Path(folder) / name).write_bytes(text)
            if script:
                words[0] = str(Path(folder) / Path(words[0]).name)
            if words[0] == "-m" or words[0].endswith(".py"):
                words = [sys.executable, "-u", *words]
            # It ends what the worker has started, too, if this actor is killed.
            mark = f"{environ['PSD_RUN_ID']}/worker-{self._rank}"
            nothing = os.open(os.devnull, os.O_RDONLY)
            watchdog = Watchdog(environ["PSD_RUN_ID"], nothing, mark)
            os.close(nothing)
            try:
                with self._lock:
                    if life <= self._life:  # it was stopped before it began
                        return -signal.SIGTERM
                    self._life = life
                    self._process = process = subprocess.Popen(  # noqa: S603 - what the user asked for
                        words,
                        env={**os.environ, **environ, "PSD_NODE": mark},
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,
                    )
                watchdog.add(process.pid)
                return process.wait()
            finally:
                watchdog.close()

    def stop(self, life: int, grace_s: float) -> None:
        """End all lives up to this number: SIGTERM, after `grace_s` SIGKILL."""
        with self._lock:
            if life < self._life:
                return
            self._life = life
            process = self._process
        if process is None or process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
            os.killpg(process.pid, signal.SIGKILL)
