"""Learners: what the parameters of the end must say of each local step, by what its learner was told.

once    it was in a difference of which its learner has heard that it counts: it counts once in all of that fragment
never   its learner has dropped it: what came back was mixed in over it, or the program has ended in order before it was sent
maybe   its learner was killed, or the job went back, while it was on its way, or might be: it counts once or not, with exact
        aggregation in all of the fragment alike. Or it was late, which without that it may be in some blocks alone

A difference that came late is none of these at first: its steps are in the next one of the fragment. Where counts cannot be
read, because differences are merged by direction, steps must have come to what a replay of the merges makes of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from counting import Failure, returns_of
from history import Histories, Life
from learner_cells import MERGES_BY_DIRECTION, fragment_names
from merge_replay import Part, Recorded, differing


@dataclass
class _Account:
    """Of one life and one fragment: its steps, by number, that are in no merge yet, with the local step; and what became of
    the others. acknowledged: of each, the clock at which it was pushed, and when its learner has heard. merged: by that clock,
    the difference. begun: of each step, its local step, and the clock at its beginning. departed: the local step at which the
    last difference that counts was taken."""

    pending: list[tuple[int, int]] = field(default_factory=list)
    acknowledged: dict[int, tuple[int, float]] = field(default_factory=dict)
    never: set[int] = field(default_factory=set)
    maybe: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)
    merged: dict[int, Part] = field(default_factory=dict)
    begun: dict[int, tuple[int, int]] = field(default_factory=dict)
    departed: int = -1

    def drop(self, into: set[int]) -> None:
        numbers = {number for _, number in self.pending}
        into.update(numbers - self.late)
        self.maybe |= numbers & self.late
        self.pending = []


def check_learners(histories: Histories) -> Iterator[Failure]:
    """Compare the parameters of the end, and what learners have found in their own, with what they were told."""
    learning, final = histories.plan.learning, histories.outcome.final
    if learning is None:
        return
    names, values, cells = fragment_names(learning.fragments), {}, histories.plan.learner_cells
    if final is not None:
        with np.load(final) as arrays:
            values = dict(arrays)
    made: set[int] = set()
    recorded = {name: Recorded(turn, learning.fragments) for turn, name in enumerate(names)}
    yield from _unlike(histories)
    for life in (life for life in histories.lives if life.is_lead):
        accounts = [_Account() for _ in names]
        yield from _follow(life, accounts, is_exact=histories.plan.is_exact, is_group=bool(histories.mates(life)))
        made |= {event["number"] for event in life.learned if event["e"] == "step"}
        for name, account in zip(names, accounts, strict=True) if values else ():
            yield from _judge(histories, life, name, account, values[name])
            _record(histories, account, values[name], recorded[name])
    for name, of_fragment in values.items():
        if not cells.is_whole(of_fragment):
            yield Failure("no counts", f"{name}: the parameters are no negated whole numbers")
        _, most = cells.counts(of_fragment, range(cells.numbers))
        if unknown := sorted({*np.flatnonzero(most).tolist()} - made):
            yield Failure("unknown step", f"{name}: steps {unknown} count, and nobody has made them")
        is_followed = learning.merge in MERGES_BY_DIRECTION and not histories.losses and not returns_of(histories)
        if is_followed and (wrong := differing(cells, learning.merge, recorded[name], of_fragment)):
            yield Failure("not what the merges lead to", f"{name}: {wrong}")


def _unlike(histories: Histories) -> Iterator[Failure]:
    """Ranks of a learner whose parameters differ after the same step."""
    leads = {life.name: life for life in histories.lives}
    for mate in (life for life in histories.lives if not life.is_lead):
        both = [{c.number: c.digest for c in life.calls if c.op == "step" and c.is_ok} for life in (leads[mate.lead], mate)]
        unlike = [number for number, digest in both[0].items() if both[1].get(number, digest) != digest]
        if unlike:
            yield Failure("ranks differ", f"{mate.name} has other parameters than rank 0 after steps {unlike[:5]}")


def _follow(life: Life, accounts: list[_Account], *, is_exact: bool, is_group: bool) -> Iterator[Failure]:
    """What a life was told, one thing after the other."""
    for event in life.learned:
        match event["e"]:
            case "step":
                for account in accounts:
                    account.pending.append((event["local"], event["number"]))
                    account.begun[event["number"]] = event["local"], event["clock"]
            case "exchange":
                account = accounts[event["fragment"]]
                is_in = [(local, number) for local, number in account.pending if local <= event["departed"]]
                if not event["is_counted"] and not is_exact:
                    account.late.update(number for _, number in is_in)
                if event["is_counted"]:
                    account.merged[event["clock"]] = Part(tuple(number for _, number in is_in), event["weight"])
                    account.departed = event["departed"]
                    account.acknowledged |= dict.fromkeys((number for _, number in is_in), (event["clock"], event["t"]))
                    account.pending = account.pending[len(is_in) :]
                if event["is_mixed"]:
                    account.drop(account.never)
                text = f"{life.name}, at its exchange of clock {event['clock']}, fragment {event['fragment']}"
                lacking = set(event["absent"]) - account.never - account.maybe
                if lacking:
                    yield Failure("own step lost", f"{text}, lacks its steps {sorted(lacking)}")
                if event["twice"]:
                    yield Failure("own step counts twice", f"{text}, has its steps {event['twice']} more than once")
            case "back":
                for account in accounts:
                    account.maybe.update(account.acknowledged)
                    account.drop(account.maybe)
    # A group's rank 0 does not take what its last exchange brings, since the others may be gone.
    has_closed = life.calls and life.calls[-1].op == "close" and life.calls[-1].is_ok and life.has_ended_in_order
    for account in accounts:
        account.drop(account.never if has_closed and not is_group else account.maybe)


def _judge(histories: Histories, life: Life, name: str, account: _Account, values: np.ndarray) -> Iterator[Failure]:
    numbers, cells = sorted({*account.acknowledged, *account.never, *account.maybe}), histories.plan.learner_cells
    if not numbers:
        return
    least, most = (dict(zip(numbers, counts.tolist(), strict=True)) for counts in cells.counts(values, numbers))
    for number in numbers:
        text = f"step {number} of {life.name}, in {name}: counts {least[number]} to {most[number]} times"
        if most[number] > 1:
            yield Failure("counted twice", text)
        elif number in account.never and most[number]:
            yield Failure("dropped and counted", text)
        elif (
            number in account.acknowledged and not least[number] and not _may_be_gone(histories, *account.acknowledged[number])
        ):
            yield Failure("acknowledged and lost", f"{text}, acknowledged at clock {account.acknowledged[number][0]}")
        elif histories.plan.is_exact and least[number] != most[number]:
            yield Failure("on some shards only, with exact aggregation", text)


def _record(histories: Histories, account: _Account, values: np.ndarray, recorded: Recorded) -> None:
    """Note the merges that a life had a part in: those that it knows, and one of which it may not have heard."""
    for clock, part in account.merged.items():
        if part.numbers:
            recorded.merges.setdefault(clock, []).append(part)
    maybe, cells = sorted(account.maybe), histories.plan.learner_cells
    _, most = cells.counts(values, maybe)
    counted = tuple(number for number, count in zip(maybe, most.tolist(), strict=True) if count)
    if counted:
        departed, first = account.begun[counted[-1]]
        weight = sum(account.departed < local <= departed for local, _ in account.begun.values())
        recorded.unplaced.append((Part(counted, weight), first))


def _may_be_gone(histories: Histories, clock: int, heard: float) -> bool:
    """The job went back to a checkpoint from before that clock, when somebody had heard of it already."""
    returns = returns_of(histories)
    if histories.losses and not returns:
        return True
    return any(each.step <= clock and each.last >= heard for each in returns)
