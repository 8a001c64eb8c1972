"""The start of a shard as a process, for whoever starts one: psd-run, or a program that trains without a cluster.

Must not know what a shard does, nor how its process is watched.
"""

from __future__ import annotations

import sys

READY_PATTERN = r"psd-server: shard (\d+)/(\d+) ready at (\S+)"
"""The only line of psd-server on standard output: the shard's address."""


def python_command(module: str) -> list[str]:
    """Command that runs one of psd's modules, untouched by files in the working directory such as a user's queue.py."""
    safe_path = ["-P"] if sys.version_info >= (3, 11) else []
    return [sys.executable, *safe_path, "-m", module]
