"""A shard's part of all tables, as _steps.pyx sees it."""

from libc.stdint cimport uint64_t

from psd_core._table cimport Mutex
from psd_core._tables_c cimport psd_tables


cdef class TablesCore:
    cdef psd_tables tables
    cdef list partitions  # until `close`
    cdef list sums
    cdef object ranks  # that it rings for
    cdef uint64_t *masks  # room for one
    cdef double *numbers  # room for all scalars

    cdef uint64_t *mask(self, object mask) except NULL
    cdef void reach(self, uint64_t version) noexcept
    cdef readonly Mutex lock
