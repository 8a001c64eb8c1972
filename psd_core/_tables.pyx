"""A shard's part of all tables for armed steps, csrc/step_tables.h: what Python and steps both see of it, and change under one lock.

This module owns every check that keeps an access within its buffer. It knows no files, and not what rounds, sessions and clocks
mean to the caller.
"""

from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from psd_core._block_c cimport PSD_SECONDS, integer_of, psd_part_of_push, psd_ranks, psd_ring, word_of
from psd_core._table cimport Mutex, Partition, Sums
from psd_core._tables_c cimport *


cdef extern from *:
    """
    #define psd_see(word) __atomic_load_n(word, __ATOMIC_SEQ_CST)
    #define psd_set(word, value) __atomic_store_n(word, value, __ATOMIC_SEQ_CST)
    """
    uint64_t psd_see(uint64_t *word) nogil
    void psd_set(uint64_t *word, uint64_t value) nogil


cdef extern from "sched.h" nogil:
    int sched_yield()


cdef class TablesCore:
    """The partitions of all tables on a shard, and their open round.

    Args:
        stores: for each table its TableStore; for each of its rule's scalars, the place among all of a step; and which of
            these is divided by 1 + age, -1: none. sums: for each table its RowSums, of the open round.
        scalars: number of all groups' scalars. is_mean, quorum: of the rounds. ids_max: most ids in a step.

    Attributes:
        lock: under which all is changed, but what says otherwise.
        version: updates; may be read without the lock. unit: of the clocks, in one update.
        has_tickets: callers wait for a version.
        is_lent: the open round has gradients that are not in the sums. is_due: it is complete, and to be applied by the caller. Steps
            count in neither.
        has_sum: somebody has brought a gradient to the open round. has_steps: steps have been offered.
    """

    def __cinit__(
        self, list stores, list sums, size_t workers, size_t scalars, bint has_rounds, bint is_mean, int64_t quorum,
        uint64_t shards, uint64_t shard, uint64_t ids_max,
    ):
        cdef psd_tables *b = &self.tables
        cdef Partition partition
        cdef Sums own
        cdef size_t i, k
        self.lock, self.partitions, self.sums = Mutex(), [each[0]._partition for each in stores], [each._sums for each in sums]
        b.count, b.workers, b.scalars, b.lock = len(stores), workers, scalars, &self.lock.mutex
        b.has_rounds, b.is_mean, b.quorum = has_rounds, is_mean, quorum
        b.shards, b.shard, b.ids_max, b.unit = shards, shard, ids_max, 1
        self.masks = <uint64_t *>calloc((workers + 63) // 64 + 1, sizeof(uint64_t))
        self.numbers = <double *>calloc(scalars + 1, sizeof(double))
        if psd_tables_init(b) != 0 or self.masks == NULL or self.numbers == NULL:
            raise MemoryError("no memory for tables")
        assert len(sums) == len(stores)
        for i in range(b.count):
            partition, own, (_, places, rate) = self.partitions[i], self.sums[i], stores[i]
            assert partition.table.spec.notes == 1 + 2 * workers and partition.table.base != NULL
            assert <uint64_t>own.dim == partition.table.spec.dim
            assert len(places) <= PSD_SCALARS_MAX and -1 <= rate < <int>len(places)
            b.partition[i].table, b.partition[i].scalars, b.partition[i].rate = &partition.table, len(places), rate
            b.partition[i].sums, b.partition[i].dim = &own.sums, own.dim
            for k in range(b.partition[i].scalars):
                assert 0 <= places[k] < <Py_ssize_t>scalars
                b.partition[i].at[k] = places[k]
        for each in stores:
            each[0].on_close = self.close

    def __dealloc__(self):
        psd_tables_free(&self.tables)
        free(self.masks)
        free(self.numbers)

    def attend(self, object ranks, bint measures_ranks):
        """Wake the steps of these ranks (psd_core.steps.Ranks) when a round closes; measures_ranks: note how long others wait for each."""
        cdef psd_ranks *found = <psd_ranks *>PyCapsule_GetPointer(ranks.capsule, "psd_ranks")
        assert self.tables.workers <= found.count
        self.ranks = ranks
        self.tables.measures_ranks, self.tables.ranks = measures_ranks, found

    cdef uint64_t *mask(self, object mask) except NULL:
        """The words of a mask, good until the next call."""
        cdef size_t i
        for i in range(self.tables.mask_words):
            self.masks[i] = word_of(mask, i)
        return self.masks

    cdef void reach(self, uint64_t version) noexcept:
        """Set the version, and wake the steps that sleep until a round closes."""
        psd_set(&self.tables.version, version)
        if self.tables.ranks != NULL:
            psd_ring(self.tables.ranks)

    def close(self):
        """Let the partitions go: steps count and read nothing any more. Not under the lock."""
        with self.lock:
            self.tables.is_closed = True
        with nogil:
            while psd_see(&self.tables.reads):
                sched_yield()
        self.partitions = []

    @property
    def version(self):
        return psd_see(&self.tables.version)

    @version.setter
    def version(self, uint64_t version):
        self.reach(version)

    @property
    def unit(self):
        return self.tables.unit

    @unit.setter
    def unit(self, uint64_t unit):
        if self.tables.unit != unit:  # else steps may be reading it
            self.tables.unit = unit

    @property
    def is_lent(self):
        return self.tables.is_lent != 0

    @is_lent.setter
    def is_lent(self, bint is_lent):
        self.tables.is_lent = is_lent

    @property
    def is_due(self):
        return psd_see(&self.tables.is_due) != 0

    @is_due.setter
    def is_due(self, bint is_due):
        psd_set(&self.tables.is_due, is_due)

    @property
    def has_sum(self):
        return self.tables.has_sum != 0

    @has_sum.setter
    def has_sum(self, bint has_sum):
        self.tables.has_sum = has_sum

    @property
    def has_steps(self):
        return self.tables.has_steps != 0

    @has_steps.setter
    def has_steps(self, bint has_steps):
        self.tables.has_steps = has_steps

    @property
    def has_tickets(self):
        return self.tables.has_tickets != 0

    @has_tickets.setter
    def has_tickets(self, bint has_tickets):
        self.tables.has_tickets = has_tickets

    @property
    def updates(self):
        """Number of updates by steps."""
        return psd_see(&self.tables.updates)

    def clock(self, size_t table):
        """The clock of a table's last update. Takes no lock."""
        assert table < self.tables.count
        return psd_see(&self.tables.partition[table].clock)

    def set_clock(self, size_t table, uint64_t clock):
        """Set it."""
        assert table < self.tables.count
        psd_set(&self.tables.partition[table].clock, clock)

    # The open round. Under the lock.

    def open(self):
        """Let the next round be open, in which nobody has a gradient."""
        psd_tables_open(&self.tables)

    def note(self, int64_t rank, uint64_t session, uint64_t since, double weight, tuple scalars):
        """Note that the open round has a worker's gradient, whose values are in the sums, lent, or none. scalars: of all groups."""
        cdef psd_part_of_push part
        cdef size_t i
        if not 0 <= rank < <int64_t>self.tables.workers or len(scalars) != <Py_ssize_t>self.tables.scalars:
            raise IndexError(f"rank: {rank} of {self.tables.workers}, with {len(scalars)} scalars of {self.tables.scalars}")
        for i in range(self.tables.scalars):
            self.numbers[i] = scalars[i]
        memset(&part, 0, sizeof(part))
        part.rank, part.session, part.since, part.weight, part.scalars = rank, session, since, weight, self.numbers
        psd_tables_note(&self.tables, &part)

    @property
    def contributors(self):
        """Mask of the ranks that the open round has a gradient of."""
        return integer_of(self.tables.contributors, self.tables.mask_words)

    def session_of(self, int64_t rank):
        """The session whose gradient of a rank the open round has; 0: none."""
        if not 0 <= rank < <int64_t>self.tables.workers:
            return 0
        return self.tables.sessions[rank] if psd_round_has(self.tables.contributors, rank) else 0

    @property
    def round(self):
        """All of the open round but the sums: sessions by rank, weight, and since when the worker is there whose scalars hold, its rank,
        and these, or None."""
        cdef psd_tables *b = &self.tables
        cdef size_t i
        sessions = {rank: self.session_of(rank) for rank in range(b.workers) if self.session_of(rank)}
        held = tuple([b.held[i] for i in range(b.scalars)]) if b.has_voice else ()
        return sessions, b.total_weight, (b.since, b.rank, held) if b.has_voice else None

    def on_gradient(self, int64_t rank, double now, object waited):
        """Note a gradient that the open round has counted, or is about to."""
        cdef psd_tables *b = &self.tables
        assert 0 <= rank < <int64_t>b.workers
        psd_times_on_gradient(&b.times, b.ranks if b.measures_ranks else NULL, b.mask_words, rank, now, self.mask(waited))

    def on_close(self, double now, object waited):
        """Note that the round has closed. waited: mask of the workers that are waited for now."""
        cdef psd_tables *b = &self.tables
        psd_times_on_close(&b.times, b.ranks if b.measures_ranks else NULL, b.mask_words, now, self.mask(waited))

    @property
    def times(self):
        """True if the open round has a gradient; when the last one closed, or None; counts of how long each was open; their sum."""
        cdef psd_round_times *t = &self.tables.times
        cdef int i
        counts = [t.closed[i] for i in range(PSD_SECONDS)]
        return t.is_open != 0, t.closed_at if t.has_closed else None, counts, t.closed_s

    @property
    def ages(self):
        """Gradients of steps by age_bucket of their age, and the sum of these ages."""
        cdef int last = PSD_AGES
        while last and not self.tables.ages[last - 1]:
            last -= 1
        return [self.tables.ages[i] for i in range(last)], self.tables.age_total


cdef class TablesPlace:
    """Version of a shard's tables: base of the class that has all other facts.

    Attributes:
        version: updates applied, as of psd.state.aggregation.trained.Trained.
    """

    cdef TablesCore core_

    def __cinit__(self, *_, **__):
        pass

    def lie_in(self, TablesCore core not None):
        """Let the version lie in that core, where steps see and change it, too."""
        self.core_ = core

    @property
    def version(self):
        return psd_see(&self.core_.tables.version)

    @version.setter
    def version(self, uint64_t version):
        self.core_.reach(version)
