"""The memory that one connection of the bulk lane shares with its worker: the worker's file, and the planes of the arena.

Descriptors travel over the local socket, each after the other side has said that it waits for one, so that none is read
together with a message and lost. Must not know calls, frames or blocks.
"""

from __future__ import annotations

import os
import weakref

from psd.contract.errors import InvalidRequest, LayoutMismatch
from psd.contract.wire import Disconnected, Kind, Stream
from psd.rim.bulk_memory import WorkerMemory
from psd.state.job import Job
from psd.state.lent_planes import LentPlanes, can_lend, lent_planes
from psd.state.shard import Shard
from psd.v1 import bulk_pb2


class Attachment:
    """Memory that is shared, from ATTACH on.

    Args:
        stream: the connection's.

    Attributes:
        planes: those that the worker may have mapped; None: none.
    """

    def __init__(self, stream: Stream, shard: Shard) -> None:
        self.planes: LentPlanes | None = None
        self._stream = stream
        self._shard = shard
        self._memory: WorkerMemory | None = None
        self._offered: weakref.ref[Job] | None = None  # the job whose planes the worker could map when it attached its memory

    def attach(self, attach: bulk_pb2.BulkAttach, *, is_reader: bool) -> None:
        """Map the worker's file, and offer planes if the worker wants some.

        Raises:
            InvalidRequest, LayoutMismatch: it is not as it must be.
        """
        self._stream.send(Kind.SEND)
        descriptors = self._stream.receive_descriptors()
        try:
            if len(descriptors) != 1:
                raise InvalidRequest("descriptor: the byte after SEND came without one")
            job = self._shard.declared()
            if attach.layout_digest != job.layout.digest:
                raise LayoutMismatch("layout_digest: is not this job's")
            self._memory = WorkerMemory(descriptors[0], attach, job.layout, has_gradients=not is_reader)
            ready = bulk_pb2.BulkReady(nonce=self._memory.nonce)
            self._close_planes()
            if attach.wants_planes and not is_reader:
                self.planes, self._offered = lent_planes(job), weakref.ref(job)
            if self.planes is not None:
                ready.planes, ready.plane_bytes = self.planes.count, self.planes.plane_bytes
                ready.plane_starts.extend([0 if start is None else start + 1 for start in self.planes.starts])
            self._stream.send(Kind.READY, ready.SerializeToString())
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def send_planes(self) -> None:
        """Send a descriptor with which the worker can map the planes, to read them. Raises InvalidRequest if there are none."""
        if self.planes is None or self._stream.local is None:
            raise InvalidRequest("kind: SEND was not expected: no planes were offered")
        try:
            descriptor = self.planes.open_read_only()
        except OSError as error:
            raise Disconnected(str(error)) from None
        try:
            self._stream.send_descriptor(descriptor)
        finally:
            os.close(descriptor)

    @property
    def attached(self) -> WorkerMemory | None:
        """The worker's memory as it was attached last, maybe for another job; None: none."""
        return self._memory

    def memory(self) -> WorkerMemory:
        """The worker's memory. Raises InvalidRequest, LayoutMismatch if there is none for the present job."""
        if self._memory is None:
            raise InvalidRequest("in_memory: nothing is attached to this connection")
        job = self._shard.job  # None while a checkpoint is loaded; then the block is refused anyway
        if job is not None and self._memory.layout_digest != job.layout.digest:
            raise LayoutMismatch("in_memory: the memory was attached for another job")
        return self._memory

    def planes_for(self, reply: bulk_pb2.BulkReply) -> LentPlanes | None:
        """The planes by which a call is answered, and its reply. What the last such call has lent is not read any more."""
        job = self._shard.job
        if self.planes is not None and not self.planes.is_of(job):
            self._close_planes()
        if self.planes is None:
            reply.attach_again = can_lend(job) and (self._offered is None or self._offered() is not job)
        else:
            self.planes.release()
        return self.planes

    def _close_planes(self) -> None:
        planes, self.planes = self.planes, None
        if planes is not None:
            planes.close()

    def close(self) -> None:
        """Share nothing any more."""
        self._memory = None
        self._close_planes()
