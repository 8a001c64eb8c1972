"""The planes of an arena that one worker of this machine has mapped, and the blocks that it reads there.

A block that is lent so is not copied. Its page stays pinned until the worker's next call, or the end of its connection, however
that ends: so a worker that is killed, or that has lost its lease, keeps nothing. Blocks are lent where all workers have the same
version, in a job with rounds, or where there is one worker; else each worker might keep versions of its own. Must not know
sockets or messages' kinds.
"""

from __future__ import annotations

import logging
import threading

from psd.rim.data_plane import PulledBlock
from psd.state.aggregation.block import BlockState
from psd.state.aggregation.small_block import SmallBlock
from psd.state.job import Job
from psd.v1 import bulk_pb2
from psd_core.arena import PLANES, ArenaError

logger = logging.getLogger(__name__)


class LentPlanes:
    """The planes that one connection's worker may map.

    Raises:
        ArenaError, OSError: there is no file for them, and none can be made.
    """

    def __init__(self, job: Job) -> None:
        self._arena = job.arena
        self._indexes = list(job.blocks)
        self._slots = lent_slots(job)
        self._file = job.arena.begin_planes(self._slots)
        self._lock = threading.Lock()
        self._held: list[PulledBlock] = []

    def describe(self, ready: bulk_pb2.BulkReady) -> None:
        """Write into a message where parameters lie."""
        ready.planes, ready.plane_bytes = PLANES, self._file.plane_bytes
        ready.plane_starts.extend(
            [start + 1 if slot in self._slots else 0 for slot, start in enumerate(self._file.starts[: len(self._indexes)])]
        )

    def open_read_only(self) -> int:
        """A descriptor of the file, which the caller closes. Raises OSError."""
        return self._file.open_read_only()

    def is_of(self, job: Job | None) -> bool:
        """True if these are the planes of a job's arena as it is now."""
        return job is not None and job.arena is self._arena

    def number(self, answer: PulledBlock) -> int:
        """1 + the plane in which the numbers of an answer lie; 0: in none of these."""
        region = answer.region
        return region.plane + 1 if region is not None and region.file is self._file else 0

    def hold(self, answer: PulledBlock) -> None:
        """Keep the page of an answer as it is until `release`."""
        with self._lock:
            self._held.append(answer)

    def release(self) -> None:
        """Let all pages go: the worker reads them no more."""
        with self._lock:
            held, self._held = self._held, []
        for answer in held:
            answer.release()

    def close(self) -> None:
        """Let all pages go, and the planes."""
        self.release()
        self._arena.end_planes()


def lent_planes(job: Job) -> LentPlanes | None:
    """The planes of a job for one more worker; None if it has nothing to lend, or there is no room for them."""
    if not lent_slots(job):
        return None
    try:
        return LentPlanes(job)
    except (ArenaError, OSError) as error:
        logger.warning("parameters are copied for workers on this machine: no file for them can be made: %s", error)
        return None


def can_lend(job: Job | None) -> bool:
    """True if a job has something to lend."""
    return job is not None and bool(lent_slots(job))


def lent_slots(job: Job) -> set[int]:
    """The blocks whose pages can be lent, by their place in the arena: those of whole flat spaces, all of them large."""
    spec, layout = job.spec, job.layout
    if layout.shard_count > 1 or spec.is_publication or not (job.policy.has_rounds or spec.world_size == 1):
        return set()
    small = {block.plan.space for block in job.blocks.values() if not _can_be_lent(block)}
    return {slot for slot, block in enumerate(job.blocks.values()) if block.plan.space not in small}


def _can_be_lent(block: BlockState) -> bool:
    return block.plan.trained and not block.plan.pull_codec and not isinstance(block, SmallBlock)
