"""Finds and ends the processes of one run, however they were started: by process group, and by PSD_RUN_ID in the environment.

psd-run gives every child its own process group, so a group contains a shard, or a worker and its child processes. These may
have left the group (a daemon, another session), but they still have the run's id in their environment, where Linux shows it. On
other systems, and for a process that has cleared its environment, only the groups count.

psutil is not used: it would read the same two files of /proc for the one loop here, as a compiled dependency of every install.
A control group would contain all processes, but needs rights that users often lack.

Used by psd-run at the end of a job and by its watchdog. Knows nothing of shards and workers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterator
from pathlib import Path

_PROC = Path("/proc")
_POLL_S = 0.05  # these are not our children, so their end has to be looked for


def end_processes(groups: Collection[int], run_id: str, grace_s: float, node_mark: str = "") -> int:
    """End all processes of these groups and of this run: SIGTERM, after `grace_s` SIGKILL. Returns how many there were.

    With a node's mark, end only that node's processes, because another node of the run may be on this machine.

    Takes `grace_s` and a moment at most. Looks repeatedly until no process is left, because one may have just started another.
    """
    seen: set[int] = set()
    terminated: set[int] = set()
    kill_at = time.monotonic() + grace_s
    give_up_at = kill_at + 2.0
    while True:
        found = set(_members(groups, run_id, node_mark))
        seen |= found
        now = time.monotonic()
        if not found or now >= give_up_at:
            return len(seen)
        signum = signal.SIGTERM if now < kill_at else signal.SIGKILL
        for pid in found - terminated if signum == signal.SIGTERM else found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signum)
        terminated |= found
        time.sleep(_POLL_S)


def _members(groups: Collection[int], run_id: str, node_mark: str) -> Iterator[int]:
    """Pids of the living processes of the groups and of the run, except this process."""
    if not (_PROC / "self" / "stat").exists():
        yield from _leaders(groups)
        return
    ours = os.getpid()
    wanted = {f"PSD_RUN_ID={run_id}".encode(), *([f"PSD_NODE={node_mark}".encode()] if node_mark else [])}
    for entry in _PROC.iterdir():
        if not entry.name.isdigit() or int(entry.name) == ours:
            continue
        try:
            # pid (name) state parent group ...; the name may hold anything, also parentheses.
            state, _parent, group = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:3]
            if state in b"ZX":  # ended; only its parent's wait is missing
                continue
            if int(group) in groups or wanted <= set((entry / "environ").read_bytes().split(b"\0")):
                yield int(entry.name)
        except (OSError, ValueError):  # has ended meanwhile, or is somebody else's
            continue


def _leaders(groups: Collection[int]) -> Iterator[int]:
    """Groups that still have a member, as negative pids (kill then signals the group); for systems without /proc."""
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, 0)
            yield -group
