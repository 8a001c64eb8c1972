"""What `_tables.pyx` uses of a shard's tables, csrc/step_tables.h."""

from libc.stdint cimport uint64_t

from psd_core._block_c cimport PSD_AGES, psd_round_times
from psd_core._table_c cimport PSD_SCALARS_MAX, psd_table, pthread_mutex_t


cdef extern from "step_tables.h" nogil:
    ctypedef struct psd_partition:
        psd_table *table
        size_t scalars
        size_t at[PSD_SCALARS_MAX]
        int rate
        uint64_t clock
    ctypedef struct psd_tables:
        size_t count, workers
        int has_rounds
        uint64_t shards, shard, ids_max
        psd_partition *partition
        pthread_mutex_t *lock
        uint64_t *notes
        uint64_t unit, version
        int is_open, has_tickets, is_closed
        uint64_t reads, updates
        psd_round_times times
        uint64_t ages[PSD_AGES]
        uint64_t age_total
