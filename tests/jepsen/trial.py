"""Runs one plan: starts shards and workers, lets the faults strike, heals, and asks everybody to end. Judges nothing.

What it leaves in its directory: plan.json, outcome.json, timeline.jsonl, a history and a log per life of a worker, a log per
shard, and the parameters of the end. A process that does not end when it should writes its stacks to its log, and is killed.
"""

from __future__ import annotations

import heapq
import itertools
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from busyness import Busyness
from links import Link, Network
from outcome import Outcome
from plan import DAMAGE, LINKS, LIVES, Fault, Plan
from processes import Process, ShardActor, Timeline, WorkerActor, last_word
from program import Options

from psd.checkpoint import CheckpointDirectory

TICK_S = 0.02
LATE_S = 7.0
RESTART_S = 0.2
"""After which a supervisor starts a program again."""

START_S = 30.0
JOIN_S = 10.0
LEARNERS_S = 40.0
"""Likewise, for those that import torch first."""

END_S = 45.0
"""From the last fault's end to the end of all programs: broken connections are noticed within 20 seconds, leases run out, and
each program takes one step more."""

FINISH_S = 40.0
TERMINATED_S = 10.0
INTERRUPTED_S = 20.0
"""How long a process that must end on a signal, within the grace time or 6 seconds, is watched before it is killed."""


