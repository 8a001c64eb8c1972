"""What the three commands' argument parsers share: one-line errors, help that keeps its layout, converters, exit statuses.

Converters only say "not a number"; what a number may be is the configuration's business (psd/contract/config.py), whose
ConfigError the commands report through `Parser.error`, so that each limit is stated in one place.
"""

from __future__ import annotations

import argparse
import signal
import sys
from typing import NoReturn

import psd

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2


def exit_status(signum: int) -> int:
    """The status of a process that a signal ended, as shells count: 130 for SIGINT, 143 for SIGTERM."""
    return 128 + signum


def signal_name(signum: int) -> str:
    """SIGTERM for 15."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


class Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line and shows its description and epilog as written."""

    def __init__(self, prog: str, usage: str, description: str, epilog: str) -> None:
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            epilog=epilog,
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
            add_help=False,
        )

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with status 2."""
        print(f"{self.prog}: error: {message} ({self.prog} --help explains)", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_USAGE)

    def add_information(self) -> None:
        """Add the options that only print; last, so that the help begins with what matters."""
        group = self.add_argument_group("information")
        group.add_argument("-h", "--help", action="help", help="show this page and exit")
        group.add_argument(
            "--version", action="version", version=f"{self.prog} {psd.__version__}", help="show psd's version and exit"
        )


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Description and epilog as written; options in a column of their own that fits the terminal of a README."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=100)


def whole_number(text: str) -> int:
    """A converter for argparse; 1_000 and 1000 are both fine."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None


def seconds(text: str) -> float:
    """A converter for argparse."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected seconds, such as 10 or 0.5, got {text!r}") from None
