"""The roster of a job: which workers are no longer waited for, and why; and the sentence about a change of it, the same in the
logs of workers and shards.

Must not know leases, or how workers hear of it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping

_NAMED_MAX = 8


class Absence(enum.Enum):
    """The reason why nobody waits for a worker; its values are the words for one worker and for several."""

    FAILED = ("has failed", "have failed")
    SILENT = ("has fallen silent", "have fallen silent")
    FINISHED = ("has finished", "have finished")


Absent = Mapping[int, Absence]
"""The workers that nobody waits for, by rank."""


class Roster:
    """The absent workers as they were last told.

    Attributes:
        is_usual: True if the last change was only that workers have finished. is_of_silence: True if some have fallen silent.
    """

    def __init__(self) -> None:
        self._absent: Absent = {}
        self.is_usual, self.is_of_silence = True, False

    def news(self, absent: Absent, world_size: int) -> str:
        """The change since the last call, in words; empty if there is none."""
        before, self._absent = self._absent, dict(absent)
        gone, back = absent.keys() - before.keys(), before.keys() - absent.keys()
        reasons = {absent[rank] for rank in gone}
        self.is_usual, self.is_of_silence = not back and reasons <= {Absence.FINISHED}, Absence.SILENT in reasons
        parts = [_clause(back, "is back", "are back")]
        parts += [_clause((rank for rank in gone if absent[rank] is why), *why.value) for why in Absence]
        said = "; ".join(filter(None, parts))
        waited_for = world_size - len(absent)
        return f"{said}: {waited_for} of {world_size} workers are waited for from now on" if said else ""


def _clause(ranks: Iterable[int], one: str, several: str) -> str:
    """A clause that names some workers and says why nobody waits for them; empty without workers."""
    numbers = sorted(ranks)
    if len(numbers) <= 1:
        return "".join(f"worker {number} {one}" for number in numbers)
    named = ", ".join(map(str, numbers[:_NAMED_MAX]))
    more = len(numbers) - _NAMED_MAX
    return f"workers {named}{f' and {more} more' if more > 0 else ''} {several}"
