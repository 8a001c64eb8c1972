"""Runs one plan of publications: shards, publishers, relays and readers, which are killed and started again as the plan says.

Leaves what trial.py does, for published_counts.py. Publishers put versions until they are told to stop; then healthy ones put a
last version, which every reader must get before it ends. Judges nothing.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable
from pathlib import Path

from course import END_S, JOIN_S, RESTART_S, Course
from plan import Fault, Plan
from processes import HERE, HOST, Process, held_port
from published_program import PublishedOptions
from published_values import PER_LIFE
from typing_extensions import override


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


class PublishedTrial(Course):
    """One trial of publications."""

    def __init__(self, plan: Plan, directory: Path) -> None:
        assert plan.publishing is not None
        self._publishing = plan.publishing
        super().__init__(plan, directory, clients=plan.workers + self._publishing.readers + self._publishing.relays)
        self._numbers = itertools.count(1)
        ranks, readers = range(plan.workers), range(self._publishing.readers)
        self._publishers = [_Actor(f"worker {rank}", lambda life, rank=rank: self._publish(rank, life)) for rank in ranks]
        places = range(self._publishing.relays)
        self._held = [held_port() for _ in places]
        self._relays = [_Actor(f"relay {place}", lambda life, place=place: self._relay(place)) for place in places]
        self._readers = [_Actor(f"reader {place}", lambda life, place=place: self._follow(place, life)) for place in readers]
        self._clients = [*self._publishers, *self._readers, *self._relays]
        self._struck = self._returned = 0
        self._places: dict[Path, int] = {}

    # -- processes -----------------------------------------------------------------------------------------------------

    @override
    def _lives(self) -> list[Process]:
        return [life for client in self._clients for life in client.lives]

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
        command = [str(HERE / "published_program.py"), options.to_json()]
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
        command = [str(HERE / "children.py"), "psd.cli.server", "--relay-of", self._servers(client)]
        command += ["--listen", f"{HOST}:{port}", "--grace", "1"]
        stem = self._directory / f"relay-{place}"
        return Process(f"relay {place}", command, stem.with_suffix(".out"), stem.with_suffix(".log"), self._timeline)

    # -- the course of things ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """The trial."""
        if not self._have_shards_begun():
            return
        for client in self._clients:
            client.start()
        self._until(lambda: all(map(self._has_read, self._readers)), JOIN_S)
        self._timeline.note("training")
        if self._publishing.puts_between:
            self._until(self._have_all_struck, self._plan.seconds, scaled=False)
        else:
            self._strike_by_the_clock()
        self._timeline.note("stopping")
        (self._directory / "stop").touch()
        by_clock = () if self._publishing.puts_between else self._plan.faults
        self._until(self._is_quiet, self._seconds_left(by_clock), scaled=False)
        if not self._until(lambda: self._is_quiet() and not any(each.is_running for each in self._publishers), END_S):
            self._give_up([each.lives[-1] for each in self._publishers if each.is_running])
            return
        ranks = range(self._plan.workers)
        self._last = [self._program("finish", f"finish {rank}", self._servers(), rank, rank, patient=True) for rank in ranks]
        if not self._until(lambda: all(each.status is not None for each in self._last), END_S):
            self._give_up([each for each in self._last if each.status is None])
            return
        if not self._until(lambda: not any(each.is_running for each in self._readers), END_S):
            self._give_up([each.lives[-1] for each in self._readers if each.is_running])
            return
        self._terminate(*(each.lives[-1] for each in self._relays))

    @override
    def close(self) -> None:
        super().close()
        for held in self._held:
            held.close()

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

    @override
    def _look_after_clients(self) -> None:
        for client in self._clients:
            if client.lives and client.is_wanted and client.lives[-1].status not in (None, 0):
                client.is_wanted = False
                self._at(RESTART_S, lambda client=client: self._start_again(client))

    @override
    def _strike_client(self, fault: Fault) -> None:
        client = self._clients[fault.rank]
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
        client.is_wanted = client not in self._publishers or not (self._directory / "stop").exists()
        if client.is_wanted:
            client.start()
