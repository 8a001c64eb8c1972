"""Checked entries to the C functions that sort out the ids of a batch. Everything runs without the GIL."""

from libc.stdint cimport int32_t, int64_t, intptr_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free


cdef extern from "distinct.h" nogil:
    void psd_shards_of(const uint64_t *, intptr_t, uint64_t, int64_t *) noexcept
    intptr_t psd_distinct(const uint64_t *, intptr_t, uint64_t, uint64_t, uint64_t *, int64_t *, int32_t *) noexcept
    void psd_sum_rows(const float *, const int32_t *, intptr_t, intptr_t, uint8_t *, float *) noexcept
    void psd_expand_rows(const float *, const int32_t *, intptr_t, intptr_t, float *) noexcept


def shards_of(const uint64_t[::1] ids not None, uint64_t shards, int64_t[::1] out not None):
    """Set `out` to the shard of each id."""
    assert out.shape[0] == ids.shape[0] and 0 < shards < 4294967296
    if ids.shape[0]:
        with nogil:
            psd_shards_of(&ids[0], ids.shape[0], shards, &out[0])


def distinct(
    const uint64_t[::1] ids not None, uint64_t seed, uint64_t[::1] out not None, int64_t[::1] starts not None, int32_t[::1] inverse not None,
):
    """Set `out` to the distinct ids by shard, as many as are returned, with where each shard's begin, and where each id is."""
    cdef intptr_t n = ids.shape[0], count
    cdef uint64_t shards = starts.shape[0] - 1
    assert out.shape[0] == n and inverse.shape[0] == n < 2147483648 and 0 < shards < 4294967296
    if n == 0:
        starts[:] = 0
        return 0
    with nogil:
        count = psd_distinct(&ids[0], n, seed, shards, &out[0], &starts[0], &inverse[0])
    if count < 0:
        raise MemoryError(f"no memory to sort {n} ids")
    return count


# What `inverse` holds was made by `distinct`, for as many rows.
def sum_rows(const float[:, ::1] rows not None, const int32_t[::1] inverse not None, float[:, ::1] out not None):
    """Set each row of `out` to the sum of the rows that `inverse` sends there."""
    cdef intptr_t n = rows.shape[0]
    assert inverse.shape[0] == n and out.shape[1] == rows.shape[1] and out.shape[0] <= n
    if n == 0 or rows.shape[1] == 0:
        return
    cdef uint8_t *seen = <uint8_t *>calloc(out.shape[0], 1)
    if seen == NULL:
        raise MemoryError(f"no memory to add {n} rows")
    with nogil:
        psd_sum_rows(&rows[0, 0], &inverse[0], n, rows.shape[1], seen, &out[0, 0])
    free(seen)


def expand_rows(const float[:, ::1] rows not None, const int32_t[::1] inverse not None, float[:, ::1] out not None):
    """Set each row of `out` to the one that `inverse` names."""
    cdef intptr_t n = out.shape[0]
    assert inverse.shape[0] == n and out.shape[1] == rows.shape[1] and rows.shape[0] <= n
    if n and rows.shape[1]:
        with nogil:
            psd_expand_rows(&rows[0, 0], &inverse[0], n, rows.shape[1], &out[0, 0])
