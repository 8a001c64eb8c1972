"""The last lines of psd-run's output: what the job has done, from what its shards report when they end.

    12.3 s; step 400, 32.5 steps/s; 800 pushes accepted, 3 late
    ended at step 400, as worker 1 has asked (stop)
    1 restart of shards
    checkpoints: /data/run-7

A push goes to every shard that has trained parameters, so the largest of the shards' counts is right. The rate covers the steps
after all workers had joined, so it does not include their imports. A restarted shard counts from its restart; if no shard has
counted from the beginning, no rate is shown. Knows no processes.
"""

from __future__ import annotations

import re

from psd.contract.launching import COUNTED_PATTERN
from psd.contract.locations import shown
from psd.watch.words import count_text, rate


class Summary:
    """Record of what psd-run has seen and heard of one job.

    Args:
        is_continued: True if the shards continue an earlier run, whose beginning this psd-run has not seen. checkpoint_dir:
            place of the checkpoints; empty: there are none.
    """

    def __init__(self, *, is_continued: bool = False, checkpoint_dir: str = "") -> None:
        self._is_continued = is_continued
        self._checkpoint_dir = checkpoint_dir
        self._starts: dict[tuple[str, int], int] = {}
        self._accepted = self._late = self._clock = 0
        self._rate = 0.0
        self._why_ended = ""
        self._has_counts = False
        self._is_whole = False

    def on_start(self, kind: str, number: int) -> None:
        """Note that a process is started, for the first time or again."""
        self._starts[kind, number] = self._starts.get((kind, number), 0) + 1

    def on_line(self, shard: int, line: str) -> None:
        """Note a line of a shard's output, if it is the report of its counts."""
        counted = re.fullmatch(COUNTED_PATTERN, line)
        if counted is None:
            return
        accepted, late, clock = map(int, counted.groups()[:3])
        self._has_counts = True
        if self._starts.get(("shard", shard), 0) == 1 and not self._is_continued:
            self._is_whole = True
            if counted[5] and float(counted[6]):
                self._rate = max(self._rate, int(counted[5]) / float(counted[6]))
        self._why_ended = counted[7] or self._why_ended
        self._accepted, self._late = max(self._accepted, accepted), max(self._late, late)
        self._clock = max(self._clock, clock)

    def lines(self, took_s: float) -> list[str]:
        """The summary. took_s: seconds that the whole job took."""
        first = [f"{took_s:.1f} s"]
        if self._has_counts:
            speed = f", {rate(self._rate)} steps/s" if self._rate else ""
            since = "" if self._is_whole else " since the shards were last started"
            first += [f"step {self._clock}{speed}", f"{self._accepted} pushes accepted, {self._late} late{since}"]
        restarts = [self._restarts(kind) for kind in ("worker", "shard")]
        found = ["; ".join(first), f"ended at step {self._clock}, {self._why_ended}" if self._why_ended else ""]
        found += [", ".join(filter(None, restarts))]
        found += [f"checkpoints: {shown(self._checkpoint_dir)}"] if self._checkpoint_dir else []
        return [line for line in found if line]

    def _restarts(self, kind: str) -> str:
        count = sum(starts - 1 for (started, _), starts in self._starts.items() if started == kind)
        return f"{count_text(count, 'restart')} of {kind}s" if count else ""
