"""The C core of a small block, as _steps.pyx sees it."""

from libc.stdint cimport uint32_t, uint64_t

from psd_core._block_c cimport psd_block, psd_dtype


cdef class BlockCore:
    cdef psd_block block
    cdef Py_buffer front
    cdef const uint32_t[::1] ends
    cdef uint64_t[16] waited_in_few
    cdef bint has_front
    cdef tuple zeros
    cdef object on_store, error
    cdef list mappings  # of the entries: what keeps their memory
    cdef object ranks  # what keeps block.ranks

    cdef uint64_t *mask(self, object mask) except NULL
    cdef void ring(self) noexcept
    cdef int check(self, int status) except -1
    cdef psd_dtype dtype_of(self, Py_buffer *view) except *
