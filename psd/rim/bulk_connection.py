"""One connection of the bulk lane at the shard, a worker's or a reader's: receives messages, makes calls on the planes, sends
messages.

One thread reads; another one answers if there is much to send. Other threads call only say_alive and the methods that end the
connection. Blocks and answers are in messages or in the worker's attached memory; the data plane sees no difference. Must not
know tickets or listeners.
"""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Callable, Generator
from typing import NamedTuple, TypeVar

import numpy as np
from google.protobuf.message import Message

from psd.contract.errors import InvalidRequest, PermissionDenied, PsdError
from psd.contract.layout import BLOCK_BYTES_MAX
from psd.contract.wire import Disconnected, Kind, Stream
from psd.rim.access import OPEN_BULK, READ, RUN_VECTORS
from psd.rim.attachment import Attachment
from psd.rim.bundles import Bundle
from psd.rim.call_frames import CallFrames, parsed
from psd.rim.calls import CallGuard, Waiter, forget_frames
from psd.rim.data_plane import DataPlane, PulledBlock, PulledRows, ReadBlock, RowsAsked
from psd.rim.outbox import Outbox
from psd.rim.sent_frames import SentFrames
from psd.rim.steps import OfferedSteps
from psd.rim.vector_plane import VectorPlane
from psd.state.shard import Shard
from psd.v1 import bulk_pb2, data_pb2, job_pb2

BLOCKS_FOR_TWO_THREADS = 4
"""Number of the shard's blocks from which a second thread sends the answers; with fewer, passing them to it costs more."""

MessageT = TypeVar("MessageT", bound=Message)
Admit = Callable[["ServedConnection", bulk_pb2.BulkHello], Bundle]
"""Admits a connection by its greeting, or a further socket of one; returns what it is of."""

STRANGER, READER = -1, -2
"""Numbers in place of a rank: before the ticket was shown, and of a reader."""

OVERDUE_S = 5.0
"""Seconds after its deadline at which a reader's call should have ended. A longer one waits for a reader that takes nothing."""

HELLO_BYTES_MAX = 1024
"""Longest head before the worker has shown its ticket."""

_FRAMES: dict[int, type[Message]] = {
    bulk_pb2.BULK_METHOD_PUSH: data_pb2.PushFrame,
    bulk_pb2.BULK_METHOD_PUSH_PULL: data_pb2.PushFrame,
    bulk_pb2.BULK_METHOD_INITIALIZE: data_pb2.InitializeFrame,
    bulk_pb2.BULK_METHOD_PULL_ROWS: data_pb2.RowsRequest,
}
"""The frames that follow a CALL, by method; after any other there are none."""

_OF_VECTORS = {bulk_pb2.BULK_METHOD_RUN_VECTORS: "batch", bulk_pb2.BULK_METHOD_FETCH_VECTOR: "fetch"}
"""The field with the request of a call for vectors, by method."""


