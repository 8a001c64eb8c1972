"""What is known of ranks, as _steps.pyx sees it; and words that steps see, too."""

from libc.stdint cimport uint32_t, uint64_t

from psd_core._block_c cimport psd_rank, psd_ranks

cdef extern from *:
    """
    #define psd_or(word, bits) __atomic_fetch_or(word, bits, __ATOMIC_SEQ_CST)
    #define psd_see(word) __atomic_load_n(word, __ATOMIC_SEQ_CST)
    #define psd_set(word, value) __atomic_store_n(word, value, __ATOMIC_SEQ_CST)
    #define psd_take(word) __atomic_exchange_n(word, 0, __ATOMIC_SEQ_CST)
    #define PSD_NEVER UINT64_MAX
    """
    uint64_t PSD_NEVER
    uint64_t psd_or(uint64_t *word, uint64_t bits) nogil
    uint64_t psd_see(uint64_t *word) nogil
    uint32_t psd_see_inside "psd_see"(uint32_t *word) nogil
    void psd_set(uint64_t *word, uint64_t value) nogil
    void psd_set_gates "psd_set"(uint32_t *word, uint32_t value) nogil
    uint64_t psd_take(uint64_t *word) nogil


cdef class Ranks:
    cdef psd_ranks ranks

    cdef psd_rank *at(self, Py_ssize_t rank) except NULL


cdef class RankPlace:
    cdef Ranks ranks
    cdef psd_rank own
    cdef psd_rank *rank_
