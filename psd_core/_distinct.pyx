"""Checked entries to the C functions that sort out the ids of a batch. Everything runs without the GIL."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int32_t, int64_t, intptr_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free


cdef extern from "distinct.h" nogil:
    void psd_shards_of(const uint64_t *, intptr_t, uint64_t, int64_t *) noexcept
    intptr_t psd_first_elsewhere(const uint64_t *, intptr_t, uint64_t, uint64_t) noexcept
    intptr_t psd_distinct(const uint64_t *, intptr_t, uint64_t, uint64_t, uint64_t *, int64_t *, int32_t *) noexcept
    void psd_sum_rows(const float *, const int32_t *, intptr_t, intptr_t, uint8_t *, float *) noexcept
    void psd_expand_rows(const float *, const int32_t *, intptr_t, intptr_t, float *) noexcept


def shards_of(const uint64_t[::1] ids not None, uint64_t shards, int64_t[::1] out not None):
    """Set `out` to the shard of each id."""
    assert out.shape[0] == ids.shape[0] and 0 < shards < 4294967296
    if ids.shape[0]:
        with nogil:
            psd_shards_of(&ids[0], ids.shape[0], shards, &out[0])


def first_elsewhere(list batches not None, uint64_t shards, uint64_t shard):
    """Find the first id that is not of this shard: the number of its batch, and its place there; None if all are."""
    cdef const uint64_t[::1] ids
    cdef intptr_t number, at
    assert 0 < shards < 4294967296
    for number in range(len(batches)):
        ids = batches[number]
        if ids.shape[0]:
            with nogil:
                at = psd_first_elsewhere(&ids[0], ids.shape[0], shards, shard)
            if at >= 0:
                return number, at
    return None


def offsets(list arrays not None, uint64_t address, uint64_t nbytes):
    """Find where C-contiguous arrays begin behind an address; None if one of them is not wholly within so many bytes."""
    cdef Py_buffer view
    cdef uint64_t start
    found = []
    for array in arrays:
        PyObject_GetBuffer(array, &view, PyBUF_SIMPLE)
        start = <uint64_t>view.buf - address  # large if it lies before
        is_within = start <= nbytes and <uint64_t>view.len <= nbytes - start
        PyBuffer_Release(&view)
        if not is_within:
            return None
        found.append(start)
    return found


def distinct(
    list batches not None, uint64_t seed, uint64_t[::1] out not None, int64_t[:, ::1] starts not None, int32_t[::1] inverse not None,
):
    """Set `out` to the distinct ids of each batch, by shard, one batch behind the other; returns how many there are in all.

    `starts`, a row for each batch, says where each shard's begin, counted from the batch's first one; `inverse` where each id is, likewise.
    """
    cdef const uint64_t[::1] ids
    cdef intptr_t number, n, count, at = 0, total = 0, left = out.shape[0]
    cdef uint64_t shards = starts.shape[1] - 1
    assert 0 < shards < 4294967296 and starts.shape[0] == len(batches) and inverse.shape[0] == left < 2147483648
    for number in range(starts.shape[0]):
        ids = batches[number]
        n = ids.shape[0]
        assert n <= left
        if n == 0:
            starts[number, :] = 0
            continue
        with nogil:
            count = psd_distinct(&ids[0], n, seed, shards, &out[total], &starts[number, 0], &inverse[at])
        if count < 0:
            raise MemoryError(f"no memory to sort {n} ids")
        at, left, total = at + n, left - n, total + count
    assert left == 0
    return total


# What each `inverse` holds was made by `distinct`, for as many rows.
def sum_rows(list batches not None, list inverses not None, list out not None):
    """Set each row of each array of `out` to the sum of the rows of its batch that its `inverse` sends there."""
    cdef const float[:, ::1] rows
    cdef const int32_t[::1] inverse
    cdef float[:, ::1] sums
    cdef intptr_t number, n
    cdef uint8_t *seen
    for number in range(len(batches)):
        rows, inverse, sums = batches[number], inverses[number], out[number]
        n = rows.shape[0]
        assert inverse.shape[0] == n and sums.shape[1] == rows.shape[1] and sums.shape[0] <= n
        if n == 0 or rows.shape[1] == 0:
            continue
        seen = <uint8_t *>calloc(sums.shape[0], 1)
        if seen == NULL:
            raise MemoryError(f"no memory to add {n} rows")
        with nogil:
            psd_sum_rows(&rows[0, 0], &inverse[0], n, rows.shape[1], seen, &sums[0, 0])
        free(seen)


def expand_rows(list batches not None, list inverses not None, list out not None):
    """Set each row of each array of `out` to the row of its batch that its `inverse` names."""
    cdef const float[:, ::1] rows
    cdef const int32_t[::1] inverse
    cdef float[:, ::1] expanded
    cdef intptr_t number, n
    for number in range(len(batches)):
        rows, inverse, expanded = batches[number], inverses[number], out[number]
        n = expanded.shape[0]
        assert inverse.shape[0] == n and expanded.shape[1] == rows.shape[1] and rows.shape[0] <= n
        if n and rows.shape[1]:
            with nogil:
                psd_expand_rows(&rows[0, 0], &inverse[0], n, rows.shape[1], &expanded[0, 0])
