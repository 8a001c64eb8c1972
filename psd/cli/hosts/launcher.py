"""A job on machines: one thread, with one selector over the children's output and deaths, other hosts, and signals.

Only the actions know where a process runs: on this machine (psd/cli/processes/host_processes.py) or on another
(psd/cli/hosts/leader.py). Decides nothing about the job itself.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import selectors
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence

from typing_extensions import override

from psd.cli.hosts.leader import Gathering
from psd.cli.job.actions import Name
from psd.cli.job.conductor import Conductor
from psd.cli.job.plan import HostPlan
from psd.cli.processes import descriptor_limit
from psd.cli.processes.display import Display, is_terminal
from psd.cli.processes.host_processes import DASHBOARD, DESCRIPTORS_BESIDE, HostProcesses
from psd.cli.processes.log_files import LogFiles
from psd.cli.processes.output import Lines, Prefixes
from psd.cli.processes.state_directories import shard_path
from psd.cli.processes.wakeup_pipe import JOB_SIGNALS, Wakeups
from psd.cli.words.arguments import EXIT_FAILURE, EXIT_OK, exit_status
from psd.cli.words.terminal import NO_ROOM, WholeWriter, discard
from psd.contract.config import ConfigError
from psd.contract.launching import DASHBOARD_PATTERN, STORED_PATTERN

_LOOPBACK = "127.0.0.1"

CHECKPOINTS_TOLD = 16
"""Number of last checkpoints to remember: a shard may report one after another shard has reported the next."""

Meet = Callable[[selectors.BaseSelector, "Launcher"], Gathering]
"""Starts to gather the other hosts; the launcher's methods are called for their events."""


