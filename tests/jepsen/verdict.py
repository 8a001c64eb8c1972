"""One trial, judged; and a failing one made smaller."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from batch_counts import check_batches
from conduct import check_conduct
from counting import Failure, check_counts
from course import conduct
from history import Histories
from launched import LaunchedTrial
from learner_counts import check_learners
from outcome import Outcome
from plan import Fault, Plan
from prefixes import check_prefixes
from published_counts import PublishedHistories, check_published, counts_of
from published_trial import PublishedTrial
from residual_counts import check_residuals
from restores import restore_all
from trial import Trial

SHOWN_PER_KIND = 3


@dataclass
class Verdict:
    """What a trial has come to.

    Attributes:
        failures: none if all is well. counts: what has happened in it, by name.
    """

    plan: Plan
    directory: Path
    failures: list[Failure]
    counts: Counter[str] = field(default_factory=Counter)
    factor: float = 1.0

    @property
    def kinds(self) -> set[str]:
        """Of its failures."""
        return {failure.kind for failure in self.failures}

    def report(self) -> str:
        """All of it for a person: the plan, and a few failures of each kind."""
        lines = [str(self.plan), *(f"    {fault}" for fault in self.plan.faults)]
        for kind in sorted(self.kinds):
            texts = [failure.text for failure in self.failures if failure.kind == kind]
            lines += [f"  {kind} ({len(texts)}):", *(f"    {text}" for text in texts[:SHOWN_PER_KIND])]
        return "\n".join(lines)


def try_plan(plan: Plan, directory: Path) -> Verdict:
    """Run a plan in a directory, which is kept, and judge it."""
    shutil.rmtree(directory, ignore_errors=True)
    kind = PublishedTrial if plan.publishing is not None else LaunchedTrial if plan.is_launched else Trial
    outcome = conduct(kind, plan, directory)
    if plan.learning is None and plan.publishing is None:
        restore_all(outcome)
    verdict = judge(outcome)
    (directory / "verdict.txt").write_text(verdict.report() + "\n")
    return verdict


def judge(outcome: Outcome) -> Verdict:
    """What a trial has come to."""
    if outcome.plan.publishing is not None:
        published = PublishedHistories(outcome)
        return Verdict(outcome.plan, outcome.directory, check_published(published), counts_of(published), outcome.factor)
    histories = Histories(outcome)
    failures = check_counts(histories) + check_conduct(histories) + check_prefixes(histories)
    failures += check_batches(histories)
    failures += [*check_residuals(histories), *check_learners(histories)]
    return Verdict(outcome.plan, outcome.directory, failures, _counts(histories), outcome.factor)


def _counts(histories: Histories) -> Counter[str]:
    counts = Counter(runs=1, cuts=histories.outcome.cuts)
    counts["pushes"] = sum(gradient.finished is not None for gradient in histories.gradients.values())
    exchanges = [event for life in histories.lives for event in life.learned if event["e"] == "exchange"]
    counts["exchanges"] = len(exchanges)
    counts["late differences"] = sum(not event["is_counted"] for event in exchanges)
    counts["errors"] = sum(call.result not in ("", "ok") for life in histories.lives for call in life.calls)
    counts["lives"] = len(histories.lives)
    counts["steps"] = sum(life.steps[0] for life in histories.lives)
    counts["steps made as calls"] = sum(life.steps[1] for life in histories.lives)
    counts["restored checkpoints"] = len(list((histories.outcome.directory / "restored").glob("*")))
    for record in histories.of("signal"):
        counts["kills"] += record["signal"] == "SIGKILL"
        counts["suspensions"] += record["signal"] == "SIGSTOP"
        counts["interrupts"] += record["signal"] == "SIGINT"
    return counts


def shrink(
    verdict: Verdict,
    directory: Path,
    *,
    runs: int,
    seconds: float,
    say: Callable[[str], None],
    attempt: Callable[[Plan, Path], Verdict] = try_plan,
) -> Verdict:
    """The same failure with fewer faults: faults are left out as long as one of its kinds comes back, each attempt made twice.

    Bounded by trials and by time; what fails rarely stays larger than it need be.
    """
    best = verdict
    deadline = time.monotonic() + seconds
    left = runs

    def fails(plan: Plan, attempts: int) -> Verdict | None:
        nonlocal left
        for _ in range(attempts):
            if left == 0 or time.monotonic() > deadline:
                return None
            left -= 1
            again = attempt(plan, directory / f"shrunk-{left}")
            if again.kinds & verdict.kinds:
                return again
            shutil.rmtree(again.directory)
        return None

    size = len(best.plan.faults)
    while size >= 1:
        for chunk in _chunks(best.plan.faults, size):
            smaller = fails(best.plan.without(chunk), attempts=2)
            if smaller is not None:
                if best is not verdict:
                    shutil.rmtree(best.directory)
                best = smaller
                say(f"    still fails with {len(best.plan.faults)} faults: {', '.join(sorted(best.kinds))}")
                break
        else:
            size //= 2
        size = min(size, len(best.plan.faults))
    return best


def _chunks(faults: Sequence[Fault], size: int) -> list[Sequence[Fault]]:
    return [faults[i : i + size] for i in range(0, len(faults), size)]
