"""The policy of psd-run: the one place that decides about events of its processes, without doing anything.

Events come in as method calls with the time; what must happen comes out as a list of actions, for psd/cli/job/conductor.py to
carry out. So each order of events is a plain unit test. The policy:

    a worker ends with status 0     it has finished; the job ends, well, when all have
    a worker fails                  restarted with its rank, while --max-restarts (of all workers together) lasts and no
                                    shard has ended, and the shards told, which wait for it however long it takes to start;
                                    then the job is stopped, with the worker's status. With
                                    --on-worker-failure continue the others go on then, and the job ends with that status
                                    when they have ended; with end the job is stopped at once
    a shard dies                    restarted at its address with its state directory, while --max-shard-restarts (of all
                                    shards together) lasts; the workers wait for it and know nothing. Then the job is stopped,
                                    with status 1; at once, if the shard has never served; and if it is started in vain
                                    SHARD_STARTS_MAX times in a row, as the next time will be no better. While the job ends it
                                    is restarted for the last checkpoint, if there is a place for that, and none there yet
    SIGINT, SIGTERM, SIGHUP         the job is stopped, with status 128 + N. With a place for checkpoints, one is taken first,
                                    while workers train, for --grace at most; a second signal skips that. Then workers end,
                                    then shards; another signal kills everything at once
    a host is lost                  its processes have died for good: the job is stopped, with status 75, as it may do better
                                    when it is run again; but with --on-worker-failure continue the others go on, if there was
                                    no shard among them
    a shard ends with status 74     it could not store the last checkpoint: a job that is well but for that, or was told to
                                    end, has that status, too; also if a shard dies for good, or with its host, before it has
                                    said that its part is stored

psd has its own policy, instead of torchrun or a process manager such as supervisor, because those restart what dies, but do not
distinguish shards, which have state and are waited for, from workers, and give the job no exit status of its own.

A job goes through the phases STARTING, RUNNING, WINDING_DOWN (all workers have finished, shards end by themselves), or from
any of them SAVING (a last checkpoint is taken), STOPPING (workers got SIGTERM), KILLING_WORKERS, STOPPING_SHARDS, KILLING, to
ENDED. Every phase except RUNNING has a deadline, at which the next, harder phase begins: so a job that is told to end does end,
whatever its processes do. Only shards that store the parameters of a finished job have as long as it takes. A shard that is
being started has a deadline, too.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Sequence

from psd.cli.job.actions import Action, Name, Say, Send, Start, Tell
from psd.cli.words.arguments import (
    EXIT_CHECKPOINT,
    EXIT_FAILURE,
    EXIT_HOST_LOST,
    EXIT_OK,
    LAST_CHECKPOINT_SIGNAL,
    exit_status,
    signal_name,
)
from psd.contract.launching import GONE_LINE, STARTING_LINE

READY_TIMEOUT_S = 3600.0
"""Seconds from the start of a shard to its ready line. It first reads its part of a checkpoint, or what it has kept: with many
gigabytes, or a slow store, for minutes. Only a store that does not answer takes as long."""

READY_REPORT_S = 5.0
"""Seconds from the start of a shard to the line that says that psd-run waits for it."""

SHARD_STARTS_MAX = 3
"""Starts in a row of a shard that has died. More than one, because another process may have its port for a moment: the system
may pick it for the socket of a worker that connects to it. But few, because most causes, such as damaged state, persist."""

START_S_MAX = 600.0
"""Seconds that a restarted worker may take until it joins. For so long, a shard that restarts is told of it, too."""

SHARDS_END_S = 3.0
"""Seconds from the end of the last worker until the shards are told to end; they end by themselves if every worker has left,"""

SHARDS_END_S_PER_WORKER = 0.1
"""and so many more for each worker: hundreds that end at once keep a machine, and the shards on it, busy."""

SAVING_SLACK_S = 2.0
"""Seconds beyond the grace for a last checkpoint: shard 0 says first why there is none."""

SHARDS_SLACK_S = 5.0
"""Seconds beyond the grace for shards: they end by themselves when it is over, and in better order than if killed."""

KILL_S = 5.0
"""Seconds from SIGKILL to giving up: the kernel may be unable to end a process that hangs in a device or a network file
system."""


class Phase(enum.Enum):
    """Phases of a job; see the module's docstring."""

    STARTING = enum.auto()
    RUNNING = enum.auto()
    WINDING_DOWN = enum.auto()
    SAVING = enum.auto()
    STOPPING = enum.auto()
    KILLING_WORKERS = enum.auto()
    STOPPING_SHARDS = enum.auto()
    KILLING = enum.auto()
    ENDED = enum.auto()


