"""The model of publications: what readers may have, by what publishers were told. From histories alone.

A put has a number, of which all its tensors and its meta are made. Where one process publishes, each put has another number;
where several do, all parts that make up a version have one number, which comes from the version before.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from conduct import DEFECT
from counting import Failure
from outcome import Outcome

OF_ONE_SOURCE = "of relays"
"""In the name of a reader's life: it reads from relays, whose digests are of their own, and which may be behind."""

PUBLISHERS_MEET = (
    *(
        "ShardUnavailable",
        "WaitTimeout",
        "Draining",
        "Overloaded",
        "RolledBack",
        "SessionFenced",
        "ShardRestarted",
        "StateLost",
    ),
    "ConfigError",
)
READERS_MEET = ("ShardUnavailable", "WaitTimeout", "Draining", "Overloaded", "NotDeclared", "CutMissed")
"""Errors that calls may raise while something is wrong."""


@dataclass
class PublishedCall:
    """One call; ended: None if its process ended first. fields: as the history has them, of its result, too."""

    op: str
    begun: float
    ended: float | None = None
    error: str = ""
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def is_ok(self) -> bool:
        """It has returned."""
        return self.ended is not None and not self.error


def calls_of(records: list[dict[str, Any]]) -> list[PublishedCall]:
    """The calls of one life."""
    calls: list[PublishedCall] = []
    for record in records:
        if record["e"] == "invoke":
            calls.append(PublishedCall(record["op"], record["t"], fields=dict(record)))
        elif record["e"] in ("ok", "error"):
            calls[-1].ended, calls[-1].error = record["t"], record.get("class", "")
            calls[-1].fields |= record
    return calls


class PublishedHistories:
    """All lives of a trial of publications.

    Attributes:
        lives: by name, their calls. puts: of all publishers. pulls: of each reader's life, those that have returned.
    """

    def __init__(self, outcome: Outcome) -> None:
        self.outcome, self.plan = outcome, outcome.plan
        self.lives: dict[str, list[PublishedCall]] = {}
        self.lasts: dict[str, dict[str, Any]] = {}
        for path in sorted(outcome.directory.glob("*-*.jsonl")):
            records = [json.loads(line) for line in path.read_text().splitlines()]
            name = path.stem.replace("-", " ")
            self.lives[name], self.lasts[name] = calls_of(records), records[-1] if records else {}
        self.puts = [call for calls in self.lives.values() for call in calls if call.op == "put"]
        self.pulls = {
            name: [call for call in calls if call.op == "pull" and call.is_ok]
            for name, calls in self.lives.items()
            if name.startswith("reader")
        }

    @property
    def has_lost(self) -> bool:
        """A shard has lost its state, so that the store has gone back to a checkpoint."""
        return any(r["what"] == "begin" and r["fault"]["kind"] == "shard-lose" for r in self.outcome.timeline)


def check_published(histories: PublishedHistories) -> list[Failure]:
    """Everything."""
    return [
        *_of_each_read(histories),
        *_order(histories),
        *_values(histories),
        *_acknowledged(histories),
        *_digests(histories),
        *_conduct(histories),
    ]


def counts_of(histories: PublishedHistories) -> Counter[str]:
    """What has happened."""
    counts = Counter(runs=1, cuts=histories.outcome.cuts)
    pulls = [pull for own in histories.pulls.values() for pull in own]
    counts["puts"] = sum(put.is_ok for put in histories.puts)
    counts["pulls"] = len(pulls)
    counts["versions read"] = len({pull.fields["version"] for pull in pulls})
    counts["errors"] = sum(bool(call.error) for calls in histories.lives.values() for call in calls)
    for record in histories.outcome.timeline:
        if record["what"] == "signal" and record["signal"] in ("SIGKILL", "SIGSTOP"):
            counts["kills" if record["signal"] == "SIGKILL" else "suspensions"] += 1
            counts[f"{record['name'].split()[0]} {record['signal']}"] += 1
    return counts


def _of_each_read(histories: PublishedHistories) -> Iterator[Failure]:
    begun: dict[int, float] = {}
    for put in histories.puts:
        number = put.fields["number"]
        begun[number] = min(begun.get(number, put.begun), put.begun)
    for name, pulls in histories.pulls.items():
        for pull in pulls:
            told = f"{name} at {pull.ended:.2f} read version {pull.fields['version']}"
            if pull.fields["wrong"]:
                yield Failure("torn version", f"{told}: {pull.fields['wrong']}")
            elif begun.get(pull.fields["number"], float("inf")) > (pull.ended or 0.0):
                yield Failure("version that was not put", f"{told}, of put {pull.fields['number']}")


