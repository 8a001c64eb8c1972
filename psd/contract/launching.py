"""The start of a shard as a process, for whoever starts one: psd-run, or a program that trains without a cluster; and the lines
in which such a process and its launcher speak to each other.

Must not know what a shard does, nor how its process is watched.
"""

from __future__ import annotations

import sys

READY_PATTERN = r"psd-server: shard (\d+)/(\d+) ready at (\S+)"
"""The only line of psd-server on standard output: the shard's address."""

STARTING_LINE, GONE_LINE = "starting {}", "gone {}"
"""Lines for --heed-launcher."""

DONE_PATTERN = r"psd-server: shard (\d+)/(\d+) done: all workers have left"
"""The line on standard error that announces a proper end with --exit-when-done; psd-run recognizes it."""

COUNTED_PATTERN = (
    r"psd-server: shard \d+/\d+ has counted (\d+) pushes, (\d+) late, up to step (\d+) from (\d+)"
    r"(?:; (\d+) steps in ([\d.]+) s)?"
)
"""The line on standard error with which a shard that ends in order says what it has done, if it had a part in that; psd-run
adds it up."""

STORED_PATTERN = r"psd-server: INFO stored checkpoint (\S+)"
"""The log's line about a checkpoint. All shards that come last together write it; psd-run shows it once."""

HAS_STORED = "has stored the last checkpoint"

LAST_CHECKPOINT_PATTERN = rf"psd-server: shard 0/\d+ ({HAS_STORED}|takes no checkpoint while workers train): .*"
"""Shard 0's line on standard error that answers LAST_CHECKPOINT_SIGNAL; psd-run waits for it."""


def python_command(module: str) -> list[str]:
    """Command that runs one of psd's modules, untouched by files in the working directory such as a user's queue.py."""
    safe_path = ["-P"] if sys.version_info >= (3, 11) else []
    return [sys.executable, *safe_path, "-m", module]