class Launcher(Conductor):
    """One job, from its first process to its last.

    Args:
        plan: plan of the job.
        meet: gathers the other hosts; None: this machine runs all processes.
    """

    def __init__(self, plan: HostPlan, meet: Meet | None = None) -> None:
        places = plan.places
        state_dirs = [str(shard_path(plan.state_dirs[index % places.nodes], index)) for index in range(places.shards)]
        super().__init__(plan, state_dirs, is_continued=plan.kept_run_id is not None)
        self._plan: HostPlan = plan
        self._meet = meet
        self._selector = selectors.DefaultSelector()
        self._processes: HostProcesses | None = None
        self._gathering: Gathering | None = None
        self._lines: dict[Name, Lines] = {}
        names = [str(name) for name in sorted(name for node in range(places.nodes) for name in places.names(node))]
        descriptor_limit.allow(2 * len(names) + DESCRIPTORS_BESIDE)  # the output of each process, and its log file
        self._wakeups: Wakeups | None = None
        output, self._errors = (WholeWriter(stream, self._is_told_to_end) for stream in (sys.stdout, sys.stderr))
        colour = not os.environ.get("NO_COLOR")
        self._prefixes = Prefixes(["psd-run", *names], colour=colour and is_terminal(output))
        self._own_prefixes = Prefixes(["psd-run", *names], colour=colour and is_terminal(self._errors))
        self._display = Display(output, self._rows)
        self._reader_is_gone = self._has_no_room = False
        self._own_signals = self._signals = 0
        self._checkpoints: deque[str] = deque(maxlen=CHECKPOINTS_TOLD)
        self._log_files: LogFiles | None = None

    def run(self) -> int:
        """Run the job to its end; returns psd-run's exit status."""
        with Wakeups(JOB_SIGNALS) as self._wakeups:
            self._selector.register(self._wakeups, selectors.EVENT_READ, functools.partial(self._read_signals, self._wakeups))
            try:
                self._begin()
                status = self._conduct()
            except ConfigError as error:
                self.say(f"error: {error}")
                return EXIT_FAILURE
            finally:
                self._clear_away()
                self._selector.close()
        if self._reader_is_gone:
            return exit_status(signal.SIGPIPE)
        self._sum_up(status)
        if self._log_files is not None:
            self._log_files.close()
        return status

    def _begin(self) -> None:
        """Start the job, or wait for other hosts first. Raises ConfigError if a directory cannot be used."""
        self._log_files = LogFiles(self._plan.log_dir) if self._plan.log_dir is not None else None
        if self._meet is not None:
            self._gathering = self._meet(self._selector, self)
        else:
            self.on_nodes_ready(self._plan, _LOOPBACK)

    # -- events --

    @override
    def _wait(self) -> None:
        times = [at for lines in self._lines.values() if (at := lines.quiet_at()) is not None]
        gathering = self._gathering
        for at in (self._policy.deadline, self._display.due, gathering.due if gathering is not None else None):
            times += [at] if at is not None else []
        timeout = max(0.0, min(times) - time.monotonic()) if times else None
        for key, _ in self._selector.select(timeout):
            key.data()
        now = time.monotonic()
        for name, lines in list(self._lines.items()):
            if (at := lines.quiet_at()) is not None and at <= now:
                self._show(name, lines.flush())
        if self._display.due is not None and self._display.due <= now:
            self._write([])
        if gathering is not None:
            gathering.on_time(now)
        if self._policy.deadline is not None and self._policy.deadline <= now:
            for key, _ in self._selector.select(0):  # events that came in time count, even if the loop was busy
                key.data()
        self._on_time()  # it checks again, because these events may have changed the deadline

    def _read_signals(self, wakeups: Wakeups) -> None:
        signums = wakeups.read()
        for signum in signums:
            if signum != signal.SIGCHLD:
                self._own_signals += 1
                self.on_signal(signum, self._own_signals)
        if signal.SIGCHLD in signums and self._processes is not None:  # one byte may stand for several
            self._processes.reap()

    def _is_told_to_end(self) -> bool:
        """True if a signal that ends the job has come, even if not handled yet: a reader of the output may hold up the loop."""
        return self._signals > 0 or (self._wakeups is not None and self._wakeups.has_told(signal.SIGCHLD))

    def on_nodes_ready(self, plan: HostPlan, address: str) -> None:
        """Begin the job: all hosts are ready.

        Args:
            plan: plan of this machine's part, with the run id that all hosts have.
            address: address of this machine, for its shards; empty if it runs no processes.
        """
        self._plan = plan
        if address:
            self._processes = HostProcesses(
                plan, address, self._selector, on_output=self.on_output, on_exit=self.on_exit, say=self.say
            )
        self._perform(self._policy.on_start(time.monotonic()))

    def on_output(self, name: Name, data: bytes) -> None:
        """Show what a process has written."""
        self._show(name, self._lines[name].feed(data, time.monotonic()))

    def on_exit(self, name: Name, returncode: int) -> None:
        """Handle the end of a process."""
        self._show(name, self._lines[name].end())
        if name == DASHBOARD:  # the job goes on without it
            self._list(dashboard="")
            self.say(f"the dashboard has ended with status {returncode}")
            return
        self._perform(self._policy.on_exit(name, returncode, time.monotonic()))

    def on_signal(self, signum: int, count: int) -> None:
        """Handle a signal to this psd-run, or to one on another host. count: 1 for the first signal to that psd-run, and so on.

        Ctrl-C on srun reaches all hosts at once: so two first signals count as one, and only a second one means more.
        """
        if count > self._signals:
            self._signals = count
            self._perform(self._policy.on_signal(signum, time.monotonic()))

    def on_lost(self, names: Sequence[Name], why: str) -> None:
        """Handle the loss of a host and of all its processes."""
        for name in names:
            if name in self._lines:
                self._show(name, self._lines[name].end())
        self._perform(self._policy.on_lost(names, why, time.monotonic()))

    # -- actions --

    def _where(self, name: Name) -> HostProcesses | Gathering:
        """Whoever has a process."""
        where = (self._processes if self._plan.is_here(name) else None) or self._gathering
        assert where is not None
        return where

    @override
    def _start(self, name: Name) -> None:
        self._lines[name] = Lines(is_live=self._display.is_live)
        self._where(name).start(name, self._addresses_for(name))

    @override
    def _send(self, name: Name, signum: int) -> None:
        self._where(name).signal(name, signum)

    @override
    def _tell(self, name: Name, line: str) -> None:
        self._where(name).tell(name, line)

    def _addresses_for(self, name: Name) -> list[str]:
        if name.kind == "worker":
            return self._servers
        # A shard that is started again is where the workers look for it, and where its parameters are.
        return [self._addresses[name.number]] if name.number in self._addresses else []

    def _clear_away(self) -> None:
        """End all processes and remove the state, on all hosts; called even if psd-run itself has failed."""
        status = self._policy.status
        self._unlist()
        if self._processes is not None:
            self._processes.clear_away(keep=status != EXIT_OK)
        if self._gathering is not None:
            self._gathering.close(EXIT_FAILURE if status is None else status)

    # -- output --

    def _show(self, name: Name, lines: Sequence[bytes]) -> None:
        if name == DASHBOARD:
            for line in lines:
                text = line.decode(errors="replace")
                if told := re.fullmatch(DASHBOARD_PATTERN, text):
                    self._list(dashboard=told[1])
                self.say(text)
            return
        self._keep(str(name), lines)
        if name.kind == "shard":
            lines = [line for line in lines if not self._is_repeated(line)]
        self._write([self._prefixes.line(str(name), line) for line in lines])
        if name.kind != "shard":
            return
        for line in lines:
            self._hear(name, line.decode(errors="replace"))

    def _keep(self, name: str, lines: Sequence[bytes]) -> None:
        """Add lines to the log files, if there are any."""
        trouble = self._log_files.write(name, lines) if self._log_files is not None else ""
        if trouble:
            self.say(trouble)

    def _is_repeated(self, line: bytes) -> bool:
        """True if the line reports a checkpoint that another shard has already reported."""
        stored = re.fullmatch(STORED_PATTERN, line.decode(errors="replace"))
        if stored is None:
            return False
        is_repeated = stored[1] in self._checkpoints
        if not is_repeated:
            self._checkpoints.append(stored[1])
        return is_repeated

    @override
    def _on_all_addresses(self) -> None:
        super()._on_all_addresses()
        if self._plan.remark:
            self.say(self._plan.remark)
        if self._plan.dashboard_command and self._processes is not None:
            self._lines[DASHBOARD] = Lines(is_live=False)
            self._processes.start(DASHBOARD, self._servers)

    def _list(self, *, dashboard: str) -> None:
        """Change the address of the dashboard in the job's record, if there is one; the job goes on if that fails."""
        if self._entry is not None:
            with contextlib.suppress(OSError):
                self._entry.change(dashboard=dashboard)

    @override
    def say(self, text: str, quote: Name | None = None) -> None:
        lines = [text.encode(errors="backslashreplace")]  # the name of a file may be no text
        if quote is not None and quote in self._lines and self._lines[quote].tail:
            lines[0] += b"; its last lines:"
            lines += [b"    " + line for line in self._lines[quote].tail]
        self._keep("psd-run", lines)
        self._write([self._own_prefixes.line("psd-run", line) for line in lines], self._errors)

    def _rows(self) -> list[bytes]:
        """The unfinished lines of all processes."""
        found = ((str(name), row) for name in sorted(self._lines) for row in self._lines[name].rows)
        return [self._prefixes.row(name, row) for name, row in found]

    def _write(self, lines: Sequence[bytes], elsewhere: WholeWriter | None = None) -> None:
        """Write lines, on standard output or elsewhere. Without lines, redraw the unfinished ones."""
        try:
            if lines:
                self._display.write(lines, time.monotonic(), elsewhere)
            else:
                self._display.redraw(time.monotonic())
        except OSError as error:
            if error.errno in NO_ROOM:
                if not self._has_no_room:
                    self._has_no_room = True
                    self.say(f"cannot write the output: {error.strerror}; the job goes on, and what has no room is lost")
                return
            self._reader_is_gone = True  # psd-run | head, or a terminal that has been closed
            discard(sys.stdout)
            self._perform(self._policy.on_signal(signal.SIGPIPE, time.monotonic()))
