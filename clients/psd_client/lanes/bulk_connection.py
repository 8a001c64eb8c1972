"""The worker's end of one bulk connection: sends calls and receives answers over a stream socket (proto/psd/v1/bulk.proto).

If the socket is local, and the worker's flat buffers lie in a segment, they are attached: the shard itself then reads gradients
and writes parameters, and messages only name them. A connection that has failed in any way is closed and not used again.
silence_deadline.py limits the wait for a silent shard. Must not know retries, sessions, or how it was opened.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from google.protobuf.message import DecodeError

from psd.contract.errors import InternalError, PsdError, ShardUnavailable, WaitTimeout, error_from
from psd.contract.layout import Block, Layout
from psd.contract.rows import TableRows
from psd.contract.wire import Disconnected, Kind, Stream
from psd.v1 import bulk_pb2, data_pb2
from psd_client.lanes.attaching import attach, mapped
from psd_client.lanes.daemon_threads import Crew, Task
from psd_client.lanes.flat import FlatBuffers
from psd_client.lanes.frames import OutFrame, WantedRows, initial_frames, push_frames
from psd_client.lanes.further_streams import join_further
from psd_client.lanes.grpc_errors import detail_of
from psd_client.lanes.mapped_planes import MappedPlanes
from psd_client.lanes.overlap_feed import Aborted
from psd_client.lanes.silence_deadline import Patience
from psd_client.lanes.transport import CANCEL_S, SMALL_BYTES, Bracket, Call, Cancelled, GradientPart, MessageT, Traffic

logger = logging.getLogger("psd_client")

HEAD_BYTES_MAX = 32 << 20
HELLO_S = 5.0
"""Seconds that a shard may take to answer a ticket, or to map memory."""


class NotGreeted(Exception):
    """Raised if the connection was accepted, but nobody answers."""


class BulkClient:
    """One open connection to one shard, for one call at a time. Another thread may call `close`.

    Args:
        stream: connected; this object closes it. shard, address: for error messages. ticket: from OpenBulk.
        call: the call that needs the connection; may cancel the greeting. traffic: counts payload bytes.
        further: open further streams, with a HELLO each, to carry parts of large payloads.

    Raises:
        NotGreeted: no answer within HELLO_S. ShardUnavailable, Cancelled, psd's errors: as from calls.

    Attributes:
        is_open: False after the first failure. is_local: True if the shard can share this process's memory.
        offer: of steps (steps.py), in the reply to the last call; None: there was none.
    """

    def __init__(
        self,
        stream: Stream,
        shard: int,
        address: str,
        ticket: bytes,
        call: Call,
        traffic: Traffic,
        further: Sequence[Callable[[], Stream]] = (),
    ) -> None:
        self.is_open = True
        self.is_local = stream.local is not None
        self.offer: bulk_pb2.StepOffer | None = None
        self._stream = stream
        self._shard = shard
        self._address = address
        self._traffic = traffic
        self._sender = Crew("psd-send")
        self._attached: list[FlatBuffers] | None = None  # the places for parameters; gradients are in the same segment
        self._planes: MappedPlanes | None = None  # of the shard
        self._has_other_planes, self._can_map = False, True  # the shard has others than were mapped; they can be mapped
        self._receiving: FlatBuffers | None = None  # the buffers into which the shard writes, or wrote last
        self._uses_memory = True
        self._wanted: WantedRows | None = None  # the rows that the current call fetches
        self._lock = threading.Lock()
        self._is_busy = False
        self._is_closed = False
        self._patience = Patience(stream)
        try:
            with self._under_way(Call(HELLO_S, call.scope)):
                hello = bulk_pb2.BulkHello(ticket=ticket, streams=1 + len(further) if further else 0)
                self._stream.send(Kind.HELLO, hello.SerializeToString())
                self._expect(Kind.WELCOME)
            if further:
                with self._under_way(Call(HELLO_S * len(further), call.scope)):
                    join_further(self._stream, further, self._patience.check, partial(self._expect, Kind.WELCOME))
        except WaitTimeout:
            raise NotGreeted from None
        except BaseException:
            self._end()
            raise

    def attach(self, gradients: FlatBuffers | None, places: Sequence[FlatBuffers], call: Call) -> None:
        """Share the buffers, which all lie in one segment, with the shard, unless it has them. Readers have no gradients."""
        if self._attached is not None and self._attached[0] is places[0] and not self._has_other_planes:
            return
        try:
            with self._under_way(Call(HELLO_S, call.scope)):
                ready = attach(self._stream, self._expect, self._parsed, gradients, places)
                self._planes = self._mapped(ready, places[0].layout) if ready.planes else None
        except WaitTimeout:
            raise self._unavailable(f"has not mapped this worker's memory within {HELLO_S:g} s") from None
        if places[0].segment is None or ready.nonce != places[0].segment.nonce:
            self._end()
            raise InternalError(f"shard {self._shard} at {self._address}: has mapped other memory than was sent")
        self._attached, self._has_other_planes = list(places), False

    def _mapped(self, ready: bulk_pb2.BulkReady, layout: Layout) -> MappedPlanes | None:
        try:
            return mapped(self._stream, ready, layout)
        except OSError as error:  # no memory for that: blocks are copied
            logger.warning("psd: shard %d at %s: its parameters are copied: %s", self._shard, self._address, error)
            self._can_map = False
            return None

    # -- calls ---------------------------------------------------------------------------------------------------------

    def transfer(
        self,
        message: bulk_pb2.BulkCall,
        part: GradientPart | None,
        awaited: Mapping[int, int],
        parameters: FlatBuffers | None,
        call: Call,
        ahead: WantedRows | None = None,
    ) -> bulk_pb2.BulkReply:
        """Make the call `message`: send `part`, if there is one, and receive blocks into the parameters.

        Args:
            awaited: bytes of the blocks to receive, by index; 0 for the tables' block, which sends only a version.
            ahead: rows to fetch, too; one frame.
        """
        if ahead is not None:
            (request,) = ahead.requests
            message.ahead.CopyFrom(request.message)
            message.ahead.payload = b"".join([ids.data for ids in request.payload])
            self._traffic.sent_bytes += request.nbytes
        if parameters is not None:
            message.into_memory = self._has(parameters)
            if message.into_memory and self._attached is not None:
                self._receiving = parameters
                message.place = self._attached.index(parameters)
                message.by_plane = parameters.maps_planes and self._can_map and bool(awaited)
            message.announce = parameters.on_received is not None
        answers_bytes = sum(awaited.values()) if message.announce or not message.into_memory else 0
        message.timeout_s = call.timeout_s
        traffic = self._traffic
        traffic.under_way = part or (), parameters, awaited, traffic.sent_bytes, traffic.received_bytes
        with self._under_way(call, ahead):
            self._stream.send(Kind.CALL, message.SerializeToString(), more=part is not None)
            sending = None
            if part is not None:
                frames = push_frames(part, self.places, in_memory=self._has(part.buffers))
                if part.feed is None and (answers_bytes <= SMALL_BYTES or self._names_only(part)):
                    for head, payload, nbytes in frames:  # all before reading anything: one thread does both
                        self._stream.send(Kind.FRAME, head.SerializeToString(), *payload, more=not head.last)
                        self._traffic.sent_bytes += nbytes
                else:
                    sending = self._begin_sending(frames, may_pause=part.feed is not None)
            return self._answer(sending, awaited, parameters, ahead, into_memory=message.into_memory)

    def initialize(
        self,
        message: bulk_pb2.BulkCall,
        first: data_pb2.InitializeFrame,
        blocks: Sequence[Block],
        values: FlatBuffers,
        call: Call,
    ) -> bool:
        """Make the call `message`, for initial values; return whether they were accepted."""
        message.timeout_s = call.timeout_s
        self._traffic.under_way = blocks, None, (), self._traffic.sent_bytes, self._traffic.received_bytes
        with self._under_way(call):
            self._stream.send(Kind.CALL, message.SerializeToString(), more=True)
            self._send(initial_frames(first, blocks, values, in_memory=self._has(values)))
            return self._parsed(bulk_pb2.BulkReply, self._received(Kind.REPLY)[0]).initialize.accepted

    def pull_rows(self, message: bulk_pb2.BulkCall, wanted: WantedRows, call: Call) -> int:
        """Make the call `message`, for rows; return their version.

        Unanswered requests fit the buffers of a socket, or there is only one: so neither side waits for the other to read.
        """
        unsent = deque(wanted.requests)
        under_way: deque[int] = deque()
        message.timeout_s = call.timeout_s
        with self._under_way(call, wanted):
            self._stream.send(Kind.CALL, message.SerializeToString(), more=True)
            try:
                while unsent or under_way:
                    while unsent and sum(under_way) + (unsent[0].nbytes if under_way else 0) <= SMALL_BYTES:
                        under_way.append(unsent[0].nbytes)
                        self._send([unsent.popleft()], may_pause=True)
                    self._take_rows(wanted, *self._received(Kind.ANSWER))
                    under_way.popleft()
                self._received(Kind.REPLY)
            except _Refused:
                if unsent:
                    self._stream.send(Kind.FRAME, data_pb2.RowsRequest(last=True).SerializeToString())
                raise
        return wanted.complete()

    def exchange(
        self, message: bulk_pb2.BulkCall, payload: Iterable[memoryview], out: memoryview, call: Call
    ) -> bulk_pb2.BulkReply:
        """Make the call `message`, for vectors: send a payload with it; the reply's payload fills `out`."""
        message.timeout_s = call.timeout_s
        with self._under_way(call, uses_memory=False):
            self._stream.send(Kind.CALL, message.SerializeToString(), *payload)
            head, payload_bytes = self._received(Kind.REPLY)
            if payload_bytes != len(out):
                what = f"sent {payload_bytes} bytes of a vector, {len(out)} were asked for"
                raise InternalError(f"shard {self._shard} at {self._address}: has {what}")
            self._stream.read_into(out)
            return self._parsed(bulk_pb2.BulkReply, head)

    def _take_rows(self, wanted: WantedRows, head: bytes, payload_bytes: int) -> None:
        before = wanted.received_bytes
        self._stream.read_into(*wanted.places(self._parsed(data_pb2.RowsFrame, head), payload_bytes))
        self._traffic.received_bytes += wanted.received_bytes - before

    def _received(self, kind: Kind) -> tuple[bytes, int]:
        """Head of the next message, and bytes of its payload; skips ALIVE."""
        while True:
            got, head, payload_bytes = self._stream.receive()
            if got is kind:
                return head, payload_bytes
            if got is not Kind.ALIVE:
                self._raise(got, head)

    def _has(self, buffers: FlatBuffers) -> bool:
        """True if the shard sees these buffers, because they lie in the attached segment."""
        segment = buffers.segment
        return (
            segment is not None
            and self._attached is not None
            and segment is self._attached[0].segment
            and not segment.is_given_up
        )

    def _names_only(self, part: GradientPart) -> bool:
        """True if little is sent: a small part, or only names of blocks in memory, and few rows or rows in memory."""
        if part.is_small:
            return True
        return self._has(part.buffers) and (
            bool(self.places(part.tables)) or sum([rows.nbytes for rows in part.tables]) <= SMALL_BYTES
        )

    def places(self, rows: Sequence[TableRows]) -> list[int]:
        """Offsets of these rows' values in attached memory, in bytes; empty if some lie elsewhere."""
        segment = self._attached[0].segment if self._attached is not None else None
        return segment.where([part.values for part in rows]) if segment is not None and rows else []

    def _send(self, frames: Iterable[OutFrame], *, may_pause: bool = False) -> None:
        """Send frames. may_pause: True if the next one may be long in coming."""
        try:
            for message, payload, nbytes in frames:
                self._stream.send(Kind.FRAME, message.SerializeToString(), *payload, more=not (may_pause or message.last))
                self._traffic.sent_bytes += nbytes
        except Aborted:
            self._cancel()  # the other thread waits for its answer
            raise

    def _begin_sending(self, frames: Iterable[OutFrame], *, may_pause: bool) -> Task[None]:
        """Start to send frames in another thread, while answers arrive."""
        sending = Task(lambda: self._send(frames, may_pause=may_pause))
        try:
            self._sender.begin(sending)
        except RuntimeError:  # the interpreter exits and starts no threads: its last push needs no answers meanwhile
            sending.run()
        return sending

    def _answer(
        self,
        sending: Task[None] | None,
        awaited: Mapping[int, int],
        parameters: FlatBuffers | None,
        ahead: WantedRows | None,
        *,
        into_memory: bool,
    ) -> bulk_pb2.BulkReply:
        """Receive the answer, and wait until everything has been sent."""
        try:
            reply = self._receive(awaited, parameters, ahead, into_memory=into_memory)
        except _Refused:
            if sending is not None and (failure := sending.wait()) is not None:  # the shard reads on to the push's end
                raise failure from None
            raise
        except BaseException:
            self._stream.shut_down(socket.SHUT_WR)
            if sending is not None and isinstance(failure := sending.wait(), Aborted):
                raise failure from None
            raise
        if sending is not None and (failure := sending.wait()) is not None:
            raise failure
        return reply

    def _receive(
        self, awaited: Mapping[int, int], parameters: FlatBuffers | None, ahead: WantedRows | None, *, into_memory: bool
    ) -> bulk_pb2.BulkReply:
        missing = dict(awaited)
        while True:
            kind, head, payload_bytes = self._stream.receive()
            if kind is Kind.ANSWER and ahead is not None and (into_memory or not missing):
                self._take_rows(ahead, head, payload_bytes)
            elif kind is Kind.ANSWER:
                frame = self._parsed(data_pb2.PullFrame, head)
                nbytes = missing.pop(frame.block, None)
                is_sent = nbytes is not None and nbytes > 0 and not into_memory
                if nbytes is None or bool(payload_bytes) != (is_sent and not (frame.base and payload_bytes == 0)):
                    raise InternalError(f"shard {self._shard} at {self._address}: sent a block that was not asked for")
                assert parameters is not None
                if is_sent:
                    parameters.receive(frame.block, payload_bytes, self._stream.read_into, frame.base, frame.version)
                    self._traffic.received_bytes += payload_bytes
                if frame.in_plane:
                    self._note_lent(parameters, frame.block, frame.in_plane)
                parameters.received(frame.block, frame.version)
            elif kind is Kind.REPLY:
                if missing and not into_memory:
                    raise InternalError(f"shard {self._shard} at {self._address}: {len(missing)} blocks are missing")
                reply = self._parsed(bulk_pb2.BulkReply, head)
                if into_memory:
                    assert parameters is not None
                    count, counts = len(reply.blocks), {len(reply.versions), len(reply.in_planes) or len(reply.blocks)}
                    if counts != {count} or not awaited.keys() >= set(reply.blocks):
                        raise InternalError(f"shard {self._shard} at {self._address}: wrote blocks that were not asked for")
                    for index, version in zip(reply.blocks, reply.versions, strict=True):
                        parameters.versions[index] = version
                    for index, in_plane in zip(reply.blocks, reply.in_planes, strict=False):  # if there are any
                        if in_plane:
                            self._note_lent(parameters, index, in_plane)
                    self._has_other_planes = reply.attach_again
                    self._traffic.received_bytes += sum(awaited.values())
                return reply
            elif kind is not Kind.ALIVE:
                self._raise(kind, head)

    def _note_lent(self, parameters: FlatBuffers, block: int, in_plane: int) -> None:
        if self._planes is None or block not in self._planes.blocks:
            raise InternalError(f"shard {self._shard} at {self._address}: block {block}: lies in no plane that was mapped")
        parameters.lent[block] = self._planes.place(in_plane, parameters)

    # -- failures ------------------------------------------------------------------------------------------------------

    def _under_way(self, call: Call, wanted: WantedRows | None = None, *, uses_memory: bool = True) -> Bracket[Call]:
        """A context for the messages of one call; closes the connection unless the shard answers.

        Args:
            wanted: rows to fetch. uses_memory: False if the shard uses no attached memory during the call.

        Raises WaitTimeout if the call does not end in time.
        """
        self._wanted, self._uses_memory = wanted, uses_memory
        return Bracket(call, self._begin, self._end_call)

    def _begin(self, call: Call) -> None:
        with self._lock:
            if not self.is_open:
                raise Cancelled if self._is_closed else self._unavailable("the connection was closed")
            self._is_busy = True
        self.offer = None
        try:
            self._patience.begin(call.timeout_s)
            call.scope.enter(self._cancel)
        except BaseException:
            self.let_go()
            raise

    def _end_call(self, call: Call, error: BaseException | None) -> None:
        try:
            if not (error is None or isinstance(error, _Refused)):  # else the connection is in order: the next call may begin
                self._abandon()
        finally:
            call.scope.leave(self._cancel)
            self.let_go()
        if error is None:
            return
        if isinstance(error, _Refused):
            raise error.error from None
        is_of_connection = isinstance(error, (ShardUnavailable, Disconnected, TimeoutError))
        if is_of_connection and (call.scope.is_cancelled or self._is_closed):
            raise Cancelled from None
        if isinstance(error, Disconnected):
            raise self._unavailable(f"the connection broke: {error}") from None
        if isinstance(error, TimeoutError):
            raise WaitTimeout(
                f"shard {self._shard} at {self._address}: no answer within {call.timeout_s:.1f} s", shard=self._shard
            ) from None

    def let_go(self) -> None:
        """Note that no call, and no step, is in progress any more."""
        self._wanted = self._traffic.under_way = None
        with self._lock:
            self._is_busy = False
            is_over = not self.is_open
        if is_over:
            self._release()

    def _unavailable(self, why: str) -> ShardUnavailable:
        where = {"shard": self._shard, "address": self._address}
        return ShardUnavailable(f"shard {self._shard} at {self._address}: {why}", **where)

    def _cancel(self) -> None:
        """End the call. Its thread waits until the shard has ended it, too, if it uses this worker's memory."""
        if self._attached is None or not self._uses_memory:
            self._stream.shut_down(socket.SHUT_RDWR)
            return
        self._patience.cancel()
        self._stream.shut_down(socket.SHUT_WR)

    def _abandon(self) -> None:
        """Wait until the shard has ended the call, so that it uses this worker's memory no more; then close."""
        self._cancel()
        if self._attached is not None and self._uses_memory and self.is_open:
            try:
                self._patience.check()
                self._stream.skip(1 << 62)
            except Disconnected:
                pass
            except BaseException as error:
                self._give_up(self._attached)
                if not isinstance(error, TimeoutError):  # a second Ctrl-C
                    self._end()
                    raise
        self._end()

    def _give_up(self, places: Sequence[FlatBuffers]) -> None:
        """Make the shared memory private: later writes of the shard are not seen here, and it gets no new gradients."""
        segment = places[0].segment
        if segment is None or segment.is_given_up:
            return
        try:
            written = {places[0], self._receiving or places[0]}  # the first one since it was attached, perhaps
            rows = [] if self._wanted is None else self._wanted.values
            segment.give_up([*(space for place in written for space in place.spaces), *rows])
        except OSError as error:
            logger.warning("psd: shard %d at %s may still write to this worker's memory: %s", self._shard, self._address, error)
            return
        logger.warning(
            "psd: shard %d at %s has not let go of this worker's memory within %g s of the end of a call; from now on it is "
            "shared with no shard, and gradients and parameters are copied through sockets",
            self._shard,
            self._address,
            CANCEL_S,
        )

    def close(self) -> None:
        """Close the connection; a call in another thread raises Cancelled. Idempotent."""
        self._is_closed = True
        self._end()

    def _end(self) -> None:
        with self._lock:
            self.is_open = False
            is_busy = self._is_busy
        self._stream.shut_down(socket.SHUT_RDWR)
        if not is_busy:
            self._release()

    def _release(self) -> None:
        """Close the stream and the sender, once neither is in use."""
        self._sender.close()
        self._stream.close()

    def _expect(self, kind: Kind, stream: Stream | None = None) -> bytes:
        got, head, payload_bytes = (self._stream if stream is None else stream).receive()
        if got is not kind or payload_bytes:
            self._raise(got, head)
        return head

    def _raise(self, kind: Kind, head: bytes) -> None:
        if kind is not Kind.ERROR:
            raise InternalError(f"shard {self._shard} at {self._address}: {kind.name} was not expected")
        message = self._parsed(bulk_pb2.BulkError, head)
        raise _Refused(error_from(message.reason, message.message, {"shard": self._shard} | detail_of(message.detail)))

    def _parsed(self, kind: type[MessageT], head: bytes) -> MessageT:
        try:
            return kind.FromString(head)
        except DecodeError as error:
            raise InternalError(f"shard {self._shard} at {self._address}: an answer is no {kind.__name__}: {error}") from None


class _Refused(Exception):
    """Raised if the shard has answered with an error."""

    def __init__(self, error: PsdError) -> None:
        super().__init__(str(error))
        self.error = error
