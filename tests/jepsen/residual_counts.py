"""Residuals, in the end and in each checkpoint: what a life's pushes have brought of the tensor that travels compressed follows
from which of them count. A residual that was lost, or taken twice, leaves another sum, as does a push that was encoded again.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from cells import Counts
from counting import Failure
from history import Histories, Life
from lossy_cells import LOSSY, Push, totals
from restores import restored


def check_residuals(histories: Histories) -> Iterator[Failure]:
    """Compare the parameters of the end, and of checkpoints, with what programs have pushed."""
    plan, final = histories.plan, histories.outcome.final
    if not plan.codec or plan.learning is not None:
        return
    if final is not None:
        with np.load(final) as arrays:
            yield from _check(histories, "the end", Counts(dict(arrays), plan.shards, plan.codec))
    for each in restored(histories.outcome):
        if not each.error:
            yield from _check(histories, f"checkpoint {each.name}", Counts(each.parameters, plan.shards, plan.codec))


def _check(histories: Histories, where: str, counts: Counts) -> Iterator[Failure]:
    cells = counts.lossy_cells
    assert cells is not None
    for life in histories.lives:
        if not any(call.pushes and LOSSY in call.tensors for call in life.calls):
            continue
        for block, (first, values) in counts.lossy.items():
            pushes = _pushes(histories, life, counts, block)
            numbers = [push[0] for push in pushes if push is not None]
            places = (np.arange(len(values)) + first) % cells.period
            own = np.isin(places, cells.of_life(numbers[0]))
            found = -values[own]
            possible = [total[own] for total in totals(cells, pushes, len(values), first)]
            if possible and not any(np.array_equal(found, each) for each in possible):
                wrong = np.flatnonzero(found != possible[0])
                text = f"{where}: {life.name}, block {block}: element {wrong[0]} of its {len(found)} is {found[wrong[0]]}, and "
                text += f"should be {possible[0][wrong[0]]}; {len(possible)} ways"
                yield Failure("residual not taken once", text)


def _pushes(histories: Histories, life: Life, counts: Counts, block: int) -> list[Push | None]:
    """What the life has pushed of a block, in order."""
    found: list[Push | None] = []
    known = set()
    for call in life.calls:
        if call.pushes and LOSSY in call.tensors and call.number not in known:
            known.add(call.number)
            gradient = histories.gradients[call.number]
            has_counted = counts.of(call.number, (LOSSY,))[block][1] > 0
            is_encoded = gradient.finished is not None and not gradient.is_dropped
            found.append((call.number, has_counted, has_counted or is_encoded))
        if call.result == "RolledBack":
            found.append(None)
    return found
