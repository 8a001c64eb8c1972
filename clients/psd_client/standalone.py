"""Private shards: processes that serve only this program, where there is no cluster, and end with it.

Shards are processes, not threads: threads would share the GIL with the program, gRPC's server does not survive the forks of
data loaders, and a client must not import the server. Must not know jobs or connections.
"""

from __future__ import annotations

import os
import re
import select
import time
import weakref

from psd.contract.errors import ShardUnavailable
from psd.contract.launching import READY_PATTERN, python_command
from psd_client.owned import OwnedProcess

START_S = 60.0
"""Seconds for a shard to start; it takes half a second on a machine that is not busy."""

_open: weakref.WeakSet[PrivateShard] = weakref.WeakSet()


class PrivateShard:
    """A private shard of this process, alone or one of several. It starts when made; `wait_ready` waits until it serves.

    Attributes:
        address: HOST:PORT; empty until the shard is ready. process: the shard's process. owner: pid of the process that started
            it. started_at: time of the start, on the monotonic clock.
    """

    def __init__(self, index: int = 0, count: int = 1) -> None:
        place = ["--shard", f"{index}/{count}", "--listen", "127.0.0.1:0"]
        self.address = ""
        self._index = index
        self.owner = os.getpid()
        self.started_at = time.monotonic()
        self.process = OwnedProcess([*python_command("psd.cli.server"), *place, "--exit-on-eof", "--log-level", "warning"])

    def wait_ready(self) -> str:
        """Wait until the shard serves; return its address.

        Raises:
            ShardUnavailable: the shard could not be started; it has written the reason to standard error.
        """
        try:
            self.address = self._read_address()
        except BaseException:
            self.close()
            raise
        _open.add(self)
        return self.address

    def _read_address(self) -> str:
        give_up_at = self.started_at + START_S
        output, text = self.process.output, b""
        while not text.endswith(b"\n"):
            ready, _, _ = select.select([output], [], [], max(0.0, give_up_at - time.monotonic()))
            data = os.read(output.fileno(), 1024) if ready else b""
            if not data:
                why = "it ended; see what it has written to standard error" if ready else f"not ready within {START_S:g} s"
                raise ShardUnavailable(f"a private shard of this process could not be started: {why}", shard=self._index)
            text += data
        match = re.fullmatch(READY_PATTERN, text.decode().strip())
        assert match is not None, text
        return match[3]

    def close(self) -> None:
        """End the shard; what it held is lost. Idempotent; does nothing in a forked child."""
        _open.discard(self)
        self.process.close()

    @classmethod
    def newest(cls) -> PrivateShard | None:
        """The latest shard that this process has started and not closed; None if there is none."""
        mine = [shard for shard in _open if shard.owner == os.getpid()]
        return max(mine, key=lambda shard: shard.started_at) if mine else None
