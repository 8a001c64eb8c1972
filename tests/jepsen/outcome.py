"""What is left of a trial, and its directory: what trial.py hands to those who judge."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plan import Plan

SLACK_S = 1.0
"""What needs the processor between two waits: it takes so much longer as the machine is slower."""


@dataclass
class Outcome:
    """What is left of a trial.

    Attributes:
        stuck: names of processes that did not end in time. final: file of the parameters; None if there are none.
        has_checkpoint: there was one to which the job could go back.
        factor: how much slower than an idle one the machine was.
    """

    plan: Plan
    directory: Path
    timeline: list[dict[str, Any]] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    final: Path | None = None
    has_checkpoint: bool = False
    factor: float = 1.0
    cuts: int = 0

    def save(self) -> None:
        """Write down what is in no other file of the directory."""
        more = {"stuck": self.stuck, "factor": self.factor, "cuts": self.cuts, "has_checkpoint": self.has_checkpoint}
        (self.directory / "outcome.json").write_text(json.dumps(more))

    @classmethod
    def load(cls, directory: Path) -> Outcome:
        """Of a trial whose directory was kept."""
        plan = Plan.from_json((directory / "plan.json").read_text())
        timeline = [json.loads(line) for line in (directory / "timeline.jsonl").read_text().splitlines()]
        final = directory / "final.npz"
        more = json.loads((directory / "outcome.json").read_text())
        return cls(plan, directory, timeline, final=final if final.exists() else None, **more)

    @property
    def have_all_ended_in_order(self) -> bool:
        """Each shard's last process has ended with status 0."""
        exits = [record for record in self.timeline if record["what"] == "exit" and record["name"].startswith("shard")]
        last = {record["name"]: record["status"] for record in exits}
        return len(last) == self.plan.shards and set(last.values()) == {0}

    @property
    def slack_s(self) -> float:
        """How much longer than on an idle machine something may take, that mostly waits."""
        return SLACK_S * self.factor
