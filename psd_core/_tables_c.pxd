"""What `_tables.pyx` uses of a shard's tables, csrc/step_tables.h."""

from libc.stdint cimport int64_t, uint64_t

from psd_core._block_c cimport PSD_AGES, psd_part_of_push, psd_ranks, psd_round_times
from psd_core._table_c cimport PSD_SCALARS_MAX, psd_sums, psd_table, pthread_mutex_t


cdef extern from "rounds.h" nogil:
    int psd_round_has(const uint64_t *contributors, int64_t rank)
    void psd_times_on_gradient(psd_round_times *, psd_ranks *, size_t words, int64_t rank, double now, const uint64_t *waited)
    void psd_times_on_close(psd_round_times *, psd_ranks *, size_t words, double now, const uint64_t *waited)


cdef extern from "step_tables.h" nogil:
    ctypedef struct psd_partition:
        psd_table *table
        uint64_t dim
        psd_sums *sums
        size_t scalars
        size_t at[PSD_SCALARS_MAX]
        int rate
        uint64_t clock
    ctypedef struct psd_tables:
        size_t count, workers, mask_words, scalars
        int has_rounds, is_mean
        int64_t quorum
        uint64_t shards, shard, ids_max
        psd_partition *partition
        pthread_mutex_t *lock
        psd_ranks *ranks
        int measures_ranks
        uint64_t unit, version
        int has_tickets, is_closed
        uint64_t reads, updates
        psd_round_times times
        uint64_t ages[PSD_AGES]
        uint64_t age_total
        uint64_t *contributors
        uint64_t *sessions
        int has_voice, has_sum
        uint64_t since
        int64_t rank
        double *held
        double total_weight
        int is_lent, has_steps
        uint64_t is_due
    int psd_tables_init(psd_tables *)
    void psd_tables_free(psd_tables *)
    void psd_tables_open(psd_tables *)
    void psd_tables_note(psd_tables *, const psd_part_of_push *)
