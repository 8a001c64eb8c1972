"""What `_block.pyx` uses of the C core of a small block, csrc/block.h."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from psd_core._kernels_c cimport PSD_BF16, PSD_F16, PSD_F32, PSD_F64, psd_dtype


cdef extern from "pthread.h" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_lock(pthread_mutex_t *)
    int pthread_mutex_trylock(pthread_mutex_t *)
    int pthread_mutex_unlock(pthread_mutex_t *)


cdef extern from "round_times.h" nogil:
    enum:
        PSD_SECONDS
    ctypedef struct psd_round_times:
        int is_open, has_closed
        double opened_at, closed_at, closed_s
        uint64_t closed[PSD_SECONDS]


cdef extern from "ranks.h" nogil:
    ctypedef struct psd_step_counts:
        uint64_t accepted, duplicate, pulls, received, sent
        uint64_t took[PSD_SECONDS]
        double took_s
    ctypedef struct psd_rank:
        uint64_t epoch
        uint32_t inside
        uint64_t session, clock, floor
        double last_seen, samples, awaited_s
        uint64_t *record
        uint64_t half_session, half_clock, half_blocks
        int half_has_ended
        uint64_t half_received
        double half_weight
        psd_step_counts counts
        double told_s
    ctypedef struct psd_ranks:
        size_t count
        psd_rank *rank
    void psd_ring(psd_ranks *)
    double psd_now()
    void psd_put(double *, double value)
    double psd_got(const double *)
    void psd_count_push(psd_rank *, int is_counted, uint64_t received, double weight)


cdef extern from "block.h" nogil:
    enum:
        PSD_FLAGS_MAX
        PSD_SCALARS_MAX
        PSD_SLOTS_MAX
        PSD_RULES
        PSD_RULES_CHECKSUM
        PSD_AGES
    ctypedef enum psd_outcome:
        PSD_NEEDS_PAGE
        PSD_NOT_SENT
        PSD_AHEAD
        PSD_NO_MEMORY
        PSD_STORE_CLOSED
        PSD_GIVEN_BACK
        PSD_STOPPED
    ctypedef enum psd_page_state:
        PSD_FREE
        PSD_SPARE
        PSD_PUBLISHED
    ctypedef struct psd_page:
        char *body
        uint64_t version, content, use
        psd_page_state state
    ctypedef struct psd_part_of_push:
        int64_t rank
        uint64_t session, clock, since
        double weight, scale
        const void *values
        psd_dtype values_dtype
        const uint8_t *present
        const double *scalars
        uint64_t version_read
        int is_version_known, is_newest, already
    ctypedef struct psd_block:
        psd_dtype dtype
        size_t item, n, segments, workers, mask_words, head_words, body_words, stride, slots
        uint64_t index
        uint64_t *entry
        const uint32_t *ends
        int rule
        uint8_t flags[PSD_FLAGS_MAX]
        int slot_at[PSD_SLOTS_MAX]
        int scalars, rate, has_rounds, is_mean
        int64_t quorum
        int (*on_store)(void *, const char *) noexcept
        void *context
        psd_ranks *ranks
        int measures_ranks
        pthread_mutex_t lock
        int has_tickets, is_stuck
        psd_round_times times
        uint64_t version
        int has_voice, has_sum
        uint64_t since
        int64_t rank
        double held[PSD_SCALARS_MAX]
        double total_weight
        uint64_t *sessions
        uint64_t *contributors
        uint8_t *touched
        void *sum
        uint64_t ages[PSD_AGES]
        uint64_t age_total
        psd_page *page
        int64_t pages, current
        int is_closed
    int psd_block_init(psd_block *) noexcept
    void psd_block_free(psd_block *) noexcept
    void psd_block_open(psd_block *, uint64_t version) noexcept
    psd_outcome psd_block_contribute(psd_block *, const psd_part_of_push *, const uint64_t *waited) noexcept
    int psd_block_is_complete(const psd_block *, const uint64_t *waited, int is_void) noexcept
    psd_outcome psd_block_close_round(psd_block *) noexcept
    void psd_block_on_gradient(psd_block *, int64_t rank, double now, const uint64_t *waited) noexcept
    void psd_block_on_close(psd_block *, double now, const uint64_t *waited) noexcept
    int psd_block_has(const psd_block *, int64_t rank) noexcept
    int64_t psd_block_lend(psd_block *, uint64_t *head, char *body, uint64_t number, uint64_t body_number) noexcept
    int64_t psd_block_surplus(psd_block *, int64_t kept) noexcept
    void psd_block_adopt(psd_block *, int64_t page, uint64_t version, uint64_t content) noexcept
    int64_t psd_block_spare(psd_block *, psd_outcome *why) noexcept
    psd_outcome psd_block_publish(psd_block *, int64_t spare, uint64_t version) noexcept
    int psd_block_discard(psd_block *, int64_t page, uint64_t use) noexcept
    int64_t psd_block_pin(psd_block *, psd_outcome *why) noexcept
    int psd_block_unpin(psd_block *, int64_t page, uint64_t use) noexcept
    int64_t psd_block_pins(psd_block *, int64_t page, uint64_t use) noexcept
    psd_page_state psd_block_state(psd_block *, int64_t page, uint64_t use) noexcept
    int64_t psd_block_stop(psd_block *) noexcept


cdef inline uint64_t word_of(object mask, size_t i):
    """A word of a mask, which is an integer."""
    return mask >> (64 * i) & 0xFFFFFFFFFFFFFFFF


cdef inline object integer_of(const uint64_t *words, size_t n):
    """A mask of n words."""
    return int.from_bytes((<const char *>words)[: 8 * n], "little")
