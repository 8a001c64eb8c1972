"""What a trial's files say: lives of workers, their calls, and the gradients that they have pushed. Judges nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from outcome import Outcome

PUSHING = ("push", "push_pull")
PULLING = ("pull", "push_pull")
CONFIRMING = (*PUSHING, *PULLING)


@dataclass
class Call:
    """One call of the public API. result: "ok", the class of its error, or "" if the process ended in the middle.

    Attributes:
        begun, ended: seconds; ended: of the process, if it ended in the middle.
        number, tensors: of the gradient, if it pushes one. change: of stats(), over the call.
        seen, new, digest: see program.py and learner.py. detail, text, trace, is_psd: of the error.
    """

    op: str
    begun: float
    clock: int | None
    number: int = -1
    tensors: tuple[str, ...] = ()
    ended: float = 0.0
    result: str = ""
    clock_after: int | None = None
    change: dict[str, int] = field(default_factory=dict)
    seen: tuple[int, int] | None = None
    new: dict[str, list[float]] = field(default_factory=dict)
    detail: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    trace: str = ""
    is_psd: bool = True
    digest: int | None = None

    @property
    def is_ok(self) -> bool:
        return self.result == "ok"

    @property
    def pushes(self) -> bool:
        return self.op in PUSHING


@dataclass
class Life:
    """One process of a worker.

    Attributes:
        row: in the matrix of batches. learned: of a learner, its steps, its exchanges, and that the job went back ("back").
        how: its own last word; "" if it had none. status: its exit status. signalled: the last signal that was to end it, and
            when. is_interrupted: one of them was SIGINT. superseded: when a twin was started, or None.
        steps: armed ones that were taken, and those that were begun and then made as calls.
    """

    name: str
    rank: int
    begun: float
    calls: list[Call] = field(default_factory=list)
    logs: list[tuple[float, str, str]] = field(default_factory=list)
    stats: dict[str, int] = field(default_factory=dict)
    how: str = ""
    how_at: float = 0.0
    ended: float = 0.0
    status: int | None = None
    signalled: str = ""
    signalled_at: float = 0.0
    is_interrupted: bool = False
    superseded: float | None = None
    log: str = ""
    row: int = -1
    learned: list[dict[str, Any]] = field(default_factory=list)
    steps: tuple[int, int] = (0, 0)

    def says(self, words: str, since: float = 0.0) -> bool:
        """A record of its log has these words."""
        return any(words in text for t, _, text in self.logs if t >= since)

    @property
    def lead(self) -> str:
        """The life's own name; or, of another rank of a learner that is a group, that of rank 0, which alone has a
        connection."""
        return self.name.partition(" rank ")[0]

    @property
    def is_lead(self) -> bool:
        """It is a worker of the job."""
        return self.name == self.lead

    @property
    def has_ended_in_order(self) -> bool:
        """Nobody has ended it, and it has not failed."""
        return self.how in ("with", "close", "fall", "finish", "read")


@dataclass
class Gradient:
    """What one life has pushed under one number, in one or more calls.

    Attributes:
        finished: the call over which the program has learnt that all shards have it: by its success, or from stats(), if the
            call has failed later on, or was the next one, which completes what the one before has left behind.
        is_dropped: stats() has said so, or may have.
    """

    number: int
    tensors: tuple[str, ...]
    life: Life
    calls: list[Call] = field(default_factory=list)
    finished: Call | None = None
    is_dropped: bool = False

    @property
    def begun(self) -> float:
        return self.calls[0].begun

    def until(self, call: Call) -> list[Call]:
        """The life's calls from its first one to another."""
        return self.life.calls[self.life.calls.index(self.calls[0]) : self.life.calls.index(call) + 1]

    def __str__(self) -> str:
        results = ", ".join(call.result or "killed" for call in self.calls)
        return f"gradient {self.number} of {self.life.name} ({self.calls[0].op} at clock {self.calls[0].clock}: {results})"


