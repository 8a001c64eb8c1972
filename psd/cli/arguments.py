"""Parts of the three commands' argument parsers: one-line errors, help that keeps its layout, converters, exit statuses, shared
options.

Converters only say "not a number"; what a number may be is the configuration's business (psd/contract/config.py), whose
ConfigError the commands report through `Parser.error`, so that each limit is stated in one place.
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any, NoReturn

import psd
from psd.cli.terminal import show
from psd.contract.config import Limits, ServerConfig
from psd.contract.printable import printable

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2


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
        show(f"{self.prog}: error: {printable(message)} ({self.prog} --help explains)", is_error=True)
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


CHECKPOINT_OPTIONS = ("checkpoint_dir", "checkpoint_secs", "checkpoint_steps", "checkpoint_keep")
"""The options of add_checkpoint_options, as fields of ServerConfig."""


def add_checkpoint_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that psd-server has and psd-run passes on to it."""
    default = ServerConfig(0, 1)
    group = parser.add_argument_group("checkpoints (use the same for all shards; see also psdctl checkpoints)")
    group.add_argument(
        "--checkpoint-dir",
        default=default.checkpoint_dir,
        metavar="URL",
        help="where checkpoints are stored, and looked for at the start: a path, or any URL that fsspec knows (default: no "
        "checkpoints)",
    )
    group.add_argument(
        "--checkpoint-secs",
        type=seconds,
        default=default.checkpoint_secs,
        metavar="S",
        help="take one every S seconds; 0: not by time (default: %(default)g)",
    )
    group.add_argument(
        "--checkpoint-steps",
        type=whole_number,
        default=default.checkpoint_steps,
        metavar="N",
        help="take one every N steps; 0: not by steps (default: %(default)s)",
    )
    group.add_argument(
        "--checkpoint-keep",
        type=whole_number,
        default=default.checkpoint_keep,
        metavar="K",
        help="remove all but the K newest (default: %(default)s)",
    )


def add_rule_option(parser: argparse._ArgumentGroup) -> None:
    """Add the option that psd-server has and psd-run passes on to it."""
    parser.add_argument(
        "--rule",
        dest="rules",
        action="append",
        default=[],
        metavar="MODULE:CLASS",
        help="let jobs name this update rule, a Python class, such as my_package.my_module:MyRule; may be given several times. "
        "The shards run its code",
    )


SECURITY_OPTIONS = ("tls_cert", "tls_key", "tls_client_ca", "token_file", "insecure")
"""The options of add_security_options, as fields of ServerConfig."""


def add_security_options(parser: argparse.ArgumentParser) -> None:
    """Add psd-server's options for access control."""
    group = parser.add_argument_group("security (files are read again when they change)")
    group.add_argument("--tls-cert", default="", metavar="FILE", help="PEM certificate with its chain; turns TLS on")
    group.add_argument("--tls-key", default="", metavar="FILE", help="its PEM key, without a password")
    group.add_argument(
        "--tls-client-ca",
        default="",
        metavar="FILE",
        help="PEM certificates: admit only clients with a certificate signed by one of these",
    )
    group.add_argument(
        "--token-file",
        default="",
        metavar="FILE",
        help="admit only clients with a token; lines: ROLE TOKEN, roles: worker, reader, admin",
    )
    group.add_argument(
        "--insecure", action="store_true", help="listen beyond this machine without TLS, on a network that keeps strangers out"
    )


CREDENTIAL_OPTIONS = {
    "tls_ca": ("PSD_TLS_CA", "PEM certificates of the authorities that sign the shards' certificates; turns TLS on"),
    "tls_cert": ("PSD_TLS_CERT", "your own PEM certificate, if the shards require one"),
    "tls_key": ("PSD_TLS_KEY", "its PEM key"),
    "token_file": ("PSD_TOKEN_FILE", "file with your token, if the shards require one"),
}
"""The options of add_credential_options, as arguments of Credentials: the variable with the default, and the help."""


def add_credential_options(parser: argparse.ArgumentParser) -> None:
    """Add psdctl's options for its own credentials."""
    group = parser.add_argument_group("credentials")
    for name, (variable, text) in CREDENTIAL_OPTIONS.items():
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, default=os.environ.get(variable, ""), metavar="FILE", help=f"{text} (default: {variable})")


LIMIT_OPTIONS = {
    "workers_max": "workers of the job",
    "tensors_max": "tensors of the job",
    "elements_max": "parameters of the job, all shards together",
    "message_bytes_max": "one gRPC message; large declarations may need more",
    "name_bytes_max": "the name of a tensor or a barrier",
    "reads_max": "readers that are fetching parameters at a time; each may keep another version of them in memory",
    "calls": "gRPC calls at a time; each has a thread (default: 4 x --max-workers + 576)",
    "connections": "gRPC connections at a time (default: 2 x --max-workers + 64)",
    "streams_max": "gRPC calls at a time on one connection; 8 for each worker if they share one (default: %(default)s)",
}
"""Fields of Limits, and the help of their flags."""


def add_limit_options(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each of Limits: --max-workers for workers_max."""
    group = parser.add_argument_group("limits (requests beyond them are refused)")
    for name, text in LIMIT_OPTIONS.items():
        group.add_argument(
            f"--max-{name.removesuffix('_max').replace('_', '-')}",
            dest=name,
            type=whole_number,
            default=getattr(Limits(), name),
            metavar="N",
            help=text if "default:" in text else f"{text} (default: %(default)s)",
        )


def checkpoint_options(args: argparse.Namespace) -> dict[str, Any]:
    """Values of the checkpoint options, as arguments of ServerConfig."""
    return {name: getattr(args, name) for name in CHECKPOINT_OPTIONS}


def security_options(args: argparse.Namespace) -> dict[str, Any]:
    """Values of the security options, as arguments of ServerConfig."""
    return {name: getattr(args, name) for name in SECURITY_OPTIONS}


def credential_options(args: argparse.Namespace) -> dict[str, str]:
    """Values of the credential options, as arguments of Credentials."""
    return {name: getattr(args, name) for name in CREDENTIAL_OPTIONS}


def limit_options(args: argparse.Namespace) -> Limits:
    """Values of the limit options; ConfigError if one is out of range."""
    return Limits(**{name: getattr(args, name) for name in LIMIT_OPTIONS})
