"""DataService: frames to blocks and back. One function per RPC, each: check, ask the shard, wait if it says so, answer.

Answers are built as bytes here (`frames.join` copies the payload once, out of the pinned page), so that a page is never pinned
longer than it takes to copy it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import grpc

from psd.contract import frames
from psd.contract.errors import CutMissed, InvalidRequest, WaitTimeout
from psd.rim.calls import Frame, Guard, Waiter, checked, frame_parser, message_parser, settle, wait_s
from psd.state.block import BlockState
from psd.state.cuts import Snapshot
from psd.state.exchange import Found, Pull, Push
from psd.state.shard import Shard
from psd.v1 import data_pb2

SERVICE = data_pb2.DESCRIPTOR.services_by_name["DataService"].full_name


class DataService:
    """The data plane of one shard."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._exchange = shard.exchange

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """The methods with psd's own (de)serializers, ready to be added to a server."""
        guard = Guard(self._shard)
        push, pull, init = data_pb2.PushFrame, data_pb2.PullRequest, data_pb2.InitializeFrame
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Push": grpc.stream_unary_rpc_method_handler(
                    guard.unary(self.push), frame_parser(push), data_pb2.PushReply.SerializeToString
                ),
                "Pull": grpc.unary_stream_rpc_method_handler(guard.stream(self.pull), message_parser(pull)),
                "Read": grpc.unary_stream_rpc_method_handler(guard.stream(self.read), message_parser(data_pb2.ReadRequest)),
                "PushPull": grpc.stream_stream_rpc_method_handler(guard.stream(self.push_pull), frame_parser(push)),
                "Initialize": grpc.stream_unary_rpc_method_handler(
                    guard.unary(self.initialize), frame_parser(init), data_pb2.InitializeReply.SerializeToString
                ),
            },
        )

    def push(self, requests: Iterator[Frame], context: grpc.ServicerContext) -> data_pb2.PushReply:
        """See DataService.Push."""
        waiter = Waiter(self._shard, context)
        frame = self._next(requests)
        push = self._begin_push(frame, waiter)
        while not self._take(push, frame, waiter):
            frame = self._next(requests)
        return self._exchange.end_push(push)

    def pull(self, request: data_pb2.PullRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
        """See DataService.Pull."""
        waiter = Waiter(self._shard, context)
        pull, blocks = self._exchange.begin_pull(request)
        self._pass_gate(pull, pull.clock, waiter)
        for block in blocks:
            yield self._read(block, pull, waiter, with_payload=not request.versions_only)

    def read(self, request: data_pb2.ReadRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
        """See DataService.Read."""
        ready: Future[Snapshot] = Future()

        def miss(cut: data_pb2.Cut, why: str) -> None:
            settle(ready, CutMissed(f"cut.step: {cut.step} is too early: {why}"))

        def hang_up() -> None:
            settle(ready, InvalidRequest("the reader hung up"))

        snapshot = self._shard.begin_read(request, lambda complete: settle(ready, complete), miss)
        try:
            if not context.add_callback(hang_up):
                return
            try:
                ready.result(wait_s(context))
            except FutureTimeoutError:
                raise WaitTimeout(f"cut.step: the blocks have not come to {request.cut.step} in time", missing=[]) from None
            for index in list(snapshot.pages):
                page = snapshot.pages.pop(index)
                yield self._frame(snapshot.job.blocks[index], (page.version, page))
        finally:
            self._shard.cuts.abandon(snapshot)

    def push_pull(self, requests: Iterator[Frame], context: grpc.ServicerContext) -> Iterator[bytes]:
        """See DataService.PushPull."""
        waiter = Waiter(self._shard, context)
        for first in requests:
            self._shard.check_draining()
            yield from self._push_pull_once(checked(first), requests, waiter)

    def _push_pull_once(self, frame: Frame, requests: Iterator[Frame], waiter: Waiter) -> Iterator[bytes]:
        push = self._begin_push(frame, waiter)
        pull = self._exchange.begin_answer(push)
        # A block is answered once the push has covered it, in that order: what a worker reads contains its own gradient.
        pending: deque[BlockState] = deque()
        is_last = False
        while not is_last:
            covered = len(push.covered)
            is_last = self._take(push, frame, waiter)
            if len(push.covered) > covered:
                pending.append(self._exchange.block(frame.head.block))
            while pending and (found := self._exchange.peek(pending[0], pull)) is not None:
                yield self._frame(pending.popleft(), found)
            if not is_last:
                frame = self._next(requests)
        reply = self._exchange.end_push(push)
        if pending:
            self._pass_gate(pull, pull.clock, waiter)
        for block in pending:
            yield self._read(block, pull, waiter)
        yield data_pb2.PullFrame(push=reply).SerializeToString()

    def initialize(self, requests: Iterator[Frame], context: grpc.ServicerContext) -> data_pb2.InitializeReply:
        """See DataService.Initialize."""
        del context
        init = None
        for frame in requests:
            head, payload = checked(frame)
            if init is None:
                if not head.HasField("caller"):
                    raise InvalidRequest("caller: the first frame of an initialization must have one")
                init = self._shard.admission.begin_initialize(head.caller, head.layout_digest, head.choice)
            elif head.HasField("caller"):
                raise InvalidRequest("caller: stands on a frame that is not the first")
            if head.HasField("block"):
                self._shard.admission.initialize_block(init, head.block, payload)
                self._exchange.count_bytes(received=payload.nbytes)
            elif payload.nbytes:
                raise InvalidRequest("block: absent, but the frame has a payload")
        if init is None:
            raise InvalidRequest("InitializeFrame: the stream ended without a frame")
        return data_pb2.InitializeReply(accepted=self._shard.admission.end_initialize(init))

    # -- inner ---------------------------------------------------------------------------------------------------------

    @staticmethod
    def _next(requests: Iterator[Frame]) -> Frame:
        frame = next(requests, None)
        if frame is None:
            raise InvalidRequest("last: the stream ended before the last frame of a push")
        found: Frame = checked(frame)
        return found

    def _begin_push(self, frame: Frame, waiter: Waiter) -> Push:
        if not frame.head.HasField("push"):
            raise InvalidRequest("push: the first frame of a push must have a header")
        push = self._exchange.begin_push(frame.head.push)
        self._pass_gate(push, push.clock, waiter)
        frame.head.ClearField("push")
        return push

    def _take(self, push: Push, frame: Frame, waiter: Waiter) -> bool:
        """Count one frame of a push; True if it is the last."""
        head, payload = frame
        if head.HasField("push"):
            raise InvalidRequest("push: a header stands on a frame that is not the first of its push")
        if head.HasField("block"):
            while (ticket := self._exchange.push_block(push, head.block, head.present, payload)) is not None:
                waiter.wait(ticket)
            self._exchange.count_bytes(received=payload.nbytes)
        elif payload.nbytes or head.present:
            raise InvalidRequest("block: absent, but the frame has a payload")
        return bool(head.last)

    def _pass_gate(self, call: Push | Pull, clock: int, waiter: Waiter) -> None:
        while (ticket := self._exchange.gate(call, clock)) is not None:
            waiter.wait(ticket)

    def _read(self, block: BlockState, pull: Pull, waiter: Waiter, *, with_payload: bool = True) -> bytes:
        while True:
            found = self._exchange.read(block, pull)
            if isinstance(found, tuple):
                return self._frame(block, found, with_payload=with_payload)
            waiter.wait(found)

    def _frame(self, block: BlockState, found: Found, *, with_payload: bool = True) -> bytes:
        version, page = found
        try:
            head = data_pb2.PullFrame(block=block.plan.index, version=version)
            return frames.join(head.SerializeToString(), page.parameter if with_payload else None)
        finally:
            self._exchange.release(page)
            self._exchange.count_bytes(sent=block.plan.nbytes if with_payload else 0)
