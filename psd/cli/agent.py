"""The side of psd-run that runs on a host reached over ssh: receives psd-run's command line, and takes part in the job.

Standard input and output are the connection, so nothing else may be printed from now on. The login shell's output comes before
the first message, and may end in the middle of a line.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence

from psd.cli import run
from psd.cli.hosts.follower import Follower
from psd.cli.hosts.link import Message, NodeLink
from psd.cli.processes.wakeup_pipe import JOB_SIGNALS, Wakeups
from psd.cli.words.arguments import EXIT_FAILURE
from psd.cli.words.terminal import prepare_streams, show


def main() -> int:
    """Take part in a job; returns its exit status."""
    prepare_streams()
    os.write(1, b"\n")
    link = NodeLink(os.dup(0), os.dup(1))
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)
    with Wakeups(JOB_SIGNALS) as wakeups:
        messages = link.wait()
        if not messages:
            return EXIT_FAILURE
        host = os.environ.get("SSH_CONNECTION", "").split()
        if len(host) != 4:
            show("psd-run: error: this is for psd-run --hosts alone, which starts it over ssh", is_error=True)
            return EXIT_FAILURE
        return _take_part(messages, link, host[2], wakeups)


def _take_part(messages: Sequence[Message], link: NodeLink, address: str, wakeups: Wakeups) -> int:
    asked, *more = messages
    try:
        os.chdir(asked["directory"])
    except OSError as error:
        show(f"psd-run: error: there is no directory {asked['directory']} here: {error.strerror}", is_error=True)
        return EXIT_FAILURE
    os.environ.update(asked["environ"])
    argv = asked["argv"]
    plan = run.plan_again(argv, None, asked["node"])
    return Follower(plan, functools.partial(run.plan_again, argv), link, address).run(wakeups, more)


if __name__ == "__main__":
    sys.exit(main())
