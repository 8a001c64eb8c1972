"""The model: what the parameters of the end must say of each gradient, by what its program was told.

once        its program has heard that all shards have it: it counts once in every block
told        it has heard, too, that some blocks were late: it counts in as many as it was told
at most     its call has failed, its process was killed, it was told of a dropped push, or the job went back to a checkpoint:
            it counts in no block twice; with exact aggregation in all or in none

What is acknowledged is not yet safe from a shard that is killed until its round has closed, which a program knows by its next
pull or push; a program that dies before that is told nothing more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from cells import Counts
from history import CONFIRMING, PULLING, Call, Gradient, Histories, Life

UNSAFE_END = "ends without knowing whether its last push was applied"
_GOES_BACK = re.compile(r"the shards go back to checkpoint \S+-step-(\d+)-\S+, timeline (\d+)")


@dataclass(frozen=True)
class Failure:
    """Something that must not be. kind: a few words, the same for all failures alike; text: the facts."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def check_counts(histories: Histories) -> list[Failure]:
    """Compare the parameters of the end with what programs were told."""
    final = histories.outcome.final
    if final is None or histories.plan.learning is not None:
        return []
    with np.load(final) as arrays:
        counts = Counts({name: arrays[name] for name in arrays.files}, histories.plan.shards, histories.plan.codec)
    if not counts.is_whole:
        return [Failure("no counts", "the parameters are no negated whole numbers")]
    return compare(histories, counts)


def compare(histories: Histories, counts: Counts) -> list[Failure]:
    """As `check_counts`, for counts that have been read."""
    failures = []
    unknown = [number for number in counts.numbers() if number not in histories.gradients]
    if unknown:
        failures.append(Failure("unknown gradient", f"numbers {unknown} count, and nobody has pushed them"))
    for gradient in histories.gradients.values():
        found = counts.of(gradient.number, gradient.tensors)
        elsewhere = counts.elsewhere(gradient.number, gradient.tensors)
        if elsewhere:
            failures.append(Failure("in absent tensors", f"{gradient} counts in {elsewhere}"))
        failures += _judge(histories, gradient, found, counts)
    for life in histories.lives:
        failures += _sums(histories, life, counts)
    return failures


def _judge(histories: Histories, gradient: Gradient, found: dict[int, tuple[int, int]], counts: Counts) -> list[Failure]:
    say = _Saying(gradient, found, counts, claim(histories, gradient))
    most = max(most for _, most in found.values())
    has_counted = [block for block, (least, _) in found.items() if least]
    is_whole = len(gradient.tensors) == len(histories.plan.names)
    if any(least != most for least, most in found.values()):
        return [say("torn block")]
    if most > 1:
        return [say("counted twice")]
    if histories.plan.is_exact and len(has_counted) not in (0, len(found)):
        return [say("on some shards only, with exact aggregation")]
    match say.claim:
        case "once" if len(has_counted) < len(found):
            return [say("acknowledged and lost")]
        case int(told) if is_whole and told != len(has_counted):
            return [say(f"told of {told} blocks that count")]
    return []


@dataclass(frozen=True)
class _Saying:
    gradient: Gradient
    found: dict[int, tuple[int, int]]
    counts: Counts
    claim: str | int

    def __call__(self, kind: str) -> Failure:
        by_shard: dict[int, list[str]] = {}
        for block, (least, most) in sorted(self.found.items()):
            by_shard.setdefault(self.counts.shard_of[block], []).append(str(most) if least == most else f"{least}..{most}")
        where = "; ".join(f"shard {shard}: {' '.join(each)}" for shard, each in sorted(by_shard.items()))
        return Failure(kind, f"{self.gradient}, claim {self.claim}; counts by block: {where}")


