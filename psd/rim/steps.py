"""A bulk connection whose steps are taken in C: offers them, and lets psd_core's loop take them until something else happens.

The connection's own thread does so, without the GIL; other threads only cancel. Must not know how a step counts.
"""

from __future__ import annotations

import os
import struct
from weakref import ref

from psd.contract.errors import InvalidRequest
from psd.contract.wire import Disconnected, Kind, Stream
from psd.rim.bulk_memory import WorkerMemory
from psd.state.desks import steps
from psd.state.desks.steps import Armed
from psd.state.job import Job
from psd.state.shard import Shard
from psd.v1 import bulk_pb2, data_pb2

STEP_BYTES_MAX = 16 << 20
"""Most bytes of a step that was not offered; more than any that ever is."""

PATIENCE_MAX = 64
"""Most replies for which nothing is offered, after steps that turned out to be none for C."""

_AGAIN = struct.Struct("<II")


class OfferedSteps:
    """The steps of one worker's connection.

    Args:
        lane: the connection's, for counts.

    Attributes:
        loop: takes the steps that were offered; None: none were.
    """

    def __init__(self, stream: Stream, shard: Shard, lane: str) -> None:
        self._stream = stream
        self._shard = shard
        self._lane = lane
        self._rank = -1
        self._armed: Armed | None = None
        self._job: ref[Job] | None = None  # of which the worker was armed last
        self.loop: steps.Loop | None = None
        self._is_cancelled = False
        self._patience = self._waits = 0

    @property
    def rank(self) -> int:
        """The rank whose steps are taken; -1: none are."""
        return self._rank if self.loop is not None else -1

    def offer(
        self, header: data_pb2.PushHeader, reply: data_pb2.PushReply, memory: WorkerMemory | None
    ) -> bulk_pb2.StepOffer | None:
        """Arm the worker of a push that is answered so, if its next push may come as a step; then what to tell it.

        Args:
            memory: where gradients and parameters lie; None: they travel.
        """
        self.loop = self._armed = None
        if not self._shard.steps.can_arm:
            return None
        if self._waits > 0:
            self._waits -= 1
            return None
        if not self._stream.is_single or (armed := self._shard.steps.arm(header, reply, self._lane)) is None:
            return None
        if memory is not None and memory.layout_digest != armed.job.layout.digest:  # attached for the job before
            self._shard.steps.revoke(header.caller.rank)
            return None
        blocks = [index for index, block in armed.job.blocks.items() if block.is_trained]
        gradients = parameters = None
        if memory is not None:
            gradients = [memory.gradient(index) for index in blocks]
            places = range(memory.place_count)
            parameters = [[memory.parameter(index, place).data.cast("B") for index in blocks] for place in places]
        self._rank, self._armed, self._job = header.caller.rank, armed, ref(armed.job)
        made, tables = armed.steps, armed.job.tables
        mapped = memory.whole if memory is not None and tables is not None else None
        self.loop = armed.loop(self._rank, self._stream.fileno(), gradients, parameters, mapped)
        if self._is_cancelled:  # since before this was seen
            self.loop.cancel()
        return bulk_pb2.StepOffer(
            epoch=armed.epoch,
            blocks=blocks if tables is None else [*blocks, tables.index],
            tables=0 if tables is None else len(tables.partitions),
            scalars=sum(len(group.values) for group in header.scalars),
            in_memory=memory is not None,
            head_bytes=made.head_bytes,
            gradient_bytes=0 if memory is not None else made.gradient_bytes,
            parameter_bytes=0 if memory is not None else made.parameter_bytes,
        )

    def cancel(self) -> None:
        """End the waits of the step under way, and write no more into the worker's memory. From any thread."""
        self._is_cancelled = True
        if (loop := self.loop) is not None:
            loop.cancel()

    def end(self) -> None:
        """Note that the connection has ended."""
        if self._job is not None and (job := self._job()) is not None:
            self._shard.steps.end(job, self._rank)
        self.loop = self._armed = None

    def take(self) -> None:
        """Take steps, if they were offered, until another message comes, or AGAIN was answered.

        Raises:
            Disconnected: the worker has gone. InvalidRequest: a step has another size than was offered.
        """
        loop, armed = self.loop, self._armed
        if loop is None or armed is None:
            return
        with self._stream.elsewhere() as ahead:
            while True:
                before = loop.done
                status, left = loop.serve(ahead)
                ahead = b""
                if status != steps.SERVED_OTHER:  # it may have closed rounds, also if the worker cannot be told any more
                    self._shard.steps.end_waits(armed.job, self._rank)
                if loop.done > before:
                    self._patience = 0
                if status != steps.SERVED_TICKETS:
                    break
            if status in (steps.SERVED_AGAIN, steps.SERVED_OTHER):
                self._stream.give_back(left)
        self.loop = self._armed = None
        if status == steps.SERVED_AGAIN and loop.reason not in steps.AGAIN_BY_SHARD:
            self._patience = self._waits = min(PATIENCE_MAX, 2 * self._patience + 1)
        elif status == steps.SERVED_WRONG:
            raise InvalidRequest("step: has another size than was offered")
        elif status == steps.SERVED_CLOSED:
            raise Disconnected("the peer has closed the connection")
        elif status == steps.SERVED_ERROR:
            raise Disconnected(os.strerror(loop.error))

    def refuse(self, nbytes: int) -> None:
        """Answer a step that was not offered, or is not any more. nbytes: of its payload, which is not read yet."""
        if nbytes > STEP_BYTES_MAX:
            raise InvalidRequest(f"step: has {nbytes} bytes of payload, and was not offered")
        self._stream.skip(nbytes)
        self._stream.send(Kind.AGAIN, _AGAIN.pack(steps.AGAIN_REVOKED, 0))
