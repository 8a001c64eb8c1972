"""The loop of one job, wherever its processes run: what happens goes to psd/cli/job/policy.py, and what that decides is done.

    a shard's line, an exit, a signal, time   ->   the policy decides   ->   start, signal, tell, say

Subclasses know where: psd/cli/hosts/launcher.py on machines, psd/cli/ray/job.py on a Ray cluster. Decides nothing.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from psd.cli.job.actions import Action, Name, Say, Send, Tell
from psd.cli.job.plan import JobPlan
from psd.cli.job.policy import JobPolicy, Phase
from psd.cli.job.summary import Summary
from psd.contract.job_records import JobEntry
from psd.contract.launching import (
    ALL_STORED_PATTERN,
    DONE_PATTERN,
    HAS_STORED,
    LAST_CHECKPOINT_PATTERN,
    READY_PATTERN,
)


class Conductor(ABC):
    """One job, from its first process to its last.

    Args:
        plan: plan of the job. state_dirs: state directories of the shards, for messages.
        is_continued: True if the shards continue an earlier run.
    """

    def __init__(self, plan: JobPlan, state_dirs: Sequence[str], *, is_continued: bool = False) -> None:
        self._plan = plan
        self._policy = JobPolicy(
            state_dirs=state_dirs,
            workers=sum(plan.places.workers),
            on_worker_failure=plan.shards.on_worker_failure,
            restarts_max=plan.restarts_max,
            shard_restarts_max=plan.shard_restarts_max,
            grace_s=plan.shards.grace_s,
            has_checkpoints=bool(plan.shards.checkpoint_dir),
        )
        self._summary = Summary(is_continued=is_continued, checkpoint_dir=plan.shards.checkpoint_dir)
        self._addresses: dict[int, str] = {}
        self._entry: JobEntry | None = None
        self._began_at = time.monotonic()

    # -- where the processes run --

    @abstractmethod
    def say(self, text: str, quote: Name | None = None) -> None:
        """Tell the user. quote: process whose last lines are shown with the text, if they are known."""

    @abstractmethod
    def _start(self, name: Name) -> None:
        """Start a process."""

    @abstractmethod
    def _send(self, name: Name, signum: int) -> None:
        """Send a signal to a process."""

    @abstractmethod
    def _tell(self, name: Name, line: str) -> None:
        """Write a line to a shard's standard input."""

    @abstractmethod
    def _wait(self) -> None:
        """Wait until something happens, for as long as the policy's deadline allows, and handle it."""

    # -- the job --

    def _conduct(self) -> int:
        """Carry out the policy's decisions until the last process has ended; return the job's status."""
        while self._policy.phase is not Phase.ENDED:
            self._wait()
        assert self._policy.status is not None
        return self._policy.status

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Say(text, quote):
                    self.say(text, quote)
                case Send(name, signum):
                    self._send(name, signum)
                case Tell(name, line):
                    self._tell(name, line)
                case _:
                    self._summary.on_start(action.name.kind, action.name.number)
                    self._start(action.name)

    def _on_time(self) -> None:
        """Tell the policy if its deadline is over."""
        now = time.monotonic()
        if self._policy.deadline is not None and self._policy.deadline <= now:
            self._perform(self._policy.on_deadline(now))

    def _hear(self, shard: Name, line: str) -> None:
        """Handle a line that a shard has written."""
        self._summary.on_line(shard.number, line)
        if ready := re.fullmatch(READY_PATTERN, line):
            self._on_address(shard.number, ready[3])
            self._perform(self._policy.on_ready(shard, time.monotonic()))
        elif re.fullmatch(DONE_PATTERN, line):
            self._policy.on_done(shard)
        elif re.fullmatch(ALL_STORED_PATTERN, line):
            self._policy.on_stored(shard)
        elif answer := re.fullmatch(LAST_CHECKPOINT_PATTERN, line):
            self._perform(self._policy.on_saved(time.monotonic(), is_stored=answer[1] == HAS_STORED))

    def _on_address(self, shard: int, address: str) -> None:
        """Note where a shard serves. Once all do for the first time, list the job for psdctl jobs, and tell the user of it."""
        is_new = shard not in self._addresses
        self._addresses[shard] = address
        if is_new and len(self._addresses) == self._plan.places.shards:
            self._on_all_addresses()

    @property
    def _servers(self) -> list[str]:
        """Addresses of the shards, in their order."""
        return [self._addresses[index] for index in range(self._plan.places.shards)]

    def _on_all_addresses(self) -> None:
        try:
            self._entry = JobEntry(self._plan.record(self._servers))
        except OSError as error:
            self.say(f"psdctl jobs will not list this job: {error.strerror or error}")
        self.say(f"run {self._plan.run_id}; to look inside: psdctl status --servers {','.join(self._servers)}")

    def _unlist(self) -> None:
        """Remove the job from those that psdctl jobs lists."""
        if self._entry is not None:
            self._entry.remove()

    def _sum_up(self, status: int) -> None:
        """Tell the user how the job has ended, and what it has done."""
        self.say("all workers have finished" if status == 0 else f"the job has ended with status {status}")
        for line in self._summary.lines(time.monotonic() - self._began_at):
            self.say(line)
