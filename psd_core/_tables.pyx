"""A shard's part of all tables for armed steps, csrc/step_tables.h: what Python and steps both see of it, and change under one lock.

This module owns every check that keeps an access within its buffer. It knows no files, and not what rounds, sessions and clocks
mean to the caller.
"""

from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free

from psd_core._block_c cimport PSD_SECONDS
from psd_core._table cimport Mutex, Partition
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
    """The partitions of all tables on a shard.

    Args:
        stores: for each table its TableStore; for each of its rule's scalars, the place among all of a step; and which of
            these is divided by 1 + age, -1: none. ids_max: most ids in a step.

    Attributes:
        lock: under which all is changed, but what says otherwise.
        version: updates; may be read without the lock. unit: of the clocks, in one update.
        is_open: the open round has a gradient, so that steps do not count. has_tickets: callers wait for a version.
    """

    def __cinit__(self, list stores, size_t workers, bint has_rounds, uint64_t shards, uint64_t shard, uint64_t ids_max):
        cdef psd_tables *b = &self.tables
        cdef Partition partition
        cdef size_t i, k
        self.lock, self.partitions = Mutex(), [each[0]._partition for each in stores]
        b.partition = <psd_partition *>calloc(len(stores) + 1, sizeof(psd_partition))
        b.notes = <uint64_t *>calloc(1 + 2 * workers, sizeof(uint64_t))
        if b.partition == NULL or b.notes == NULL:
            raise MemoryError("no memory for tables")
        b.count, b.workers, b.has_rounds, b.lock = len(stores), workers, has_rounds, &self.lock.mutex
        b.shards, b.shard, b.ids_max, b.unit = shards, shard, ids_max, 1
        for i in range(b.count):
            partition, (_, places, rate) = self.partitions[i], stores[i]
            assert partition.table.spec.notes == 1 + 2 * workers and partition.table.base != NULL
            assert len(places) <= PSD_SCALARS_MAX and -1 <= rate < <int>len(places)
            b.partition[i].table, b.partition[i].scalars, b.partition[i].rate = &partition.table, len(places), rate
            for k in range(b.partition[i].scalars):
                b.partition[i].at[k] = places[k]
        for each in stores:
            each[0].on_close = self.close

    def __dealloc__(self):
        free(self.tables.partition)
        free(self.tables.notes)

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
        psd_set(&self.tables.version, version)

    @property
    def unit(self):
        return self.tables.unit

    @unit.setter
    def unit(self, uint64_t unit):
        if self.tables.unit != unit:  # else steps may be reading it
            self.tables.unit = unit

    @property
    def is_open(self):
        return self.tables.is_open != 0

    @is_open.setter
    def is_open(self, bint is_open):
        self.tables.is_open = is_open

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

    @property
    def times(self):
        """The time at which the last round of a step closed (None: there was none); how long such rounds took, by bucket, and the sum."""
        closed_at = self.tables.times.closed_at if self.tables.times.has_closed else None
        return closed_at, [self.tables.times.closed[i] for i in range(PSD_SECONDS)], self.tables.times.closed_s

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
        psd_set(&self.core_.tables.version, version)
