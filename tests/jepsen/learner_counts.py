"""Learners: what the parameters of the end must say of each local step, by what its learner was told.

once    it was in a difference of which its learner has heard that it counts: it counts once in all of that fragment
never   its learner has dropped it: what came back was mixed in over it, or the program has ended in order before it was sent
maybe   its learner was killed, or the job went back, while it was on its way, or might be: it counts once or not, with exact
        aggregation in all of the fragment alike. Or it was late, which without that it may be in some blocks alone

A difference that came late is none of these at first: its steps are in the next one of the fragment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from counting import Failure, returns_of
from history import Histories, Life
from learner_cells import fragment_names


@dataclass
class _Account:
    """Of one life and one fragment: its steps, by number, that are in no merge yet, with the local step; and what became of
    the others. acknowledged: of each, the clock at which it was pushed, and when its learner has heard."""

    pending: list[tuple[int, int]] = field(default_factory=list)
    acknowledged: dict[int, tuple[int, float]] = field(default_factory=dict)
    never: set[int] = field(default_factory=set)
    maybe: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)

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
    for life in histories.lives:
        accounts = [_Account() for _ in names]
        yield from _follow(life, accounts, is_exact=histories.plan.is_exact)
        made |= {event["number"] for event in life.learned if event["e"] == "step"}
        for name, account in zip(names, accounts, strict=True) if values else ():
            yield from _judge(histories, life, name, account, values[name])
    for name, of_fragment in values.items():
        if not cells.is_whole(of_fragment):
            yield Failure("no counts", f"{name}: the parameters are no negated whole numbers")
        _, most = cells.counts(of_fragment, range(cells.numbers))
        if unknown := sorted({*np.flatnonzero(most).tolist()} - made):
            yield Failure("unknown step", f"{name}: steps {unknown} count, and nobody has made them")


def _follow(life: Life, accounts: list[_Account], *, is_exact: bool) -> Iterator[Failure]:
    """What a life was told, one thing after the other."""
    for event in life.learned:
        match event["e"]:
            case "step":
                for account in accounts:
                    account.pending.append((event["local"], event["number"]))
            case "exchange":
                account = accounts[event["fragment"]]
                is_in = [(local, number) for local, number in account.pending if local <= event["departed"]]
                if not event["is_counted"] and not is_exact:
                    account.late.update(number for _, number in is_in)
                if event["is_counted"]:
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
    is_settled = life.calls and life.calls[-1].op == "close" and life.calls[-1].is_ok and life.has_ended_in_order
    for account in accounts:
        account.drop(account.never if is_settled else account.maybe)


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


def _may_be_gone(histories: Histories, clock: int, heard: float) -> bool:
    """The job went back to a checkpoint from before that clock, when somebody had heard of it already."""
    returns = returns_of(histories)
    if histories.losses and not returns:
        return True
    return any(each.step <= clock and each.last >= heard for each in returns)
