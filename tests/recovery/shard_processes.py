"""Real psd-server processes that tests kill and start again at the same address."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

READY = re.compile(r"ready at (\S+)")


class ShardProcess:
    """One shard with its own state directory; `start` again after `kill` is the same shard in another life."""

    def __init__(self, index: int, count: int, directory: Path, *flags: str) -> None:
        self.index = index
        self.count = count
        self.directory = directory
        self.address = "127.0.0.1:0"
        self._flags = flags
        self._process: subprocess.Popen[str] | None = None

    def start(self, **environ: str) -> None:
        command = [sys.executable, "-m", "psd.cli.server", "--shard", f"{self.index}/{self.count}", "--listen", self.address]
        command += ["--state-dir", str(self.directory), "--exit-when-done", "--log-level", "error", *self._flags]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | environ)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found = READY.search(line)
        assert found is not None, f"shard {self.index} did not start: {line!r}, status {self._process.wait(30)}"
        self.address = found[1]

    def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._end()

    def wait(self) -> int:
        """The exit status, once it has ended by itself."""
        assert self._process is not None
        status = self._process.wait(60)
        self._end()
        return status

    def _end(self) -> None:
        if self._process is not None:
            self._process.wait(60)
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def close(self) -> None:
        if self._process is not None:
            self.kill()
