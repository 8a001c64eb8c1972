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

LAST_CHECKPOINT_PATTERN = rf"psd-server: shard 0/\d+ ({HAS_STORED}|takes no checkpoint while workers train): .*"
"""Shard 0's line on standard error that answers LAST_CHECKPOINT_SIGNAL; psd-run waits for it."""

DASHBOARD_PATTERN = r"dashboard: (https?://[^\s#]+/)(?:#\S*)?(?: .*)?"
"""The line of psdctl dashboard that tells its address, which may have a token after it; psd-run recognizes it."""


def python_command(module: str) -> list[str]:
    """Command that runs one of psd's modules, without importing files in the working directory such as a user's queue.py."""
    safe_path = ["-P"] if sys.version_info >= (3, 11) else []
    return [sys.executable, *safe_path, "-m", module]
