"""The command that starts a shard's process, for psd-run and for programs that train without a cluster; and the lines that such
a process and its launcher send each other.

Must not know what a shard does, or how its process is watched.
"""

from __future__ import annotations

import sys

READY_PATTERN = r"psd-server: shard (\d+)/(\d+) ready at (\S+)"
"""The only line of psd-server on standard output: the shard's address."""

STARTING_LINE, GONE_LINE = "starting {}", "gone {}"
"""Lines on standard input with --heed-launcher."""

DONE_PATTERN = r"psd-server: shard (\d+)/(\d+) done: all workers have left"
"""The line on standard error that announces an orderly end with --exit-when-done; psd-run recognizes it."""

COUNTED_PATTERN = (
    r"psd-server: shard \d+/\d+ has counted (\d+) pushes, (\d+) late, up to step (\d+) from (\d+)"
    r"(?:; (\d+) steps in ([\d.]+) s)?(?:; ended there, (as .+))?"
)
"""The line on standard error that counts what a shard has done, if anything, when it ends in order; psd-run adds these up."""

STORED_PATTERN = r"psd-server: INFO stored checkpoint (\S+)"
"""The log line about a checkpoint. If several shards finish together, each writes it; psd-run shows it once."""

HAS_STORED = "has stored the last checkpoint"

LAST_CHECKPOINT_PATTERN = (
    rf"psd-server: (?:shard \d+/\d+ ({HAS_STORED})|shard 0/\d+ takes no checkpoint while workers train): .*"
)
"""A shard's line on standard error that says that all have stored the last checkpoint, or shard 0's that LAST_CHECKPOINT_SIGNAL
is in vain; psd-run waits for one of them."""

HAS_ALL_STORED = "has nothing left to store"

ALL_STORED_PATTERN = rf"psd-server: shard (\d+)/(\d+) {HAS_ALL_STORED}"
"""The line on standard error of a shard with checkpoints that ends, once its part of the last one is stored; psd-run recognizes
it: from then on the shard's death does no harm."""

DASHBOARD_PATTERN = r"dashboard: (https?://[^\s#]+/)(?:#\S*)?(?: .*)?"
"""The line of psdctl dashboard that tells its address, which may have a token after it; psd-run recognizes it."""


def python_command(module: str) -> list[str]:
    """Command that runs one of psd's modules, without importing files in the working directory such as a user's queue.py."""
    safe_path = ["-P"] if sys.version_info >= (3, 11) else []
    return [sys.executable, *safe_path, "-m", module]
