"""Arguments of this process as the system shows them to everybody, such as in ps: without the secrets of URLs among them.

Whoever types a password can be overseen until the process has come so far; options that take a URL take @FILE, too, which is
never seen. Must not know options.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from psd.contract.locations import shown

_ARGUMENTS_START = 45
"""Place of arg_start in /proc/self/stat after the command's name, proc(5)."""


def hide_secrets() -> None:
    """Write over them, where the kernel reads them for others; nothing on systems without /proc."""
    try:
        given = Path("/proc/self/cmdline").read_bytes()
        start = int(Path("/proc/self/stat").read_bytes().rpartition(b") ")[2].split()[_ARGUMENTS_START])
    except (OSError, ValueError, IndexError):
        return
    hidden = b"\0".join(_hidden(word) for word in given.split(b"\0"))
    # What stands there is compared first: the address is taken at its word only where the kernel has read the same from it.
    if hidden != given and start and ctypes.string_at(start, len(given)) == given:
        ctypes.memmove(start, hidden, len(given))


def _hidden(word: bytes) -> bytes:
    """An argument without secrets, as long as it was."""
    text = os.fsdecode(word)
    clear = shown(text)
    return word if clear == text else os.fsencode(clear)[: len(word)].ljust(len(word))
