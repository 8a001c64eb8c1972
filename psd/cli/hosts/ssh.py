"""psd-run --hosts a:4,b:4: starts a psd-run on each host, over ssh, and leads them. The job does not run on this host, unless
it is one of them.

    ssh HOST exec PYTHON -m psd.cli.agent        its two pipes are the connection; psd/cli/agent.py is the other side

The command, its directory and the variables of --env are sent over the connection, not as arguments, which everybody on that
host could read. ssh asks no questions (BatchMode): hosts must be known, and keys must be present or in an agent. When psd-run
ends, for any reason, the connection ends, and with it the processes on that host.

Knows ssh; psd/cli/hosts/leader.py handles the messages.
"""

from __future__ import annotations

import contextlib
import functools
import selectors
import shlex
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from psd.cli.hosts.launcher import Launcher
from psd.cli.hosts.leader import Gathering, Leader, Peer
from psd.cli.hosts.link import NodeLink
from psd.cli.job.plan import HostPlan
from psd.contract.config import ConfigError
from psd.contract.launching import python_command

_OPTIONS = ("-T", "-oBatchMode=yes", "-oConnectTimeout=20", "-oServerAliveInterval=5", "-oServerAliveCountMax=4")

_END_S = 5.0
"""Seconds for ssh to end, once its pipes are closed,"""

_CONNECTING_END_S = 1.0
"""and for one that may still be connecting, which does not look at its pipes."""


def parse_hosts(text: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Parse --hosts: hosts, in the form that ssh takes, and the number of workers on each.

    Raises:
        ConfigError: the value is not of the form HOST:WORKERS,...
    """
    hosts, workers = [], []
    for part in text.split(","):
        host, _, count = part.strip().rpartition(":")
        if not host or host.startswith("-") or any(c.isspace() for c in host) or not count.isdigit():
            raise ConfigError(f"--hosts: expected HOST:WORKERS,HOST:WORKERS, such as a:4,b:4, got {part!r}")
        hosts.append(host)
        workers.append(int(count))
    if len(set(hosts)) != len(hosts):
        raise ConfigError(f"--hosts: a host is given twice in {text!r}")
    return tuple(hosts), tuple(workers)


def run(plan: HostPlan, replan: Callable[[str, int], HostPlan], argv: Sequence[str]) -> int:
    """Run the job over ssh; returns psd-run's exit status.

    Args:
        plan: plan of the job; none of its nodes is here. replan: makes it again, for a run id and a node.
        argv: arguments of psd-run, which are also sent to the hosts.
    """
    meeting = plan.meeting
    assert meeting is not None
    processes: list[subprocess.Popen[bytes]] = []

    def meet(selector: selectors.BaseSelector, leader: Leader) -> Gathering:
        gathering = Gathering(plan, "", lambda run_id: replan(run_id, -1), selector, leader)
        for number, host in enumerate(meeting.hosts):
            process = _start(shlex.split(meeting.ssh), host, meeting.remote_python)
            processes.append(process)
            assert process.stdin is not None
            assert process.stdout is not None
            link = NodeLink(process.stdout.fileno(), process.stdin.fileno(), has_preamble=True)
            peer = Peer(link, functools.partial(_end, process), number, origin=host)
            peer.link.send({"argv": list(argv), "node": number, "directory": str(Path.cwd()), "environ": dict(meeting.environ)})
            gathering.add(peer)
        gathering.keep_in_touch()
        return gathering

    try:
        return Launcher(plan, meet).run()
    finally:
        for process in processes:
            _end(process, True)


def _start(ssh: Sequence[str], host: str, remote_python: str) -> subprocess.Popen[bytes]:
    python = remote_python or python_command("psd.cli.agent")[0]
    command = shlex.join(["exec", python, *python_command("psd.cli.agent")[1:]])
    try:
        # A session of its own: Ctrl-C is for psd-run, which ends the job in order, over these connections.
        return subprocess.Popen(  # noqa: S603 - what the user asked for
            [*ssh, *_OPTIONS, "--", host, command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigError(f"--ssh: cannot start {ssh[0]}: {error.strerror or error}") from error


def _end(process: subprocess.Popen[bytes], has_joined: bool) -> str | None:
    """Close the connection, which ends all processes on that host. Return how ssh has ended; None: it was killed."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    try:
        process.wait(_END_S if has_joined else _CONNECTING_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None
    return f"ssh has ended with status {process.returncode}"
