"""A shard's part of all tables, as _steps.pyx sees it."""

from psd_core._table cimport Mutex
from psd_core._tables_c cimport psd_tables


cdef class TablesCore:
    cdef psd_tables tables
    cdef list partitions  # until `close`
    cdef readonly Mutex lock
