"""Shared parts of the three commands' argument parsers: one-line errors, help with a fixed layout, converters, exit statuses.

Converters only refuse what is not a number. The configuration (psd/contract/config.py) checks limits, so that each is stated in
one place; the commands report its ConfigError through `Parser.error`.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import psd
from psd.cli.words.terminal import show
from psd.contract.config import ConfigError, ServerConfig
from psd.contract.locations import shown
from psd.contract.printable import printable
from psd.contract.settings import PORT, SECRET_LOCATION, Setting, settings_of

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_STATE_LOST = 65
"""The parameters that a shard leaves cannot be continued with: EX_DATAERR of sysexits.h."""

EXIT_CHECKPOINT = 74
"""All went well, except that the last checkpoint could not be stored: EX_IOERR of sysexits.h."""

EXIT_HOST_LOST = 75
"""One of several hosts was lost, so the same command may succeed when it is repeated: EX_TEMPFAIL of sysexits.h."""

LAST_CHECKPOINT_SIGNAL = signal.SIGUSR1
"""Tells a shard that the job is about to end: it takes the last checkpoint while the workers still train, and goes on."""


def flag_of(name: str) -> str:
    """The flag of an option, such as --max-restarts for max_restarts."""
    return f"--{name.replace('_', '-')}"


def refuse_given(args: argparse.Namespace, whys: Mapping[str, str], where: str = "") -> None:
    """Raise ConfigError if one of these options is given. whys: the reason, by option. where: begins each reason."""
    for name, why in whys.items():
        value = getattr(args, name)
        if not (value is None or value is False or value == ""):
            raise ConfigError(f"{flag_of(name)}: {where}{why}")


def exit_status(signum: int) -> int:
    """The exit status that shells report for a signal: 130 for SIGINT, 143 for SIGTERM."""
    return 128 + signum


def signal_name(signum: int) -> str:
    """Name of a signal, such as SIGTERM for 15."""
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
        show(f"{self.prog}: error: {printable(shown(message))} ({self.prog} --help explains)", is_error=True)
        raise SystemExit(EXIT_USAGE)

    def add_information(self) -> None:
        """Add the options that only print something. Call this last, so that the help begins with what matters."""
        group = self.add_argument_group("information")
        group.add_argument("-h", "--help", action="help", help="show this page and exit")
        group.add_argument(
            "--version", action="version", version=f"{self.prog} {psd.__version__}", help="show psd's version and exit"
        )

    def finish(self, run: Callable[[argparse.Namespace], int]) -> None:
        """Say what runs this command of psdctl, and add the options that only print something. Call this last.

        run: returns the exit status. It may raise ConfigError, if an option is wrong, PsdError and CommandFailed.
        """
        self.add_information()
        self.set_defaults(run=run, parser=self)


class CommandFailed(Exception):
    """A command of psdctl has failed; the text says why."""


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"  # noqa: SLF001 - argparse has no public name for it


def add_command(commands: Commands, name: str, usage: str, description: str, epilog: str) -> Parser:
    """Add a command to psdctl; returns its parser."""
    prog = f"psdctl {name}"
    return commands.add_parser(name, prog=prog, usage=f"{prog} {usage}", description=description, epilog=epilog)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows description and epilog as written, and options in a separate column, in lines of at most 100 characters."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=100)


def whole_number(text: str) -> int:
    """Convert an argument to a whole number; 1_000 and 1000 are both accepted."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None


def seconds(text: str) -> float:
    """Convert an argument to a number of seconds."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected seconds, such as 10 or 0.5, got {text!r}") from None


def location(text: str) -> str:
    """Convert an argument that is a path or a URL; @FILE gives the file's contents, to keep secrets off the command line."""
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text().strip()
    except (OSError, ValueError) as error:
        words = error.strerror if isinstance(error, OSError) else "it holds no text"
        raise argparse.ArgumentTypeError(f"cannot read {text[1:]}: {words}") from None


def _port(text: str) -> int | None:
    """Convert an argument to the number of a port, or None for "off"."""
    return None if text == "off" else whole_number(text)


_CONVERTERS: dict[Any, Callable[[str], Any]] = {
    int: whole_number,
    float: seconds,
    str: str,
    tuple: str,
    SECRET_LOCATION: location,
    PORT: _port,
}

Options: TypeAlias = Mapping[str, Setting]
"""Options by name of the value that they set: --checkpoint-dir sets checkpoint_dir, --lease sets lease_s."""


def add_options(group: argparse._ArgumentGroup, options: Options, defaults: Mapping[str, Any]) -> None:
    """Add flags to a group of the help."""
    for name, option in options.items():
        flag, default = option.flag_of(name), defaults.get(name)
        if option.kind is bool:
            group.add_argument(flag, dest=name, action="store_true", help=option.help)
            continue
        shown = (
            ""
            if default in ("", None, ()) or "default:" in option.help
            else f" (default: %(default){'g' if option.kind is float else 's'})"
        )
        group.add_argument(
            flag,
            dest=name,
            action="append" if option.kind is tuple else "store",
            type=_CONVERTERS[option.kind],
            choices=option.choices or None,
            default=[] if option.kind is tuple else default,
            metavar=option.metavar,
            help=option.help + shown,
        )


def values(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """The parsed values of these options, by name."""
    return {name: getattr(args, name) for name in names}


SERVER_DEFAULTS = vars(ServerConfig(0, 1))

SECRET_OPTIONS = tuple(name for name, each in settings_of(ServerConfig).items() if each.kind is SECRET_LOCATION)
"""Options of psd-server that may have a secret in them."""


def add_settings(parser: argparse.ArgumentParser, group: str) -> argparse._ArgumentGroup:
    """Add a group of psd-server's options to the help; return the group."""
    added = parser.add_argument_group(group)
    add_options(added, settings_of(ServerConfig, group), SERVER_DEFAULTS)
    return added


CREDENTIAL_OPTIONS: Options = {
    "tls_ca": Setting(
        "FILE", "PEM certificates of the authorities that sign the shards' certificates; turns TLS on (default: PSD_TLS_CA)"
    ),
    "tls_cert": Setting("FILE", "your own PEM certificate, if the shards require one (default: PSD_TLS_CERT)"),
    "tls_key": Setting("FILE", "its PEM key (default: PSD_TLS_KEY)"),
    "token_file": Setting("FILE", "file with your token, if the shards require one (default: PSD_TOKEN_FILE)"),
}
"""Options of psdctl; arguments of Credentials."""
