"""The lane to a real shard: a gRPC channel for control calls, and for bulk calls a separate connection if one works; else they
take that channel, and heartbeats one of their own.

For bulk calls over gRPC, frames are built and parsed as raw bytes (frames.py), so gRPC's generated stubs are not used. A
push_pull is full duplex: gRPC's thread takes frames from the sending generator while the calling thread writes the answers
into the parameters. Must not know sessions, clocks, retries or other shards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from google.protobuf.message import Message
from numpy.typing import NDArray
from typing_extensions import override

from psd.contract import frames
from psd.contract.config import alternatives
from psd.contract.credentials import Credentials
from psd.contract.errors import InternalError, ShardUnavailable, WaitTimeout
from psd.contract.layout import Block
from psd.contract.rows import TableRows
from psd.contract.vector_batches import payload_parts
from psd.v1 import bulk_pb2, control_pb2, data_pb2, job_pb2, vectors_pb2
from psd_client.lanes.bulk_opener import BulkOpener
from psd_client.lanes.bulk_reads import ReadingCaller, ReadingClient
from psd_client.lanes.daemon_threads import can_start_threads
from psd_client.lanes.flat import FlatBuffers
from psd_client.lanes.frames import (
    BlockAnswer,
    OutFrame,
    Places,
    WantedRows,
    initial_frames,
    push_frames,
    small_push,
    vector_frames,
)
from psd_client.lanes.grpc_channel import MESSAGE_BYTES_MAX, GrpcChannel
from psd_client.lanes.overlap_feed import Aborted
from psd_client.lanes.steps import SteppingClient
from psd_client.lanes.transport import Call, GradientPart, Lane, MessageT, RowsAhead, Scope, Share

AT_ONCE_BYTES_MAX = MESSAGE_BYTES_MAX - (1 << 20)
"""Limit of the gradients or parameters in one message if no stream is possible."""

BLOCKS_AT_ONCE_BYTES_MAX = 3 << 19
"""Limit of the parameters of a push_pull over gRPC with one message each way; with more, a stream is faster, since blocks
overlap. Rows do not; their limit is that of a frame."""

AHEAD_BYTES_MAX = 512 << 10
"""Limit of the ids of rows that a push_pull fetches, too: they are in the head of its message."""

VECTORS_AT_ONCE_BYTES_MAX = 1 << 20
"""Limit of a batch's payload in one message; a larger one is sent in frames, which avoid a copy of it all."""

_CONTROL = "/psd.v1.ControlService/"
_DATA = "/psd.v1.DataService/"
_VECTORS = "/psd.v1.VectorService/"


