"""Entries to the C functions of deltas. Everything runs without the GIL.

``deltas.py`` documents them and names what does not fit; here is what memory safety needs, as assertions on typed memoryviews.
"""

from libc.stdint cimport intptr_t, uint8_t


cdef extern from "delta.h" nogil:
    ctypedef enum psd_delta_field:
        PSD_DELTA_SOUND
    enum:
        PSD_DELTA_CHUNK
    intptr_t psd_delta_encode(const uint8_t *, const uint8_t *, intptr_t, int, uint8_t *, intptr_t) noexcept
    psd_delta_field psd_delta_fault(const uint8_t *, intptr_t, intptr_t, int, intptr_t *) noexcept
    void psd_delta_apply(const uint8_t *, uint8_t *, intptr_t, int) noexcept


CHUNK = PSD_DELTA_CHUNK


cdef intptr_t _elements(intptr_t nbytes, int size) except -1:
    assert size in (1, 2, 4, 8) and nbytes % size == 0
    return nbytes // size


def encode(const uint8_t[::1] old not None, const uint8_t[::1] new not None, int size, uint8_t[::1] out not None):
    """Write the delta from `old` to `new` to `out`; returns its length, or -1 if it does not fit."""
    cdef intptr_t n = _elements(old.shape[0], size), nbytes
    assert new.shape[0] == old.shape[0]
    if n == 0:
        return 0
    if out.shape[0] == 0:
        return -1
    with nogil:
        nbytes = psd_delta_encode(&old[0], &new[0], n, size, &out[0], out.shape[0])
    return nbytes


def fault(const uint8_t[::1] delta not None, intptr_t nbytes, int size):
    """The field of the first flaw of a delta of arrays of so many bytes, and its chunk; the field is 0 if there is none."""
    cdef intptr_t n = _elements(nbytes, size), chunk = 0, length = delta.shape[0]
    cdef psd_delta_field field
    cdef const uint8_t *start = &delta[0] if length else NULL
    with nogil:
        field = psd_delta_fault(start, length, n, size, &chunk)
    return <int>field, chunk


def apply(const uint8_t[::1] delta not None, uint8_t[::1] values not None, int size):
    """Change `values` by a delta in which `fault` has found nothing."""
    cdef intptr_t n = _elements(values.shape[0], size)
    if n == 0:
        return
    assert delta.shape[0]
    with nogil:
        psd_delta_apply(&delta[0], &values[0], n, size)
