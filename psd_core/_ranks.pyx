"""Facts of a job's ranks on a shard, csrc/ranks.h, for Python: armed steps see and change them, too.

Who is armed, and when that is revoked, is the caller's.
"""

from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free

from psd_core._block_c cimport PSD_SECONDS, psd_count_push, psd_got, psd_put, psd_rank, psd_ranks, psd_ring

import os


cdef extern from "sched.h" nogil:
    int sched_yield()


cdef class Ranks:
    """Facts of the ranks of a job, on one shard, that steps see and change, too."""

    def __cinit__(self, size_t count):
        cdef size_t i
        self.ranks.count = count
        self.ranks.rank = <psd_rank *>calloc(count if count else 1, sizeof(psd_rank))
        if self.ranks.rank == NULL:
            raise MemoryError(f"no memory for {count} ranks")
        for i in range(count):
            # The epochs of a rank in another life, or of another job, are others.
            self.ranks.rank[i].epoch = int.from_bytes(os.urandom(6), "little") << 8 | 1
            self.ranks.rank[i].last_seen = -1.0

    def __dealloc__(self):
        free(self.ranks.rank)

    cdef psd_rank *at(self, Py_ssize_t rank) except NULL:
        if not 0 <= rank < <Py_ssize_t>self.ranks.count:
            raise IndexError(f"rank {rank} of {self.ranks.count}")
        return &self.ranks.rank[rank]

    @property
    def capsule(self):
        """Address of them, for a block; see BlockCore.attend. Good as long as this object."""
        return PyCapsule_New(&self.ranks, "psd_ranks", NULL)

    def revoke(self):
        """Take no more steps until ranks are armed anew; none is under way when this returns. Not under a lock below the shard's."""
        cdef size_t i
        cdef bint was_armed = False
        for i in range(self.ranks.count):
            was_armed |= psd_or(&self.ranks.rank[i].epoch, 1) % 2 == 0
        if was_armed:
            psd_ring(&self.ranks)
        with nogil:
            for i in range(self.ranks.count):
                while psd_see_inside(&self.ranks.rank[i].inside):
                    sched_yield()

    def revoke_one(self, Py_ssize_t rank):
        """Do likewise with one rank."""
        cdef psd_rank *r = self.at(rank)
        if psd_or(&r.epoch, 1) % 2 == 0:
            psd_ring(&self.ranks)
        with nogil:
            while psd_see_inside(&r.inside):
                sched_yield()

    def take_counts(self, Py_ssize_t rank):
        """Counts of a rank's steps since this was last called, or None if there are none: pushes accepted, and had already;
        pulls; bytes received, and sent; how long they took, by bucket, and the sum."""
        cdef psd_rank *r = self.at(rank)
        cdef uint64_t pulls = psd_take(&r.counts.pulls)
        cdef double took_s, total_s
        cdef int i
        if not pulls:
            return None
        total_s = psd_got(&r.counts.took_s)  # which the rank's steps go on adding to
        took_s, r.told_s = total_s - r.told_s, total_s
        return (
            psd_take(&r.counts.accepted), psd_take(&r.counts.duplicate), pulls, psd_take(&r.counts.received),
            psd_take(&r.counts.sent), [psd_take(&r.counts.took[i]) for i in range(PSD_SECONDS)], took_s,
        )

    def known(self, Py_ssize_t rank):
        """Facts that decide of a rank's steps, for tests: epoch; session, if armed; name, blocks and end of a step answered AGAIN."""
        cdef psd_rank *r = self.at(rank)
        half = (r.half_session, r.half_clock, r.half_blocks, r.half_has_ended) if r.half_blocks else None
        return r.epoch, r.session if r.epoch % 2 == 0 else None, half

    def half(self, Py_ssize_t rank, uint64_t session, uint64_t clock):
        """Bits of the blocks, by their place among the trained ones, that have counted the push of this name in a step that was
        answered AGAIN."""
        cdef psd_rank *r = self.at(rank)
        return r.half_blocks if r.half_session == session and r.half_clock == clock else 0

    def forget_half(self, Py_ssize_t rank):
        """Forget them: the push has been made."""
        self.at(rank).half_blocks = 0

    def give_up_half(self, Py_ssize_t rank):
        """Forget them, and count the step as far as it came: its connection has ended, and no push is made in its place."""
        cdef psd_rank *r = self.at(rank)
        if r.half_blocks and r.half_has_ended:
            psd_count_push(r, True, r.half_received, r.half_weight)
        r.half_blocks = 0


cdef class RankPlace:
    """Facts of one rank: base of the class that has all others.

    Attributes:
        clock, last_seen, samples, awaited_s: as of psd.state.workers.membership.Worker.
    """

    def __cinit__(self, *_, **__):
        self.rank_ = &self.own
        self.own.last_seen = -1.0

    def lie_in(self, Ranks ranks, Py_ssize_t rank):
        """Let these facts lie where steps of that rank see and change them, too; they are those that are there."""
        self.rank_, self.ranks = ranks.at(rank), ranks

    @property
    def clock(self):
        return psd_see(&self.rank_.clock)

    @clock.setter
    def clock(self, uint64_t clock):
        psd_set(&self.rank_.clock, clock)

    @property
    def last_seen(self):
        return psd_got(&self.rank_.last_seen)

    @last_seen.setter
    def last_seen(self, double at):
        psd_put(&self.rank_.last_seen, at)

    @property
    def samples(self):
        return psd_got(&self.rank_.samples)

    @samples.setter
    def samples(self, double samples):
        psd_put(&self.rank_.samples, samples)

    @property
    def awaited_s(self):
        return psd_got(&self.rank_.awaited_s)

    @awaited_s.setter
    def awaited_s(self, double seconds):
        psd_put(&self.rank_.awaited_s, seconds)
