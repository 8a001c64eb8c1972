"""ControlService: small unary calls. One function per RPC: asks the shard, waits if the shard says so, answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from psd.contract.bounds import PARTS_MAX
from psd.contract.errors import CheckpointFailed
from psd.rim import views
from psd.rim.access import Metadata
from psd.rim.calls import CallGuard, Waiter, message_parser
from psd.rim.checkpointer import Checkpointer
from psd.state.cuts.snapshots import check_cuts
from psd.state.shard import Shard
from psd.v1 import control_pb2

_DESCRIPTOR = control_pb2.DESCRIPTOR.services_by_name["ControlService"]
SERVICE = _DESCRIPTOR.full_name

ALLOWED_WHILE_DRAINING = frozenset({"Heartbeat", "Leave", "Status"})
PACED = frozenset({"Status", "Curves"})
"""Methods for callers other than workers and readers, answered at a pace."""


class ControlService:
    """The control plane of one shard.

    Args:
        address: returns the address that Status shows.
        on_leave: called after a worker has left.
        open_bulk, open_reads: answer OpenBulk and OpenReads; also get the call's metadata.
        checkpointer: None without --checkpoint-dir.
    """

    def __init__(
        self,
        shard: Shard,
        guard: CallGuard,
        *,
        address: Callable[[], str],
        on_leave: Callable[[], None],
        open_bulk: Callable[[control_pb2.OpenBulkRequest, Metadata], control_pb2.OpenBulkReply],
        open_reads: Callable[[control_pb2.OpenReadsRequest, Metadata], control_pb2.OpenBulkReply],
        checkpointer: Checkpointer | None = None,
    ) -> None:
        self._shard = shard
        self._guard = guard
        self._open_bulk = open_bulk
        self._open_reads = open_reads
        self._checkpointer = checkpointer
        self._address = address
        self._on_leave = on_leave

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """A handler for all methods of the service's descriptor."""
        methods: dict[str, Callable[[Any, grpc.ServicerContext], Any]] = {
            "Join": self.join,
            "Declare": self.declare,
            "Heartbeat": self.heartbeat,
            "Leave": self.leave,
            "Barrier": self.barrier,
            "Load": self.load,
            "Commit": self.commit,
            "Measure": self.measure,
            "Counted": self.counted,
            "Checkpoint": self.checkpoint,
            "Rollback": self.rollback,
            "Describe": self.describe,
            "OpenBulk": self.open_bulk,
            "OpenReads": self.open_reads,
            "Status": self.status,
            "Kick": self.kick,
            "SetLearningRate": self.set_learning_rate,
            "Drain": self.drain,
            "Stop": self.stop,
            "Log": self.log,
            "Curves": self.curves,
        }
        # Parts: each tensor with an alias, or with two sums in each shard's measure; and all others.
        config = self._shard.config
        of_tensors = 2 * config.limits.tensors_max
        parts_max = {"Declare": of_tensors + PARTS_MAX, "Commit": config.shard_count * of_tensors + PARTS_MAX}
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                method.name: grpc.unary_unary_rpc_method_handler(
                    self._guard.unary(
                        methods[method.name],
                        while_draining=method.name in ALLOWED_WHILE_DRAINING,
                        paced=method.name in PACED,
                    ),
                    message_parser(getattr(control_pb2, method.input_type.name), parts_max.get(method.name, PARTS_MAX)),
                    getattr(control_pb2, method.output_type.name).SerializeToString,
                )
                for method in _DESCRIPTOR.methods
            },
        )

    def join(self, request: control_pb2.JoinRequest, context: grpc.ServicerContext) -> control_pb2.JoinReply:
        del context
        return self._shard.admission.join(request)

    def declare(self, request: control_pb2.DeclareRequest, context: grpc.ServicerContext) -> control_pb2.DeclareReply:
        reply, ticket = self._shard.admission.declare(request)
        if ticket is not None:
            reply.choice = Waiter(self._shard, context).wait(ticket)
            reply.initializer = reply.choice > 0
            reply.initialized = not reply.initializer
        return reply

    def heartbeat(self, request: control_pb2.HeartbeatRequest, context: grpc.ServicerContext) -> control_pb2.HeartbeatReply:
        del context
        check_cuts(request.cuts)
        waits = self._shard.admission.heartbeat(request)
        self._shard.learn(request.caller, request.cuts)
        return views.heartbeat_reply(self._shard, waits)

    def leave(self, request: control_pb2.LeaveRequest, context: grpc.ServicerContext) -> control_pb2.LeaveReply:
        del context
        self._shard.admission.leave(request.caller, failed=request.failed, left_at=request.left_at)
        self._on_leave()
        return control_pb2.LeaveReply()

    def commit(self, request: control_pb2.CommitRequest, context: grpc.ServicerContext) -> control_pb2.CommitReply:
        with self._shard.counted("commit"):
            ticket = self._shard.settlement.commit(request)
            if ticket is not None:
                Waiter(self._shard, context).wait(ticket)
            return self._shard.settlement.commit_reply(request.caller.rank, request.clock)

    def measure(self, request: control_pb2.MeasureRequest, context: grpc.ServicerContext) -> control_pb2.MeasureReply:
        del context
        with self._shard.counted("measure"):
            return self._shard.settlement.measure(request)

    def counted(self, request: control_pb2.CountedRequest, context: grpc.ServicerContext) -> control_pb2.CountedReply:
        del context
        return control_pb2.CountedReply(blocks=self._shard.exchange.counted(request))

    def checkpoint(self, request: control_pb2.CheckpointRequest, context: grpc.ServicerContext) -> control_pb2.CheckpointReply:
        del request
        if self._checkpointer is None:
            raise CheckpointFailed("this shard was started without --checkpoint-dir")
        return control_pb2.CheckpointReply(name=self._checkpointer.take_now(context.time_remaining()))

    def rollback(self, request: control_pb2.RollbackRequest, context: grpc.ServicerContext) -> control_pb2.RollbackReply:
        del context
        self._shard.restoration.rollback(request)
        return control_pb2.RollbackReply()

    def barrier(self, request: control_pb2.BarrierRequest, context: grpc.ServicerContext) -> control_pb2.BarrierReply:
        began = self._shard.now()
        reply: control_pb2.BarrierReply = Waiter(self._shard, context).wait(self._shard.arrive(request))
        self._shard.count_barrier(self._shard.age_s(began))
        return reply

    def load(self, request: control_pb2.LoadRequest, context: grpc.ServicerContext) -> control_pb2.LoadReply:
        ticket = self._shard.parameters.load(request)
        return control_pb2.LoadReply(sets=ticket is not None and Waiter(self._shard, context).wait(ticket))

    def describe(self, request: control_pb2.DescribeRequest, context: grpc.ServicerContext) -> control_pb2.DescribeReply:
        del context
        return self._shard.describe(request)

    def open_bulk(self, request: control_pb2.OpenBulkRequest, context: grpc.ServicerContext) -> control_pb2.OpenBulkReply:
        return self._open_bulk(request, context.invocation_metadata())

    def open_reads(self, request: control_pb2.OpenReadsRequest, context: grpc.ServicerContext) -> control_pb2.OpenBulkReply:
        return self._open_reads(request, context.invocation_metadata())

    def status(self, request: control_pb2.StatusRequest, context: grpc.ServicerContext) -> control_pb2.StatusReply:
        del request, context
        progress = self._checkpointer.progress if self._checkpointer is not None else None
        return views.shard_status(self._shard, self._address(), progress)

    def kick(self, request: control_pb2.KickRequest, context: grpc.ServicerContext) -> control_pb2.KickReply:
        del context
        return control_pb2.KickReply(has_ended=self._shard.admission.kick(request.rank, request.session))

    def set_learning_rate(
        self, request: control_pb2.SetLearningRateRequest, context: grpc.ServicerContext
    ) -> control_pb2.SetLearningRateReply:
        del context
        return control_pb2.SetLearningRateReply(learning_rate=self._shard.scale_learning_rate(request.scale))

    def drain(self, request: control_pb2.DrainRequest, context: grpc.ServicerContext) -> control_pb2.DrainReply:
        del request, context
        return control_pb2.DrainReply(ends_at=self._shard.end_job())

    def stop(self, request: control_pb2.StopRequest, context: grpc.ServicerContext) -> control_pb2.StopReply:
        del context
        return control_pb2.StopReply(orders=self._shard.stop(request.caller))

    def log(self, request: control_pb2.LogRequest, context: grpc.ServicerContext) -> control_pb2.LogReply:
        del context
        self._shard.log(request)
        return control_pb2.LogReply()

    def curves(self, request: control_pb2.CurvesRequest, context: grpc.ServicerContext) -> control_pb2.CurvesReply:
        del context
        return self._shard.curves(request.after)
