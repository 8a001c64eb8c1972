"""Exact aggregation with norms over the whole gradient: finds the verdict on a decided round.

Every shard measures its part of the round; shard 0 derives a verdict from all measures; the next pull carries it to the shards,
which apply the round. Any worker may do this, for its own round or for one whose workers are gone. All come to the same
verdict, and the first one is kept (psd/state/aggregation/settlement.py). Must not know gradients or clocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from psd.contract.errors import InternalError, WaitTimeout
from psd.v1 import control_pb2, job_pb2
from psd_client.lanes.shards import Shards
from psd_client.lanes.transport import Call, Lane
from psd_client.worker.session.session import Session

POLL_S = 0.05
"""Seconds until shards are asked again, while one lacks gradients because it was killed. Workers do not wait at that shard: one
that waited there would not notice that another shard was killed, too, and needs this worker's gradient again."""

ATTEMPTS_MAX = 8
"""Attempts to find a verdict: two for each measurement, and some because other workers may come in between."""


class VerdictSearch:
    """The part of one worker in finding verdicts.

    Args:
        lanes: the shards that have something to measure.
        push_again: makes sure that a shard has this worker's gradient before it measures.

    Attributes:
        verdict: the last verdict that is known; final when `find` returns.
        applied: the latest round on which this worker has told all shards the verdict.
    """

    def __init__(
        self,
        session: Session,
        shards: Shards,
        lanes: Sequence[Lane],
        timeout_s: float,
        push_again: Callable[[Lane, Call], None],
    ) -> None:
        self._session = session
        self._shards = shards
        self._lanes = lanes
        self._timeout_s = timeout_s
        self._push_again = push_again
        self.verdict: job_pb2.Verdict | None = None
        self.applied = -1
        self._asked = -1

    @property
    def latest(self) -> int:
        """The latest decided round that has members, as far as this worker knows; -1 if there is none."""
        return max((d.round for d in self._session.decisions if any(d.members)), default=-1)

    def is_untold_before(self, clock: int) -> bool:
        """True if a round's members may be gone before all shards have its verdict; nobody could push the next round then."""
        return self.applied < self.latest < clock

    def find(self) -> None:
        """Learn the verdict on the latest round; measure the round if nobody has."""
        measures: Sequence[job_pb2.Measure] = ()
        under = None
        for _ in range(ATTEMPTS_MAX):
            round_ = self.latest
            if round_ < 0 or self._is_final(self.verdict, round_):
                return
            if measures or self._asked != round_:
                self._ask(round_, measures, under)
            measures, under = (), None
            if round_ == self.latest and not self._is_final(self.verdict, round_):
                under = self.verdict if self.verdict is not None and self.verdict.round == round_ else None
                measures = self._measure(round_, under)
                self._asked = -1
        raise InternalError(f"round {round_} was measured several times, but shard 0 has no verdict on it")

    def on_commit(self, round_: int, reply: control_pb2.CommitReply) -> None:
        """Note shard 0's decision and verdict on a round."""
        self._asked = round_
        if reply.HasField("verdict"):
            self.verdict = reply.verdict

    def on_applied(self) -> None:
        """Note that all shards have the last verdict, and have applied its round."""
        if self.verdict is not None:
            self.applied = self.verdict.round

    def skips(self, round_: int) -> bool:
        """True if the last verdict is on that round and skips it."""
        return self.verdict is not None and self.verdict.round == round_ and self.verdict.skip

    def forget(self) -> None:
        """Forget everything: the job has gone back to a checkpoint."""
        self.verdict, self.applied, self._asked = None, -1, -1

    @staticmethod
    def _is_final(verdict: job_pb2.Verdict | None, round_: int) -> bool:
        return verdict is not None and verdict.round == round_ and verdict.is_final

    def _ask(self, round_: int, measures: Sequence[job_pb2.Measure], under: job_pb2.Verdict | None) -> None:
        """Send shard 0 these measures, if there are any, and learn its verdict on the round."""

        def commit_at(lane: Lane, call: Call) -> control_pb2.CommitReply:
            request = control_pb2.CommitRequest(
                caller=self._session.caller(lane.shard),
                clock=round_,
                without_waiting=True,
                measures=measures,
                verdict=under if measures else None,
            )
            return lane.commit(request, call)

        (reply,) = self._shards.run(commit_at, self._timeout_s, self._shards.lanes[:1])
        self._session.decisions = list(reply.decisions)
        self.on_commit(round_, reply)

    def _measure(self, round_: int, under: job_pb2.Verdict | None) -> list[job_pb2.Measure]:
        """The measures of the round, by shard; empty if some shard has closed it, so that shard 0 knows the verdict already."""

        def measure_at(lane: Lane, call: Call) -> control_pb2.MeasureReply:
            self._push_again(lane, call)
            request = control_pb2.MeasureRequest(
                caller=self._session.caller(lane.shard),
                clock=self._session.clock,
                decisions=self._session.decisions,
                round=round_,
                verdict=under,
            )
            return lane.measure(request, call)

        deadline = time.monotonic() + self._timeout_s
        while True:
            replies = self._shards.run(measure_at, self._timeout_s, self._lanes)
            if any(reply.is_closed for reply in replies):
                return []
            if not any(reply.is_open for reply in replies):
                return [reply.measure for reply in replies]
            if time.monotonic() > deadline:
                missing = sorted({rank for reply in replies for rank in reply.missing})
                raise WaitTimeout(
                    f"round {round_}: a shard was killed and has not been sent again the gradients of workers {missing}",
                    missing=missing,
                )
            time.sleep(POLL_S)
