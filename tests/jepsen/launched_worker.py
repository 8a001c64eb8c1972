"""A worker of a trial under psd-run: python launched_worker.py TEMPLATE, the options that all of them share."""

from __future__ import annotations

import faulthandler
import signal
import sys
from pathlib import Path

from launched import options_of_worker
from program import live

if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # as in children.py
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    live(options_of_worker(Path(sys.argv[1])))
