"""A lane that hands each call to the checker and waits for what that makes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from fake_steps import FakeStepping
from numpy.typing import NDArray
from wire import Outcome, Request

from psd.contract import frames
from psd.contract.layout import Block
from psd.contract.rows import TableRows, in_frames, parts_of, payload_of
from psd.v1 import control_pb2, data_pb2, vectors_pb2
from psd_client.lanes.flat import FlatBuffers
from psd_client.lanes.transport import Call, GradientPart, Lane, RowsAhead, Scope


class Asks(Protocol):
    """The process whose lane it is."""

    def ask(self, shard: int, request: Request, scope: Scope) -> Outcome:
        """The outcome of a call; Cancelled if the scope was cancelled. Raises the error that it is."""
        ...

    def beat(self, shard: int, request: Request) -> Callable[[], Outcome]:
        """Send a heartbeat; the function returned waits for its outcome."""
        ...

    def received(self, versions: Sequence[tuple[int, int]]) -> None:
        """Blocks have come."""
        ...

    @property
    def peer(self) -> int:
        """Its number, where steps are armed; else -1."""
        ...


class FakeLane(Lane):
    """One worker's way to one shard."""

    transport = "fake"

    def __init__(self, shard: int, process: Asks) -> None:
        super().__init__(shard, f"10.0.0.{shard + 1}:7000")
        self._process = process
        self.stepping = FakeStepping(shard, process) if process.peer >= 0 else None

    def __repr__(self) -> str:
        return f"lane {self.shard}"

    def ask(self, method: str, request: Any, reply: type[Any], call: Call, *, is_wait: bool = False) -> Any:
        return reply.FromString(self._process.ask(self.shard, _request(method.lower(), request), call.scope).body)

    def _ask_bulk(self, request: Request, call: Call) -> Outcome:
        """Ask over the connection that carries steps, too; the answer may offer some."""
        stepping = self.stepping
        if not isinstance(stepping, FakeStepping):
            return self._process.ask(self.shard, request._replace(wants_steps=False), call.scope)
        stepping.begin_call()
        outcome = self._process.ask(self.shard, request._replace(process=self._process.peer), call.scope)
        stepping.take_offer(outcome.offer)
        return outcome

    def leave(self, request: control_pb2.LeaveRequest, timeout_s: float) -> None:
        del timeout_s
        self._process.ask(self.shard, _request("leave", request), Scope())

    def begin_heartbeat(
        self, request: control_pb2.HeartbeatRequest, timeout_s: float
    ) -> Callable[[], control_pb2.HeartbeatReply]:
        del timeout_s
        reply = self._process.beat(self.shard, _request("heartbeat", request))
        return lambda: control_pb2.HeartbeatReply.FromString(reply().body)

    def initialize(self, first: data_pb2.InitializeFrame, blocks: Sequence[Block], values: FlatBuffers, call: Call) -> bool:
        sent = tuple((block.index, b"", values.block(block.index).tobytes()) for block in blocks)
        outcome = self._process.ask(self.shard, _request("initialize", first, sent), call.scope)
        return data_pb2.InitializeReply.FromString(outcome.body).accepted

    def store_buffers(self, request: data_pb2.BuffersRequest, call: Call) -> None:
        raise NotImplementedError("these jobs have no buffers")

    def set_parameters(self, request: data_pb2.ParametersRequest, call: Call) -> None:
        raise NotImplementedError("these workers load none")

    def push(self, part: GradientPart, call: Call) -> data_pb2.PushReply:
        outcome = self._ask_bulk(_request("push", part.header, _gradients(part)), call)
        return data_pb2.PushReply.FromString(outcome.body)

    def pull(self, request: data_pb2.PullRequest, blocks: Sequence[Block], parameters: FlatBuffers, call: Call) -> None:
        outcome = self._ask_bulk(_request("pull", request), call)
        assert len(outcome.versions) == len(blocks) + (parameters.layout.tables_block(self.shard) is not None)
        self._process.received(outcome.versions)

    def push_pull(
        self, part: GradientPart, parameters: FlatBuffers, call: Call, ahead: RowsAhead | None = None
    ) -> data_pb2.PushReply:
        asked = _request("push_pull", part.header, _gradients(part))._replace(wants_steps=part.wants_steps)
        outcome = self._ask_bulk(asked, call)
        self._process.received(outcome.versions)
        return data_pb2.PushReply.FromString(outcome.body)

    def read(self, request: data_pb2.ReadRequest, blocks: Sequence[Block], parameters: FlatBuffers, call: Call) -> set[int]:
        raise NotImplementedError("workers do not read")

    def pull_rows(
        self, request: data_pb2.PullRequest, wanted: Sequence[TableRows], call: Call, *, counts_no_use: bool = False
    ) -> int:
        raise NotImplementedError("these workers pull no rows")

    def read_rows(self, request: data_pb2.ReadRequest, wanted: Sequence[TableRows], call: Call) -> int:
        raise NotImplementedError("these workers pull no rows")

    def run_vectors(
        self, batch: vectors_pb2.VectorBatch, pieces: Sequence[NDArray[Any]], call: Call
    ) -> vectors_pb2.VectorAnswer:
        raise NotImplementedError("these jobs have no vectors")

    def change_vectors(self, kind: str, request: vectors_pb2.VectorChange, call: Call) -> vectors_pb2.VectorAnswer:
        raise NotImplementedError("these jobs have no vectors")

    def list_vectors(self, request: vectors_pb2.VectorListRequest, call: Call) -> vectors_pb2.VectorListReply:
        raise NotImplementedError("these jobs have no vectors")

    def fetch_vector(self, request: vectors_pb2.VectorFetch, out: memoryview, call: Call) -> None:
        raise NotImplementedError("these jobs have no vectors")

    def close(self) -> None:
        pass


def _request(kind: str, message: Any, blocks: tuple[tuple[int, bytes, bytes], ...] = ()) -> Request:
    return Request(kind, _bytes(message), blocks)


def _gradients(part: GradientPart) -> tuple[tuple[int, bytes, bytes], ...]:
    found = []
    for block, present in part.outgoing():
        bits = b"" if present is None else frames.present_bits(present)
        head = data_pb2.PushFrame(present=bits)
        found.append((block.index, _bytes(head), b"".join(each.tobytes() for each in part.sent(block, present))))
    if part.tables_block is not None:
        framed = in_frames(part.outgoing_rows()) or [[]]
        for rows in framed:
            head = data_pb2.PushFrame(rows=parts_of(rows), more=rows is not framed[-1])
            found.append((part.tables_block, _bytes(head), b"".join(piece.tobytes() for piece in payload_of(rows))))
    return tuple(found)


def _bytes(message: Any) -> bytes:
    found: bytes = message.SerializeToString(deterministic=True)
    return found
