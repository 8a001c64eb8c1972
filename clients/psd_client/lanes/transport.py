"""The transport interface: one lane per shard, which moves whole blocks between flat buffers and that shard.

A lane sends what it is given, once, and raises the typed error that the shard raised (ShardUnavailable if none came). It knows
nothing of retries, sessions, clocks or other shards; those are in shards.py, session.py and exchange.py. shard_lane.py has the
lanes of real shards.

Every call runs in a `Scope`: cancelling the scope from another thread ends the call at once, with `Cancelled`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from psd.contract.layout import Block
from psd.contract.rows import TableRows
from psd.v1 import bulk_pb2, control_pb2, data_pb2, job_pb2, vectors_pb2
from psd_client.lanes.flat import FlatBuffers
from psd_client.lanes.overlap_feed import Feed, Outgoing
from psd_core.worker_steps import WorkerSteps

SMALL_BYTES = 64 << 10
"""Bytes that fit the buffers of a socket; for GradientPart.is_small."""

CANCEL_S = 2.0
"""Seconds that a shard may take to stop using this worker's memory after a call was cancelled: the time for one block."""

T = TypeVar("T")
MessageT = TypeVar("MessageT", bound=Message)

Share = Callable[[FlatBuffers | None, Sequence[FlatBuffers]], None]
"""A function that gives a shard access to the gradients, and to all places for parameters, in shared memory: for bulk calls. A
reader has no gradients."""


class Bracket(Generic[T]):
    """A context manager that calls `begin` and `end`. Each step uses it, and contextlib's takes four times as long.

    Args:
        what: passed to both functions. begin: if it raises, `end` is not called.
        end: gets the exception of the context, or None; may raise another.
    """

    __slots__ = ("_begin", "_end", "_what")

    def __init__(self, what: T, begin: Callable[[T], None], end: Callable[[T, BaseException | None], None]) -> None:
        self._what = what
        self._begin = begin
        self._end = end

    def __enter__(self) -> None:
        self._begin(self._what)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._end(self._what, error)


class Cancelled(Exception):
    """The call's scope was cancelled, because another shard's call failed or the user interrupted. Never reaches the user."""


class Encoding(Protocol):
    """The encoded form of a push's blocks."""

    def block(self, block: Block, present: NDArray[np.bool_] | None, /) -> NDArray[Any]:
        """The array that travels of a block, in shared memory if the gradients are.

        present: as in Outgoing, with at least one."""
        ...


class Scope:
    """The calls to all shards that belong to one operation, to be cancelled together."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self._sleeping: threading.Event | None = None
        self._lock = threading.Lock()
        self._cancels: set[Callable[[], object]] = set()

    def cancel(self) -> None:
        """Cancel the scope's calls, current and later ones."""
        with self._lock:
            self.is_cancelled = True
            cancels = list(self._cancels)
            if self._sleeping is not None:
                self._sleeping.set()
        for cancel in cancels:
            cancel()

    def entered(self, cancel: Callable[[], object]) -> Bracket[Callable[[], object]]:
        """A context for one call. `cancel` ends the call; it is also called if the calling thread itself is interrupted."""
        return Bracket(cancel, self.enter, self._end)

    def enter(self, cancel: Callable[[], object]) -> None:
        """Begin a call that `cancel` can end. Raises Cancelled if the scope is cancelled already."""
        with self._lock:
            if not self.is_cancelled:
                self._cancels.add(cancel)
                return
        cancel()
        raise Cancelled

    def leave(self, cancel: Callable[[], object]) -> None:
        """Note that the call has ended."""
        with self._lock:
            self._cancels.discard(cancel)

    def _end(self, cancel: Callable[[], object], error: BaseException | None) -> None:
        try:
            if error is not None:
                cancel()
        finally:
            self.leave(cancel)

    def sleep(self, seconds: float) -> None:
        """Sleep; raise Cancelled if the scope is cancelled before or meanwhile."""
        with self._lock:
            if self._sleeping is None:
                self._sleeping = threading.Event()
            if self.is_cancelled:
                raise Cancelled
        self._sleeping.wait(seconds)
        if self.is_cancelled:
            raise Cancelled


class Call(NamedTuple):
    """The conditions of one call: its time limit, from now, and the scope that can end it."""

    timeout_s: float
    scope: Scope


