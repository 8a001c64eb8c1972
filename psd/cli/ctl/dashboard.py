"""`psdctl dashboard`: reads the flags, and serves the dashboard of a job. psd/watch/dashboard decides what is shown."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from psd.cli.ctl.job_arguments import USAGE, add_where, check
from psd.cli.words import arguments
from psd.cli.words.arguments import EXIT_OK, CommandFailed, Commands, seconds, whole_number
from psd.cli.words.terminal import show
from psd.contract.config import ConfigError, join_address
from psd.contract.tls import TlsFiles
from psd.contract.tokens import parse_token
from psd.contract.watched import read_secret
from psd.watch.asking import Asker
from psd.watch.earlier import EarlierRuns
from psd.watch.sampler import ANSWER_S, Sampler

if TYPE_CHECKING:
    from psd.watch.dashboard.server import DashboardPlace

PORT = 8265
INTERVAL_S = 1.0

_DESCRIPTION = """\
Show a job in a browser: whether it trains, how fast, what limits it and who is slow; curves over time; a
page for each shard and each worker. It looks at the job as psdctl status does, again and again, and takes no
part in it. The page loads nothing from other sites. Needs the extra ui: pip install 'psd[ui]'."""

_EPILOG = """\
examples:
  psdctl dashboard --servers 127.0.0.1:7000,127.0.0.1:7001
  psdctl dashboard --host 0.0.0.0 --https-cert host.crt --https-key host.key

It listens on this machine alone unless --host says otherwise. Beyond it, browsers must show a token: the one
in --access-token-file, or one that is made up and printed. The printed address has it after the #, a part
that browsers do not send; the page exchanges it for a cookie. From afar, ssh -L 8265:127.0.0.1:8265 HOST is
as good, and needs none of this.

exit status:
  0     ended by Ctrl-C or SIGTERM
  1     the port is taken, or the extra is missing
  2     the options are wrong"""


def add_command(commands: Commands) -> None:
    """Add `dashboard` to psdctl."""
    parser = arguments.add_command(commands, "dashboard", USAGE, _DESCRIPTION, _EPILOG)
    where = parser.add_argument_group("where to show it")
    where.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: %(default)s)")
    where.add_argument(
        "--port", type=whole_number, metavar="PORT", help=f"port to listen on (default: {PORT}, or another one if it is taken)"
    )
    where.add_argument("--any-port", action="store_true", help="take another port than --port if that is taken, and say so")
    where.add_argument(
        "--access-token-file", default="", metavar="FILE", help="file with the token that browsers must show, also on loopback"
    )
    where.add_argument("--https-cert", default="", metavar="FILE", help="PEM certificate of the dashboard; turns HTTPS on")
    where.add_argument("--https-key", default="", metavar="FILE", help="its PEM key")
    where.add_argument(
        "--interval", type=seconds, default=INTERVAL_S, metavar="SECONDS", help="between two looks (default: %(default)g)"
    )
    where.add_argument(
        "--log-dir",
        default=os.environ.get("PSD_LOG_DIR", ""),
        metavar="DIR",
        help="psd-run's --log-dir: its earlier runs can be drawn, too (default: PSD_LOG_DIR)",
    )
    add_where(parser, ANSWER_S, "how long a look waits for each shard")
    parser.finish(_run)


def _run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C; returns the exit status."""
    check(args)
    args.host = args.host.strip("[]")
    try:
        from psd.watch.dashboard import server
    except ModuleNotFoundError as error:
        raise CommandFailed(f"{error.name} is not installed: pip install 'psd[ui]'") from None
    try:
        place = _place(args)
    except OSError as error:
        raise CommandFailed(f"--host, --port: cannot listen on {args.host}: {error.strerror or error}") from error

    def say() -> None:
        for line in announcement(args.host, place, PORT if args.port is None else args.port):
            show(line)

    with Asker(args.servers, args.credentials) as asker:
        earlier = EarlierRuns(Path(args.log_dir)) if args.log_dir else None
        asyncio.run(server.serve(Sampler(asker, answer_s=args.timeout), place, args.interval, say, earlier))
    return EXIT_OK


def _place(args: argparse.Namespace) -> DashboardPlace:
    """The place at which to listen, with the token to ask for and TLS.

    Raises:
        ConfigError: an option is wrong. OSError: listening at the address fails.
    """
    from psd.watch.dashboard import server
    from psd.watch.dashboard.admission import is_loopback

    if args.port is not None and not 0 <= args.port <= 65535:
        raise ConfigError(f"--port: expected 0 to 65535, got {args.port}")
    if not 0.1 <= args.interval <= 3600:
        raise ConfigError(f"--interval: expected 0.1 to 3600 seconds, got {args.interval:g}")
    if bool(args.https_cert) != bool(args.https_key):
        raise ConfigError("--https-cert, --https-key: expected both or none")
    token = None
    if args.access_token_file:
        where = "--access-token-file"
        path = args.access_token_file
        token = parse_token(read_secret(path, where).decode("ascii", "replace"), f"{where}: {Path(path)}")
    elif not is_loopback(args.host):
        token = secrets.token_urlsafe(24)
    tls = None
    if args.https_cert:
        names = ("", "--https-cert", "--https-key")
        tls = TlsFiles("", args.https_cert, args.https_key, is_server=True, names=names).load()[1]
    port = PORT if args.port is None else args.port
    listener = server.listen(args.host, port, is_firm=args.port is not None and not args.any_port)
    return server.DashboardPlace(listener, token, is_token_new=token is not None and not args.access_token_file, tls=tls)


def announcement(host: str, place: DashboardPlace, wanted: int) -> list[str]:
    """Lines that tell the user the dashboard's address, and how to log in. wanted: the port that was to be used; 0: any."""
    from psd.watch.dashboard.admission import is_loopback

    name = socket.gethostname() if host in ("", "0.0.0.0", "::") else host  # noqa: S104
    port = place.listener.getsockname()[1]
    address = join_address(name, port)
    fragment = f"#token={place.token}" if place.is_token_new else ""
    taken = f" (port {wanted} is not free)" if wanted not in (0, port) else ""
    lines = [f"dashboard: {'http' if place.tls is None else 'https'}://{address}/{fragment}{taken}"]
    if place.tls is None and not is_loopback(host):
        lines.append("dashboard: without --https-cert the token and what the page shows can be read on the network")
    return lines
