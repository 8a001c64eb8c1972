"""The course of a trial: what is due when, its shards, the links to them, and the faults that strike these.

Subclasses have the clients, and say how a trial goes. A process that does not end when it should writes its stacks to its log,
and is killed. Judges nothing.
"""

from __future__ import annotations

import heapq
import itertools
import random
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from busyness import Busyness
from links import Link, Network
from outcome import Outcome
from plan import DAMAGE, LINKS, Fault, Plan
from processes import HOST, Process, ShardActor, Timeline

from psd.checkpoint import CheckpointDirectory

TICK_S = 0.02
RESTART_S = 0.2
"""After which a supervisor starts a program again."""

START_S = 30.0
JOIN_S = 10.0
END_S = 45.0
"""From the last fault's end to the end of all programs: broken connections are noticed within 20 seconds, leases run out, and
each program takes one step more."""

TERMINATED_S = 10.0
"""How long a process that must end on a signal, within the grace time, is watched before it is killed."""


class Conducted(Protocol):
    """A trial of any kind."""

    outcome: Outcome

    def run(self) -> None:
        """Do what the plan says."""

    def close(self) -> None:
        """Leave nothing running."""


def conduct(kind: Callable[[Plan, Path], Conducted], plan: Plan, directory: Path) -> Outcome:
    """Run a plan. Returns when no process of the trial is left."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "plan.json").write_text(plan.to_json())
    trial = kind(plan, directory)
    try:
        trial.run()
    finally:
        trial.close()
    return trial.outcome


class Course(ABC):
    """The part that trials with shards of their own have in common.

    Args:
        clients: how many there are; each has a link of its own to each shard.
    """

    def __init__(self, plan: Plan, directory: Path, clients: int) -> None:
        self.outcome = Outcome(plan, directory)
        self._plan, self._directory = plan, directory
        self._timeline = Timeline(directory / "timeline.jsonl")
        self._network, self._busyness = Network(), Busyness()
        self._due: list[tuple[float, int, Callable[[], Any]]] = []
        self._order = itertools.count()
        self._shards = [ShardActor(plan, i, directory, self._timeline) for i in range(plan.shards)]
        self._links: dict[tuple[int, int], Link] = {
            (client, shard.index): self._network.link((HOST, shard.control), shard.bulk)
            for client in range(clients)
            for shard in self._shards
        }
        self._cuts = 0
        self._watched: dict[Process, float] = {}
        self._looked = 0.0
        self._last: list[Process] = []

    # -- what subclasses have ------------------------------------------------------------------------------------------

    @abstractmethod
    def _lives(self) -> Sequence[Process]:
        """Processes of the clients, those that have ended, too."""

    @abstractmethod
    def _look_after_clients(self) -> None:
        """Give those successors that want one, as a supervisor would."""

    @abstractmethod
    def _strike_client(self, fault: Fault) -> None:
        """Let a fault of a client strike."""

    # -- shards --------------------------------------------------------------------------------------------------------

    def _servers(self, client: int | None = None) -> str:
        """The shards' addresses, over a client's own links; None: without a proxy."""
        if client is None:
            return ",".join(shard.address for shard in self._shards)
        return ",".join(self._links[client, shard.index].address for shard in self._shards)

    def _have_shards_begun(self) -> bool:
        """Start the shards; False if they do not come up."""
        for shard in self._shards:
            shard.start()
        if self._until(lambda: all(shard.is_ready for shard in self._shards), START_S):
            return True
        self._give_up([shard.process for shard in self._shards if not shard.is_ready])
        return False

    def _terminate(self, *others: Process) -> None:
        """Ask the shards, and others, to end."""
        left = [*(shard.process for shard in self._shards), *others]
        for process in left:
            assert process is not None
            process.signal(signal.SIGTERM)
        if not self._until(lambda: all(process.status is not None for process in left if process), 15):
            self._give_up([process for process in left if process and process.status is None])

    def close(self) -> None:
        """Whatever has happened: nothing is left running."""
        for process in [*self._lives(), *self._last]:
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

    def _give_up(self, stuck: Sequence[Process | None]) -> None:
        """Some processes do not end: keep their stacks, and those of all others, who may be what they wait for."""
        self.outcome.stuck += [process.name for process in stuck if process is not None]
        everybody = [*(shard.process for shard in self._shards), *self._lives(), *self._last]
        for process in everybody:
            if process is not None:
                process.signal(signal.SIGUSR1)
        self._until(lambda: False, 1.0)

    # -- time ----------------------------------------------------------------------------------------------------------

    def _at(self, seconds: float, action: Callable[[], Any]) -> None:
        """Do something so many seconds from now."""
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._order), action))

    def _strike_by_the_clock(self) -> None:
        """Let all faults strike when they are due, and train meanwhile."""
        for fault in self._plan.faults:
            self._at(fault.at, lambda fault=fault: self._begin(fault))
        self._until(lambda: False, self._plan.seconds, scaled=False)

    def _is_quiet(self) -> bool:
        return not self._due

    def _seconds_left(self, faults: Iterable[Fault]) -> float:
        """Until these have been healed."""
        last = max((fault.at + fault.seconds for fault in faults), default=0.0)
        return max(0.0, last - self._plan.seconds) + 1

    def _until(self, fact: Callable[[], bool], seconds: float, *, scaled: bool = True) -> bool:
        """Do what is due until a fact holds: True; or for so long (longer on a busy machine, if scaled): False."""
        begun = time.monotonic()
        pause = threading.Event()
        while True:
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                heapq.heappop(self._due)[2]()
            self._look_after_clients()
            for shard in self._shards:
                _ = shard.is_ready  # writes down when it is
            if now - self._looked > 1.0:
                self._looked = now
                self._look_around()
            if fact():
                return True
            if now - begun > seconds * (self._busyness.factor if scaled else 1.0):
                return False
            pause.wait(TICK_S)

    def _look_around(self) -> None:
        """Look, once a second, at processes that had to end by a certain time."""
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
        elif fault.kind.startswith(("shard", "disk")):
            self._strike_shard(fault, self._shards[fault.shard])
        else:
            self._strike_client(fault)

    def _has_checkpoint(self) -> bool:
        directory = self._directory / "checkpoints"
        return directory.exists() and CheckpointDirectory(str(directory)).newest() is not None

    def _end(self, fault: Fault, heal: Callable[[], Any]) -> None:
        heal()
        self._timeline.note("end", fault=vars(fault))

    def _links_of(self, fault: Fault) -> list[Link]:
        return [
            link for (client, shard), link in self._links.items() if fault.rank in (-1, client) and fault.shard in (-1, shard)
        ]

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
                else:
                    process.kill()
                if fault.kind == "shard-lose":
                    shard.lose_state()
                self._start_when_ended(fault, shard, process)
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
