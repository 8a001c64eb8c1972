"""Removes the secrets in URLs from the arguments of this process that the system shows to everybody, for instance in ps.

A password among the arguments is visible until this has been done. Options that take a URL also take @FILE, which is never
visible. Must not know options.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from psd.contract.locations import shown

_ARGUMENTS_START = 45
"""Place of arg_start in /proc/self/stat after the command's name, proc(5)."""


def hide_secrets() -> None:
    """Overwrite the secrets in the memory from which the kernel reads arguments. Does nothing on systems without /proc."""
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
    """The argument with its secrets replaced, at the same length."""
    text = os.fsdecode(word)
    clear = shown(text)
    return word if clear == text else os.fsencode(clear)[: len(word)].ljust(len(word))
