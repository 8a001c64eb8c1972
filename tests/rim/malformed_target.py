"""A shard in mid-training to send wrong requests to.

`Target` calls the handlers as gRPC does, through parsers and guard, but in this process. A request says what is sent, and which
error must come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc
import numpy as np

from psd.contract.config import Limits, ServerConfig
from psd.contract.consistency import SYNC
from psd.contract.jobspec import GroupSpec, JobSpec, TensorSpec
from psd.contract.layout import Layout
from psd.contract.tables import SparseTableSpec
from psd.rim.bulk_server import BulkServer
from psd.rim.calls import CallGuard
from psd.rim.control_service import ControlService
from psd.rim.data_plane import DataPlane
from psd.rim.data_service import DataService
from psd.rim.pace import Pace
from psd.rim.vector_gate import VectorGate
from psd.rim.vector_plane import VectorPlane
from psd.rim.vector_service import VectorService
from psd.state.aggregation.rounds import FastRound
from psd.state.counts import LANES
from psd.state.shard import Shard
from psd.v1 import control_pb2, data_pb2, job_pb2
from psd_core.distinct import shard_of

WORLD = 3
ME = 1
SPEC = JobSpec(
    WORLD,
    (
        TensorSpec("w", (7,), "float32", 0),
        TensorSpec("v", (4,), "float32", 0),
        TensorSpec("x", (5,), "float64", 1),
        TensorSpec("s", (3,), "float32", 2),
    ),
    (GroupSpec("sgd", ("momentum",)), GroupSpec("sgd"), GroupSpec("static")),
    SYNC,
)
LAYOUT = Layout(SPEC, 2)
WITH_TABLES = replace(
    SPEC,
    groups=(*SPEC.groups, GroupSpec("sgd")),
    tables=(SparseTableSpec("a", 3, len(SPEC.groups)), SparseTableSpec("b", 2, len(SPEC.groups))),
)
TABLES_BLOCK = len(LAYOUT.blocks)
ID = next(i for i in range(100) if shard_of(np.array([i], np.uint64), 2)[0] == 0)
"""An id whose rows are on this shard."""
STEPS = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0))
TRAINED, FOREIGN, STATIC, LENGTH = 0, 1, 2, 11
SCALARS = ((0.5, 0.5, 0.0, 0.0), (0.5, 0.0, 0.0, 0.0), ())
LIMITS = Limits(workers_max=8, tensors_max=50, elements_max=100_000)


class Aborted(Exception):
    """The end of a call: status, reason, message."""

    def __init__(self, code: grpc.StatusCode, reason: str, message: str) -> None:
        super().__init__(f"{code.name} {reason}: {message}")
        self.code, self.reason, self.message = code, reason, message


class Context:
    """A call whose deadline has come: whatever would wait ends at once."""

    def __init__(self) -> None:
        self._trailing: dict[str, Any] = {}

    def time_remaining(self) -> float:
        return 0.0

    def add_callback(self, callback: Callable[[], None]) -> bool:
        return True

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def cancel(self) -> None:
        raise AssertionError("nobody is turned away here")

    def set_trailing_metadata(self, metadata: Any) -> None:
        self._trailing = dict(metadata)

    def abort(self, code: grpc.StatusCode, message: str) -> None:
        raise Aborted(code, self._trailing["psd-reason"], message)


@dataclass
class Request:
    """A request to send, and, if it is wrong on purpose, the reasons one of which must come and the word that must be in it."""

    method: str
    messages: list[bytes]
    reasons: tuple[str, ...] = ()
    word: str = ""
    what: str = ""


class Target:
    """Shard 0 of 2 in mid-training: two rounds done, a third open with worker 0's gradient.

    Args:
        spec: another job of the same tensors. steps: clock and rank of each push so far.

    Attributes:
        layout: of the job. scalars: of a push.
    """

    def __init__(self, shard: Shard | None = None, spec: JobSpec = SPEC, steps: Sequence[tuple[int, int]] = STEPS) -> None:
        self.shard = shard if shard is not None else Shard(ServerConfig(0, 2, limits=LIMITS), incarnation=77)
        planes = {lane: DataPlane(self.shard, lane) for lane in LANES}
        guard = CallGuard(self.shard, Pace())
        data = DataService(self.shard, planes["grpc"], guard)
        self.vectors = VectorPlane(self.shard, self.shard.readers.fetching, VectorGate())
        bulk = BulkServer(self.shard, planes, self.vectors, guard, self.shard._core.config)
        control = ControlService(
            self.shard, guard, address=str, on_leave=int, open_bulk=bulk.open, open_reads=bulk.open_reads
        ).handler()
        self._handlers = (control, data.handler(), VectorService(guard, self.vectors).handler())
        self.layout = Layout(spec, 2)
        self.scalars = [*SCALARS, SCALARS[1]][: len(spec.groups)]
        self.callers = [self._join(rank) for rank in range(WORLD)]
        for caller in self.callers:
            self.shard.admission.declare(control_pb2.DeclareRequest(caller=caller, spec=spec.to_message()))
        init = self.shard.admission.begin_initialize(self.callers[0], self.layout.digest, self.shard._core.initial.choice)
        for index in (TRAINED, STATIC):
            block = LAYOUT.blocks[index]
            self.shard.admission.initialize_block(init, index, memoryview(np.arange(block.length, dtype=block.dtype).tobytes()))
        assert self.shard.admission.end_initialize(init)
        self.choice = init.choice
        for clock, rank in steps:
            self.push(rank, clock)

    def close(self) -> None:
        self.shard.close(keep=False)

    def _join(self, rank: int) -> job_pb2.Caller:
        reply = self.shard.admission.join(control_pb2.JoinRequest(shard_count=2, rank=rank, world_size=WORLD))
        return job_pb2.Caller(run_id=reply.run_id, incarnation=reply.incarnation, rank=rank, session=reply.session)

    def header(self, rank: int, clock: int) -> data_pb2.PushHeader:
        return data_pb2.PushHeader(
            caller=self.callers[rank],
            clock=clock,
            weight=1.0 + rank,
            layout_digest=self.layout.digest,
            scalars=[data_pb2.GroupScalars(values=values) for values in self.scalars],
        )

    def push(self, rank: int, clock: int) -> data_pb2.PushReply:
        exchange = self.shard.exchange
        push = exchange.begin_push(self.header(rank, clock))
        gradient = np.linspace(rank, clock + 1, LENGTH, dtype=np.float32)
        assert exchange.push_block(push, TRAINED, b"", memoryview(gradient.tobytes())) is None
        if self.layout.spec.tables:
            assert exchange.push_block(push, TABLES_BLOCK, b"", memoryview(b"")) is None
        return exchange.end_push(push)

    def call(self, request: Request) -> list[Any]:
        """The answer's messages; raises Aborted."""
        details = type("Details", (), {"method": request.method, "invocation_metadata": ()})()
        handler = next(h for h in (x.service(details) for x in self._handlers) if h is not None)
        parsed = map(handler.request_deserializer or bytes, request.messages)
        if handler.request_streaming and handler.response_streaming:
            return list(handler.stream_stream(parsed, Context()))
        if handler.request_streaming:
            return [handler.stream_unary(parsed, Context())]
        if handler.response_streaming:
            return list(handler.unary_stream(next(parsed), Context()))
        return [handler.unary_unary(next(parsed), Context())]

    def fingerprint(self) -> Any:
        """All that a refused request must leave as it is: pages, rounds, dedup windows, members, scalars, arrivals, waits."""
        core = self.shard._core
        assert core.job is not None
        assert core.membership is not None
        blocks = []
        for state in core.job.blocks.values():
            page, round_ = state._page, state._round
            assert page is not None
            blocks.append((state.version, page.parameter.tobytes(), [s.tobytes() for s in page.slots], page.steps.tobytes()))
            blocks.append((page.sessions.tobytes(), page.clocks.tobytes()))
            assert isinstance(round_, FastRound)
            if round_._contributors:
                assert round_._sum._sum is not None
                sums = round_._sum._sum.tobytes(), round_._touched.tobytes()
                blocks.append((round_._contributors, round_._total_weight, round_._voice, *sums))
        members = [(w.state, w.session, w.clock, w.floor, w.has_pushed, w.host, w.pid) for w in core.membership.workers]
        scalars = core.job.agreement.known()
        arrived = {name: list(b.arrived) for name, b in core.barriers._barriers.items() if b.arrived}
        return blocks, members, scalars, arrived, len(core.waiting.open()), len(core.gates), core.run_id
