"""What `_table.pyx` uses of the C store of a table's partition, csrc/table.h, and of arena.h."""

from libc.stdint cimport int64_t, intptr_t, uint8_t, uint32_t, uint64_t


cdef extern from "arena.h" nogil:
    enum:
        PSD_LARGE_PAGE
    int psd_populate(void *, size_t) noexcept
    int psd_make_large(void *) noexcept


cdef extern from "pthread.h" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *, const void *)
    int pthread_mutex_destroy(pthread_mutex_t *)
    int pthread_mutex_lock(pthread_mutex_t *)
    int pthread_mutex_trylock(pthread_mutex_t *)
    int pthread_mutex_unlock(pthread_mutex_t *)


cdef extern from "table.h" nogil:
    enum:
        PSD_FLAGS_MAX
        PSD_SCALARS_MAX
        PSD_RULES
        PSD_RULES_CHECKSUM
        PSD_REGIONS
        PSD_INDEX
        PSD_OTHER_INDEX
        PSD_HEADS
        PSD_ROWS
        PSD_REMOVED_MAX
        PSD_CHUNK_BUCKETS
        PSD_LOG_MAX
        PSD_OWN_SLOTS_MAX
    ctypedef struct psd_hyper:
        uint8_t flags[PSD_FLAGS_MAX]
        double scalars[PSD_SCALARS_MAX]
    ctypedef struct psd_head:
        uint64_t id
        uint64_t used
        uint64_t changed
        uint64_t check
    ctypedef struct psd_root:
        uint64_t step, version, clock, rows, places, spares, current, buckets, next_buckets, moved
        uint64_t created, evicted, expired, removed, refused, unadmitted, log_first, log_end, fresh_moves
    ctypedef struct psd_log_entry:
        uint64_t from_step "from"
        double scalars[PSD_SCALARS_MAX]
    ctypedef struct psd_table_spec:
        uint64_t dim, width, stored, rows_max, push_max, notes, seed, admit_after, admit_below
        int rule, rowwise, init, slots, evicts, catches_up, settles, rests, is_half
        uint8_t rest_without[PSD_SCALARS_MAX]
        int64_t decay_at
        double a, b
        psd_hyper flags
        int64_t slot_at[PSD_OWN_SLOTS_MAX]
        float slot_start[PSD_OWN_SLOTS_MAX]
    ctypedef struct psd_region:
        uint64_t at, size, backed
    ctypedef struct psd_scratch:
        pass
    ctypedef struct psd_snapshot:
        int is_active, is_failed
        uint64_t version, saved
    ctypedef struct psd_oldest:
        pass
    ctypedef struct psd_table:
        psd_table_spec spec
        pthread_mutex_t *writing
        psd_region region[PSD_REGIONS]
        uint64_t size
        char *base
        psd_root *root
        psd_scratch scratch
        psd_snapshot snapshot
        psd_oldest oldest
        uint64_t reads, hits
        void (*on_store)(void *, const char *) noexcept
        void *context
        char problem[160]
    ctypedef struct psd_part:
        const uint64_t *ids
        const float *values
        intptr_t n
    ctypedef struct psd_own_rule:
        int (*apply)(void *, intptr_t) noexcept
        void *context
        intptr_t capacity, count
        float *pieces
        float *gradients
        uint64_t *ids
        uint64_t *places
        double scale
    ctypedef struct psd_push:
        psd_hyper hyper
        psd_own_rule *own
        double scale
        uint64_t clock
        int distinct, whole
        int64_t step
        const uint64_t *clocks
        const uint64_t *notes
        const double *history
        uint64_t entries, scalars
    void psd_mix_all(const uint64_t *, uint64_t *, intptr_t) noexcept
    uint64_t psd_slots_seed
    void psd_initial_value(const psd_table_spec *, uint64_t, float *) noexcept
    int psd_table_plan(psd_table *) noexcept
    int psd_table_make_lock(psd_table *) noexcept
    void psd_table_drop_lock(psd_table *) noexcept
    void psd_table_format(psd_table *, uint64_t) noexcept
    int psd_table_adopt(psd_table *) noexcept
    int psd_table_lack(const psd_table *, uint64_t, uint64_t, uint64_t *) noexcept
    psd_log_entry *psd_logged(const psd_table *, uint64_t) noexcept
    uint64_t *psd_notes(const psd_table *) noexcept
    uint32_t *psd_spares(const psd_table *) noexcept
    uint64_t psd_index_scan(const psd_table *, uint64_t, uint64_t **, uint64_t, uint64_t *) noexcept
    int psd_index_must_move(const psd_table *, uint64_t) noexcept
    void psd_index_move(psd_table *, uint64_t) noexcept
    int psd_table_read(psd_table *, const uint64_t *, intptr_t, float *, uint8_t *, int, int64_t) noexcept
    uint64_t psd_table_walk(psd_table *, uint64_t, psd_head *, float *, uint64_t, uint64_t *) noexcept
    int psd_table_push(psd_table *, const psd_push *, const psd_part *, int) noexcept
    void psd_table_commit_push(psd_table *) noexcept
    int psd_table_expire(psd_table *, uint64_t, uint64_t) noexcept
    uint64_t psd_table_discard(psd_table *, const uint64_t *, intptr_t) noexcept
    void psd_scratch_free(psd_scratch *) noexcept
    uint64_t psd_oldest_used(const psd_oldest *) noexcept
    void psd_oldest_free(psd_oldest *) noexcept
    void psd_snapshot_begin(psd_table *, int, uint64_t, uint64_t) noexcept
    int psd_snapshot_next(psd_table *, psd_head *, float *, uint64_t, uint64_t *) noexcept
    void psd_snapshot_end(psd_table *) noexcept
    uint64_t psd_removals(const psd_root *) noexcept
    uint64_t *psd_removal(const psd_table *, uint64_t) noexcept
    uint64_t psd_first_removal(const psd_table *, const psd_root *) noexcept
    ctypedef struct psd_sums:
        intptr_t count
        uint64_t *ids
        float *values
        int is_touched
    int psd_sums_prepare(psd_sums *, const uint64_t *, const float *, intptr_t, intptr_t) noexcept
    void psd_sums_add(psd_sums *, intptr_t, double) noexcept
    void psd_sums_clear(psd_sums *) noexcept
    void psd_sums_free(psd_sums *) noexcept