@dataclass
class GradientPart:
    """The part of a push for one shard.

    Attributes:
        header: identity, weight and scalars of the push.
        blocks: the shard's trained blocks. At least one, unless there is a tables_block.
        buffers: hold their values: finite, and zero in tensors that are not present.
        present: (tensors of the spec,) which tensors have a gradient; None: all.
        feed: provides the blocks, if the gradients are still being computed.
        tables_block: index of the shard's tables' block, which is pushed, too; None: the job has no tables.
        tables: gradients of the shard's rows, in the dtype in which they are sent, with distinct ids for each table. If the
            feed has some, these are sent instead.
        encoding: the form in which blocks are sent; None: as they are.
        already: blocks that the shard has of this push, so that their numbers are not sent.
        wants_steps: the worker can make the next pushes as steps, if the shard offers that.
    """

    blocks: Sequence[Block]
    buffers: FlatBuffers
    present: NDArray[np.bool_] | None = None
    feed: Feed | None = None
    tables_block: int | None = None
    tables: Sequence[TableRows] = ()
    encoding: Encoding | None = None
    already: frozenset[int] = frozenset()
    wants_steps: bool = False
    header: data_pb2.PushHeader = field(kw_only=True)

    @property
    def is_small(self) -> bool:
        """True if the blocks are complete, and fit the buffers of a socket."""
        return self.is_complete_within(SMALL_BYTES)

    def is_complete_within(self, nbytes: int) -> bool:
        """True if no block is still being computed, and all together have at most so many bytes."""
        return self.feed is None and self.nbytes <= nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks' parameters and of `tables`; without the rows of the feed."""
        return sum([block.nbytes for block in self.blocks]) + sum([rows.nbytes for rows in self.tables])

    def has(self, block: Block) -> bool:
        """True if a tensor of a block is present. Nothing is sent of others. Not of blocks that a feed provides."""
        return self.present is None or bool(self.present[block.segment_tensors].any())

    def outgoing(self) -> Iterator[Outgoing]:
        """The blocks in the order in which to send them, each once; may wait for the next one."""
        if self.feed is not None:
            yield from self.feed.take(self.blocks)
            return
        for block in self.blocks:
            yield block, None if self.present is None else self.present[block.segment_tensors]

    def sent(self, block: Block, present: NDArray[np.bool_] | None) -> list[NDArray[Any]]:
        """The arrays that are sent of a block; none if nothing of it is present. present: as in Outgoing."""
        if present is not None and not present.any():
            return []
        return [self.buffers.block(block.index) if self.encoding is None else self.encoding.block(block, present)]

    def outgoing_rows(self) -> Sequence[TableRows]:
        """The gradients of rows; waits for them if the feed computes them."""
        if self.feed is not None and self.tables_block is not None:
            self.feed.wait()
            if self.feed.tables:
                return self.feed.tables[self.buffers.layout.shard_of(self.tables_block)]
        return self.tables

    @property
    def answered(self) -> dict[int, int]:
        """The blocks that answer a push_pull: bytes of parameters by index; 0 for the tables' block, which sends a version.

        Of a push of one part of the job these are its blocks."""
        blocks = {block.index: block.nbytes for block in self.blocks}
        if self.header.part:
            blocks = {index: blocks[index] for index in self.header.answered}
        return blocks if self.tables_block is None else blocks | {self.tables_block: 0}


@dataclass
class RowsAhead:
    """Rows that a push_pull may fetch, too, as they are when it is answered.

    Attributes:
        wanted: the rows, whose values are filled. version: the version of the shard's tables if they were filled; else None.
    """

    wanted: Sequence[TableRows]
    version: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of ids and numbers."""
        return sum(rows.nbytes for rows in self.wanted)


UnderWay = tuple["GradientPart | Sequence[Block]", FlatBuffers | None, Collection[int], int, int]
"""A bulk call: what it sends; the buffers that it fills, and the blocks of them; and the bytes sent and received before it."""


@dataclass
class Traffic:
    """Payload bytes of one lane so far.

    Attributes:
        under_way: the bulk call that is being made; None: none, or one that moves little. See progress.py.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    under_way: UnderWay | None = None


