"""The C store of a table's partition, as _tables.pyx sees it."""

from libc.stdint cimport intptr_t

from psd_core._table_c cimport psd_sums, psd_table, pthread_mutex_t


cdef class Mutex:
    cdef pthread_mutex_t mutex
    cdef bint is_made


cdef class Partition:
    cdef psd_table table
    cdef Py_buffer view
    cdef bint is_attached, has_lock
    cdef object on_store
    cdef readonly Mutex writing


cdef class Sums:
    cdef psd_sums sums
    cdef readonly intptr_t dim
    cdef bint is_ready
