"""The matrix of batches, in the end and in each checkpoint: in the row of each life, all columns say how many have run.

Acknowledged ones have run once in the end. A program that is gone may have left its last one on some shards alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from batches import batches_of
from counting import Failure
from history import Histories, Life
from numpy.typing import NDArray
from restores import restored


def check_batches(histories: Histories) -> Iterator[Failure]:
    """Compare it with what programs were told."""
    goes_back = bool(histories.losses) or any(c.result == "RolledBack" for x in histories.lives for c in x.calls)
    # A job under psd-run may go back before a worker of its next life has begun, so that none is told.
    goes_back = goes_back or any("went back to checkpoint" in log for log in histories.shard_logs)
    path = batches_of(histories.outcome.directory)
    if path.exists():
        yield from _check(histories, "the end", np.load(path), is_end=not goes_back)
    found = list(restored(histories.outcome))
    for each in found:
        if each.batches is not None:
            is_end = each is found[-1] and histories.outcome.have_all_ended_in_order and not goes_back
            yield from _check(histories, f"checkpoint {each.name}", each.batches, is_end=is_end)


def _check(histories: Histories, where: str, rows: NDArray[Any], *, is_end: bool) -> Iterator[Failure]:
    """is_end: what was acknowledged is there."""
    for life in histories.lives:
        calls = [call for call in life.calls if call.op == "batch"]
        done, least, most = sum(call.is_ok for call in calls), int(rows[life.row].min()), int(rows[life.row].max())
        text = f"{where}: {life.name}: {done} of {len(calls)} batches acknowledged, and {least} to {most} have run"
        if most - least > _leaves_half(life):
            yield Failure("torn batch", text)
        elif most > len(calls):
            yield Failure("batch ran twice", text)
        elif least < done and is_end:
            yield Failure("batch lost", text)


def _leaves_half(life: Life) -> bool:
    """It was gone before its last batch was acknowledged."""
    batches = [call for call in life.calls if call.op == "batch"]
    return bool(batches) and not batches[-1].is_ok and not life.has_ended_in_order
