"""The processes of a job on this machine: starts and signals them, reports their output and deaths, and leaves none behind.

Invariants: the watchdog knows every child from its start to its end; a child's output is read to its end before its death is
reported; after `clear_away` no process of the run is left on this machine, and no state directory that is not to be kept.
Decides nothing: it does what it is told, and reports what happens.
"""

from __future__ import annotations

import contextlib
import functools
import selectors
import signal
from collections.abc import Callable, Sequence

from psd.cli.job.actions import Name
from psd.cli.job.plan import HostPlan
from psd.cli.processes import descriptor_limit
from psd.cli.processes.child import Child
from psd.cli.processes.left_over import end_processes
from psd.cli.processes.state_directories import StateDirectory
from psd.cli.processes.watchdog import Watchdog
from psd.cli.words.arguments import EXIT_CHECKPOINT, EXIT_OK, EXIT_STATE_LOST
from psd.contract.config import join_address

_WATCHDOGS_MAX = 4
"""Largest number of watchdogs started in one job. If more are killed, it is on purpose."""

_SWEEP_GRACE_S = 2.0
"""Seconds for processes that workers have left behind, once the workers themselves are gone."""

DASHBOARD = Name("dashboard", 0)

DESCRIPTORS_BESIDE = 64
"""Open files of psd-run beside those of its processes."""

CANNOT_START = 126
"""Status of a process that could not be started, as a shell has it."""