class Histories:
    """All lives of a trial, of those that come last, too."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.plan = outcome.plan
        self.timeline = outcome.timeline
        self.lives = [self._life(record) for record in self.of("start") if not record["name"].startswith(("shard", "psd-run"))]
        self.gradients: dict[int, Gradient] = {}
        for life in self.lives:
            for call in life.calls:
                if call.pushes:
                    gradient = Gradient(call.number, call.tensors, life)
                    self.gradients.setdefault(call.number, gradient).calls.append(call)
            if self.plan.learning is None:  # else calls are not of one gradient each
                self._follow(life)

    def _follow(self, life: Life) -> None:
        """Learn from what stats() say over each call what has become of its gradient, or of the one that has failed before.

        A call sends nothing of its own before what a failed one has left behind is completed or dropped.
        """
        failed: list[Gradient] = []
        for call in life.calls:
            own = self.gradients[call.number] if call.pushes else None
            others = [each for each in failed if each is not own]
            dropped, finished = call.change.get("pushes_dropped", 0), call.change.get("pushes", 0)
            if own is not None and call.is_ok:
                own.finished = own.finished or call
                finished -= 1
            subjects = others or [own or self._latest(life, call)] if dropped or finished > 0 else []
            for subject in subjects:
                # Of several failed pushes one had begun, and which one cannot be known.
                subject.is_dropped |= dropped > 0 or len(subjects) > 1
                if finished > 0 and len(subjects) == 1:
                    subject.finished = subject.finished or call
            if (own is not None and call.is_ok) or call.result == "RolledBack" or (call.op == "pull" and call.is_ok):
                failed = []
            elif own is not None:
                failed = [own] if subjects else [*others, own]

    def _latest(self, life: Life, call: Call) -> Gradient:
        """The last gradient that was pushed before a call."""
        numbers = [each.number for each in life.calls[: life.calls.index(call)] if each.pushes]
        return self.gradients[numbers[-1]]

    @cached_property
    def shard_logs(self) -> list[str]:
        """Of all lives of each shard."""
        paths = [self.outcome.directory / f"shard-{shard}.log" for shard in range(self.plan.shards)]
        return [path.read_text(errors="replace") if path.exists() else "" for path in paths]

    def of(self, what: str) -> Iterator[dict[str, Any]]:
        """The timeline's records of a kind."""
        return (record for record in self.timeline if record["what"] == what)

    def faults(self, *kinds: str) -> list[dict[str, Any]]:
        """Records of faults that have begun, of these kinds."""
        return [record for record in self.of("begin") if record["fault"]["kind"] in kinds]

    @cached_property
    def losses(self) -> list[float]:
        """When a shard has lost what it held: it was taken away, or damaged, and was not repaired before it started again."""
        found = [record["t"] for record in self.faults("shard-lose")]
        for record in self.of("damage"):
            since = [x for x in self.timeline if x.get("name") == record["name"] and x["t"] >= record["t"]]
            decisive = next((x["what"] for x in since if x["what"] in ("repair", "ready")), "")
            found += [record["t"]] * (decisive != "repair")
        return sorted(found)

    @cached_property
    def restarts(self) -> list[float]:
        """When shards have started again. One that is told to end does so some seconds after its fault has begun."""
        starts = [record for record in self.of("start") if record["name"].startswith("shard")]
        return [again["t"] for i, again in enumerate(starts) if again["name"] in {first["name"] for first in starts[:i]}]

    def mates(self, life: Life) -> list[Life]:
        """Of the other ranks, in a life of a learner of several processes."""
        return [other for other in self.lives if other.lead == life.lead and other is not life]

    @cached_property
    def now(self) -> float:
        """The trial's end."""
        return float(self.timeline[-1]["t"])

    def _life(self, start: dict[str, Any]) -> Life:
        name = start["name"]
        words = name.split()
        life = Life(name, int(words[1]), start["t"], ended=self.now)
        for record in self.timeline:
            if record["what"] == "superseded" and record["name"] == life.lead:
                life.superseded = record["t"]
            if record.get("name") != name:
                continue
            if record["what"] == "exit":
                life.ended, life.status = record["t"], record["status"]
            elif record["what"] == "signal" and record["signal"] in ("SIGKILL", "SIGINT"):
                life.signalled, life.signalled_at = record["signal"], record["t"]
                life.is_interrupted |= record["signal"] == "SIGINT"
        stem = name.replace(" ", "-")
        path = self.outcome.directory / f"{stem}.jsonl"
        log = self.outcome.directory / f"{stem}.log"
        life.log = log.read_text(errors="replace") if log.exists() else ""
        for line in path.read_text().splitlines() if path.exists() else ():
            _take(life, json.loads(line))
        for call in life.calls:
            call.ended = call.ended or life.ended
        return life


def _take(life: Life, record: dict[str, Any]) -> None:
    """Add a line of a history."""
    match record["e"]:
        case "begin":
            life.row = record.get("row", -1)
        case "invoke":
            tensors = tuple(record.get("tensors", ()))
            life.calls.append(Call(record["op"], record["t"], record["clock"], record.get("number", -1), tensors))
            if record["op"] == "step":
                life.learned.append(record | {"e": "step"})
        case "exchange":
            life.learned.append(record)
        case "ok" | "error":
            call = life.calls[-1]
            call.ended = record["t"]
            call.result = record.get("class", "ok")
            if call.result == "RolledBack":
                life.learned.append(record | {"e": "back"})
            call.clock_after, call.digest = record.get("clock"), record.get("digest")
            call.seen = tuple(record["seen"]) if record.get("seen") else None
            call.new = record.get("new", {})
            life.steps = tuple(record.get("steps", life.steps))
            call.detail, call.text = record.get("detail", {}), record.get("text", "")
            call.trace, call.is_psd = record.get("trace", ""), record.get("is_psd", True)
            after = record.get("stats", {})
            call.change = {name: value - life.stats.get(name, 0) for name, value in after.items()}
            life.stats = after or life.stats
        case "log":
            life.logs.append((record["t"], record["level"], record["text"]))
        case "end":
            life.how, life.how_at = record["how"], record["t"]
