"""Options shared by the psdctl commands that ask shards: which job, how long to wait, and credentials."""

from __future__ import annotations

import argparse
import os

from psd.cli.ctl.job_choice import chosen
from psd.cli.words.arguments import CREDENTIAL_OPTIONS, Parser, add_options, seconds
from psd.contract.config import ConfigError, parse_servers
from psd.contract.credentials import Credentials
from psd.contract.job_records import JobRecord

USAGE = "[--job NAME | --servers HOST:PORT,...] [options]"
"""Usage of a command that has no other arguments."""

TIMEOUT_MAX_S = 3_600.0


def add_where(parser: Parser, timeout_s: float, timeout_help: str) -> None:
    """Add the options. After parsing, call `check`."""
    where = parser.add_argument_group("which job")
    where.add_argument(
        "--servers",
        metavar="HOST:PORT,...",
        help="addresses of the shards, in their order (default: PSD_SERVERS, or those of --job)",
    )
    add_job(where)
    credentials = parser.add_argument_group("credentials (of a job of this machine: those that its workers have)")
    add_options(credentials, CREDENTIAL_OPTIONS, {})
    add_timeout(where, timeout_s, timeout_help)


def add_job(where: argparse._ArgumentGroup) -> None:
    """Add --job."""
    where.add_argument(
        "--job",
        metavar="NAME",
        help="one of your jobs on this machine, by its name or the beginning of that; psdctl jobs lists them (default: the "
        "only one; if there are several, you are asked)",
    )


def add_timeout(where: argparse._ArgumentGroup, timeout_s: float, timeout_help: str) -> None:
    """Add --timeout."""
    where.add_argument(
        "--timeout", type=seconds, default=timeout_s, metavar="SECONDS", help=f"{timeout_help} (default: %(default)g)"
    )


def check(args: argparse.Namespace) -> None:
    """Replace parsed flags by checked values: `servers`, a tuple, and `credentials`; add `files`, from which these are, by
    argument of Credentials, and `record`, that of a job of this machine, or None. A wrong flag ends the process."""
    parser: Parser = args.parser
    check_seconds(parser, "timeout", args.timeout)
    try:
        args.record = job = _job(args)
        args.servers = parse_servers(args.servers) if job is None else job.servers
        given = {name: getattr(args, name) for name in CREDENTIAL_OPTIONS}
        known = _from_environment() if job is None else files_of(job)
        args.files = {name: known[name] if file is None else file for name, file in given.items()}
        args.credentials = Credentials(**args.files)
    except ConfigError as error:
        parser.error(f"--{str(error).replace('_', '-', 1) if str(error).startswith(('tls_', 'token_')) else error}")


def _job(args: argparse.Namespace) -> JobRecord | None:
    """The job of this machine that is meant; None if there are addresses, which are then in `servers`."""
    if args.job is not None and args.servers is not None:
        raise ConfigError("job: not beside --servers, which says which job")
    if args.servers is None and args.job is None:
        args.servers = os.environ.get("PSD_SERVERS")
    if args.servers is not None:
        return None
    return chosen(args.parser.prog, args.job, "servers: expected the shards' addresses, here or in PSD_SERVERS")


def files_of(job: JobRecord) -> dict[str, str]:
    """The files of certificates and tokens for a job of this machine, by argument of Credentials.

    Those in the environment are for other shards: psd-run does not give them to its workers, either.
    """
    return {name: getattr(job, name) for name in CREDENTIAL_OPTIONS}


def _from_environment() -> dict[str, str]:
    return {name: os.environ.get(f"PSD_{name.upper()}", "") for name in CREDENTIAL_OPTIONS}


def check_seconds(parser: Parser, name: str, value: float | None) -> None:
    """End the process if a time is given and is not one that commands may wait."""
    if value is not None and not 0 < value <= TIMEOUT_MAX_S:
        parser.error(f"--{name}: expected more than 0 and at most {TIMEOUT_MAX_S:g} seconds, got {value:g}")
