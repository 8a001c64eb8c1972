"""Runs one plan: starts shards and workers, lets the faults strike, heals, and asks everybody to end. Judges nothing.

What it leaves in its directory: plan.json, outcome.json, timeline.jsonl, a history and a log per life of a worker, a log per
shard, and the parameters of the end.
"""

from __future__ import annotations

import itertools
import random
import signal
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from course import END_S, JOIN_S, RESTART_S, Course
from plan import LIVES, Fault, Plan
from processes import Process, WorkerActor, last_word
from program import Options
from typing_extensions import override

LATE_S = 7.0
LEARNERS_S = 40.0
"""As JOIN_S, for those that import torch first."""

PARTED_S = 5.0
"""After which the launcher of a learner that is a group ends the processes that have survived one of them."""

FINISH_S = 40.0
INTERRUPTED_S = 20.0
"""How long a process that must end on Ctrl-C, within 6 seconds, is watched before it is killed."""


class Trial(Course):
    """One trial of workers."""

    def __init__(self, plan: Plan, directory: Path) -> None:
        super().__init__(plan, directory, clients=plan.workers)
        self._workers = [WorkerActor(rank, self._timeline) for rank in range(plan.workers)]
        self._numbers = itertools.count(0, plan.per_life)
        self._is_ending = False
        self._late: set[Process] = set()
        self._parted: set[WorkerActor] = set()

    # -- the course of things ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """The trial."""
        if not self._have_shards_begun():
            return
        for worker in self._workers:
            self._start(worker)
        if not self._plan.early:
            self._until(lambda: all(map(_has_begun, self._workers)), JOIN_S if self._plan.learning is None else LEARNERS_S)
        self._timeline.note("training")
        self._strike_by_the_clock()
        if self._plan.ends_dead:
            self._until(lambda: self._is_quiet() and all(shard.is_ready for shard in self._shards), END_S)
            self._is_ending = True
            self._strike_all()
        else:
            self._timeline.note("stopping")
            (self._directory / "stop").touch()
            self._until(lambda: self._is_quiet() and not self._running(), self._seconds_left(self._plan.faults), scaled=False)
            if not self._until(lambda: self._is_quiet() and not self._running(), END_S):
                self._give_up(self._running())
                return
            self._is_ending = True
            self._finish()
        self.outcome.has_checkpoint = self._has_checkpoint()  # before the shards store one of their end
        self._terminate()

    def _strike_all(self) -> None:
        """No worker is well when the shards are told to end."""
        source = random.Random(self._plan.seed)
        for worker in self._workers:
            kind = source.choice(("worker-kill", "worker-stop", "worker-interrupt"))
            fault = Fault(kind, self._plan.seconds, 0.0, rank=worker.rank)
            self._timeline.note("begin", fault=vars(fault), text=str(fault))
            number = {"worker-kill": signal.SIGKILL, "worker-stop": signal.SIGSTOP}.get(kind, signal.SIGINT)
            _signal(worker.processes[:1], number)

    def _finish(self) -> None:
        """Healthy workers of all ranks come last, so that all that is open closes; then the parameters are read."""
        final = self._directory / "final.npz"
        for role, ranks in (("finish", range(self._plan.workers)), ("read", range(1))):
            last = [self._start_last(role, rank, final) for rank in ranks]
            if not self._until(lambda last=last: all(each.status is not None for each in last), FINISH_S):
                self._give_up([each for each in last if each.status is None])
                return
        if final.exists():
            self.outcome.final = final

    def _start_last(self, role: str, rank: int, final: Path) -> Process:
        options = self._options(rank, 0, self._servers())
        name = f"{role} {rank}"
        changed: dict[str, Any] = {"history": str(self._directory / f"{name.replace(' ', '-')}.jsonl")}
        changed["connect"] = options.connect | {"wait_timeout": 60.0, "retry_timeout": 20.0}
        actor = WorkerActor(rank, self._timeline)
        actor.start(Options(**vars(options) | changed | {"role": role, "final": str(final)}), name)
        self._last.append(actor.lives[0][0])
        return self._last[-1]

    # -- workers -------------------------------------------------------------------------------------------------------

    @override
    def _lives(self) -> list[Process]:
        leads = [process for worker in self._workers for process, _ in worker.lives]
        return leads + [process for worker in self._workers for mates in worker.mates for process in mates]

    def _running(self) -> list[Process]:
        return [process for process in self._lives() if process.status is None]

    def _options(self, rank: int, life: int, servers: str) -> Options:
        plan = self._plan
        return Options(
            history=str(self._directory / f"worker-{rank}-life-{life}.jsonl"),
            stop=str(self._directory / "stop"),
            servers=servers,
            rank=rank,
            workers=plan.workers,
            shards=plan.shards,
            size=plan.size,
            seed=(plan.seed * 1000 + rank) * 1000 + life,
            first=next(self._numbers),
            count=plan.per_life,
            connect={
                "transport": plan.lane,
                "wait_timeout": plan.wait_s,
                "retry_timeout": plan.retry_s,
                "run_id": f"trial-{plan.seed}" if plan.named else None,
            },
            declared=plan.declared,
            style=vars(plan.styles[rank]) if plan.styles else {},
            has_tables=plan.has_tables,
            has_vectors=plan.has_vectors,
            codec=plan.codec,
            is_stepping=plan.is_stepping,
            learning=None if plan.learning is None else vars(plan.learning),
            plant=plan.plant,
        )

    def _start(self, worker: WorkerActor) -> None:
        is_known = any(map(_has_declared, worker.lives))  # else the others wait for it to come
        if ((self._directory / "stop").exists() and is_known) or sum(len(each.lives) for each in self._workers) >= LIVES:
            worker.is_wanted = False
            return
        worker.is_wanted = True
        self._parted.discard(worker)
        worker.start(self._options(worker.rank, len(worker.lives), self._servers(worker.rank)))

    @override
    def _look_after_clients(self) -> None:
        self._running()  # writes down who has ended
        for worker in self._workers:
            processes = worker.processes
            have_some_ended = len({process.status is None for process in processes}) == 2
            if have_some_ended and any(process.status for process in processes) and worker not in self._parted:
                self._parted.add(worker)
                self._at(PARTED_S * self._busyness.factor, partial(self._part, worker, len(worker.lives)))
            if not processes or any(p.status is None for p in processes) or not worker.is_wanted or self._is_ending:
                continue
            worker.is_wanted = False
            if worker.wants_successor:
                self._at(RESTART_S, lambda worker=worker: self._start(worker))

    def _part(self, worker: WorkerActor, life: int) -> None:
        """One process of a group has failed: end the others, if they have not noticed."""
        if len(worker.lives) == life:
            worker.kill()

    @override
    def _look_around(self) -> None:
        """Have programs that have ended, but whose processes have not, say in their logs where they are, too; once each."""
        for worker in self._workers:
            for process, options in worker.lives:
                if process.status is None and not process.is_stopped and process not in self._late:
                    last = last_word(options)
                    if last.get("e") == "end" and time.monotonic() - last["t"] > LATE_S:
                        self._late.add(process)
                        process.signal(signal.SIGUSR1)
        super()._look_around()

    # -- faults --------------------------------------------------------------------------------------------------------

    @override
    def _strike_client(self, fault: Fault) -> None:
        worker = self._workers[fault.rank]
        processes = worker.processes
        if not processes or processes[0].status is not None:
            return
        struck = processes
        if len(processes) > 1 and fault.kind in ("worker-kill", "worker-stop"):
            struck = (processes[:1], processes[1:], processes)[int(3 * fault.part) % 3]
        match fault.kind:
            case "worker-stop":
                _signal(struck, signal.SIGSTOP)
                self._at(fault.seconds, lambda: self._end(fault, lambda: _resume(struck)))
                return
            case "worker-twin":
                if not _has_begun(worker):
                    return  # it would join after its twin, and be the later one
                _signal(struck, signal.SIGSTOP)
                self._at(fault.seconds, lambda: self._end(fault, lambda: _resume(struck)))
                self._timeline.note("superseded", name=processes[0].name)
                self._start(worker)
                return
            case "worker-interrupt":
                if any(process.is_stopped for process in struck):
                    return
                _signal(struck, signal.SIGINT)
                deadline = time.monotonic() + INTERRUPTED_S * self._busyness.factor
                self._watched |= dict.fromkeys(struck, deadline)
            case "worker-vanish":
                for link in self._links_of(Fault("link-half-open", 0, 0, rank=worker.rank)):
                    self._cuts += link.begin(Fault("link-half-open", fault.at, fault.seconds, side="shard"))
                _kill(struck)
            case _:
                _kill(struck)
        worker.is_wanted = False
        self._at(fault.seconds, lambda: self._end(fault, lambda: self._start_again(worker, fault)))

    def _start_again(self, worker: WorkerActor, fault: Fault) -> None:
        if fault.kind == "worker-kill":
            worker.kill()  # what has been left of a group
        self._start(worker)


def _signal(processes: Iterable[Process], number: signal.Signals) -> None:
    for process in processes:
        process.signal(number)


def _resume(processes: Iterable[Process]) -> None:
    for process in processes:
        process.resume()


def _kill(processes: Iterable[Process]) -> None:
    for process in processes:
        process.kill()


def _has_declared(life: tuple[Process, Options]) -> bool:
    """The others know it, and its shards do, whatever becomes of them."""
    path = Path(life[1].history)
    return path.exists() and '"e": "ok", "op": "declare"' in path.read_text()


def _has_begun(worker: WorkerActor) -> bool:
    """Its latest life has pushed something, or has ended."""
    process, options = worker.lives[-1]
    path = Path(options.history)
    return process.status is not None or (path.exists() and any(f'"op": "{op}' in path.read_text() for op in ("push", "step")))
