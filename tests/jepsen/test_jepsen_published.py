"""The model of publications finds what is planted, and nothing in histories that are sound; and one short trial."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from outcome import Outcome
from plan import Fault, Plan, Publishing
from published_counts import PublishedHistories, check_published
from published_plan import draw_any, publications_under_kills, publishing_fault
from published_values import meta_of, parts_of, state_of, wrong_in
from verdict import try_plan

PLAN = Plan(1, "tcp", "exact", 1, 2, lease_s=4.0, wait_s=3.0, retry_s=3.0, named=True, publishing=Publishing(2, 1))


class PublishedStory:
    """Histories that are made up: of one publisher, a reader of the shards, and one of relays."""

    NAMES = ("worker-0-life-0", "reader-0-life-0", "reader-1-life-0-of-relays", "finish-0")

    def __init__(self, directory: Path, plan: Plan = PLAN) -> None:
        self._directory, self._plan = directory, plan
        self._lines: dict[str, list[dict[str, Any]]] = {name: [] for name in self.NAMES}
        self.timeline: list[dict[str, Any]] = []
        self.t = 10.0

    def write(self, name: str, **fields: Any) -> None:
        self.t += 0.01
        self._lines[name].append({"t": self.t, **fields})

    def put(self, number: int, version: int | None, error: str = "", name: str = "worker-0-life-0") -> None:
        """A put; version None: its process is killed in it, unless it raises an error."""
        self.write(name, e="invoke", op="put", number=number)
        if error:
            self.write(name, **{"class": error}, e="error", op="put", is_psd=error != "KeyError", text="", trace="")
        elif version is not None:
            self.write(name, e="ok", op="put", number=number, version=version)

    def pull(self, version: int, number: int, *, newer: int | None = None, relay: bool = False, **changed: Any) -> None:
        """A reader gets a version."""
        name = self.NAMES[2 if relay else 1]
        told = {"way": "all", "connection": 1, "newer_than": newer, "wrong": "", "digest": f"{version} {relay}"} | changed
        self.write(name, e="invoke", op="pull", **told)
        self.write(name, e="ok", op="pull", version=version, number=number, **told)

    def found(self, last: int = 99) -> set[str]:
        """The kinds of failures."""
        if last:
            self.put(last, last, name="finish-0")
        for name, lines in self._lines.items():
            (self._directory / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        outcome = Outcome(self._plan, self._directory, self.timeline)
        return {failure.kind for failure in check_published(PublishedHistories(outcome))}


@pytest.fixture
def story(tmp_path: Path) -> PublishedStory:
    """Two puts that have returned, the first read by both."""
    made = PublishedStory(tmp_path)
    made.put(101, 1)
    made.pull(1, 101)
    made.pull(1, 101, relay=True)
    made.put(102, 2)
    return made


def test_a_sound_history_has_no_failures(story: PublishedStory) -> None:
    """Of a put whose publisher was killed, too, which some have read; a relay that is behind; another connection to it."""
    story.pull(1, 101, relay=True)
    story.put(103, None)
    story.pull(3, 103, newer=1)
    story.pull(2, 102, relay=True)
    story.pull(1, 101, relay=True, connection=2)
    story.put(201, None, "ShardUnavailable")
    story.put(201, 5)

    assert story.found() == set()


@pytest.mark.parametrize(
    ("plant", "kind"),
    [
        (lambda story: story.pull(2, 102, wrong="3 of 4 elements"), "torn version"),
        (lambda story: story.pull(3, 103), "version that was not put"),
        (lambda story: story.pull(1, 101), "acknowledged and lost"),
        (lambda story: story.pull(2, 102, newer=2), "older version"),
        (lambda story: [story.pull(2, 102, relay=True), story.pull(1, 101, relay=True)], "older version"),
        (lambda story: story.pull(2, 101), "two values of a version"),
        (lambda story: story.pull(3, 102), "put twice"),
        (lambda story: story.put(103, 1), "older version"),
        (lambda story: story.put(103, 2), "two values of a version"),
        (lambda story: [story.pull(2, 102), story.pull(2, 102, digest="another")], "digests differ"),
        (lambda story: story.put(103, None, "InternalError"), "unexpected InternalError"),
        (lambda story: story.put(103, None, "KeyError"), "builtin KeyError"),
    ],
)
def test_what_is_planted_is_found(story: PublishedStory, plant: Callable[[PublishedStory], Any], kind: str) -> None:
    plant(story)

    assert kind in story.found()


def test_a_last_version_that_nobody_could_put_is_found(story: PublishedStory) -> None:
    assert story.found(last=0) == {"no end"}


def test_after_a_loss_a_checkpoint_is_a_version_of_its_own(story: PublishedStory) -> None:
    """Its put has two numbers then; none of them has two puts."""
    story.pull(2, 102)
    story.timeline.append({"t": story.t, "what": "begin", "fault": vars(Fault("shard-lose", 0, 0.1, 0))})
    story.pull(900_000, 101)
    story.put(103, 900_001)

    assert story.found(last=999_999) == set()


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_torn_values_are_found(dtype: str | None) -> None:
    """An element of another put, in any tensor; another meta; and nothing in what is whole."""
    whole = {name: value.astype(np.float32) if name == "half" else value for name, value in state_of(10_007, 2).items()}
    if dtype is not None:
        for name in ("big", "small"):
            bits = whole[name].view(np.uint32)
            whole[name] = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)
    assert wrong_in(whole, meta_of(10_007), 2, dtype) == ""
    assert wrong_in(whole, None, 2, dtype) == "its meta is None"
    for name, value in whole.items():
        torn = value.copy()
        torn.reshape(-1)[-1] += 256
        assert f"elements of {name} are not of put 10007" in wrong_in({**whole, name: torn}, meta_of(10_007), 2, dtype)


def test_parts_make_up_a_put() -> None:
    assert [sorted(part) for part in parts_of(7, 2, 2)] == [["big", "half"], ["small", "whole"]]
    assert sorted(parts_of(7, 2, 1)[0]) == ["big", "half", "small", "whole"]


def test_some_random_plans_are_of_publications() -> None:
    """With faults of every kind, each of a client that there is; and they come back from JSON."""
    plans = [plan for plan in map(draw_any, range(300)) if plan.publishing is not None]
    kinds = {fault.kind for plan in plans for fault in plan.faults}

    assert len(plans) > 20
    assert {"shard-kill", "worker-kill", "reader-kill", "relay-kill", "link-reset"} <= kinds
    for plan in plans:
        assert plan.publishing is not None
        assert Plan.from_json(plan.to_json()) == plan
        clients = plan.workers + plan.publishing.readers + plan.publishing.relays
        assert all(fault.rank < clients for fault in plan.faults)
    assert publishing_fault(random.Random(1), PLAN, ("relay-kill",)).rank == 3
    assert [fault.kind.endswith("-kill") for fault in publications_under_kills(1, 30, 60.0).faults] == [True] * 30


@pytest.mark.process
def test_a_trial_of_publications_when_each_process_is_killed_then_no_version_lies(tmp_path: Path) -> None:
    plan = Plan(
        **vars(PLAN)
        | {
            "seconds": 2.0,
            "publishing": Publishing(2, 1, 0.05),
            "faults": (
                Fault("shard-kill", 0.4, 0.2, shard=1),
                Fault("worker-kill", 0.8, 0.1, rank=0),
                Fault("relay-kill", 1.0, 0.1, rank=3),
                Fault("reader-stop", 1.1, 0.3, rank=1),
                Fault("link-reset", 1.3, 0.0, rank=1, shard=0),
                Fault("shard-kill", 1.5, 0.1, shard=0),
            ),
        }
    )

    verdict = try_plan(plan, tmp_path / "trial")

    assert verdict.failures == [], verdict.report()
    assert verdict.counts["puts"] > 0
    assert verdict.counts["versions read"] > 0
