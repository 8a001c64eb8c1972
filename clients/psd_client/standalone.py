"""Private shards: processes that serve this program alone, where there is no cluster, and end with it.

Processes and not threads: a shard's work would take its turns with the program's under one GIL, gRPC's server does not survive
the forks that data loaders make, and a client knows nothing of a server's insides.

A private shard reads from a pipe whose only other end is here, so that the kernel tells it of this process's end, whatever ends
it; then it ends, too. Forked children close their copies of the pipes at once. Must not know jobs or connections.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
import threading
import time
import weakref

from psd.contract.errors import ShardUnavailable
from psd.contract.launching import READY_PATTERN, python_command

START_S = 60.0
"""Longest start of a shard, which takes half a second on a machine that is not busy."""

END_S = 10.0

_forking = threading.RLock()  # held while a pipe is made, so that no fork comes before it is known here
_open: weakref.WeakSet[PrivateShard] = weakref.WeakSet()


class PrivateShard:
    """One shard of this process, alone or one of several.

    Raises:
        ShardUnavailable: it could not be started; standard error has its words.

    Attributes:
        address: HOST:PORT. started_at: on the monotonic clock.
    """

    def __init__(self, index: int = 0, count: int = 1) -> None:
        place = ["--shard", f"{index}/{count}", "--listen", "127.0.0.1:0"]
        self.started_at = time.monotonic()
        self._pid = os.getpid()
        with _forking:
            self._process = subprocess.Popen(  # noqa: S603, our own module
                [*python_command("psd.cli.server"), *place, "--exit-on-eof", "--log-level", "warning"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,  # Ctrl-C is the program's, which may go on
            )
            _open.add(self)
        try:
            self.address = self._read_address(index)
        except BaseException:
            self.close()
            raise

    def _read_address(self, index: int) -> str:
        assert self._process.stdout is not None
        give_up_at = time.monotonic() + START_S
        with self._process.stdout as output:
            text = b""
            while not text.endswith(b"\n"):
                ready, _, _ = select.select([output], [], [], max(0.0, give_up_at - time.monotonic()))
                data = os.read(output.fileno(), 1024) if ready else b""
                if not data:
                    why = "it ended; see what it has written to standard error" if ready else f"not ready within {START_S:g} s"
                    raise ShardUnavailable(f"a private shard of this process could not be started: {why}", shard=index)
                text += data
        match = re.fullmatch(READY_PATTERN, text.decode().strip())
        assert match is not None, text
        return match[3]

    def close(self) -> None:
        """End the shard; what it held is gone. Idempotent; nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        _open.discard(self)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def let_go(self) -> None:
        """Close a forked child's copy of the pipe."""
        if self._process.stdin is not None:
            self._process.stdin.close()


def newest_address() -> str | None:
    """The address of the private shard that this process has started last, of those that live; None if there is none."""
    return max(_open, key=lambda shard: shard.started_at).address if _open else None


def _after_fork_in_child() -> None:
    for shard in list(_open):
        shard.let_go()
    _open.clear()
    _forking.release()


os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_after_fork_in_child)
