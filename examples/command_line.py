"""The command line of an example: its numbers as options, and an end in words where it has no job or no data."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable


class CommandLine(argparse.ArgumentParser):
    """Options of an example; `does` says in a sentence what it does."""

    def __init__(self, does: str) -> None:
        super().__init__(description=f"{does} Alone, or started by psd-run.")

    def number(self, option: str, default: float, meaning: str) -> None:
        """Add an option whose value is a whole number if its default is one."""
        self.add_argument(option, type=type(default), default=default, help=f"{meaning} (default %(default)s)")

    def run(self, program: Callable[[argparse.Namespace], None], command: str = "psd-run --shards 2 --workers 2") -> None:
        """Run the program; where it has no job or no data, end with what is wrong, and with a command that works."""
        try:
            program(self.parse_args())
        except (ValueError, FileNotFoundError) as error:  # a ConfigError, for one
            sys.exit(f"{error}\nFor example: {command} {sys.argv[0]}")