def run(plan: Plan, directory: Path) -> Outcome:
    """Returns when no process of the trial is left."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "plan.json").write_text(plan.to_json())
    trial = _Trial(plan, directory)
    try:
        trial.run()
    finally:
        trial.close()
    return trial.outcome


class _Trial:
    def __init__(self, plan: Plan, directory: Path) -> None:
        self.outcome = Outcome(plan, directory)
        self._plan = plan
        self._directory = directory
        self._timeline = Timeline(directory / "timeline.jsonl")
        self._network = Network()
        self._busyness = Busyness()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._shards = [ShardActor(plan, i, directory, self._timeline) for i in range(plan.shards)]
        self._links: dict[tuple[int, int], Link] = {
            (rank, shard.index): self._network.link(("127.0.0.1", shard.control), shard.bulk)
            for rank in range(plan.workers)
            for shard in self._shards
        }
        self._workers = [WorkerActor(rank, self._timeline) for rank in range(plan.workers)]
        self._numbers = itertools.count(0, plan.per_life)
        self._is_ending = False
        self._late: set[Process] = set()
        self._watched: dict[Process, float] = {}
        self._looked = 0.0
        self._last: list[Process] = []

    # -- the course of things ------------------------------------------------------------------------------------------

    def run(self) -> None:
        for shard in self._shards:
            shard.start()
        if not self._until(lambda: all(shard.is_ready for shard in self._shards), START_S):
            self._give_up([shard.process for shard in self._shards if not shard.is_ready])
            return
        for worker in self._workers:
            self._start(worker)
        if not self._plan.early:
            self._until(lambda: all(map(_has_begun, self._workers)), JOIN_S if self._plan.learning is None else LEARNERS_S)
        self._timeline.note("training")
        for fault in self._plan.faults:
            self._at(fault.at, lambda fault=fault: self._begin(fault))
        self._until(lambda: False, self._plan.seconds, scaled=False)
        if self._plan.ends_dead:
            self._until(lambda: self._is_quiet() and all(shard.is_ready for shard in self._shards), END_S)
            self._is_ending = True
            self._strike_all()
        else:
            self._timeline.note("stopping")
            (self._directory / "stop").touch()
            self._until(lambda: self._is_quiet() and not self._running(), self._seconds_left(), scaled=False)
            if not self._until(lambda: self._is_quiet() and not self._running(), END_S):
                self._give_up(self._running())
                return
            self._is_ending = True
            self._finish()
        self.outcome.has_checkpoint = self._has_checkpoint()  # before the shards store one of their end
        for shard in self._shards:
            assert shard.process is not None
            shard.process.signal(signal.SIGTERM)
        left = [shard.process for shard in self._shards]
        if not self._until(lambda: all(process.status is not None for process in left if process), 15):
            self._give_up([process for process in left if process and process.status is None])

    def _strike_all(self) -> None:
        """No worker is well when the shards are told to end."""
        source = random.Random(self._plan.seed)
        for worker in self._workers:
            kind = source.choice(("worker-kill", "worker-stop", "worker-interrupt"))
            fault = Fault(kind, self._plan.seconds, 0.0, rank=worker.rank)
            self._timeline.note("begin", fault=vars(fault), text=str(fault))
            process = worker.process
            if process is not None and process.status is None:
                process.signal({"worker-kill": signal.SIGKILL, "worker-stop": signal.SIGSTOP}.get(kind, signal.SIGINT))

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
        options = self._options(rank, 0, servers=",".join(shard.address for shard in self._shards))
        name = f"{role} {rank}"
        changed: dict[str, Any] = {"history": str(self._directory / f"{name.replace(' ', '-')}.jsonl")}
        changed["connect"] = options.connect | {"wait_timeout": 60.0, "retry_timeout": 20.0}
        actor = WorkerActor(rank, self._timeline)
        actor.start(Options(**vars(options) | changed | {"role": role, "final": str(final)}), name)
        self._last.append(actor.lives[0][0])
        return self._last[-1]

    def close(self) -> None:
        """Whatever has happened: nothing is left running."""
        for process in [*self._running(), *self._last]:
            if process.status is None:
                process.kill()
        self.outcome.cuts = self._cuts
        for shard in self._shards:
            shard.close()
        self._network.close()
        self.outcome.factor = self._busyness.close()
        self._timeline.note("closed", factor=round(self.outcome.factor, 2))
        self._timeline.close()
        self.outcome.timeline = self._timeline.records
        self.outcome.save()

    def _give_up(self, stuck: list[Process | None]) -> None:
        """Some processes do not end: keep their stacks, and those of all others, who may be what they wait for."""
        self.outcome.stuck += [process.name for process in stuck if process is not None]
        everybody = [shard.process for shard in self._shards] + [*self._running(), *self._last]
        for process in everybody:
            if process is not None:
                process.signal(signal.SIGUSR1)
        self._until(lambda: False, 1.0)

    _cuts = 0

    # -- time ----------------------------------------------------------------------------------------------------------

    def _at(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something so many seconds from now."""
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._order), action))

    def _seconds_left(self) -> float:
        """Until all faults have been healed."""
        last = max((fault.at + fault.seconds for fault in self._plan.faults), default=0)
        return max(0.0, last - self._plan.seconds) + 1

    def _is_quiet(self) -> bool:
        return not self._due

    def _until(self, fact: Callable[[], bool], seconds: float, *, scaled: bool = True) -> bool:
        """Do what is due until a fact holds: True; or for so long (longer on a busy machine, if scaled): False."""
        begun = time.monotonic()
        pause = threading.Event()
        while True:
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                heapq.heappop(self._due)[2]()
            self._look_after_workers()
            for shard in self._shards:
                _ = shard.is_ready  # writes down when it is
            if now - self._looked > 1.0:
                self._looked = now
                self._look_for_late_ends()
                self._look_at_watched()
            if fact():
                return True
            if now - begun > seconds * (self._busyness.factor if scaled else 1.0):
                return False
            pause.wait(TICK_S)

    # -- workers -------------------------------------------------------------------------------------------------------

    def _running(self) -> list[Process]:
        return [process for worker in self._workers for process, _ in worker.lives if process.status is None]

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
            learning=None if plan.learning is None else vars(plan.learning),
        )

    def _start(self, worker: WorkerActor) -> None:
        servers = ",".join(self._links[worker.rank, shard.index].address for shard in self._shards)
        is_known = any(map(_has_declared, worker.lives))  # else the others wait for it to come
        if ((self._directory / "stop").exists() and is_known) or sum(len(each.lives) for each in self._workers) >= LIVES:
            worker.is_wanted = False
            return
        worker.is_wanted = True
        worker.start(self._options(worker.rank, len(worker.lives), servers))

    def _look_after_workers(self) -> None:
        """Give those successors that want one, as a supervisor would."""
        self._running()  # writes down who has ended
        for worker in self._workers:
            process = worker.process
            if process is None or process.status is None or not worker.is_wanted or self._is_ending:
                continue
            worker.is_wanted = False
            if worker.wants_successor:
                self._at(RESTART_S, lambda worker=worker: self._start(worker))

    def _look_for_late_ends(self) -> None:
        """Have programs that have ended, but whose processes have not, say in their logs where they are. Once each."""
        for worker in self._workers:
            for process, options in worker.lives:
                if process.status is None and not process.is_stopped and process not in self._late:
                    last = last_word(options)
                    if last.get("e") == "end" and time.monotonic() - last["t"] > LATE_S:
                        self._late.add(process)
                        process.signal(signal.SIGUSR1)

    def _look_at_watched(self) -> None:
        """Processes that had to end by a certain time."""
        for process, deadline in list(self._watched.items()):
            if process.status is None and time.monotonic() > deadline:
                self._give_up([process])
                process.kill()
            if process.status is not None:
                del self._watched[process]

    # -- faults --------------------------------------------------------------------------------------------------------

    def _begin(self, fault: Fault) -> None:
        if fault.kind == "shard-lose" and not self._has_checkpoint():
            fault = replace(fault, kind="shard-kill")  # nobody could go on
        self._timeline.note("begin", fault=vars(fault), text=str(fault))
        if fault.kind in LINKS:
            links = self._links_of(fault)
            self._cuts += sum(link.begin(fault) for link in links)
            self._at(fault.seconds, lambda: self._end(fault, lambda: [link.end(fault) for link in links]))
        elif fault.kind.startswith("worker"):
            self._strike_worker(fault, self._workers[fault.rank])
        else:
            self._strike_shard(fault, self._shards[fault.shard])

    def _has_checkpoint(self) -> bool:
        directory = self._directory / "checkpoints"
        return directory.exists() and CheckpointDirectory(str(directory)).newest() is not None

    def _end(self, fault: Fault, heal: Callable[[], Any]) -> None:
        heal()
        self._timeline.note("end", fault=vars(fault))

    def _links_of(self, fault: Fault) -> list[Link]:
        return [link for (rank, shard), link in self._links.items() if fault.rank in (-1, rank) and fault.shard in (-1, shard)]

    def _strike_shard(self, fault: Fault, shard: ShardActor) -> None:
        process = shard.process
        assert process is not None
        match fault.kind:
            case "shard-kill" | "shard-lose" | "shard-terminate" | "shard-damage":
                if process.status is not None:
                    return  # it is down
                is_told = fault.kind == "shard-terminate" or (fault.kind == DAMAGE and fault.part >= 0.5)
                if is_told and not process.is_stopped:
                    process.signal(signal.SIGTERM)
                    self._watched[process] = time.monotonic() + TERMINATED_S * self._busyness.factor
                    self._start_when_ended(fault, shard, process)
                    return
                process.kill()
                if fault.kind == DAMAGE:
                    self._start_when_ended(fault, shard, process)
                    return
                if fault.kind == "shard-lose":
                    shard.lose_state()
                self._at(fault.seconds, lambda: self._end(fault, shard.start))
            case "shard-stop":
                process.signal(signal.SIGSTOP)
                self._at(fault.seconds, lambda: self._end(fault, process.resume))
            case "shard-vanish":
                self._begin(Fault("link-black-hole", fault.at, fault.seconds, shard=fault.shard))
            case "disk-full":
                shard.fill_disk()
                self._at(fault.seconds, lambda: self._end(fault, shard.clear_disk))

    def _start_when_ended(self, fault: Fault, shard: ShardActor, process: Process) -> None:
        if process.status is None:
            self._at(TICK_S, lambda: self._start_when_ended(fault, shard, process))
        elif fault.kind == DAMAGE and shard.damage(random.Random(fault.part)):
            self._at(fault.seconds, lambda: self._start_damaged(fault, shard))
        else:
            self._at(fault.seconds, lambda: self._end(fault, shard.start))

    def _start_damaged(self, fault: Fault, shard: ShardActor) -> None:
        """If it refuses to start, repair what was damaged, and start it again."""
        shard.start()
        process = shard.process
        assert process is not None

        def look() -> None:
            if process.status is not None and shard.process is process:
                shard.repair()
                self._end(fault, shard.start)
            elif shard.is_ready or shard.process is not process:
                self._end(fault, lambda: None)
            else:
                self._at(TICK_S, look)

        look()

    def _strike_worker(self, fault: Fault, worker: WorkerActor) -> None:
        process = worker.process
        if process is None or process.status is not None:
            return
        match fault.kind:
            case "worker-stop":
                process.signal(signal.SIGSTOP)
                self._at(fault.seconds, lambda: self._end(fault, process.resume))
                return
            case "worker-twin":
                if not _has_begun(worker):
                    return  # it would join after its twin, and be the later one
                process.signal(signal.SIGSTOP)
                self._at(fault.seconds, lambda: self._end(fault, process.resume))
                self._timeline.note("superseded", name=process.name)
                self._start(worker)
                return
            case "worker-interrupt":
                if process.is_stopped:
                    return
                process.signal(signal.SIGINT)
                self._watched[process] = time.monotonic() + INTERRUPTED_S * self._busyness.factor
            case "worker-vanish":
                for link in self._links_of(Fault("link-half-open", 0, 0, rank=worker.rank)):
                    self._cuts += link.begin(Fault("link-half-open", fault.at, fault.seconds, side="shard"))
                process.kill()
            case _:
                process.kill()
        worker.is_wanted = False
        self._at(fault.seconds, lambda: self._end(fault, lambda: self._start(worker)))


def _has_declared(life: tuple[Process, Options]) -> bool:
    """The others know it, and its shards do, whatever becomes of them."""
    path = Path(life[1].history)
    return path.exists() and '"e": "ok", "op": "declare"' in path.read_text()


def _has_begun(worker: WorkerActor) -> bool:
    """Its latest life has pushed something, or has ended."""
    process, options = worker.lives[-1]
    path = Path(options.history)
    return process.status is not None or (path.exists() and any(f'"op": "{op}' in path.read_text() for op in ("push", "step")))
