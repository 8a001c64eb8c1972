"""What `_steps.pyx` uses of armed steps, csrc/steps.h and step_loop.h."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from psd_core._block_c cimport psd_block, psd_dtype, psd_ranks
from psd_core._tables_c cimport psd_tables


cdef extern from "step_frames.h" nogil:
    enum:
        PSD_AGAIN_REVOKED
        PSD_AGAIN_CUT
        PSD_AGAIN_LONG_WAIT
    ctypedef struct psd_step_head:
        uint64_t epoch, clock


cdef extern from "steps.h" nogil:
    enum:
        PSD_STEP_BLOCKS_MAX
    ctypedef struct psd_step_place:
        psd_block *block
        psd_dtype gradient_dtype
        size_t gradient_bytes, parameter_bytes, first_scalar
    ctypedef struct psd_step_voice:
        uint64_t round
        int is_there, is_mixed
        double *scalars
        uint64_t *spoke
        uint64_t *counted
        uint64_t *since
    ctypedef struct psd_steps:
        size_t blocks, scalars, mask_words
        psd_step_place place[PSD_STEP_BLOCKS_MAX]
        psd_tables *tables
        double *low
        double *high
        int has_rounds, has_bound
        uint64_t bound
        psd_ranks *ranks
        uint64_t *waited
        uint64_t stop_at
        uint32_t has_gates
        size_t head_bytes, gradient_bytes, parameter_bytes
        psd_step_voice voice[2]
    ctypedef struct psd_step:
        psd_steps *steps
        int64_t rank
        const psd_step_head *head
        uint64_t counted_blocks
        int hands_back
        int64_t page[PSD_STEP_BLOCKS_MAX]
        uint64_t tables_version
    size_t psd_step_blocks(const psd_steps *)
    int psd_steps_init(psd_steps *)
    void psd_steps_free(psd_steps *)
    int psd_steps_hear(psd_steps *, uint64_t round, int64_t rank, uint64_t since, const double *scalars, int is_alike)
    int psd_steps_stop(const psd_steps *, int64_t rank, uint64_t clock)
    int psd_steps_voice(psd_steps *, int odd, psd_step_voice *copy)
    int psd_step_begin(psd_step *)
    int psd_step_count(psd_step *, size_t i, const void *gradient)
    int psd_step_count_rows(psd_step *)
    void psd_step_end(psd_step *)
    int psd_step_reached(const psd_step *)
    int psd_step_pin(psd_step *, double began)
    void psd_step_unpin(psd_step *)
    void psd_step_abandon(psd_step *)
    int psd_step_again(psd_step *, int reason, int is_inside)
    size_t psd_eights(size_t)


cdef extern from "step_loop.h" nogil:
    enum:
        PSD_STEP_PLACES_MAX
    ctypedef enum psd_served:
        PSD_SERVED_CLOSED
        PSD_SERVED_OTHER
        PSD_SERVED_WRONG
        PSD_SERVED_AGAIN
        PSD_SERVED_TICKETS
        PSD_SERVED_ERROR
    ctypedef struct psd_step_connection:
        psd_step step
        int fd, error, in_memory, reason
        size_t places
        const void *gradient[PSD_STEP_BLOCKS_MAX]
        void *parameter[PSD_STEP_PLACES_MAX][PSD_STEP_BLOCKS_MAX]
        char *memory
        size_t memory_bytes
        uint64_t done
        char *buffer
        char *rows
        double began
        size_t capacity, have
    int psd_step_connection_init(psd_step_connection *)
    void psd_step_connection_free(psd_step_connection *)
    psd_served psd_steps_serve(psd_step_connection *)
    void psd_step_cancel(psd_step_connection *)
    psd_served psd_step_hold(psd_step_connection *, const char *message, size_t nbytes)
    int psd_step_find_rows(psd_step_connection *)
    size_t psd_step_answered_bytes(const psd_step_connection *)