class Stepping(Protocol):
    """A connection that carries armed steps (steps.py), one at a time, which hold it from `hold` to `let_go`, or its end."""

    @property
    def fileno(self) -> int:
        """The socket's descriptor."""

    def offered(self, gradients: FlatBuffers, parameters: FlatBuffers) -> bulk_pb2.StepOffer | None:
        """The offer in the shard's last reply, if it holds for these buffers."""

    def places(self, rows: Sequence[TableRows]) -> list[int]:
        """Offsets of these rows' values in attached memory, in bytes; empty if some lie elsewhere."""

    def hold(self, offer: bulk_pb2.StepOffer) -> bool:
        """Begin a step. False: it cannot be made on this connection now."""

    def let_go(self) -> None:
        """End a step to which the answer has come, or which was not sent."""

    def finish(self, steps: WorkerSteps, place: int, call: Call) -> bool:
        """End a step that is under way. True: it was taken; False: it is to be made as a call. Raises what a call raises."""

    def cancel_step(self) -> None:
        """End a step that is under way, without waiting for the shard; then `abandon_step` is to be called."""

    def abandon_step(self) -> None:
        """End a step that is under way, and the connection."""


class Lane(ABC):
    """The connections of a worker to one shard. One thread at a time makes bulk calls; control calls may run beside them.

    Attributes:
        shard: the shard's index. address: HOST:PORT. traffic: payload bytes so far.
        transport: how bulk data travels, and why not by a better transport, for status.
        stepping: the connection over which the shard has offered steps in its reply to the last push_pull; None: it has not.
    """

    transport: str
    stepping: Stepping | None = None

    def __init__(self, shard: int, address: str) -> None:
        self.shard = shard
        self.address = address
        self.traffic = Traffic()

    @property
    def is_interruptible(self) -> bool:
        """True if a bulk call made now may be interrupted by an exception from a signal handler, such as Ctrl-C's."""
        return False

    def prepare(self, caller: job_pb2.Caller, call: Call) -> Share | None:
        """Open the transport for bulk calls. Returns a function that shares memory with the shard; None if the shard cannot see
        this process's memory."""
        del caller, call
        return None

    @abstractmethod
    def ask(self, method: str, request: Message, reply: type[MessageT], call: Call, *, is_wait: bool = False) -> MessageT:
        """Call a method of ControlService with one message. is_wait: True if the method may wait for other workers."""

    def join(self, request: control_pb2.JoinRequest, call: Call) -> control_pb2.JoinReply:
        """Join the job at this shard."""
        return self.ask("Join", request, control_pb2.JoinReply, call)

    def declare(self, request: control_pb2.DeclareRequest, call: Call) -> control_pb2.DeclareReply:
        """Agree on the job; at shard 0, wait for the initial values."""
        return self.ask("Declare", request, control_pb2.DeclareReply, call, is_wait=True)

    def rollback(self, request: control_pb2.RollbackRequest, call: Call) -> control_pb2.RollbackReply:
        """Make the shard go back to a checkpoint, on a new timeline."""
        return self.ask("Rollback", request, control_pb2.RollbackReply, call, is_wait=True)

    def commit(self, request: control_pb2.CommitRequest, call: Call) -> control_pb2.CommitReply:
        """Exact aggregation: report that all shards have a push; wait for the decision on its round."""
        return self.ask("Commit", request, control_pb2.CommitReply, call, is_wait=True)

    def measure(self, request: control_pb2.MeasureRequest, call: Call) -> control_pb2.MeasureReply:
        """Exact aggregation: fetch the measure of the shard's part of a decided round."""
        return self.ask("Measure", request, control_pb2.MeasureReply, call)

    def barrier(self, request: control_pb2.BarrierRequest, call: Call) -> control_pb2.BarrierReply:
        """Wait at a barrier until all workers have arrived."""
        return self.ask("Barrier", request, control_pb2.BarrierReply, call, is_wait=True)

    @abstractmethod
    def begin_heartbeat(
        self, request: control_pb2.HeartbeatRequest, timeout_s: float
    ) -> Callable[[], control_pb2.HeartbeatReply]:
        """Send a heartbeat without waiting; return a function that waits for the reply."""

    def stop(self, request: control_pb2.StopRequest, call: Call) -> control_pb2.StopReply:
        """Ask shard 0 to end the job for all workers."""
        return self.ask("Stop", request, control_pb2.StopReply, call)

    def log(self, request: control_pb2.LogRequest, call: Call) -> None:
        """Report scalars to shard 0."""
        self.ask("Log", request, control_pb2.LogReply, call)

    @abstractmethod
    def leave(self, request: control_pb2.LeaveRequest, timeout_s: float) -> None:
        """Report that the worker has finished. Starts no thread, so that it works while the interpreter exits."""

    @abstractmethod
    def initialize(self, first: data_pb2.InitializeFrame, blocks: Sequence[Block], values: FlatBuffers, call: Call) -> bool:
        """Provide the initial values of the blocks. False if the shard has other values already, which it keeps.

        Args:
            first: the head of the first frame: caller, layout digest and choice.
        """

    @abstractmethod
    def store_buffers(self, request: data_pb2.BuffersRequest, call: Call) -> None:
        """Store buffers: what this worker has computed beside the parameters."""

    def load(self, request: control_pb2.LoadRequest, call: Call) -> control_pb2.LoadReply:
        """Wait at shard 0 until all workers load parameters, or report that they are set."""
        return self.ask("Load", request, control_pb2.LoadReply, call, is_wait=not request.is_set)

    @abstractmethod
    def set_parameters(self, request: data_pb2.ParametersRequest, call: Call) -> None:
        """Set parameters or slots."""

    @abstractmethod
    def push(self, part: GradientPart, call: Call) -> data_pb2.PushReply:
        """Send a gradient; returns when the shard has counted it."""

    @abstractmethod
    def pull(self, request: data_pb2.PullRequest, blocks: Sequence[Block], parameters: FlatBuffers, call: Call) -> None:
        """Fetch `blocks`, which `request` names, or a slot of theirs, into the buffers, which are undefined if this fails. With
        the request's `versions_only` nothing is fetched: the call only waits."""

    @abstractmethod
    def pull_rows(
        self, request: data_pb2.PullRequest, wanted: Sequence[TableRows], call: Call, *, counts_no_use: bool = False
    ) -> int:
        """Fetch rows of tables into `wanted`'s values. Returns the version of the shard's tables; the lowest, if updates came
        in between. counts_no_use: do not mark the rows as used."""

    @abstractmethod
    def read_rows(self, request: data_pb2.ReadRequest, wanted: Sequence[TableRows], call: Call) -> int:
        """Do as `pull_rows`, for a reader, and without waiting."""

    def describe(self, request: control_pb2.DescribeRequest, call: Call) -> control_pb2.DescribeReply:
        """Fetch the job and its progress, for a reader."""
        return self.ask("Describe", request, control_pb2.DescribeReply, call)

    def prepare_reads(self, request: data_pb2.ReadRequest, call: Call) -> Share | None:
        """Do as `prepare`, for a reader, which `request` names."""
        del request, call
        return None

    @abstractmethod
    def read(self, request: data_pb2.ReadRequest, blocks: Sequence[Block], parameters: FlatBuffers, call: Call) -> set[int]:
        """Fetch all blocks of the shard at a cut into the buffers. Returns the digests of workers' positions in PullFrames."""

    @abstractmethod
    def push_pull(
        self, part: GradientPart, parameters: FlatBuffers, call: Call, ahead: RowsAhead | None = None
    ) -> data_pb2.PushReply:
        """Push, and fetch the same blocks into the buffers, which are undefined if this fails; full duplex.

        ahead: rows to fetch, too, if that takes no further round trip.
        """

    @abstractmethod
    def run_vectors(
        self, batch: vectors_pb2.VectorBatch, pieces: Sequence[NDArray[Any]], call: Call
    ) -> vectors_pb2.VectorAnswer:
        """Run a batch on vectors. pieces: the batch's payload."""

    @abstractmethod
    def change_vectors(self, kind: str, request: vectors_pb2.VectorChange, call: Call) -> vectors_pb2.VectorAnswer:
        """Make or drop a vector. kind: "create" or "drop"."""

    @abstractmethod
    def list_vectors(self, request: vectors_pb2.VectorListRequest, call: Call) -> vectors_pb2.VectorListReply:
        """Fetch the specs of all vectors."""

    @abstractmethod
    def fetch_vector(self, request: vectors_pb2.VectorFetch, out: memoryview, call: Call) -> None:
        """Fetch numbers of a vector, as many as fill `out`, whose contents are undefined if this fails."""

    @abstractmethod
    def close(self) -> None:
        """Give the connection back. Idempotent."""
