"""Private shards: processes that serve only this program, where there is no cluster, and end with it; and the record by which
psdctl finds them.

Shards are processes, not threads: threads would share the GIL with the program, gRPC's server does not survive the forks of
data loaders, and a client must not import the server. Must not know jobs or connections.
"""

from __future__ import annotations

import logging
import os
import re
import select
import sys
import time
import weakref
from collections.abc import Callable

from psd.contract.errors import ShardUnavailable
from psd.contract.job_records import JobEntry, new_record, run_id_of
from psd.contract.launching import READY_PATTERN, python_command
from psd_client.owned import OwnedProcess

logger = logging.getLogger(__name__)

START_S = 60.0
"""Seconds for a shard to start; it takes half a second on a machine that is not busy."""

_COMMAND = "-c"
"""sys.argv[0] of a program that is an argument of Python's; that of an interactive one is empty."""

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


def listed(servers: str, workers: int) -> Callable[[], None]:
    """Have psdctl find the shards of this program's own, by a record on this machine; return a function that ends that.

    Args:
        servers: their addresses, separated by commas. workers: number of workers.
    """
    program, *more = getattr(sys, "argv", None) or [""]  # a program in C that embeds Python may have set none
    name = run_id_of("" if program == _COMMAND else program)
    try:
        entry = JobEntry(new_record(name, tuple(servers.split(",")), workers, (program or "python", *more)))
    except OSError as error:  # the job needs none of it
        logger.warning("psd: psdctl jobs will not list this job: %s", error.strerror or error)
        return lambda: None
    return entry.remove