class ServedConnection:
    """One worker's connection, or one reader's.

    Args:
        has_core_to_spare: returns True if a second thread would run beside this one, not take turns with other connections.

    Attributes:
        rank: the worker's; READER for a reader; STRANGER before it has shown its ticket.
        session: the session of its admission, or of its last call.
        ended: set when no call is in progress any more.
        is_welcome: called with a method of gRPC (psd/rim/access.py) before each call: True if the worker's token may still
            call it; None: it always may. Set on admission.
    """

    def __init__(
        self,
        stream: Stream,
        shard: Shard,
        plane: DataPlane,
        vectors: VectorPlane,
        guard: CallGuard,
        has_core_to_spare: Callable[[], bool],
    ) -> None:
        self.rank = STRANGER
        self.session = 0
        self._ends_at = math.inf  # a reader's call
        self.is_welcome: Callable[[str], bool] | None = lambda _: False
        self.ended = threading.Event()
        self._stream = stream
        self._shard = shard
        self._plane = plane
        self._vectors = vectors
        self._guard = guard
        self._has_core_to_spare = has_core_to_spare
        self._steps = OfferedSteps(stream, shard, "tcp" if stream.is_tcp else "shm")
        self._pushed: data_pb2.PushHeader | None = None  # of the call of push_pull under way
        self._shared = Attachment(stream, shard)
        self._scratch = memoryview(b"")
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._has_hung_up = False
        self._is_busy = False
        self._is_ending = False
        self._second_thread: Outbox[_Outgoing] | None = None
        self._has_stream = True

    def serve(self, admit: Admit, hello_s: float) -> None:
        """Take calls until either side ends the connection."""
        try:
            self._stream.set_deadline(hello_s)
            if not self._welcome(admit, hello_s):
                return
            self._stream.set_deadline(None)
            self._stream.head_bytes_max = self._shard.config.limits.message_bytes_max
            self._scratch = memoryview(np.empty(BLOCK_BYTES_MAX // 8)).cast("B")  # type: ignore[arg-type]  # aligned
            while self._begin_message():
                if self._steps.loop is not None:
                    self._steps.take()
                kind, head, payload_bytes = self._stream.receive()
                if self.is_welcome is not None and not self.is_welcome(READ if self.rank == READER else OPEN_BULK):
                    break  # the worker, or reader, asks for another ticket, and so shows its current token
                with self._lock:
                    self._is_busy = True
                if kind is Kind.CALL:
                    call = parsed(bulk_pb2.BulkCall, head)
                    if payload_bytes and call.method != bulk_pb2.BULK_METHOD_RUN_VECTORS:
                        raise InvalidRequest(f"payload: has {payload_bytes} bytes, but only a batch on vectors has any")
                    if call.method in _OF_VECTORS:
                        self._call_vectors(call, payload_bytes)
                    else:
                        self._call(call)
                elif kind is Kind.ATTACH and not payload_bytes:
                    self._attach(parsed(bulk_pb2.BulkAttach, head))
                elif kind is Kind.SEND and not payload_bytes:
                    self._shared.send_planes()
                elif kind is Kind.STEP:
                    self._steps.refuse(payload_bytes)
                else:
                    raise InvalidRequest(f"kind: {kind.name} is not expected here")
        except (Disconnected, TimeoutError) as error:
            forget_frames(error)
        except PsdError as error:  # the two sides no longer agree on where a message begins
            self._send_error(self._guard.as_error(error))

    def _begin_message(self) -> bool:
        self._ends_at = math.inf
        with self._lock:
            self._is_busy = False
            return not self._is_ending

    def _welcome(self, admit: Admit, hello_s: float) -> bool:
        """Greet the worker; False if this is a further socket of a connection, which has it now."""
        kind, head, payload_bytes = self._stream.receive()
        if kind is not Kind.HELLO or payload_bytes:
            raise InvalidRequest(f"kind: a connection begins with HELLO, not {kind.name}")
        hello = parsed(bulk_pb2.BulkHello, head)
        bundle = admit(self, hello)
        self.rank = bundle.rank
        self._stream.send(Kind.WELCOME)
        if hello.strand:
            bundle.put(hello.strand, self._stream)
            self._has_stream = False
            return False
        if hello.streams > 1:
            self._stream.join(bundle.take(hello_s))
        return True

    @property
    def is_tcp(self) -> bool:
        """True for TCP, False for a local socket."""
        return self._stream.is_tcp

    @property
    def is_overdue(self) -> bool:
        """True if a reader's call goes on beyond its deadline."""
        return time.monotonic() > self._ends_at

    # -- the end, from other threads -----------------------------------------------------------------------------------

    def hang_up(self) -> None:
        """Disconnect the worker: end the waits of the call in progress, and the connection with it."""
        with self._lock:
            is_again, self._has_hung_up = self._has_hung_up, True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
        self._steps.cancel()
        # Both ways, to wake a thread that is sending, too. But a local worker's memory may be attached, and for the worker the
        # end of the connection means that nothing uses that memory any more.
        is_forced = self._stream.is_tcp or (is_again and self.is_overdue)
        self._stream.shut_down(socket.SHUT_RDWR if is_forced else socket.SHUT_RD)

    def cut(self) -> None:
        """End a connection by force if `hang_up` has not: wake a thread that is sending."""
        self._stream.shut_down(socket.SHUT_RDWR)

    def check_token(self) -> None:
        """Take no more steps if the worker's token is not good any more: its next call is refused."""
        rank = self._steps.rank
        if rank >= 0 and self.is_welcome is not None and not self.is_welcome(OPEN_BULK):
            self._shard.steps.revoke(rank)

    def say_alive(self) -> None:
        """Tell a worker whose call is in progress that this process lives; a worker on this machine needs no telling."""
        if self._is_busy and self._stream.is_tcp:
            self._stream.send_if_idle(Kind.ALIVE)

    def end_when_idle(self) -> None:
        """End after the call in progress, if there is one."""
        with self._lock:
            self._is_ending = True
            is_busy = self._is_busy
        if not is_busy:
            self._stream.shut_down(socket.SHUT_RD)

    def close(self) -> None:
        """Close the descriptor and unmap the memory; called when `serve` has returned."""
        if self._second_thread is not None:
            self._second_thread.close()
            self._second_thread = None  # it refers to this connection, and so to its scratch memory
        self._steps.end()
        self._shared.close()
        self.ended.set()
        if self._has_stream:
            self._stream.close()

    # -- what a Waiter needs of its call -------------------------------------------------------------------------------

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Have `callback` called when the worker hangs up; False if it has already."""
        with self._lock:
            if self._has_hung_up:
                return False
            self._callbacks.append(callback)
            return True

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _attach(self, attach: bulk_pb2.BulkAttach) -> None:
        try:
            self._shared.attach(attach, is_reader=self.rank == READER)
        except PsdError as error:
            self._send_error(self._guard.as_error(error))

    def _call(self, call: bulk_pb2.BulkCall) -> None:
        """Answer one call: send blocks as they become ready, then the reply or the error."""
        frames = _FRAMES.get(call.method)
        sent = None if frames is None else CallFrames(self._stream, self._scratch, frames)
        has_payload = not call.pull.versions_only
        reply = bulk_pb2.BulkReply()
        planes = self._shared.planes_for(reply) if call.by_plane and call.into_memory else None
        try:
            self._shard.check_draining()
            answers = self._answers(call, sent)
            put = self._way_out()
            try:
                for item in answers:
                    if isinstance(item, data_pb2.PushReply):
                        reply.push.CopyFrom(item)
                    elif isinstance(item, data_pb2.InitializeReply):
                        reply.initialize.CopyFrom(item)
                    elif isinstance(item, PulledRows):
                        if self._second_thread is not None:
                            self._second_thread.flush()  # blocks come first
                        is_last = sent is not None and sent.is_last  # the REPLY follows
                        numbers = () if item.is_there else [rows.values for rows in item.rows]
                        self._stream.send(Kind.ANSWER, item.head(), *numbers, more=is_last)
                    elif has_payload:
                        in_plane = planes.number(item.region) if planes is not None else 0
                        if call.into_memory:
                            reply.blocks.append(item.block)
                            reply.versions.append(item.version)
                            if planes is not None:
                                reply.in_planes.append(in_plane)
                            if isinstance(item, ReadBlock):
                                reply.contents.append(item.content)
                                reply.positions = item.positions
                        put(_Outgoing(item, call.place if call.into_memory else None, call.announce, in_plane))
                    else:
                        item.release()
            finally:
                answers.close()
                if self._second_thread is not None:
                    self._second_thread.flush()  # send all answers
        except (Disconnected, TimeoutError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the worker is told
            self._refuse(error)
            if sent is not None:
                sent.skip_rest()
        else:
            if call.wants_steps and self._pushed is not None:
                offer = self._steps.offer(self._pushed, reply.push, self._shared.attached if call.into_memory else None)
                if offer is not None:
                    reply.step.CopyFrom(offer)
            self._stream.send(Kind.REPLY, reply.SerializeToString())
        finally:
            self._pushed = None
            if self._callbacks:
                with self._lock:
                    self._callbacks.clear()

    def _call_vectors(self, call: bulk_pb2.BulkCall, payload_bytes: int) -> None:
        """Answer one call for vectors: both ways one message. It uses no attached memory."""
        head, unread = _OF_VECTORS[call.method], payload_bytes
        try:
            self._shard.check_draining()
            self._check_caller(getattr(call, head).caller)
            if head == "fetch":
                with self._vectors.fetch(call.fetch) as numbers:
                    self._stream.send(Kind.REPLY, b"", numbers)
                return
            self._check_may_run_vectors()
            payload = self._vectors.room(payload_bytes)
            self._stream.read_into(payload)
            unread = 0
            answer = self._vectors.run(call.batch, payload, "tcp" if self.is_tcp else "shm")
        except (Disconnected, TimeoutError):
            raise
        except Exception as error:  # noqa: BLE001 - likewise
            self._refuse(error)
            self._stream.skip(unread)
        else:
            self._stream.send(Kind.REPLY, bulk_pb2.BulkReply(vectors=answer).SerializeToString())

    def _check_may_run_vectors(self) -> None:
        if self.is_welcome is not None and not self.is_welcome(RUN_VECTORS):
            raise PermissionDenied("Run: is for workers; this token may push, but not run batches on vectors")

    def _answers(
        self, call: bulk_pb2.BulkCall, sent: CallFrames | None
    ) -> Generator[PulledBlock | PulledRows | data_pb2.PushReply | data_pb2.InitializeReply]:
        """Begin the call on the data plane."""
        deadline = _Deadline(self, call.timeout_s)
        if (call.method == bulk_pb2.BULK_METHOD_READ) != (self.rank == READER):
            raise InvalidRequest(f"method: {call.method} is not one of a {'reader' if self.rank == READER else 'worker'}'s")
        if call.method == bulk_pb2.BULK_METHOD_READ:
            self._ends_at = deadline.at + OVERDUE_S
            return self._plane.read(call.read, deadline, is_whole=call.into_memory)
        waiter = Waiter(self._shard, deadline)
        if sent is None:
            self._check_caller(call.pull.caller)
            if call.method != bulk_pb2.BULK_METHOD_PULL:
                raise InvalidRequest(f"method: {call.method} is not one of the bulk lane's")
            return self._plane.pull(call.pull, waiter)
        frames = SentFrames(sent.frames(), self._shared.memory, self.rank)
        if call.method == bulk_pb2.BULK_METHOD_PULL_ROWS:
            head = frames.head("pull")
            self._check_caller(head.pull.caller)
            return self._plane.pull_rows(head.pull, frames.rows(), waiter, counts_no_use=head.counts_no_use)
        if call.method == bulk_pb2.BULK_METHOD_INITIALIZE:
            head = frames.head("caller")
            self._check_caller(head.caller)
            return self._plane.initialize(head, frames.initial_blocks())
        header = frames.head("push").push
        self._check_caller(header.caller)
        if call.method == bulk_pb2.BULK_METHOD_PUSH:
            return self._plane.push(header, frames.blocks(), waiter)
        ahead: RowsAsked | None = None
        if call.HasField("ahead"):
            places = self._shared.memory().rows(call.ahead.rows, call.ahead.rows_at) if call.ahead.rows_at else ()
            ahead = call.ahead.rows, memoryview(call.ahead.payload), places
        self._pushed = header
        return self._plane.push_pull(header, frames.blocks(), waiter, ahead)

    def _way_out(self) -> Callable[[_Outgoing], None]:
        """A function that sends an answer; in a second thread, if there are many blocks and a core to spare."""
        job = self._shard.job  # None while a checkpoint is loaded; then the call is refused anyway
        is_one_way = self.rank == READER  # nothing arrives meanwhile
        if is_one_way or job is None or len(job.blocks) < BLOCKS_FOR_TWO_THREADS or not self._has_core_to_spare():
            return self._deliver
        if self._second_thread is None:
            self._second_thread = Outbox(self._deliver, lambda out: out.answer.release(), "psd-bulk-out")
        return self._second_thread.put

    def _check_caller(self, caller: job_pb2.Caller) -> None:
        if caller.rank != self.rank:
            raise InvalidRequest(f"caller.rank: is {caller.rank}, but this connection is worker {self.rank}'s")
        self.session = caller.session

    def _refuse(self, error: Exception) -> None:
        if self._has_hung_up:  # there is nobody to tell
            raise Disconnected from error
        self._send_error(self._guard.as_error(error))

    def _deliver(self, out: _Outgoing) -> None:
        answer, is_lent = out.answer, False
        try:
            if out.place is None:
                payload = answer.payload()
                self._plane.counts.count_bytes(sent=payload.nbytes, saved=answer.values.nbytes - payload.nbytes)
                self._stream.send(Kind.ANSWER, answer.head(), payload, more=True)  # at least the REPLY follows
                return
            if self._has_hung_up:  # a worker that has not waited may use its memory for something else
                raise Disconnected("the worker has hung up")
            self._plane.counts.count_bytes(sent=answer.nbytes)
            if out.in_plane and self._shared.planes is not None:
                self._shared.planes.hold(answer.release)  # where it is, unchanged
                is_lent = True
                if out.is_announced:
                    self._stream.send(Kind.ANSWER, answer.head(out.in_plane))
                return
            if answer.codec or isinstance(answer, ReadBlock):
                answer.write_to(self._shared.memory().parameter(answer.block, out.place))
            elif answer.nbytes:
                np.copyto(self._shared.memory().parameter(answer.block, out.place), answer.values)
            if out.is_announced:
                self._stream.send(Kind.ANSWER, answer.head())
        finally:
            if not is_lent:
                answer.release()

    def _send_error(self, error: PsdError) -> None:
        message = bulk_pb2.BulkError(reason=error.reason, message=str(error), detail=json.dumps(error.detail))
        try:
            self._stream.send(Kind.ERROR, message.SerializeToString())
        except (Disconnected, TimeoutError):
            return


class _Outgoing(NamedTuple):
    answer: PulledBlock
    place: int | None  # in attached memory; None: it is sent in a message
    is_announced: bool
    in_plane: int = 0  # 1 + the plane in which the worker reads it; 0: it gets a copy


class _Deadline:
    """A call's deadline, with the interface that Waiter expects of a gRPC context."""

    def __init__(self, connection: ServedConnection, timeout_s: float) -> None:
        self.add_callback = connection.add_callback
        self.at = time.monotonic() + timeout_s

    def time_remaining(self) -> float:
        """Seconds left."""
        return self.at - time.monotonic()
