"""Runs one plan of publications: shards, publishers, relays and readers, which are killed and started again as the plan says.

Leaves what trial.py does, for published_counts.py. Publishers put versions until they are told to stop; then healthy ones put a
last version, which every reader must get before it ends. Judges nothing.
"""

from __future__ import annotations

import heapq
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from busyness import Busyness
from links import Network
from outcome import Outcome
from plan import LINKS, Fault, Plan
from processes import HERE, HOST, Process, ShardActor, Timeline, held_port
from published_program import PublishedOptions
from published_values import PER_LIFE
from trial import END_S, JOIN_S, RESTART_S, START_S, TICK_S

from psd.checkpoint import CheckpointDirectory


def run(plan: Plan, directory: Path) -> Outcome:
    """Returns when no process of the trial is left."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "plan.json").write_text(plan.to_json())
    trial = _PublishedTrial(plan, directory)
    try:
        trial.run()
    finally:
        trial.close()
    return trial.outcome


class _Actor:
    """One client, over all of its lives.

    Args:
        name: as in the timeline, such as "reader 2". begin: starts a process of its next life, whose number it is given.

    Attributes:
        lives: its processes. is_wanted: it gets a successor when it has ended with another status than 0.
    """

    def __init__(self, name: str, begin: Callable[[int], Process]) -> None:
        self.name = name
        self._begin = begin
        self.lives: list[Process] = []
        self.is_wanted = True

    @property
    def is_running(self) -> bool:
        """A process of it is there."""
        return bool(self.lives) and self.lives[-1].status is None

    def start(self) -> None:
        """Begin a life, unless one has begun."""
        if not self.is_running:
            self.lives.append(self._begin(len(self.lives)))


class _PublishedTrial:
    def __init__(self, plan: Plan, directory: Path) -> None:
        assert plan.publishing is not None
        self.outcome = Outcome(plan, directory)
        self._plan, self._directory, self._publishing = plan, directory, plan.publishing
        self._timeline = Timeline(directory / "timeline.jsonl")
        self._network, self._busyness = Network(), Busyness()
        self._due: list[tuple[float, int, Callable[[], Any]]] = []
        self._order, self._numbers = itertools.count(), itertools.count(1)
        self._shards = [ShardActor(plan, i, directory, self._timeline) for i in range(plan.shards)]
        ranks, readers = range(plan.workers), range(self._publishing.readers)
        self._publishers = [_Actor(f"worker {rank}", lambda life, rank=rank: self._publish(rank, life)) for rank in ranks]
        places = range(self._publishing.relays)
        self._held = [held_port() for _ in places]
        self._relays = [_Actor(f"relay {place}", lambda life, place=place: self._relay(place)) for place in places]
        self._readers = [_Actor(f"reader {place}", lambda life, place=place: self._follow(place, life)) for place in readers]
        self._clients = [*self._publishers, *self._readers, *self._relays]
        self._links = {
            (client, shard.index): self._network.link((HOST, shard.control), shard.bulk)
            for client in range(len(self._clients))
            for shard in self._shards
        }
        self._cuts = self._struck = self._returned = 0
        self._places: dict[Path, int] = {}
        self._last: list[Process] = []

    # -- processes -----------------------------------------------------------------------------------------------------

    def _servers(self, client: int) -> str:
        return ",".join(self._links[client, shard.index].address for shard in self._shards)

    def _program(self, role: str, name: str, servers: str, rank: int, seed: int, *, patient: bool = False) -> Process:
        plan, directory = self._plan, self._directory
        stem = directory / name.replace(" ", "-")
        connect = {"wait_timeout": plan.wait_s, "retry_timeout": plan.retry_s}
        if role != "read":
            connect = {"wait_timeout": 60.0, "retry_timeout": 20.0} if patient else connect
            connect |= {"transport": plan.lane, "run_id": f"trial-{plan.seed}"}
        options = PublishedOptions(
            role=role,
            history=str(stem.with_suffix(".jsonl")),
            stop=str(directory / "stop"),
            last=str(directory / "last"),
            servers=servers,
            rank=rank,
            ranks=plan.workers,
            shards=plan.shards,
            seed=seed,
            first=PER_LIFE * next(self._numbers),
            connect=connect,
            pace_s=self._publishing.pace_s,
        )
        command = [str(HERE / "published_program.py"), str(os.getpid()), options.to_json()]
        return Process(name, command, stem.with_suffix(".out"), stem.with_suffix(".log"), self._timeline)

    def _publish(self, rank: int, life: int) -> Process:
        seed = (self._plan.seed * 100 + rank) * 1000 + life
        return self._program("publish", f"worker {rank} life {life}", self._servers(rank), rank, seed)

    def _follow(self, place: int, life: int) -> Process:
        client = self._plan.workers + place
        servers, relays = self._servers(client), self._relays
        # The first reader asks the shards; of the others, each prefers another relay.
        name = f"reader {place} life {life}"
        if relays and place:
            ports = [self._held[(place + at) % len(relays)].getsockname()[1] for at in range(min(2, len(relays)))]
            servers, name = "|".join(f"{HOST}:{port}" for port in ports), f"{name} of relays"
        return self._program("read", name, servers, place, (self._plan.seed * 100 + 50 + place) * 1000 + life)

    def _relay(self, place: int) -> Process:
        client = self._plan.workers + self._publishing.readers + place
        port = self._held[place].getsockname()[1]
        command = [str(HERE / "children.py"), str(os.getpid()), "psd.cli.server", "--relay-of", self._servers(client)]
        command += ["--listen", f"{HOST}:{port}", "--grace", "1"]
        stem = self._directory / f"relay-{place}"
        return Process(f"relay {place}", command, stem.with_suffix(".out"), stem.with_suffix(".log"), self._timeline)

    # -- the course of things ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """The trial."""
        for shard in self._shards:
            shard.start()
        if not self._until(lambda: all(shard.is_ready for shard in self._shards), START_S):
            self._give_up([shard.process for shard in self._shards if not shard.is_ready])
            return
        for client in self._clients:
            client.start()
        self._until(lambda: all(map(self._has_read, self._readers)), JOIN_S)
        self._timeline.note("training")
        if self._publishing.puts_between:
            self._until(self._have_all_struck, self._plan.seconds, scaled=False)
        else:
            for fault in self._plan.faults:
                self._at(fault.at, lambda fault=fault: self._begin(fault))
            self._until(lambda: False, self._plan.seconds, scaled=False)
        self._timeline.note("stopping")
        (self._directory / "stop").touch()
        by_clock = () if self._publishing.puts_between else self._plan.faults
        last = max((fault.at + fault.seconds for fault in by_clock), default=0.0)
        self._until(lambda: not self._due, max(0.0, last - self._plan.seconds) + 1, scaled=False)
        if not self._until(lambda: not self._due and not any(each.is_running for each in self._publishers), END_S):
            self._give_up([each.lives[-1] for each in self._publishers if each.is_running])
            return
        servers = ",".join(shard.address for shard in self._shards)
        ranks = range(self._plan.workers)
        self._last = [self._program("finish", f"finish {rank}", servers, rank, rank, patient=True) for rank in ranks]
        if not self._until(lambda: all(each.status is not None for each in self._last), END_S):
            self._give_up([each for each in self._last if each.status is None])
            return
        if not self._until(lambda: not any(each.is_running for each in self._readers), END_S):
            self._give_up([each.lives[-1] for each in self._readers if each.is_running])
            return
        ending = [shard.process for shard in self._shards] + [each.lives[-1] for each in self._relays]
        for process in ending:
            assert process is not None
            process.signal(signal.SIGTERM)
        if not self._until(lambda: all(process is None or process.status is not None for process in ending), 15):
            self._give_up([process for process in ending if process and process.status is None])

    def close(self) -> None:
        """Whatever has happened: nothing is left running."""
        for process in [*(life for client in self._clients for life in client.lives), *self._last]:
            if process.status is None:
                process.kill()
        self.outcome.cuts = self._cuts
        for shard in self._shards:
            shard.close()
        for held in self._held:
            held.close()
        self._network.close()
        self.outcome.factor = self._busyness.close()
        self._timeline.note("closed", factor=round(self.outcome.factor, 2))
        self._timeline.close()
        self.outcome.timeline = self._timeline.records
        self.outcome.save()

    def _give_up(self, stuck: Sequence[Process | None]) -> None:
        """Some processes do not end: keep their stacks, and those of all others."""
        self.outcome.stuck += [process.name for process in stuck if process is not None]
        for process in [
            *(shard.process for shard in self._shards),
            *(life for client in self._clients for life in client.lives),
        ]:
            if process is not None:
                process.signal(signal.SIGUSR1)
        self._until(lambda: False, 1.0)

    def _has_read(self, reader: _Actor) -> bool:
        """It has had a version."""
        path = next(self._directory.glob(f"{reader.name.replace(' ', '-')}-life-0*.jsonl"), None)
        return path is not None and '"e": "ok"' in path.read_text()

    def _puts(self) -> int:
        """How many have returned so far."""
        for path in self._directory.glob("worker-*.jsonl"):
            with path.open() as file:
                file.seek(self._places.get(path, 0))
                while (line := file.readline()).endswith("\n"):
                    self._returned += '"e": "ok", "op": "put"' in line
                    self._places[path] = file.tell()
        return self._returned

    def _have_all_struck(self) -> bool:
        """Let the next fault strike if it is its turn; True after so many more puts as come before each."""
        number = self._struck
        if self._puts() < (number + 1) * self._publishing.puts_between:
            return False
        if number == len(self._plan.faults):
            return True
        self._struck += 1
        self._begin(self._plan.faults[number])
        return False

    def _at(self, seconds: float, action: Callable[[], Any]) -> None:
        """Do something so many seconds from now."""
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._order), action))

    def _until(self, fact: Callable[[], bool], seconds: float, *, scaled: bool = True) -> bool:
        """Do what is due until a fact holds: True; or for so long (longer on a busy machine, if scaled): False."""
        begun = time.monotonic()
        pause = threading.Event()
        while True:
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                heapq.heappop(self._due)[2]()
            for client in self._clients:
                if client.lives and client.is_wanted and client.lives[-1].status not in (None, 0):
                    client.is_wanted = False
                    self._at(RESTART_S, lambda client=client: self._start_again(client))
            for shard in self._shards:
                _ = shard.is_ready  # writes down when it is
            if fact():
                return True
            if now - begun > seconds * (self._busyness.factor if scaled else 1.0):
                return False
            pause.wait(TICK_S)

    # -- faults --------------------------------------------------------------------------------------------------------

    def _begin(self, fault: Fault) -> None:
        if fault.kind == "shard-lose" and not self._has_checkpoint():
            fault = Fault("shard-kill", fault.at, fault.seconds, shard=fault.shard)  # nobody could go on
        self._timeline.note("begin", fault=vars(fault), text=str(fault))
        if fault.kind in LINKS:
            struck = [link for at, link in self._links.items() if fault.rank in (-1, at[0]) and fault.shard in (-1, at[1])]
            self._cuts += sum(link.begin(fault) for link in struck)
            self._at(fault.seconds, lambda: self._end(fault, lambda: [link.end(fault) for link in struck]))
        elif fault.kind.startswith("shard"):
            self._strike_shard(fault, self._shards[fault.shard])
        else:
            self._strike_client(fault, self._clients[fault.rank])

    def _end(self, fault: Fault, heal: Callable[[], Any]) -> None:
        heal()
        self._timeline.note("end", fault=vars(fault))

    def _has_checkpoint(self) -> bool:
        directory = self._directory / "checkpoints"
        return directory.exists() and CheckpointDirectory(str(directory)).newest() is not None

    def _strike_shard(self, fault: Fault, shard: ShardActor) -> None:
        process = shard.process
        assert process is not None
        if fault.kind == "shard-stop":
            process.signal(signal.SIGSTOP)
            self._at(fault.seconds, lambda: self._end(fault, process.resume))
        elif process.status is None:
            if fault.kind == "shard-terminate" and not process.is_stopped:
                process.signal(signal.SIGTERM)
                self._start_when_ended(fault, shard, process, time.monotonic() + START_S)
                return
            process.kill()
            if fault.kind == "shard-lose":
                shard.lose_state()
            self._at(fault.seconds, lambda: self._end(fault, shard.start))

    def _start_when_ended(self, fault: Fault, shard: ShardActor, process: Process, deadline: float) -> None:
        if process.status is not None:
            self._at(fault.seconds, lambda: self._end(fault, shard.start))
            return
        if time.monotonic() > deadline:
            self._give_up([process])
            process.kill()
        self._at(TICK_S, lambda: self._start_when_ended(fault, shard, process, deadline))

    def _strike_client(self, fault: Fault, client: _Actor) -> None:
        if not client.is_running:
            return
        process = client.lives[-1]
        if fault.kind.endswith("stop"):
            process.signal(signal.SIGSTOP)
            self._at(fault.seconds, lambda: self._end(fault, process.resume))
            return
        client.is_wanted = False
        process.kill()
        self._at(fault.seconds, lambda: self._end(fault, lambda: self._start_again(client)))

    def _start_again(self, client: _Actor) -> None:
        """As a supervisor would; publishers, only as long as there is something to publish."""
        client.is_wanted = True
        if client not in self._publishers or not (self._directory / "stop").exists():
            client.start()
