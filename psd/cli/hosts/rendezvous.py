"""psd-run --nnodes: the same command on every host. The hosts meet at --rendezvous HOST:PORT, and one of them leads.

The host that can listen at the address leads, as node 0, unless --node-rank says otherwise. All others connect to it, and retry
until it is there.

Their connections are as safe as those to the shards: they use TLS with --tls-cert, and accept only hosts with the same
--token-file (psd/cli/hosts/proof.py).
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import ssl
import time
from collections.abc import Callable

from psd.cli.hosts.follower import Follower
from psd.cli.hosts.launcher import Launcher
from psd.cli.hosts.leader import GATHER_S, MISSING_SAID_S, Gathering, Leader
from psd.cli.hosts.link import NodeLink
from psd.cli.job.plan import HostPlan
from psd.cli.processes.wakeup_pipe import JOB_SIGNALS, Wakeups
from psd.cli.words.arguments import exit_status
from psd.cli.words.terminal import show
from psd.contract.config import ConfigError, join_address, parse_address

_DIAL_S = 0.2
"""Seconds between two attempts."""

_DIAL_TIMEOUT_S = 5.0

_HINTS = {
    errno.EADDRINUSE: "; has another host --node-rank 0, too?",
    errno.EADDRNOTAVAIL: "; is it an address of this host?",
}
"""Errors of listening that make a host a follower; with hints for a host that was told to lead."""

Replan = Callable[[str, int], HostPlan]


def run(plan: HostPlan, replan: Replan) -> int:
    """Lead the job, or take part in it; returns psd-run's exit status.

    Args:
        plan: the plan from this host's command line. replan: makes it again, for a run id and a node.

    Raises:
        ConfigError: this host cannot listen at the address, or no leader is found there.
    """
    assert plan.meeting is not None
    host, port = parse_address(plan.meeting.rendezvous, "--rendezvous")
    listener = _listen(host.strip("[]"), port, must=plan.meeting.node == 0) if plan.meeting.node in (None, 0) else None
    if listener is None:
        return _follow(plan, replan, host.strip("[]"), port)

    tls = plan.meeting.tls.leader.load()[1] if plan.meeting.tls is not None else None

    def meet(selector: selectors.BaseSelector, leader: Leader) -> Gathering:
        address = listener.getsockname()[0]
        gathering = Gathering(plan, address, lambda run_id: replan(run_id, 0), selector, leader)
        gathering.listen(listener, tls)
        gathering.keep_in_touch()
        return gathering

    with listener:
        return Launcher(plan, meet).run()


def _listen(host: str, port: int, *, must: bool) -> socket.socket | None:
    """A socket that listens at the address; None if another host or process is the leader."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--rendezvous: cannot look up {host}: {error.strerror or error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(64)
    except OSError as error:
        listener.close()
        if not must and error.errno in _HINTS:
            return None
        hint = _HINTS.get(error.errno or 0, "")
        where = join_address(host, port)
        raise ConfigError(f"--rendezvous: node 0 cannot listen at {where}: {error.strerror or error}{hint}") from error
    return listener


def _follow(plan: HostPlan, replan: Replan, host: str, port: int) -> int:
    meeting = plan.meeting
    assert meeting is not None
    tls = meeting.tls.node.load()[1] if meeting.tls is not None else None
    give_up_at = time.monotonic() + GATHER_S
    say_at = time.monotonic() + MISSING_SAID_S
    with Wakeups(JOB_SIGNALS) as wakeups:
        while True:
            try:
                connection = _dial(host, port, tls)
                break
            except OSError as error:
                why, now = error.strerror or str(error), time.monotonic()
            if now >= give_up_at:
                raise ConfigError(f"--rendezvous: nobody leads at {meeting.rendezvous}: {why}")
            if now >= say_at:
                say_at = now + MISSING_SAID_S
                show(f"[psd-run] nobody leads at {meeting.rendezvous} yet: {why}", is_error=True)
            signums = wakeups.wait(_DIAL_S)
            if signums:
                return exit_status(signums[0])
        with connection:
            secured = connection if isinstance(connection, ssl.SSLSocket) else None
            link = NodeLink(connection.fileno(), connection.fileno(), secured)
            return Follower(plan, replan, link, connection.getsockname()[0]).run(wakeups)


def _dial(host: str, port: int, tls: ssl.SSLContext | None) -> socket.socket:
    """Connect to node 0. Raises ConfigError if that can never succeed, OSError if it may succeed later."""
    connection = socket.create_connection((host, port), _DIAL_TIMEOUT_S)
    if connection.getsockname() == connection.getpeername():  # TCP lets a socket dial itself, where nobody listens
        connection.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    if tls is None:
        return connection
    where = f"--rendezvous: {join_address(host, port)}"
    try:
        return tls.wrap_socket(connection, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(f"{where}: the certificate of node 0 is refused: {error.verify_message}") from None
    except (ssl.SSLError, ConnectionError) as error:
        why = getattr(error, "reason", None) or error.strerror or str(error)
        raise ConfigError(
            f"{where} does not speak TLS with this host ({why}); --tls-cert and --tls-key are for all hosts or for none"
        ) from None