class HostProcesses:
    """The part of a job that runs on this machine.

    Args:
        plan: plan of the job, for this node.
        host: address at which the shards listen.
        selector: selector of the caller's loop. The data of what is registered here is a function to call when it is ready.
        on_output: called with a process and the bytes that it has written. on_exit: called with a process that has ended, and
            its status, negative for a signal. say: called with messages for the user.

    Raises:
        ConfigError: the state directory cannot be used.
    """

    def __init__(
        self,
        plan: HostPlan,
        host: str,
        selector: selectors.BaseSelector,
        *,
        on_output: Callable[[Name, bytes], None],
        on_exit: Callable[[Name, int], None],
        say: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._host = host
        self._selector = selector
        self._on_output, self._on_exit, self._say = on_output, on_exit, say
        self._children: dict[Name, Child] = {}
        self._unborn: list[Name] = []
        self._ends: dict[Name, int] = {}  # of shards: their statuses
        self._watchdog: Watchdog | None = None
        self._watchdogs_left = _WATCHDOGS_MAX
        self._state = StateDirectory(
            plan.state_dirs[plan.node],
            plan.run_id,
            plan.places.shards,
            is_private=plan.is_state_private,
            urls=plan.urls,
        )
        descriptor_limit.allow(len(plan.places.names(plan.node)) + DESCRIPTORS_BESIDE)
        self._start_watchdog()

    def start(self, name: Name, addresses: Sequence[str]) -> None:
        """Start a process.

        Args:
            name: name of the process.
            addresses: for a worker or the dashboard, the addresses of all shards; for a restarted shard, its own address.
        """
        plan = self._plan
        if name.kind == "shard":
            listen = addresses[0] if addresses else join_address(self._host, 0)
            command = plan.shard_command(name.number, listen, self._state.shard(name.number))
            environ = plan.shard_environ
        elif name == DASHBOARD:
            command, environ = plan.dashboard_command, plan.worker_environ(0, addresses)
        else:
            command, environ = plan.worker_command, plan.worker_environ(name.number, addresses)
        try:
            child = Child(command, environ, is_told=name.kind == "shard")
        except OSError as error:
            self._say(f"cannot start {name}: {error}")
            self._unborn.append(name)
            signal.raise_signal(signal.SIGCHLD)  # `reap` reports it like any death: the caller expects none in `start`
            return
        self._children[name] = child
        self._selector.register(child, selectors.EVENT_READ, functools.partial(self._read_output, name))
        if self._watchdog is not None:
            self._watchdog.add(child.pid)

    def signal(self, name: Name, signum: int) -> None:
        """Signal the whole group of a process; do nothing if it has ended."""
        if name in self._children:
            self._children[name].signal(signum)

    def tell(self, name: Name, line: str) -> None:
        """Write a line to a shard's standard input; do nothing if it has ended."""
        if name in self._children:
            self._children[name].tell(line)

    @property
    def living(self) -> list[Name]:
        """The processes that have not ended, shards first."""
        return sorted(self._children)

    def reap(self) -> None:
        """Report processes that have ended or could not be started. Call this after SIGCHLD."""
        unborn, self._unborn = self._unborn, []
        for name in unborn:
            self._on_exit(name, CANNOT_START)
        for name in self.living:  # shards first: a worker's failure may be the consequence of theirs
            if name in self._children and self._children[name].has_ended():
                self._bury(name)
        if self._watchdog is not None and self._watchdog.has_died():
            self._replace_watchdog()

    def clear_away(self, *, keep: bool) -> None:
        """End all processes, even if psd-run has failed; remove the state. keep: leave it, if a later run can continue."""
        for child in self._children.values():
            child.signal(signal.SIGKILL)
        for name, child in self._children.items():
            self._ends[name] = child.close()
        self._children.clear()
        count = end_processes((), self._plan.run_id, _SWEEP_GRACE_S, self._plan.node_mark)
        if count:
            self._say(f"ended {count} processes that the workers had left behind")
        if self._state.close(keep=keep):
            self._say(f"the parameters are kept in {self._state.path}{self._use_of_state()}")
        if self._watchdog is not None:
            self._watchdog.close()

    def _use_of_state(self) -> str:
        """Words that say how the parameters left by the shards can be used."""
        ends = {name: status for name, status in sorted(self._ends.items()) if name.kind == "shard"}
        if EXIT_STATE_LOST in ends.values():
            return ", but cannot be continued with, as a round of exact aggregation was lost; remove them before the next job"
        killed = ", ".join(str(name) for name, status in ends.items() if status not in (EXIT_OK, EXIT_CHECKPOINT))
        found = "; psd-run with this --state-dir continues with them"
        if not killed:
            return found
        instead = "with the newest checkpoint, if there is one" if self._plan.shards.checkpoint_dir else "not at all"
        lost = f"a round of exact aggregation was lost with {killed}, which did not end in order"
        return f"{found}, unless {lost}: then {instead}"

    def _read_output(self, name: Name) -> None:
        child = self._children.get(name)
        if child is None or (data := child.read()) is None:
            return
        if data:
            self._on_output(name, data)
        else:  # it has closed its output; that it has ended is another event
            self._selector.unregister(child)

    def _bury(self, name: Name) -> None:
        child = self._children[name]
        self._on_output(name, child.read_rest())
        with contextlib.suppress(KeyError):
            self._selector.unregister(child)
        del self._children[name]
        returncode = self._ends[name] = child.close()
        if self._watchdog is not None:
            self._watchdog.remove(child.pid)
        self._on_exit(name, returncode)

    def _start_watchdog(self) -> None:
        self._watchdogs_left -= 1
        try:
            self._watchdog = Watchdog(
                self._plan.run_id,
                self._state.lock_fd,
                node_mark=self._plan.node_mark,
                groups=[child.pid for child in self._children.values()],
                paths=[self._state.path] if self._state.is_private else self._state.url_files,
            )
        except OSError as error:
            self._say(f"cannot start the watchdog ({error}); if psd-run is killed, its processes may be left behind")

    def _replace_watchdog(self) -> None:
        assert self._watchdog is not None
        self._watchdog.close()
        self._watchdog = None
        if self._watchdogs_left:
            self._start_watchdog()
            self._say("the watchdog, which ends the job if psd-run is killed, has died; started another")
        else:
            self._say(
                "the watchdog has died again; continuing without one: if psd-run is killed, its processes may be left behind"
            )