def _order(histories: PublishedHistories) -> Iterator[Failure]:
    """Versions do not go back: for a connection; at shards, which have the newest, for a life."""
    for name, pulls in histories.pulls.items():
        newest: dict[Any, int] = {}
        for pull in pulls:
            version = pull.fields["version"]
            source = pull.fields["connection"] if OF_ONE_SOURCE in name else None
            least = max(newest.get(source, 0), (pull.fields["newer_than"] or -1) + 1)
            if version < least:
                yield Failure("older version", f"{name} at {pull.ended:.2f} read version {version}, and {least} was due")
            newest[source] = max(newest.get(source, 0), version)


def _values(histories: PublishedHistories) -> Iterator[Failure]:
    """A version stands for one put, and a put for one version: but the tensors of a checkpoint become another one."""
    told = [(call.fields["version"], call.fields["number"]) for call in histories.puts if call.is_ok]
    told += [(pull.fields["version"], pull.fields["number"]) for pulls in histories.pulls.values() for pull in pulls]
    numbers: dict[int, int] = {}
    versions: dict[int, int] = {}
    for version, number in told:
        if numbers.setdefault(version, number) != number:
            yield Failure("two values of a version", f"version {version} is put {numbers[version]}, and put {number}")
        if versions.setdefault(number, version) != version and not histories.has_lost:
            yield Failure("put twice", f"put {number} is version {versions[number]}, and version {version}")


def _acknowledged(histories: PublishedHistories) -> Iterator[Failure]:
    """From the moment at which put has returned a version, shards give no older one; and there is a last one."""
    puts = sorted((put.ended or 0.0, put.fields["version"]) for put in histories.puts if put.is_ok)
    for name, pulls in histories.pulls.items():
        if OF_ONE_SOURCE in name:
            continue
        at, due = 0, 0
        for pull in pulls:
            while at < len(puts) and puts[at][0] < pull.begun:
                due = max(due, puts[at][1])
                at += 1
            if pull.fields["version"] < due:
                told = f"{name} at {pull.begun:.2f} asked, and read version {pull.fields['version']}"
                yield Failure("acknowledged and lost", f"{told}; put had returned {due}")
    last = [calls for name, calls in histories.lives.items() if name.startswith("finish")]
    if not (last and all(calls and calls[-1].is_ok for calls in last)) and not histories.outcome.stuck:
        yield Failure("no end", "healthy publishers that came last could not put a version")
    for previous, following in itertools.pairwise(puts):
        if following[1] < previous[1] and histories.plan.workers == 1:
            yield Failure("older version", f"put returned version {following[1]} after {previous[1]}")


def _digests(histories: PublishedHistories) -> Iterator[Failure]:
    """Who asks for the same names of one version has the same digest, whatever the dtype; relays have their own."""
    known: dict[Any, str] = {}
    for name, pulls in histories.pulls.items():
        for pull in pulls:
            tensors = {"some": "some", "out": "out"}.get(pull.fields["way"], "all")
            key = pull.fields["version"], tensors, OF_ONE_SOURCE in name
            if known.setdefault(key, pull.fields["digest"]) != pull.fields["digest"]:
                yield Failure("digests differ", f"{name} at {pull.ended:.2f}: of version {key[0]}, {tensors}")


def _conduct(histories: PublishedHistories) -> Iterator[Failure]:
    for name in histories.outcome.stuck:
        yield Failure("stuck", f"{name} did not end in time")
    for name, calls in histories.lives.items():
        allowed = READERS_MEET if name.startswith("reader") else PUBLISHERS_MEET
        if histories.plan.workers > 1 and name.startswith(("worker", "finish")):
            allowed = (*allowed, "InvalidRequest")  # ranks may put parts of different versions, when one comes again
        for call in calls:
            if call.error and not call.fields.get("is_psd", True):
                yield Failure(f"builtin {call.error}", f"{name}, {call.op}: {call.fields['text']}\n{call.fields['trace']}")
            elif call.error and call.error not in allowed:
                yield Failure(f"unexpected {call.error}", f"{name}, {call.op} at {call.begun:.2f}: {call.fields['text']}")
    exits = {r["name"]: r["status"] for r in histories.outcome.timeline if r["what"] == "exit"}
    for name, status in exits.items():
        if status not in (0, 75, -9, -15) and not (status == 74 and name.startswith("shard")):
            yield Failure("exit status", f"{name} ended with status {status}")
    for path in sorted(histories.outcome.directory.glob("*.log")):
        said = path.read_text(errors="replace")
        found = DEFECT.search(said) if path.stem.startswith("shard") else None
        at = found.start() if found is not None else said.find("Traceback")
        if at >= 0:
            yield Failure("traceback", f"{path.stem}: ...{said[max(0, at - 300) :][:3000]}")