class JobPolicy:
    """Decides what is done about each event of one job.

    Args:
        state_dirs: state directories of the shards, for messages.
        workers: number of workers.
        on_worker_failure: one of ON_WORKER_FAILURE.
        restarts_max: limit of restarts of workers. shard_restarts_max: limit of restarts of shards; None: whoever runs them
            starts them again while there is hope, and reports their deaths only then.
        grace_s: seconds from SIGTERM to SIGKILL, and for the last checkpoint.
        has_checkpoints: True if there is a place for checkpoints.

    Attributes:
        phase: the phase that the job is in.
    """

    def __init__(
        self,
        *,
        state_dirs: Sequence[str],
        workers: int,
        restarts_max: int,
        shard_restarts_max: int | None,
        grace_s: float,
        has_checkpoints: bool,
        on_worker_failure: str = "wait",
    ) -> None:
        self.phase = Phase.STARTING
        self._status: int | None = None
        self._is_told_to_end = False
        self._has_failed_to_store = False
        self._is_saved = False  # the last checkpoint is, by all shards
        self._stored: set[Name] = set()  # shards that end and have nothing left to store
        self._missed: set[Name] = set()  # shards that have died for good while the job ends, before that
        self._has_checkpoints = has_checkpoints
        self._state_dirs = state_dirs
        self._shards = [Name("shard", index) for index in range(len(state_dirs))]
        self._workers = [Name("worker", rank) for rank in range(workers)]
        self._restarts_max = restarts_max
        self._restarts_left = restarts_max
        self._shard_restarts_max = shard_restarts_max
        self._shard_restarts_left = shard_restarts_max or 0
        self._grace_s = grace_s
        self._on_worker_failure = on_worker_failure
        self._workers_status = EXIT_OK  # of the first that failed for good, if the others went on
        self._phase_ends_at: float | None = None
        self._alive: set[Name] = set()
        self._ready: set[Name] = set()  # shards that serve
        self._ready_by: dict[Name, float] = {}  # shards that have been started and do not serve yet
        self._reports_at: dict[Name, float] = {}  # those of them that nothing has been said about
        self._died_at: dict[Name, float] = {}  # shards that have served, died and do not serve again yet
        self._starts_in_vain: dict[Name, int] = {}  # of each of those
        self._done: set[Name] = set()  # shards that have seen all workers leave
        self._signals = 0
        self._restarted: dict[Name, float] = {}  # workers, and when they were last started again

    @property
    def status(self) -> int | None:
        """The exit status, once it is known."""
        has_failed = self._has_failed_to_store or any(map(self._is_needed, self._missed))
        if has_failed and (self._status == EXIT_OK or self._is_told_to_end):
            return EXIT_CHECKPOINT
        return self._status

    @property
    def deadline(self) -> float | None:
        """The time at which to call `on_deadline`, on the clock of the events; None: never."""
        if self.phase in (Phase.STARTING, Phase.RUNNING):
            return min([*self._ready_by.values(), *self._reports_at.values()], default=None)
        return self._phase_ends_at

    def on_start(self, now: float) -> list[Action]:
        """Begin the job."""
        return [self._start_shard(shard, now) for shard in self._shards]

    def on_ready(self, shard: Name, now: float) -> list[Action]:
        """Handle a shard's ready line. Workers start when all do."""
        self._ready.add(shard)
        self._ready_by.pop(shard, None)
        self._reports_at.pop(shard, None)
        self._starts_in_vain.pop(shard, None)
        died_at = self._died_at.pop(shard, None)
        if self.phase in (Phase.SAVING, Phase.STOPPING, Phase.KILLING_WORKERS):
            return [Send(shard, LAST_CHECKPOINT_SIGNAL)] if self._has_checkpoints else []
        if self.phase is Phase.STOPPING_SHARDS and died_at is not None:
            return [Send(shard, LAST_CHECKPOINT_SIGNAL), Send(shard, signal.SIGTERM)]
        if self.phase is Phase.WINDING_DOWN:
            self._phase_ends_at = now + SHARDS_END_S
        if self.phase not in (Phase.STARTING, Phase.RUNNING):
            return []
        actions: list[Action] = []
        if died_at is not None:
            actions.append(Say(f"{shard} serves again, {now - died_at:.1f} s after its end"))
            late = sorted(worker for worker, at in self._restarted.items() if at >= now - START_S_MAX)
            actions += [Tell(shard, STARTING_LINE.format(worker.number)) for worker in late]
        if self.phase is Phase.STARTING and len(self._ready) == len(self._shards):
            self.phase = Phase.RUNNING
            self._alive.update(self._workers)
            actions += [Start(name) for name in self._workers]
        return actions

    def on_done(self, shard: Name) -> None:
        """Note that all workers have left a shard, so that its end is no failure."""
        self._done.add(shard)

    def on_stored(self, shard: Name) -> None:
        """Note that a shard that ends has stored its part of the last checkpoint, so that its death does no harm."""
        self._stored.add(shard)

    def on_exit(self, name: Name, returncode: int, now: float) -> list[Action]:
        """Handle the end of a process; `returncode` is negative if a signal ended it."""
        self._alive.discard(name)
        if name.kind == "worker":
            actions = self._on_worker_exit(name, returncode, now)
        else:
            actions = self._on_shard_exit(name, returncode, now)
        return actions + self._advance(now)

    def on_lost(self, names: Sequence[Name], why: str, now: float) -> list[Action]:
        """Handle the loss of a host and of these processes; there are none before the job has begun."""
        has_begun = bool(self._alive)
        gone = self._alive & set(names)
        self._alive -= gone
        if self.phase not in (Phase.STARTING, Phase.RUNNING):
            self._missed |= gone & (self._ready | self._died_at.keys())
        for name in gone:
            self._ready.discard(name)
            self._ready_by.pop(name, None)
            self._reports_at.pop(name, None)
        shards, workers = (sorted(name for name in gone if name.kind == kind) for kind in ("shard", "worker"))
        say = Say(f"{why}, and with it {self._names(gone)}" if gone else why)
        if self.phase not in (Phase.STARTING, Phase.RUNNING) or (has_begun and not gone):
            return [say, *self._advance(now)]
        if shards or not workers or self._on_worker_failure != "continue":
            status = EXIT_HOST_LOST if gone else EXIT_FAILURE
            return self._fail(Say(f"{say.text}; stopping the job"), status, now) + self._advance(now)
        self._workers_status = self._workers_status or EXIT_FAILURE
        return [say, *self._wind_down(now), *self._advance(now)]

    def on_saved(self, now: float, *, is_stored: bool) -> list[Action]:
        """Handle a report that all shards have stored the last checkpoint, or that they do not while workers train."""
        self._is_saved = self._is_saved or is_stored
        return self._stop(Say(f"stopping the job, {self._within}"), now) if self.phase is Phase.SAVING else []

    def on_signal(self, signum: int, now: float) -> list[Action]:
        """Handle a signal that tells psd-run to end."""
        if signum == signal.SIGPIPE and self._signals:
            return []  # Ctrl-C has ended whoever reads the output, too
        self._signals += 1
        name = signal_name(signum)
        if self._signals == 1 and self.phase in (Phase.STARTING, Phase.RUNNING, Phase.WINDING_DOWN):
            self._status, self._is_told_to_end = exit_status(signum), True
            if self._has_checkpoints and self.phase is Phase.RUNNING:
                return self._save(name, now)
            return self._stop(Say(f"{name}: stopping the job, {self._within}"), now) + self._advance(now)
        if self._signals == 1:
            return [Say(f"{name}: the job is being stopped already; a second signal kills it at once")]
        if self.phase is Phase.SAVING:
            return self._stop(Say(f"{name}: not waiting for the checkpoint; stopping the job, {self._within}"), now)
        if self.phase in (Phase.KILLING, Phase.ENDED):
            return []
        return [Say(f"{name}: killing all processes"), *self._kill(now)]

    def on_deadline(self, now: float) -> list[Action]:
        """Handle the end of a deadline: a phase, or a shard's start, has lasted too long."""
        late = self._names(self._alive)
        if self.phase in (Phase.STARTING, Phase.RUNNING):
            slow = [name for name, at in self._reports_at.items() if at <= now]
            if slow:
                self._reports_at = {name: at for name, at in self._reports_at.items() if at > now}
                return [Say(f"waiting for {self._names(set(slow))} to be ready, for at most {READY_TIMEOUT_S:g} s")]
            shard = min(self._ready_by, key=lambda name: (self._ready_by[name], name))
            text = f"{shard} was not ready after {READY_TIMEOUT_S:g} s; stopping the job"
            return self._fail(Say(text, quote=shard), EXIT_FAILURE, now) + self._advance(now)
        if self.phase is Phase.WINDING_DOWN and self._died_at.keys() & self._alive:
            self._phase_ends_at = now + SHARDS_END_S
            return []
        if self.phase is Phase.WINDING_DOWN:
            return self._hasten(now)
        if self.phase is Phase.SAVING:
            return self._stop(Say(f"no checkpoint within {self._grace_s:g} s; stopping the job, {self._within}"), now)
        if self.phase is Phase.STOPPING:
            workers = self._living("worker")
            self.phase, self._phase_ends_at = Phase.KILLING_WORKERS, now + KILL_S
            text = f"not ended within {self._grace_s:g} s: {self._names(set(workers))}; killing"
            return [Say(text), *(Send(name, signal.SIGKILL) for name in workers)]
        if self.phase is Phase.KILLING_WORKERS:
            return self._stop_shards(now)
        if self.phase is Phase.STOPPING_SHARDS:
            self._missed.update(name for name in self._living("shard") if name in self._ready)
            return [Say(f"not ended within {self._grace_s:g} s: {late}; killing"), *self._kill(now)]
        self.phase, self._phase_ends_at = Phase.ENDED, None
        return [Say(f"SIGKILL did not end {late}; giving up")]

    def _on_worker_exit(self, worker: Name, returncode: int, now: float) -> list[Action]:
        if self.phase is not Phase.RUNNING:
            return []
        if returncode == 0:
            return [*self._tell_of(worker, GONE_LINE, self._restarted.pop(worker, None)), *self._wind_down(now)]
        death = f"{worker} {_describe(returncode)}"
        shards_gone = [name for name in self._shards if name not in self._alive]
        if self._restarts_left and not shards_gone and self._on_worker_failure != "end":
            self._restarts_left -= 1
            self._alive.add(worker)
            if self._on_worker_failure != "continue":
                self._restarted[worker] = now
            told = self._tell_of(worker, STARTING_LINE, self._restarted.get(worker))
            say = Say(f"{death}; starting it again ({_restarts(self._restarts_left)} left)", quote=worker)
            return [say, *told, Start(worker)]
        if shards_gone:
            why = f"{self._names(set(shards_gone))} has ended, so it cannot be started again; "
        else:
            why = "no restarts left; " if self._restarts_max else ""
        status = returncode if returncode > 0 else exit_status(-returncode)
        if self._on_worker_failure == "continue":
            self._workers_status = self._workers_status or status
            others = f"; {why}the others go on without it" if self._living("worker") else ""
            return [Say(f"{death}{others}", quote=worker), *self._wind_down(now)]
        return self._fail(Say(f"{death}; {why}stopping the job", quote=worker), status, now)

    def _tell_of(self, worker: Name, line: str, since: float | None) -> list[Action]:
        """Tell the shards that serve of a worker that was restarted; the others are told when they serve."""
        return [] if since is None else [Tell(shard, line.format(worker.number)) for shard in sorted(self._ready)]

    def _wind_down(self, now: float) -> list[Action]:
        """Begin to wait for the shards to end by themselves, if no worker is left."""
        if not self._has_workers:
            self._status, self.phase, self._phase_ends_at = self._workers_status, Phase.WINDING_DOWN, now + self._shards_end_s
        return []

    def _on_shard_exit(self, shard: Name, returncode: int, now: float) -> list[Action]:
        has_served = shard in self._ready or shard in self._died_at
        if shard in self._ready:
            self._ready.remove(shard)
            self._died_at[shard] = now
        else:
            self._starts_in_vain[shard] = self._starts_in_vain.get(shard, 0) + 1
        self._ready_by.pop(shard, None)
        self._reports_at.pop(shard, None)

        death = f"{shard} {_describe(returncode)}"
        is_over = shard in self._done or self.phase not in (Phase.STARTING, Phase.RUNNING, Phase.SAVING)
        if is_over and returncode == EXIT_CHECKPOINT:
            self._has_failed_to_store = True
            return [Say(f"{shard} could not store the last checkpoint", quote=shard)]
        starts_in_vain = self._starts_in_vain.get(shard, 0)
        if starts_in_vain and has_served:
            death += " before it served again"
        if is_over or self.phase is Phase.SAVING:
            if self._is_wanted(shard, returncode) and self._shard_restarts_left and starts_in_vain < SHARD_STARTS_MAX:
                return self._restart_shard(shard, death, returncode, now)
            if returncode and has_served and self.phase is not Phase.KILLING:
                self._missed.add(shard)
            if not is_over:
                return self._stop(Say(f"{death}; stopping the job, {self._within}", quote=shard), now)
            if shard in self._missed and self._is_needed(shard):
                lacks = "and is not started again, so that the last checkpoint may lack its part"
                return [Say(f"{death}, {lacks}", quote=shard)]
            is_worth_saying = returncode != 0 and self.phase in (Phase.RUNNING, Phase.WINDING_DOWN)
            return [Say(f"{death} after all workers had ended", quote=shard)] if is_worth_saying else []
        if not has_served:
            return self._fail(Say(f"{death} at its start; stopping the job", quote=shard), EXIT_FAILURE, now)
        if starts_in_vain == SHARD_STARTS_MAX:
            text = f"{death}, {starts_in_vain} times in a row; stopping the job"
            return self._fail(Say(text, quote=shard), EXIT_FAILURE, now)
        if not self._shard_restarts_left:
            limit = self._shard_restarts_max
            why = "it is not started again" if limit is None else f"no restarts left (--max-shard-restarts {limit})"
            return self._fail(Say(f"{death}; {why}; stopping the job", quote=shard), EXIT_FAILURE, now)
        return self._restart_shard(shard, death, returncode, now)

    def _is_needed(self, shard: Name) -> bool:
        """True if a last checkpoint is not stored without this shard, for all that is known."""
        return self._has_checkpoints and shard not in self._stored and (shard in self._done or not self._is_saved)

    def _is_wanted(self, shard: Name, returncode: int) -> bool:
        """True if a shard that has died while the job ends can still take part in the last checkpoint."""
        if not self._is_needed(shard) or shard not in self._died_at or returncode == 0 or self.phase is Phase.KILLING:
            return False
        if self.phase is Phase.STOPPING_SHARDS and returncode > 0:
            return False  # it has ended by itself, or has been told twice
        # Each stores its part of a job that all workers have left; else they do so together, if they have not done so.
        return shard in self._done or {*self._shards} <= self._alive | {shard}

    def _restart_shard(self, shard: Name, death: str, returncode: int, now: float) -> list[Action]:
        self._shard_restarts_left -= 1
        self._done.discard(shard)
        text = (
            f"{death}; starting it again, its state is in {self._state_dirs[shard.number]} "
            f"({_restarts(self._shard_restarts_left)} left)"
        )
        return [Say(text, quote=None if returncode == -signal.SIGKILL else shard), self._start_shard(shard, now)]

    def _start_shard(self, shard: Name, now: float) -> Action:
        self._alive.add(shard)
        self._ready_by[shard] = now + READY_TIMEOUT_S
        self._reports_at[shard] = now + READY_REPORT_S
        return Start(shard)

    @property
    def _shards_end_s(self) -> float:
        return SHARDS_END_S + SHARDS_END_S_PER_WORKER * len(self._workers)

    @property
    def _within(self) -> str:
        return f"within {self._grace_s:g} s; another signal kills it at once"

    def _save(self, signal_: str, now: float) -> list[Action]:
        self.phase, self._phase_ends_at = Phase.SAVING, now + self._grace_s + SAVING_SLACK_S
        text = f"{signal_}: taking a last checkpoint before the job ends, within {self._grace_s:g} s; a second signal skips it"
        return [Say(text), *(Send(name, LAST_CHECKPOINT_SIGNAL) for name in sorted(self._ready))]

    def _hasten(self, now: float) -> list[Action]:
        late = [name for name in self._living("shard") if name not in self._done]
        if not late and self._has_checkpoints:
            self._phase_ends_at = None
            return [Say(f"waiting for {self._names(self._alive)} to store the last checkpoint; a signal ends that")]
        late = late or self._living("shard")
        if self._done:
            what = f"has not heard so from all of them, as {self._names(self._done)} has"
        else:
            as_it_should = "as a script does that calls distribute() or connect() of psd_client"
            what = f"has not told that all have joined and left, {as_it_should}"
        text = f"all workers have ended, and in {self._shards_end_s:g} s {self._names(set(late))} {what}; draining"
        return [Say(text), *self._stop_shards(now, late)]

    def _fail(self, say: Say, status: int, now: float) -> list[Action]:
        self._status = status
        return self._stop(say, now)

    def _stop(self, say: Say, now: float) -> list[Action]:
        self.phase, self._phase_ends_at = Phase.STOPPING, now + self._grace_s
        return [say, *(Send(name, signal.SIGTERM) for name in self._living("worker"))]

    def _stop_shards(self, now: float, shards: Sequence[Name] | None = None) -> list[Action]:
        self.phase, self._phase_ends_at = Phase.STOPPING_SHARDS, now + self._grace_s + SHARDS_SLACK_S
        told = self._living("shard") if shards is None else shards
        return [Send(name, signal.SIGTERM) for name in told if name not in self._died_at]  # those are told when they serve

    def _kill(self, now: float) -> list[Action]:
        self.phase, self._phase_ends_at = Phase.KILLING, now + KILL_S
        return [Send(name, signal.SIGKILL) for name in sorted(self._alive)]

    def _advance(self, now: float) -> list[Action]:
        """Leave the phase if it is over."""
        actions: list[Action] = []
        is_waiting_for_workers = self.phase in (Phase.SAVING, Phase.STOPPING, Phase.KILLING_WORKERS)
        if is_waiting_for_workers and not self._has_workers:
            actions = self._stop_shards(now)
        if not self._alive and self.phase not in (Phase.STARTING, Phase.RUNNING):
            self.phase, self._phase_ends_at = Phase.ENDED, None
        return actions

    @property
    def _has_workers(self) -> bool:
        """True if a worker lives. Must be fast: it is asked at the end of each worker, and there may be thousands."""
        return any(name.kind == "worker" for name in self._alive)

    def _living(self, kind: str) -> list[Name]:
        return sorted(name for name in self._alive if name.kind == kind)

    def _names(self, names: set[Name]) -> str:
        return ", ".join(map(str, sorted(names)))


def _restarts(count: int) -> str:
    return "1 restart" if count == 1 else f"{count or 'no'} restarts"


def _describe(returncode: int) -> str:
    if returncode >= 0:
        return f"ended with status {returncode}"
    hint = " (the kernel does so, too, when memory runs out)" if returncode == -signal.SIGKILL else ""
    return f"was killed by {signal_name(-returncode)}{hint}"