class ShardLane(Lane):
    """The lane to one shard. Without `credentials`: no TLS, no token.

    Args:
        address: HOST:PORT; for a reader also those of relays, A|B, which all speak gRPC alone. is_reader: True for a reader.
        transport: "grpc"; "auto", the best one that works; or "shm" or "tcp", which raise ConfigError if they do not work.
        streams: TCP connections of the bulk lane.
    """

    def __init__(
        self,
        shard: int,
        address: str,
        transport: str,
        credentials: Credentials | None = None,
        streams: int = 1,
        *,
        is_reader: bool = False,
    ) -> None:
        super().__init__(shard, address)
        credentials = credentials if credentials is not None else Credentials()
        transport = transport if len(alternatives(address)) == 1 else "grpc"
        self.transport = "grpc" if transport == "grpc" else ""
        self._channel = GrpcChannel(shard, address, credentials)
        # For heartbeats where gradients travel by gRPC: over a slow link they would else wait behind what lies in that
        # connection's buffers, for longer than a lease.
        self._heartbeats = GrpcChannel(shard, address, credentials)
        self._bulk: BulkOpener[job_pb2.Caller, SteppingClient] | None = None
        self._reads: BulkOpener[ReadingCaller, ReadingClient] | None = None
        self._incarnation = 0  # of the shard, as a reader has heard; 0: a relay's
        if is_reader and transport != "grpc":
            self._reads = BulkOpener(
                shard, address, transport, credentials, self._open_reads, self.traffic, ReadingClient, streams
            )
        elif transport != "grpc":
            self._bulk = BulkOpener(
                shard, address, transport, credentials, self.open_bulk, self.traffic, SteppingClient, streams
            )
        self._name = f"shard {shard} at {address}"
        self._shared: tuple[FlatBuffers | None, Sequence[FlatBuffers]] | None = None

    @property
    @override
    def is_interruptible(self) -> bool:
        """True while bulk calls need no gRPC."""
        bulk = self._bulk or self._reads
        return bulk is not None and bulk.is_open

    def close(self) -> None:
        """Close all connections; calls in progress end."""
        self._channel.close()
        self._heartbeats.close()
        for bulk in (self._bulk, self._reads):
            if bulk is not None:
                bulk.close()

    # -- control calls -------------------------------------------------------------------------------------------------

    @override
    def ask(self, method: str, request: Message, reply: type[MessageT], call: Call, *, is_wait: bool = False) -> MessageT:
        return self._channel.unary(f"{_CONTROL}{method}", request, reply, call, is_wait=is_wait)

    def open_bulk(self, caller: job_pb2.Caller, call: Call) -> control_pb2.OpenBulkReply:
        """Ask for a ticket to a bulk connection."""
        return self.ask("OpenBulk", control_pb2.OpenBulkRequest(caller=caller), control_pb2.OpenBulkReply, call)

    def _open_reads(self, caller: ReadingCaller, call: Call) -> control_pb2.OpenBulkReply:
        return self.ask("OpenReads", caller.request, control_pb2.OpenBulkReply, call)

    @override
    def describe(self, request: control_pb2.DescribeRequest, call: Call) -> control_pb2.DescribeReply:
        reply = super().describe(request, call)
        self._incarnation = reply.incarnation
        return reply

    @override
    def begin_heartbeat(
        self, request: control_pb2.HeartbeatRequest, timeout_s: float
    ) -> Callable[[], control_pb2.HeartbeatReply]:
        channel = self._heartbeats if self.transport == "grpc" else self._channel
        return channel.begin_unary(f"{_CONTROL}Heartbeat", request, control_pb2.HeartbeatReply, Call(timeout_s, Scope()))

    @override
    def leave(self, request: control_pb2.LeaveRequest, timeout_s: float) -> None:
        self._channel.is_leaving = self._heartbeats.is_leaving = True
        self._channel.unary(f"{_CONTROL}Leave", request, control_pb2.LeaveReply, Call(timeout_s, Scope()), is_wait=False)

    # -- bulk calls ----------------------------------------------------------------------------------------------------

    @override
    def prepare(self, caller: job_pb2.Caller, call: Call) -> Share | None:
        connection = self._opened(caller, call)
        return self._share if connection is not None and connection.is_local else None

    def _share(self, gradients: FlatBuffers | None, places: Sequence[FlatBuffers]) -> None:
        self._shared = gradients, places

    def _opened(self, caller: job_pb2.Caller, call: Call) -> SteppingClient | None:
        if self._bulk is None:
            return None
        connection = self._bulk.connection(caller, call)
        self.transport = self._bulk.transport
        return connection

    def _connection(self, caller: job_pb2.Caller, call: Call) -> SteppingClient | None:
        """The connection for bulk calls, with memory attached; None to use gRPC."""
        connection = self._opened(caller, call)
        if connection is not None:
            self._attach(connection, call)
        return connection

    def _attach(self, connection: SteppingClient | ReadingClient, call: Call) -> None:
        """Give the shard access to the memory that is shared with it, if there is some."""
        if self._shared is not None and connection.is_local:
            gradients, places = self._shared
            if places[0].segment is not None and not places[0].segment.is_given_up:
                connection.attach(gradients, places, call)

    @override
    def initialize(self, first: data_pb2.InitializeFrame, blocks: Sequence[Block], values: FlatBuffers, call: Call) -> bool:
        connection = self._connection(first.caller, call)
        if connection is not None and blocks:
            message = bulk_pb2.BulkCall(method=bulk_pb2.BULK_METHOD_INITIALIZE)
            return connection.initialize(message, first, blocks, values, call)
        sent = self._joined(initial_frames(first, blocks, values))
        with self._moving(blocks):
            return self._channel.stream_out(f"{_DATA}Initialize", sent, data_pb2.InitializeReply, call, is_wait=False).accepted

    @override
    def store_buffers(self, request: data_pb2.BuffersRequest, call: Call) -> None:
        self._channel.unary(f"{_DATA}StoreBuffers", request, data_pb2.BuffersReply, call, is_wait=False)
        self.traffic.sent_bytes += sum(len(block.payload) for block in request.buffers)

    @override
    def set_parameters(self, request: data_pb2.ParametersRequest, call: Call) -> None:
        self._channel.unary(f"{_DATA}SetParameters", request, data_pb2.ParametersReply, call, is_wait=False)
        self.traffic.sent_bytes += sum(len(block.payload) for block in request.parameters)

    @override
    def push(self, part: GradientPart, call: Call) -> data_pb2.PushReply:
        connection = self._connection(part.header.caller, call)
        if connection is not None:
            message = bulk_pb2.BulkCall(method=bulk_pb2.BULK_METHOD_PUSH)
            return connection.transfer(message, part, {}, None, call).push
        if can_start_threads():
            if part.is_complete_within(frames.FRAME_BYTES_MAX) and len(part.blocks) + (part.tables_block is not None) == 1:
                (frame,) = self._joined(push_frames(part))
                return data_pb2.PushReply.FromString(self._channel.frame(f"{_DATA}Push", frame, call))
            sent = self._joined(push_frames(part))
            with self._moving(part):
                return self._channel.stream_out(f"{_DATA}Push", sent, data_pb2.PushReply, call, is_wait=True)
        if part.nbytes > AT_ONCE_BYTES_MAX:  # the shard refuses it with exact aggregation
            raise RuntimeError("gRPC cannot send this much at the end of the program with this Python; call close() earlier")
        # A worker that ends waits for the round, too.
        answer = BlockAnswer(self._name, part.answered, None, self.traffic)
        return answer.take_small(self._channel.frame(f"{_DATA}PushPullSmall", self._small(part, None), call)).reply

    @override
    def push_pull(
        self, part: GradientPart, parameters: FlatBuffers, call: Call, ahead: RowsAhead | None = None
    ) -> data_pb2.PushReply:
        connection = self._connection(part.header.caller, call)
        if parameters.maps_planes:
            parameters.lent.clear()
        rows: WantedRows | None = None
        if connection is not None:
            message = bulk_pb2.BulkCall(method=bulk_pb2.BULK_METHOD_PUSH_PULL, wants_steps=part.wants_steps)
            if ahead is not None and part.feed is None:
                rows = self._ahead(ahead, connection.places)
            answered = connection.transfer(message, part, part.answered, parameters, call, rows)
            reply = answered.push
            if part.wants_steps:
                is_offered = answered.HasField("step")
                connection.offer, self.stepping = (answered.step, connection) if is_offered else (None, None)
        elif part.is_complete_within(frames.FRAME_BYTES_MAX) and (
            sum([block.nbytes for block in part.blocks]) <= BLOCKS_AT_ONCE_BYTES_MAX
        ):
            if ahead is not None:
                rows = self._ahead(ahead)
            answer = BlockAnswer(self._name, part.answered, parameters, self.traffic, rows)
            reply = answer.take_small(self._channel.frame(f"{_DATA}PushPullSmall", self._small(part, rows), call)).reply
        else:
            answer = BlockAnswer(self._name, part.answered, parameters, self.traffic)
            sent = self._joined(push_frames(part))
            with self._moving(part, parameters, part.answered):
                reply = answer.take(self._channel.stream_in(f"{_DATA}PushPull", sent, call)).reply
        if ahead is not None:
            ahead.version = rows.complete() if rows is not None else None
        return reply

    def _ahead(self, ahead: RowsAhead, places: Places = lambda _: []) -> WantedRows | None:
        """The request for rows ahead; None if it needs more than one frame."""
        rows = WantedRows(self._name, ahead.wanted, places=places)
        return rows if len(rows.requests) == 1 and rows.requests[0].nbytes <= AHEAD_BYTES_MAX else None

    @override
    def pull(self, request: data_pb2.PullRequest, blocks: Sequence[Block], parameters: FlatBuffers, call: Call) -> None:
        connection = self._connection(request.caller, call) if not request.slot else None  # another lane carries no steps
        awaited = {block.index: block.nbytes for block in blocks}
        if parameters.maps_planes and not request.versions_only:
            parameters.lent.clear()
        tables_block = parameters.layout.tables_block(self.shard)
        if tables_block is not None and (tables_block in request.blocks or not request.blocks):
            awaited[tables_block] = 0
        if connection is not None:
            message = bulk_pb2.BulkCall(method=bulk_pb2.BULK_METHOD_PULL, pull=request)
            connection.transfer(message, None, {} if request.versions_only else awaited, parameters, call)
            return
        answer = BlockAnswer(self._name, awaited, None if request.versions_only else parameters, self.traffic)
        with self._moving((), parameters, () if request.versions_only else awaited):
            answer.take(self._channel.stream_in(f"{_DATA}Pull", request, call))

    @override
    def pull_rows(
        self, request: data_pb2.PullRequest, wanted: Sequence[TableRows], call: Call, *, counts_no_use: bool = False
    ) -> int:
        connection = self._connection(request.caller, call)
        first = data_pb2.RowsRequest(pull=request, counts_no_use=counts_no_use)
        if connection is None:
            return self._asked("PullRows", first, wanted, call)
        message = bulk_pb2.BulkCall(method=bulk_pb2.BULK_METHOD_PULL_ROWS)
        return connection.pull_rows(message, WantedRows(self._name, wanted, first, connection.places), call)

    @override
    def read_rows(self, request: data_pb2.ReadRequest, wanted: Sequence[TableRows], call: Call) -> int:
        return self._asked("ReadRows", data_pb2.RowsRequest(read=request), wanted, call)

    @override
    def prepare_reads(self, request: data_pb2.ReadRequest, call: Call) -> Share | None:
        connection = self._opened_reads(request, call)
        return self._share if connection is not None and connection.is_local else None

    def _opened_reads(self, request: data_pb2.ReadRequest, call: Call) -> ReadingClient | None:
        if self._reads is None or not self._incarnation:
            self.transport = "grpc" if self._reads is None else "grpc (a relay)"
            return None
        asked = control_pb2.OpenReadsRequest(reader=request.reader)
        connection = self._reads.connection(ReadingCaller(self._incarnation, asked), call)
        self.transport = self._reads.transport
        return connection

    @override
    def read(self, request: data_pb2.ReadRequest, blocks: Sequence[Block], parameters: FlatBuffers, call: Call) -> set[int]:
        awaited = {block.index: block.nbytes for block in blocks}
        connection = self._opened_reads(request, call)
        if connection is not None:
            self._attach(connection, call)
            return connection.read(request, awaited, parameters, call)
        answer = BlockAnswer(self._name, awaited, parameters, self.traffic)
        return answer.take(self._channel.stream_in(f"{_DATA}Read", request, call)).positions

    # -- vectors -------------------------------------------------------------------------------------------------------

    @override
    def run_vectors(
        self, batch: vectors_pb2.VectorBatch, pieces: Sequence[NDArray[Any]], call: Call
    ) -> vectors_pb2.VectorAnswer:
        self.traffic.sent_bytes += batch.payload_bytes
        connection = self._opened(batch.caller, call)
        if connection is not None:
            message = bulk_pb2.BulkCall(method=bulk_pb2.BULK_METHOD_RUN_VECTORS, batch=batch)
            try:
                return connection.exchange(message, payload_parts(pieces), memoryview(bytearray()), call).vectors
            except WaitTimeout as error:  # a batch waits for no worker, so it is the shard that is late
                raise ShardUnavailable(str(error), shard=self.shard, address=self.address) from None
        answer = vectors_pb2.VectorAnswer
        if batch.payload_bytes <= VECTORS_AT_ONCE_BYTES_MAX:
            frame = vectors_pb2.VectorFrame(batch=batch, payload=b"".join(payload_parts(pieces)))
            return self._channel.unary(f"{_VECTORS}Run", frame, answer, call, is_wait=False)
        return self._channel.stream_out(f"{_VECTORS}RunFrames", vector_frames(batch, pieces), answer, call, is_wait=False)

    @override
    def change_vectors(self, kind: str, request: vectors_pb2.VectorChange, call: Call) -> vectors_pb2.VectorAnswer:
        method = f"{_VECTORS}{kind.capitalize()}"
        return self._channel.unary(method, request, vectors_pb2.VectorAnswer, call, is_wait=False)

    @override
    def list_vectors(self, request: vectors_pb2.VectorListRequest, call: Call) -> vectors_pb2.VectorListReply:
        return self._channel.unary(f"{_VECTORS}List", request, vectors_pb2.VectorListReply, call, is_wait=False)

    @override
    def fetch_vector(self, request: vectors_pb2.VectorFetch, out: memoryview, call: Call) -> None:
        connection = self._opened(request.caller, call) if request.HasField("caller") else None
        if connection is not None:
            message = bulk_pb2.BulkCall(method=bulk_pb2.BULK_METHOD_FETCH_VECTOR, fetch=request)
            connection.exchange(message, (), out, call)
            self.traffic.received_bytes += len(out)
            return
        at = 0
        for frame in self._channel.stream_in(f"{_VECTORS}Fetch", request, call):
            _, numbers = frames.split(frame, "VectorFrame")
            if len(numbers) > len(out) - at:
                raise InternalError(f"{self._name}: has sent more numbers of a vector than were asked for")
            out[at : at + len(numbers)] = numbers
            at += len(numbers)
        self.traffic.received_bytes += at
        if at != len(out):
            raise InternalError(f"{self._name}: has sent {at} bytes of a vector, {len(out)} were asked for")

    @contextlib.contextmanager
    def _moving(
        self, outgoing: GradientPart | Sequence[Block], buffers: FlatBuffers | None = None, incoming: Collection[int] = ()
    ) -> Iterator[None]:
        """Let it be known how far a call over gRPC is that moves much."""
        traffic = self.traffic
        traffic.under_way = outgoing, buffers, incoming, traffic.sent_bytes, traffic.received_bytes
        try:
            yield
        finally:
            traffic.under_way = None

    # -- gRPC's messages -----------------------------------------------------------------------------------------------

    def _small(self, part: GradientPart, ahead: WantedRows | None) -> bytes:
        """A SmallPush: all frames of a push, and the request for rows ahead, if any."""
        sent = list(push_frames(part))
        self.traffic.sent_bytes += sum([frame.nbytes for frame in (*sent, *(ahead.requests if ahead is not None else ()))])
        return small_push(sent, ahead)

    def _asked(self, method: str, first: data_pb2.RowsRequest, wanted: Sequence[TableRows], call: Call) -> int:
        """Fetch rows over gRPC."""
        rows = WantedRows(self._name, wanted, first)
        asked = self._joined(rows.requests)
        try:
            answers: Iterable[bytes]
            if len(rows.requests) == 1:
                answers = (self._channel.frame(f"{_DATA}{method}", next(asked), call),)
            else:
                answers = self._channel.stream_in(f"{_DATA}{method}", asked, call)
            for frame in answers:
                head, payload = frames.split(frame, "RowsFrame")
                rows.fill(data_pb2.RowsFrame.FromString(head), payload)
        finally:
            self.traffic.received_bytes += rows.received_bytes
        return rows.complete()

    def _joined(self, frames: Iterable[OutFrame]) -> Iterator[bytes]:
        """The frames as gRPC sends them. Runs in its thread during the call; must not raise."""
        try:
            for frame in frames:
                self.traffic.sent_bytes += frame.nbytes
                yield frame.joined()
        except Aborted:  # the call fails, because the shard refuses a push without a last frame
            return
