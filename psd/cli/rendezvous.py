"""psd-run --nnodes: the same command on every host, of which one leads; how they find each other at --rendezvous HOST:PORT.

The host that has the address leads: whoever can listen there is node 0, unless --node-rank says otherwise. All others dial, and
go on dialling while it is not there yet.
"""

from __future__ import annotations

import errno
import selectors
import signal
import socket
import time
from collections.abc import Callable

from psd.cli.arguments import exit_status
from psd.cli.follower import Follower
from psd.cli.gathering import GATHER_S, Gathering, Leader
from psd.cli.launcher import Launcher
from psd.cli.node_link import NodeLink
from psd.cli.plan import Plan
from psd.cli.wakeups import Wakeups
from psd.contract.config import ConfigError, parse_address

_DIAL_S = 0.2
"""Seconds between two attempts."""

_DIAL_TIMEOUT_S = 5.0

Replan = Callable[[str, int], Plan]


def run(plan: Plan, replan: Replan) -> int:
    """Lead the job, or take part in it; returns psd-run's exit status.

    Args:
        plan: of the job, as this host was asked for it. replan: makes it again, for a run id and a node.

    Raises:
        ConfigError: this host cannot listen there, or nobody leads there.
    """
    assert plan.meeting is not None
    host, port = parse_address(plan.meeting.rendezvous, "--rendezvous")
    listener = _listen(host.strip("[]"), port, must=plan.meeting.node == 0) if plan.meeting.node in (None, 0) else None
    if listener is None:
        return _follow(plan, replan, host.strip("[]"), port)

    def meet(selector: selectors.BaseSelector, leader: Leader) -> Gathering:
        address = listener.getsockname()[0]
        gathering = Gathering(plan, address, lambda run_id: replan(run_id, 0), selector, leader)
        gathering.listen(listener)
        return gathering

    with listener:
        return Launcher(plan, meet).run()


def _listen(host: str, port: int, *, must: bool) -> socket.socket | None:
    """A socket at the address; None if another host, or another process of this one, is to lead."""
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
        if not must and error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            return None
        raise ConfigError(f"--rendezvous: node 0 cannot listen at {host}:{port}: {error.strerror or error}") from error
    return listener


def _follow(plan: Plan, replan: Replan, host: str, port: int) -> int:
    give_up_at = time.monotonic() + GATHER_S
    with Wakeups([signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP]) as wakeups:
        while True:
            try:
                connection = socket.create_connection((host, port), _DIAL_TIMEOUT_S)
                break
            except OSError as error:
                if time.monotonic() >= give_up_at:
                    raise ConfigError(f"--rendezvous: nobody leads at {host}:{port}: {error.strerror or error}") from error
            signums = wakeups.wait(_DIAL_S)
            if signums:
                return exit_status(signums[0])
        with connection:
            link = NodeLink(connection.fileno(), connection.fileno())
            return Follower(plan, replan, link, connection.getsockname()[0]).run(wakeups)
