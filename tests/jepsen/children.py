"""What each child process of a trial does first; and, run as a program, one of psd's: python children.py PARENT MODULE OPTIONS.

A child dies with the harness, and writes the stacks of its threads on SIGUSR1.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def settle_in(parent: int) -> None:
    """In the child. parent: the process id of the harness."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has gone already
        os._exit(1)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # what holds once the interpreter ends, and takes its own handler back
    faulthandler.register(signal.SIGUSR1, all_threads=True)


if __name__ == "__main__":
    settle_in(int(sys.argv.pop(1)))
    sys.exit(importlib.import_module(sys.argv.pop(1)).main())
