"""The planes of an arena that one worker of this machine has mapped, and the blocks that it reads there.

A block that is lent is not copied. Its page stays pinned until the worker's next pull, or the end of its connection, however
that ends: so a worker that is killed, or has lost its lease, keeps nothing. Blocks are lent in a job with rounds, where all
workers have the same version, and to an only worker; else each worker might keep versions of its own. Must not know sockets or
kinds of messages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from psd.state import locks
from psd.state.aggregation.block import BlockState
from psd.state.aggregation.small_block import BYTES_MAX
from psd.state.job import Job
from psd_core.arena import PLANES, ArenaError, Region

logger = logging.getLogger(__name__)


class LentPlanes:
    """The planes that one connection's worker may map.

    Raises:
        ArenaError, OSError: there is no file for them, and none can be made.

    Attributes:
        count: number of planes. plane_bytes: length of each, one behind the other. starts: by the shard's blocks, the offset of
            their parameters in a plane; None: they are never there.
    """

    def __init__(self, job: Job) -> None:
        slots = lent_slots(job)
        self._arena = job.arena
        self._file = job.arena.begin_planes(slots)
        self._lock = locks.new(locks.Level.LEAF)
        self._held: list[Callable[[], None]] = []
        self.count, self.plane_bytes = PLANES, self._file.plane_bytes
        self.starts = [start if slot in slots else None for slot, start in enumerate(self._file.starts)]

    def open_read_only(self) -> int:
        """A descriptor of the file, which the caller closes. Raises OSError."""
        return self._file.open_read_only()

    def is_of(self, job: Job | None) -> bool:
        """True if these are the planes of a job's arena as it is now."""
        return job is not None and job.arena is self._arena

    def number(self, region: Region | None) -> int:
        """1 + the plane of what lies in a region; 0: it lies in none of these."""
        return region.plane + 1 if region is not None and region.file is self._file else 0

    def hold(self, unpin: Callable[[], None]) -> None:
        """Keep a pinned page as it is until `release`, which calls `unpin`."""
        with self._lock:
            self._held.append(unpin)

    def release(self) -> None:
        """Let all pages go: the worker reads them no more."""
        with self._lock:
            held, self._held = self._held, []
        for unpin in held:
            unpin()

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
    return block.plan.trained and block.plan.nbytes > BYTES_MAX and not block.plan.pull_codec
