"""The part of a simulated worker that brings verdicts about: psd_client/worker/exchange/verdict_search.py, as generators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from psd.state.shard import Shard
from psd.v1 import control_pb2, job_pb2


@dataclass
class Sent:
    """A push, and the incarnations of the shards that have it."""

    session: int
    clock: int
    value: float
    weight: float
    skip: bool = False
    incarnations: dict[int, int] = field(default_factory=dict)


@dataclass
class Counted:
    """A gradient that a block has counted, or is about to."""

    rank: int
    session: int
    clock: int
    weight: float
    value: float
    is_counted: bool = False


class SettlingWorker:
    """A worker with decisions, of whose rounds it finds out how they are applied."""

    world: Any
    clock: int
    decisions: list[job_pb2.Decision]
    verdict: job_pb2.Verdict | None
    settled: int
    asked: int
    at_all: Callable[..., Iterator[Any]]
    call: Callable[..., Iterator[Any]]
    caller: Callable[[int], Any]
    pull: Callable[[int], Iterator[Any]]
    push_again: Callable[[int, Shard], Iterator[Any]]

    def pull_everywhere(self) -> Iterator[Any]:
        yield from self.await_decisions()
        if self.world.spec.has_verdicts:
            yield from self.settle()
        yield from self.at_all(self.pull)
        if self.verdict is not None:
            self.settled = self.verdict.round

    def await_decisions(self) -> Iterator[Any]:
        """What psd_client/worker/session/session.py does: know what was decided on the round before the clock."""
        known = max((decision.round for decision in self.decisions), default=-1)
        if self.world.is_exact and self.clock > known + 1:
            self.world.waits_for_decisions += 1
            yield from self.call(0, self.only_wait)

    def only_wait(self, shard: Shard) -> Iterator[Any]:
        caller, clock = self.caller(0), self.clock - 1
        self.world.check_alive(0, caller)
        yield from self.decided(shard, control_pb2.CommitRequest(caller=caller, clock=clock, only_wait=True))

    def decided(self, shard: Shard, request: control_pb2.CommitRequest) -> Iterator[Any]:
        """Commit, or only wait, and hear what was decided."""
        ticket = shard.settlement.commit(request)
        if ticket is not None:
            yield ticket
            ticket.future.result(0)
            self.world.check_alive(0, request.caller)
        reply = shard.settlement.commit_reply(request.caller.rank, request.clock)
        self.on_commit(request.clock, reply)
        if not request.without_waiting:
            self.clock = max(self.clock, reply.clock)

    def catch_up(self) -> Iterator[Any]:
        """Whoever made the last round may be gone before all shards had its verdict."""
        if self.world.spec.has_verdicts and self.settled < self.latest_round() < self.clock:
            yield from self.pull_everywhere()

    def latest_round(self) -> int:
        return max((d.round for d in self.decisions if any(d.members)), default=-1)

    def is_final(self, round_: int) -> bool:
        return self.verdict is not None and self.verdict.round == round_ and self.verdict.is_final

    def settle(self) -> Iterator[Any]:
        measures: list[job_pb2.Measure] = []
        under: job_pb2.Verdict | None = None
        for _ in range(20):
            round_ = self.latest_round()
            if round_ < 0 or self.is_final(round_):
                return
            if measures or self.asked != round_:
                yield from self.call(0, self.ask(round_, measures, under))
            measures, under = [], None
            if round_ == self.latest_round() and not self.is_final(round_):
                under = self.verdict if self.verdict is not None and self.verdict.round == round_ else None
                measures = yield from self.measure_everywhere(round_, under)
                self.asked = -1
        raise AssertionError(f"shard 0 has no verdict on round {round_}")

    def on_commit(self, round_: int, reply: control_pb2.CommitReply) -> None:
        self.world.oracle.on_decisions(reply.decisions)
        self.decisions = list(reply.decisions)
        self.asked = round_
        if reply.HasField("verdict"):
            self.verdict = reply.verdict
            if reply.verdict.is_final:
                self.world.oracle.on_verdict(reply.verdict)

    def ask(self, round_: int, measures: list[job_pb2.Measure], under: job_pb2.Verdict | None) -> Callable[[Shard], Any]:
        def ask(shard: Shard) -> Iterator[Any]:
            self.world.check_alive(0, self.caller(0))
            request = control_pb2.CommitRequest(
                caller=self.caller(0),
                clock=round_,
                without_waiting=True,
                measures=measures,
                verdict=under if measures else None,
            )
            assert shard.settlement.commit(request) is None
            reply = shard.settlement.commit_reply(self.caller(0).rank, round_)
            yield None
            self.on_commit(round_, reply)

        return ask

    def measure_everywhere(self, round_: int, under: job_pb2.Verdict | None) -> Iterator[Any]:
        measuring = [i for i in range(len(self.world.shards)) if self.world.layout.blocks_of(i)]
        while True:
            replies: dict[int, control_pb2.MeasureReply] = {}
            yield from self.at_all(lambda index, to=replies: self.measure_at(index, round_, under, to))
            if any(replies[index].is_closed for index in measuring):
                return []
            if not any(replies[index].is_open for index in measuring):
                return [replies[index].measure for index in measuring]
            yield None

    def measure_at(
        self, index: int, round_: int, under: job_pb2.Verdict | None, replies: dict[int, control_pb2.MeasureReply]
    ) -> Iterator[Any]:
        def measure(shard: Shard) -> Iterator[Any]:
            yield from self.push_again(index, shard)
            caller = self.caller(index)
            self.world.check_alive(index, caller)
            request = control_pb2.MeasureRequest(
                caller=caller, clock=self.clock, decisions=self.decisions, round=round_, verdict=under
            )
            return shard.settlement.measure(request)

        replies[index] = yield from self.call(index, measure)
