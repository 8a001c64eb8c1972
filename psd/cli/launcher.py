"""Carries out a job of psd-run: one thread, one selector over the children's output, their deaths and the signals.

    events: output, SIGCHLD, SIGINT, time   ->   psd/cli/policy.py decides   ->   actions: start, signal, say

Invariants: every child is known to the watchdog from its start to its end; a child's output is read to its end before its death
is told; when `run` returns, however it does, no process of the run is left, and no state directory that nobody has asked for.
Decides nothing about the job itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from psd.cli.arguments import EXIT_FAILURE, EXIT_OK, exit_status
from psd.cli.display import Display, is_terminal
from psd.cli.log_files import LogFiles
from psd.cli.output import Lines, Prefixes
from psd.cli.policy import Action, JobPolicy, Name, Phase, Say, Send
from psd.cli.processes import Child
from psd.cli.server import DONE_PATTERN, LAST_CHECKPOINT_PATTERN, STORED_PATTERN
from psd.cli.state import StateDirectory, shard_path
from psd.cli.summary import Summary
from psd.cli.sweep import end_processes
from psd.cli.wakeups import Wakeups
from psd.cli.watchdog import Watchdog
from psd.contract.config import ConfigError
from psd.contract.launching import READY_PATTERN

_ANY_PORT = "127.0.0.1:0"

_WATCHDOGS_MAX = 4
"""Watchdogs started in one job at most. Whoever kills more of them means it."""

_SWEEP_GRACE_S = 2.0
"""Seconds for processes that workers have left behind, once the workers themselves are gone."""


@dataclass(frozen=True)
class Plan:
    """A job to run.

    Attributes:
        run_id: of this run only; processes are found by it.
        shards, workers, on_worker_failure, restarts_max, shard_restarts_max, grace_s: see psd-run --help.
        checkpoint_dir: where the shards store checkpoints; empty: nowhere.
        log_dir: for a file of each process; None: no files.
        state_dir: where the shards' state directories are made.
        is_state_private: it is removed in any case.
        is_continued: it holds what an earlier run has left.
        shard_command: the command of a shard, by index, address to listen at, and state directory.
        worker_command: the command of every worker.
        shard_environ: the environment of the shards.
        worker_environ: the environment of a worker, by rank and the shards' addresses.
    """

    run_id: str
    shards: int
    workers: int
    on_worker_failure: str
    restarts_max: int
    shard_restarts_max: int
    grace_s: float
    checkpoint_dir: str
    log_dir: Path | None
    state_dir: Path
    is_state_private: bool
    is_continued: bool
    shard_command: Callable[[int, str, Path], Sequence[str]]
    worker_command: Sequence[str]
    shard_environ: Mapping[str, str]
    worker_environ: Callable[[int, Sequence[str]], Mapping[str, str]]


class Launcher:
    """One job, from its first process to its last."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._policy = JobPolicy(
            state_dirs=[str(shard_path(plan.state_dir, index)) for index in range(plan.shards)],
            workers=plan.workers,
            on_worker_failure=plan.on_worker_failure,
            restarts_max=plan.restarts_max,
            shard_restarts_max=plan.shard_restarts_max,
            grace_s=plan.grace_s,
            has_checkpoints=bool(plan.checkpoint_dir),
        )
        self._selector = selectors.DefaultSelector()
        self._children: dict[Name, Child] = {}
        self._lines: dict[Name, Lines] = {}
        self._addresses: dict[int, str] = {}
        self._watchdog: Watchdog | None = None
        self._watchdogs_left = _WATCHDOGS_MAX
        self._signals: list[int] = []
        names = [*(f"shard {index}" for index in range(plan.shards)), *(f"worker {rank}" for rank in range(plan.workers))]
        colour = not os.environ.get("NO_COLOR")
        self._prefixes = Prefixes(["psd-run", *names], colour=colour and is_terminal(sys.stdout.buffer))
        self._own_prefixes = Prefixes(["psd-run", *names], colour=colour and is_terminal(sys.stderr.buffer))
        self._display = Display(sys.stdout.buffer, self._rows)
        self._reader_is_gone = False
        self._checkpoint = ""  # the last one that a shard has told of
        self._log_files: LogFiles | None = None
        self._summary = Summary(is_continued=plan.is_continued, checkpoint_dir=plan.checkpoint_dir)

    def run(self) -> int:
        """Run the job to its end; returns psd-run's exit status."""
        started_at = time.monotonic()
        with Wakeups([signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP]) as wakeups:
            self._selector.register(wakeups, selectors.EVENT_READ)
            plan = self._plan
            try:
                self._log_files = LogFiles(plan.log_dir) if plan.log_dir is not None else None
                self._state = StateDirectory(plan.state_dir, plan.run_id, plan.shards, is_private=plan.is_state_private)
            except ConfigError as error:
                self._say(f"error: {error}")
                return EXIT_FAILURE
            try:
                self._start_watchdog()
                self._perform(self._policy.on_start(time.monotonic()))
                while self._policy.phase is not Phase.ENDED:
                    self._wait(wakeups)
            finally:
                self._clear_away()
                self._selector.close()
        status = self._policy.status
        assert status is not None
        if self._reader_is_gone:
            return exit_status(signal.SIGPIPE)
        self._say("all workers have finished" if status == 0 else f"the job has ended with status {status}")
        for line in self._summary.lines(time.monotonic() - started_at):
            self._say(line)
        if self._log_files is not None:
            self._log_files.close()
        return status

    # -- events --

    def _wait(self, wakeups: Wakeups) -> None:
        """Sleep until something happens, and handle it."""
        times = [at for lines in self._lines.values() if (at := lines.quiet_at()) is not None]
        if self._policy.deadline is not None:
            times.append(self._policy.deadline)
        if self._display.due is not None:
            times.append(self._display.due)
        timeout = max(0.0, min(times) - time.monotonic()) if times else None
        for key, _ in self._selector.select(timeout):
            if key.fileobj is wakeups:
                self._read_signals(wakeups)
            else:
                self._read_output(key.data)
        now = time.monotonic()
        for name, lines in list(self._lines.items()):
            if (at := lines.quiet_at()) is not None and at <= now:
                self._show(name, lines.flush())
        if self._display.due is not None and self._display.due <= now:
            self._write([])
        # Again after each: what one event decides may change what the next one means.
        if self._policy.deadline is not None and self._policy.deadline <= now:
            self._perform(self._policy.on_deadline(now))

    def _read_signals(self, wakeups: Wakeups) -> None:
        signums = wakeups.read()
        for signum in signums:
            if signum != signal.SIGCHLD:
                self._perform(self._policy.on_signal(signum, time.monotonic()))
        if signal.SIGCHLD in signums:  # one byte may stand for several
            for name in sorted(self._children):  # shards first: a worker's failure may be the consequence of theirs
                if name in self._children and self._children[name].has_ended():
                    self._on_exit(name)
            if self._watchdog is not None and self._watchdog.has_died():
                self._replace_watchdog()

    def _read_output(self, name: Name) -> None:
        child = self._children.get(name)
        if child is None or (data := child.read()) is None:
            return
        if data:
            self._show(name, self._lines[name].feed(data, time.monotonic()))
        else:  # it has closed its output; that it has ended is another event
            self._selector.unregister(child)

    def _on_exit(self, name: Name) -> None:
        child = self._children[name]
        lines = self._lines[name]
        self._show(name, lines.feed(child.read_rest(), time.monotonic()))
        self._show(name, lines.end())
        with contextlib.suppress(KeyError):
            self._selector.unregister(child)
        del self._children[name]
        returncode = child.close()
        if self._watchdog is not None:
            self._watchdog.remove(child.pid)
        self._summary.on_exit(name.kind, time.monotonic())
        self._perform(self._policy.on_exit(name, returncode, time.monotonic()))

    # -- actions --

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Say):
                self._say(action.text, action.quote)
            elif isinstance(action, Send):
                if action.name in self._children:
                    self._children[action.name].signal(action.signum)
            else:
                self._start(action.name)

    def _start(self, name: Name) -> None:
        if name.kind == "shard":
            # A shard that is started again is where the workers look for it, and where its parameters are.
            listen = self._addresses.get(name.number, _ANY_PORT)
            command = self._plan.shard_command(name.number, listen, self._state.shard(name.number))
            environ = self._plan.shard_environ
        else:
            servers = [self._addresses[index] for index in range(self._plan.shards)]
            command, environ = self._plan.worker_command, self._plan.worker_environ(name.number, servers)
        self._lines[name] = Lines(is_live=self._display.is_live)
        self._summary.on_start(name.kind, name.number, time.monotonic())
        try:
            child = Child(command, environ)
        except OSError as error:
            self._say(f"cannot start {name}: {error}")
            self._perform(self._policy.on_exit(name, 126, time.monotonic()))  # as a shell has it
            return
        self._children[name] = child
        self._selector.register(child, selectors.EVENT_READ, name)
        if self._watchdog is not None:
            self._watchdog.add(child.pid)

    def _start_watchdog(self) -> None:
        self._watchdogs_left -= 1
        try:
            self._watchdog = Watchdog(
                self._plan.run_id,
                self._state.lock_fd,
                groups=[child.pid for child in self._children.values()],
                directories=[self._state.path] if self._state.is_private else [],
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

    def _clear_away(self) -> None:
        """End all processes and remove the state, also when psd-run itself has failed."""
        for child in self._children.values():
            child.signal(signal.SIGKILL)
            child.close()
        self._children.clear()
        count = end_processes((), self._plan.run_id, _SWEEP_GRACE_S)
        if count:
            self._say(f"ended {count} processes that the workers had left behind")
        if self._state.close(keep=self._policy.status != EXIT_OK):
            self._say(f"the parameters are kept in {self._state.path}; psd-run with this --state-dir continues with them")
        if self._watchdog is not None:
            self._watchdog.close()

    # -- output --

    def _show(self, name: Name, lines: Sequence[bytes]) -> None:
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
                if is_new and len(self._addresses) == self._plan.shards:
                    self._say_what_runs()
                self._perform(self._policy.on_ready(name, time.monotonic()))
            elif re.fullmatch(DONE_PATTERN, text):
                self._policy.on_done(name)
            elif re.fullmatch(LAST_CHECKPOINT_PATTERN, text):
                self._perform(self._policy.on_saved(time.monotonic()))

    def _keep(self, name: str, lines: Sequence[bytes]) -> None:
        """Add lines to the log files, if there are any."""
        trouble = self._log_files.write(name, lines) if self._log_files is not None else ""
        if trouble:
            self._say(trouble)

    def _is_repeated(self, line: bytes) -> bool:
        """True for the news of a checkpoint that another shard has told."""
        stored = re.fullmatch(STORED_PATTERN, line.decode(errors="replace"))
        if stored is None:
            return False
        earlier, self._checkpoint = self._checkpoint, stored[1]
        return earlier == stored[1]

    def _say_what_runs(self) -> None:
        servers = ",".join(self._addresses[index] for index in range(self._plan.shards))
        self._say(f"run {self._plan.run_id}; to look inside: psdctl status --servers {servers}")

    def _say(self, text: str, quote: Name | None = None) -> None:
        lines = [text.encode()]
        if quote is not None and quote in self._lines and self._lines[quote].tail:
            lines[0] += b"; its last lines:"
            lines += [b"    " + line for line in self._lines[quote].tail]
        self._keep("psd-run", lines)
        self._write([self._own_prefixes.line("psd-run", line) for line in lines], sys.stderr.buffer)

    def _rows(self) -> list[bytes]:
        """The unfinished lines of all processes."""
        found = ((str(name), row) for name in sorted(self._children) for row in self._lines[name].rows)
        return [self._prefixes.row(name, row) for name, row in found]

    def _write(self, lines: Sequence[bytes], elsewhere: BinaryIO | None = None) -> None:
        """Write lines, on standard output or elsewhere; without any, what is unfinished has changed."""
        try:
            if lines:
                self._display.write(lines, time.monotonic(), elsewhere)
            else:
                self._display.redraw(time.monotonic())
        except OSError:  # psd-run | head, or a terminal that has been closed
            self._reader_is_gone = True
            nowhere = os.open(os.devnull, os.O_WRONLY)  # takes Python's own flush at exit
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
            self._perform(self._policy.on_signal(signal.SIGPIPE, time.monotonic()))