def claim(histories: Histories, gradient: Gradient) -> str | int:
    """What must be true of a gradient: "once", "at most", or the number of blocks that its program was told of."""
    is_lost = any(call.result == "StateLost" for call in gradient.calls)  # its round cannot be completed any more
    if gradient.finished is None or gradient.is_dropped or is_lost or _may_be_rolled_back(histories, gradient):
        return "at most"
    window = _until_confirmed(gradient, gradient.finished, has_rounds=histories.plan.has_rounds)
    if window is None:
        if histories.plan.ends_dead or histories.plan.is_launched:
            return "at most"  # its round may never close
        if any(restarted >= gradient.begun for restarted in histories.restarts):
            return "at most"
        window = gradient.until(gradient.life.calls[-1])
    if any(call.change.get("blocks_late") for call in window):
        before = gradient.life.calls[: gradient.life.calls.index(window[0])]
        is_staged = sum(call.change.get("blocks_staged", 0) for call in before) > 0  # of the gradient before, still undecided
        is_one = sum(call.change.get("pushes", 0) for call in window) <= 1  # else of one before, too, which was completed first
        is_alone = is_one and not is_staged and all(call.number in (-1, gradient.number) for call in window)
        told = sum(call.change.get("blocks_counted", 0) + call.change.get("blocks_duplicate", 0) for call in window)
        return told if is_alone else "at most"
    return "once"


def _until_confirmed(gradient: Gradient, finished: Call, *, has_rounds: bool) -> list[Call] | None:
    """The calls from a gradient's first one to the one that says that it is safe; None if none does."""
    life = gradient.life
    if not has_rounds or (finished.is_ok and finished.op in PULLING):
        return gradient.until(finished)
    for call in life.calls[life.calls.index(finished) + 1 :]:
        if call.result in ("RolledBack", "SessionFenced", "StateLost"):
            return None
        if call.pushes and call.number != gradient.number and not finished.is_ok:
            return None  # another gradient has been sent instead of finding out about this one
        if call.is_ok and (call.op in CONFIRMING or (call.op == "close" and not life.says(UNSAFE_END, call.begun))):
            return gradient.until(call)
    if life.how == "fall" and life.status == 0 and not life.says(UNSAFE_END, life.how_at):
        return gradient.until(life.calls[-1])
    return None


@dataclass
class Return:
    """The job's return to a checkpoint: which step that was of, and when somebody first and last heard of it."""

    step: int
    first: float
    last: float


def returns_of(histories: Histories) -> list[Return]:
    """One for each timeline that began so."""
    heard: dict[int, Return] = {}
    for life in histories.lives:
        told = [(c.ended, c.detail.get("timeline", 0), c.detail.get("step", 0)) for c in life.calls if c.result == "RolledBack"]
        for t, _, text in life.logs:
            found = _GOES_BACK.search(text)
            if found is not None:
                told.append((t, int(found[2]), int(found[1])))
        for t, timeline, step in told:
            known = heard.setdefault(timeline, Return(step, t, t))
            known.first, known.last = min(known.first, t), max(known.last, t)
    return list(heard.values())


def _may_be_rolled_back(histories: Histories, gradient: Gradient) -> bool:
    """The job went back to a checkpoint at a time that may have been after this gradient's."""
    returns = returns_of(histories)
    losses = histories.losses
    if not (returns or losses):
        return False
    last = max([each.last for each in returns] + losses)
    if gradient.begun > last:
        return bool(losses) and losses[-1] == last  # nobody has noticed
    finished, clock = gradient.finished, gradient.calls[0].clock
    assert finished is not None
    is_kept = (
        histories.plan.mode in ("fast", "exact", "norm")
        and clock is not None
        and finished.clock_after == clock + 1
        and bool(returns)
        and clock < min(each.step for each in returns)
        and finished.ended < min([each.first for each in returns] + losses)
    )
    return not is_kept


def _sums(histories: Histories, life: Life, counts: Counts) -> list[Failure]:
    """stats() of a program that has ended in order says in how many blocks its gradients count."""
    own = [gradient for gradient in histories.gradients.values() if gradient.life is life]
    claims = [claim(histories, gradient) for gradient in own]
    all_names = histories.plan.names
    is_whole = all(len(gradient.tensors) == len(all_names) for gradient in own)
    is_plain = all(call.is_ok for call in life.calls) and not life.stats.get("pushes_dropped")
    if not (own and life.has_ended_in_order and is_plain and is_whole and histories.plan.has_rounds):
        return []
    if "at most" in claims and not life.stats.get("blocks_late"):
        return []
    if any(_may_be_rolled_back(histories, gradient) for gradient in own) or life.calls[-1].op != "close":
        return []
    told = life.stats["blocks_counted"] + life.stats["blocks_duplicate"]
    really = sum(least for gradient in own for least, _ in counts.of(gradient.number, gradient.tensors).values())
    if told == really:
        return []
    text = f"{life.name} was told of {told} blocks that count, of {len(own)} gradients; {really} do"
    return [Failure("stats() is wrong", text)]
