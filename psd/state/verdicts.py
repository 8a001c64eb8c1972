"""EXACT aggregation, where an update needs norms over the whole gradient: from the shards' measures to one verdict for all.

    a round is decided -> every shard measures its part -> shard 0 finds the verdict -> every shard applies the round

A worker takes the measures to shard 0 and the verdict to the others, as it does with decisions. Measures follow from the
decision, the gradients and the current pages alone, to the bit; so it does not matter who asks, how often, or in which
incarnation of a shard. A final verdict is kept beside the arena before anybody hears of it: once it is known, some shard may
have applied it, and could not measure that round again.

Guarded by the shard's lock, but for `find`, which may take a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from psd.contract.errors import InvalidRequest
from psd.contract.jobspec import JobSpec
from psd.contract.verdicts import Verdict, judged
from psd.state import locks
from psd.v1 import job_pb2


class VerdictStore(Protocol):
    """Keeps a few bytes beside the arena, for the arena's lifetime."""

    def load_verdict(self) -> bytes:
        """The saved bytes; empty if there are none."""
        ...

    def save_verdict(self, verdict: bytes) -> None:
        """Replace the saved bytes, whole or not at all."""
        ...


@locks.guarded_by(locks.Level.SHARD, but=("find",))
class Verdicts:
    """The verdict on the latest round that has one.

    Args:
        measuring: how many shards have something to measure.
    """

    def __init__(self, spec: JobSpec, measuring: int, store: VerdictStore) -> None:
        self._spec = spec
        self._measuring = measuring
        self._store = store
        stored = store.load_verdict()
        self._latest = Verdict.from_message(job_pb2.Verdict.FromString(stored), spec) if stored else None

    def on(self, round_: int) -> Verdict | None:
        """The verdict on a round, or None."""
        return self._latest if self._latest is not None and self._latest.round == round_ else None

    def find(self, round_: int, under: Verdict | None, measures: Sequence[job_pb2.Measure]) -> Verdict | None:
        """The verdict that follows from the measures of a round; None if one is known that needs no more. Takes no lock.

        Raises:
            InvalidRequest: the measures are not those of all shards.
        """
        if self._is_settled(round_):
            return None
        if len(measures) != self._measuring:
            raise InvalidRequest(f"measures: expected those of {self._measuring} shards, got {len(measures)}")
        if under is not None and under.round != round_:
            raise InvalidRequest(f"verdict.round: the measures are of round {round_}, got {under.round}")
        return judged(self._spec, round_, under, measures)

    def record(self, verdict: Verdict | None) -> None:
        """Keep a verdict; the first one stands, and all others equal it."""
        if verdict is None or self._is_settled(verdict.round):
            return
        if verdict.is_final:
            self._store.save_verdict(verdict.to_message().SerializeToString())
        self._latest = verdict

    def _is_settled(self, round_: int) -> bool:
        latest = self._latest
        return latest is not None and (latest.round > round_ or (latest.round == round_ and latest.is_final))
