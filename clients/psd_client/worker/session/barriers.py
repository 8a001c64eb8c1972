"""A worker's calls of barriers, to which it may bring values: each call has a number, by which it is known when it comes again.

Must not know what the values mean, nor gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from psd.contract.errors import BarrierTimeout, InvalidRequest, RolledBack
from psd.v1 import control_pb2
from psd_client.lanes.shards import Shards
from psd_client.lanes.transport import Call, Cancelled, Lane
from psd_client.worker.session.membership import nothing
from psd_client.worker.session.session import Session

LATE_S = 1.0
"""Seconds that are given to a wait after its deadline, so that the shard can say which workers it waited for."""


class _Begun(NamedTuple):
    """A call that was begun: its name, reduction and the names of its numbers; its session, and its number in that."""

    what: tuple[str, int, list[str]]
    session: int
    seq: int


class BarrierCalls:
    """The barrier calls of one worker.

    Args:
        timeout_s: longest wait for other workers.
    """

    def __init__(self, session: Session, shards: Shards, timeout_s: float) -> None:
        self._session = session
        self._shards = shards
        self._timeout_s = timeout_s
        self._last: tuple[int, int] = 0, 0  # session and number of the last call
        self._open: _Begun | None = None  # the last call, if it has failed

    def arrive(
        self,
        name: str,
        keep_push: Callable[[], None] | None = None,
        numbers: Sequence[control_pb2.Number] = (),
        reduction: int = 0,
    ) -> control_pb2.BarrierReply:
        """Wait at shard 0 until every worker that is in the job has arrived; the reply has the numbers of all, reduced.

        keep_push: sends the last push again to shards that have lost it: other workers may have to wait for its round there
            before they can arrive.
        """
        what = name, reduction, [number.name for number in numbers]
        begun = self._open
        if begun is None or begun.what != what:  # else the same call again: the barrier may have opened, but the reply was lost
            session, seq = self._last
            self._last = (session, seq + 1) if session == self._session.number else (self._session.number, 1)
            begun = self._open = _Begun(what, *self._last)

        def arrive_at(lane: Lane, call: Call) -> control_pb2.BarrierReply:
            request = control_pb2.BarrierRequest(
                caller=self._session.caller(lane.shard),
                name=name,
                seq=begun.seq,
                session=begun.session,
                numbers=numbers,
                reduction=reduction,  # type: ignore[arg-type]
            )
            return lane.barrier(request, call)

        reply = control_pb2.BarrierReply()
        try:
            for attempt in self._session.attempts():
                with attempt:
                    if keep_push is None:
                        (reply,) = self._shards.run(arrive_at, self._timeout_s, self._shards.lanes[:1])
                    else:
                        reply = self._arrive(arrive_at, keep_push)
        except (BarrierTimeout, InvalidRequest, RolledBack):  # the arrival was withdrawn or refused, or none counts any more
            self._open = None
            raise
        self._open = None
        return reply

    def _arrive(
        self, arrive_at: Callable[[Lane, Call], control_pb2.BarrierReply], keep_push: Callable[[], None]
    ) -> control_pb2.BarrierReply:
        """Wait at a barrier. Each time that a shard was restarted, leave it, call `keep_push`, and arrive again."""
        now, memberships = self._session.now, self._session.memberships
        deadline = now() + self._timeout_s
        while True:
            known = memberships.held.incarnations

            def wait(lane: Lane, call: Call, known: tuple[int, ...] = known) -> control_pb2.BarrierReply:
                memberships.on_restart = call.scope.cancel
                if memberships.held.incarnations != known:
                    raise Cancelled
                return arrive_at(lane, call)

            try:
                keep_push()
                (reply,) = self._shards.run(wait, max(deadline - now(), LATE_S), self._shards.lanes[:1])
            except Cancelled:
                if memberships.held.incarnations == known:
                    raise
            else:
                return reply
            finally:
                memberships.on_restart = nothing
