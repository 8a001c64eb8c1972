"""Carries out a job of psd-run: one thread, with one selector over the children's output and deaths, other hosts, and signals.

    events: output, exits, SIGCHLD, SIGINT, time   ->   psd/cli/job/policy.py decides   ->   actions: start, signal, say

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

from psd.cli.hosts.leader import Gathering
from psd.cli.job.plan import Plan
from psd.cli.job.policy import Action, JobPolicy, Name, Phase, Say, Send, Tell
from psd.cli.job.summary import Summary
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
from psd.contract.job_records import JobEntry
from psd.contract.launching import (
    DASHBOARD_PATTERN,
    DONE_PATTERN,
    HAS_STORED,
    LAST_CHECKPOINT_PATTERN,
    READY_PATTERN,
    STORED_PATTERN,
)

_LOOPBACK = "127.0.0.1"

CHECKPOINTS_TOLD = 16
"""Number of last checkpoints to remember: a shard may report one after another shard has reported the next."""

Meet = Callable[[selectors.BaseSelector, "Launcher"], Gathering]
"""Starts to gather the other hosts; the launcher's methods are called for their events."""


class Launcher:
    """One job, from its first process to its last.

    Args:
        plan: plan of the job.
        meet: gathers the other hosts; None: this machine runs all processes.
    """

    def __init__(self, plan: Plan, meet: Meet | None = None) -> None:
        self._plan = plan
        self._meet = meet
        places = plan.places
        self._policy = JobPolicy(
            state_dirs=[str(shard_path(plan.state_dirs[index % places.nodes], index)) for index in range(places.shards)],
            workers=sum(places.workers),
            on_worker_failure=plan.on_worker_failure,
            restarts_max=plan.restarts_max,
            shard_restarts_max=plan.shard_restarts_max,
            grace_s=plan.grace_s,
            has_checkpoints=bool(plan.checkpoint_dir),
        )
        self._selector = selectors.DefaultSelector()
        self._processes: HostProcesses | None = None
        self._gathering: Gathering | None = None
        self._lines: dict[Name, Lines] = {}
        self._addresses: dict[int, str] = {}
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
        self._entry: JobEntry | None = None
        self._summary = Summary(is_continued=plan.kept_run_id is not None, checkpoint_dir=plan.checkpoint_dir)

    def run(self) -> int:
        """Run the job to its end; returns psd-run's exit status."""
        started_at = time.monotonic()
        with Wakeups(JOB_SIGNALS) as self._wakeups:
            self._selector.register(self._wakeups, selectors.EVENT_READ, functools.partial(self._read_signals, self._wakeups))
            try:
                self._begin()
                while self._policy.phase is not Phase.ENDED:
                    self._wait()
            except ConfigError as error:
                self.say(f"error: {error}")
                return EXIT_FAILURE
            finally:
                self._clear_away()
                self._selector.close()
        status = self._policy.status
        assert status is not None
        if self._reader_is_gone:
            return exit_status(signal.SIGPIPE)
        self.say("all workers have finished" if status == 0 else f"the job has ended with status {status}")
        for line in self._summary.lines(time.monotonic() - started_at):
            self.say(line)
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

    def _wait(self) -> None:
        """Sleep until something happens, and handle it."""
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
        # The deadline is checked again, because these events may have changed it.
        if self._policy.deadline is not None and self._policy.deadline <= now:
            self._perform(self._policy.on_deadline(now))

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

    def on_nodes_ready(self, plan: Plan, address: str) -> None:
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

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Say):
                self.say(action.text, action.quote)
                continue
            own = self._processes if self._plan.is_here(action.name) else None
            where = own or self._gathering
            assert where is not None
            if isinstance(action, Send):
                where.signal(action.name, action.signum)
            elif isinstance(action, Tell):
                where.tell(action.name, action.line)
            else:
                self._lines[action.name] = Lines(is_live=self._display.is_live)
                self._summary.on_start(action.name.kind, action.name.number)
                where.start(action.name, self._addresses_for(action.name))

    def _addresses_for(self, name: Name) -> list[str]:
        if name.kind == "worker":
            return [self._addresses[index] for index in range(self._plan.places.shards)]
        # A shard that is started again is where the workers look for it, and where its parameters are.
        return [self._addresses[name.number]] if name.number in self._addresses else []

    def _clear_away(self) -> None:
        """End all processes and remove the state, on all hosts; called even if psd-run itself has failed."""
        status = self._policy.status
        if self._entry is not None:
            self._entry.remove()
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
            text = line.decode(errors="replace")
            self._summary.on_line(name.number, text)
            if ready := re.fullmatch(READY_PATTERN, text):
                is_new = name.number not in self._addresses
                self._addresses[name.number] = ready[3]
                if is_new and len(self._addresses) == self._plan.places.shards:
                    self._say_what_runs()
                self._perform(self._policy.on_ready(name, time.monotonic()))
            elif re.fullmatch(DONE_PATTERN, text):
                self._policy.on_done(name)
            elif answer := re.fullmatch(LAST_CHECKPOINT_PATTERN, text):
                self._perform(self._policy.on_saved(time.monotonic(), is_stored=answer[1] == HAS_STORED))

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

    def _say_what_runs(self) -> None:
        addresses = [self._addresses[index] for index in range(self._plan.places.shards)]
        servers = ",".join(addresses)
        try:
            self._entry = JobEntry(self._plan.record(addresses))
        except OSError as error:
            self.say(f"psdctl jobs will not list this job: {error.strerror or error}")
        self.say(f"run {self._plan.run_id}; to look inside: psdctl status --servers {servers}")
        if self._plan.remark:
            self.say(self._plan.remark)
        if self._plan.dashboard_command and self._processes is not None:
            self._lines[DASHBOARD] = Lines(is_live=False)
            self._processes.start(DASHBOARD, addresses)

    def _list(self, *, dashboard: str) -> None:
        """Change the address of the dashboard in the job's record, if there is one; the job goes on if that fails."""
        if self._entry is not None:
            with contextlib.suppress(OSError):
                self._entry.change(dashboard=dashboard)

    def say(self, text: str, quote: Name | None = None) -> None:
        """Tell the user. quote: process whose last lines are shown with the text."""
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
