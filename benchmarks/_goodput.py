"""Goodput of real learners: the steps that they make although one of them dies every few seconds, and comes back later.

Each is a process, and a step takes the same time whatever the machine: a pause stands for an accelerator's computing. So that
starting Python is not counted, they are forks of one that has loaded torch. The same for learners by gloo, without psd
(_gloo_learner.py). Knows nothing of command lines.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import _gloo_learner
import _report
from _paced_learner import PacedLearner
from _processes import FORKS, START_S, ProcessFailed, Shard, cleanly

import psd_client
import psd_client.torch as psd

BASE = "data parallel"
NESTEROV = psd_client.SGD(lr=0.7, momentum=0.8, nesterov=True)
"""0.8 rather than DiLoCo's 0.9: there are some tens of outer steps, not hundreds."""
LEASE_S = 2.0

GOODPUT: Mapping[str, Mapping[str, Any]] = {
    BASE: {},
    "DiLoCo": {"local": psd.Local(20, NESTEROV)},
    "Streaming, 4 fragments": {"local": psd.Local(20, NESTEROV, fragments=4, delay=4)},
    "DiLoCo, quorum of half": {"local": psd.Local(20, NESTEROV), "quorum": 0.5},
    "decoupled, 4 fragments": {"local": psd.Local("auto:20", NESTEROV, fragments=4, delay=4), "quorum": 0.5, "grace": "auto"},
    "async": {"local": psd.Local(20, psd_client.SGD(lr=0.25)), "consistency": "async"},
}
"""Ways to train, and the options of psd.distribute for them. A quorum is a share of the learners."""

BY_GLOO: Mapping[str, int] = {"data parallel by gloo": 1, "DiLoCo by gloo": 20}
"""Ways without psd; local steps between two exchanges."""


def options_of(ways: Mapping[str, Mapping[str, Any]], way: str, learners: int) -> dict[str, Any]:
    """Options of psd.distribute for a way to train."""
    options = dict(ways[way])
    if "quorum" in options:
        options["quorum"] = max(1, int(options["quorum"] * learners))
    return options


def learn(task: Mapping[str, Any], rank: int, joined: Event) -> None:
    """Make steps until killed, as one learner; each is a byte in a file."""
    learner = PacedLearner(task, joined)
    options = options_of(GOODPUT, task["way"], task["learners"])
    place = {"servers": task["servers"], "rank": rank, "world_size": task["learners"]}
    optimizer = psd.distribute(learner.model, learner.inner, **place, **options)
    learner.begin()
    while True:
        learner.compute(optimizer)
        optimizer.step()
        learner.count()


class Learners:
    """The learner processes of one run.

    Attributes:
        steps: a file with a byte for each step.
    """

    def __init__(self, way: str, servers: str, directory: Path, args: argparse.Namespace, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.steps = directory / "steps"
        self._task = {
            "way": way,
            "servers": servers,
            "learners": args.learners,
            "step_s": args.step_ms / 1000,
            "steps": str(self.steps),
            "local_steps": BY_GLOO.get(way, 0),
        }
        self._members = 0
        self._processes: dict[int, Any] = {}

    def begin_all(self, count: int) -> None:
        """Start so many learners, and wait until they have joined."""
        self.tell(range(count))
        for rank, joined in enumerate([self.begin(rank) for rank in range(count)]):
            if not joined.wait(START_S):
                raise ProcessFailed(f"learner {rank}: has not joined in {START_S:g} s")

    def begin(self, rank: int) -> Event:
        """Start the learner of this rank; what is set when it has joined."""
        joined = FORKS.Event()
        target = _gloo_learner.learn if self._task["local_steps"] else learn
        self._processes[rank] = process = FORKS.Process(target=target, args=(self._task, rank, joined), daemon=True)
        process.start()
        self._stack.callback(process.kill)
        return joined

    def kill(self, rank: int) -> None:
        """Kill the learner of this rank."""
        self._processes[rank].kill()
        self._processes[rank].join()

    def tell(self, ranks: Sequence[int]) -> None:
        """Say who is there; learners of psd need not be told."""
        self._members += 1
        _gloo_learner.write_members(self.steps.with_name("members"), self._members, sorted(ranks))

    @property
    def done(self) -> int:
        """Steps that all learners have made so far."""
        return self.steps.stat().st_size if self.steps.exists() else 0


def measure(ways: Sequence[str], args: argparse.Namespace, memory: Path) -> list[dict[str, Any]]:
    """A run for each way, with and without failures."""
    runs = []
    for way in ways:
        for fails in (True,) if args.only_failures else (False, True):
            with cleanly() as stack, tempfile.TemporaryDirectory(dir=memory) as directory:
                shard = Shard("--state-dir", f"{directory}/state", "--lease", str(LEASE_S), "--on-worker-failure", "continue")
                shard.start()
                stack.callback(shard.kill)
                shard.wait_ready()
                learners = Learners(way, shard.address, Path(directory), args, stack)
                runs.append({"way": way, "fails": fails, **_watch(learners, args, fails=fails)})
            _report.progress(f"{way}, {'with' if fails else 'without'} failures: {runs[-1]['share']:.1%} of the steps")
    return runs


def _watch(learners: Learners, args: argparse.Namespace, *, fails: bool) -> dict[str, float]:
    """Let learners train, and kill and return them; the steps that they made, and those that they could have made."""
    drawn, pause = random.Random(1), threading.Event()
    learners.begin_all(args.learners)
    begun, before = time.perf_counter(), learners.done
    away: dict[int, float] = {}
    absent_s, kills, next_kill = 0.0, 0, args.every

    def present() -> list[int]:
        return [rank for rank in range(args.learners) if rank not in away]

    while (now := time.perf_counter() - begun) < args.seconds:
        for rank, since in list(away.items()):
            if now >= since + args.away:
                absent_s += now - away.pop(rank)
                learners.tell(present())
                learners.begin(rank)
        if fails and now >= next_kill:
            rank = drawn.choice(present())
            learners.kill(rank)
            away[rank], next_kill, kills = now, next_kill + args.every, kills + 1
            learners.tell(present())
        pause.wait(0.02)
    absent_s += sum(now - since for since in away.values())
    possible = (args.learners * now - absent_s) / (args.step_ms / 1000)
    done = learners.done - before
    return {"done": done, "possible": possible, "share": done / possible, "kills": kills}


def text(runs: Sequence[Mapping[str, Any]]) -> str:
    """A table with a row per way."""
    share = {(run["way"], run["fails"]): run["share"] for run in runs}
    rows = [
        (way, *(f"{share[way, fails]:.0%}" if (way, fails) in share else "-" for fails in (False, True)))
        for way in dict.fromkeys(run["way"] for run in runs)
    ]
    return _report.table(("way", "steps, nobody dies", "steps, with failures"), rows)
