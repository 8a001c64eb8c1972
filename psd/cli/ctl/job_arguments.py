"""Options shared by the psdctl commands that ask shards: their addresses, how long to wait, and credentials."""

from __future__ import annotations

import argparse
import os

from psd.cli.words.arguments import CREDENTIAL_OPTIONS, Parser, add_credential_options, seconds, values
from psd.contract.config import ConfigError, parse_servers
from psd.contract.credentials import Credentials

TIMEOUT_MAX_S = 3_600.0


def add_where(parser: Parser, timeout_s: float, timeout_help: str) -> None:
    """Add the options. After parsing, call `check`."""
    where = parser.add_argument_group("which job")
    where.add_argument(
        "--servers",
        default=os.environ.get("PSD_SERVERS"),
        metavar="HOST:PORT,...",
        help="addresses of the shards, in their order (default: PSD_SERVERS)",
    )
    add_credential_options(parser)
    where.add_argument(
        "--timeout", type=seconds, default=timeout_s, metavar="SECONDS", help=f"{timeout_help} (default: %(default)g)"
    )


def check(args: argparse.Namespace) -> None:
    """Replace parsed flags by checked values: `servers`, a tuple, and `credentials`. A wrong flag ends the process."""
    parser: Parser = args.parser
    if args.servers is None:
        parser.error("--servers: expected the shards' addresses, here or in PSD_SERVERS; psd-run prints them when it starts")
    try:
        args.servers = parse_servers(args.servers)
        args.credentials = Credentials(**values(args, CREDENTIAL_OPTIONS))
    except ConfigError as error:
        parser.error(f"--{str(error).replace('_', '-', 1) if str(error).startswith(('tls_', 'token_')) else error}")
    check_seconds(parser, "timeout", args.timeout)


def check_seconds(parser: Parser, name: str, value: float | None) -> None:
    """End the process if a time is given and is not one that commands may wait."""
    if value is not None and not 0 < value <= TIMEOUT_MAX_S:
        parser.error(f"--{name}: expected more than 0 and at most {TIMEOUT_MAX_S:g} seconds, got {value:g}")
