"""Entries to the C functions of codecs. Everything runs without the GIL.

``codecs.py`` documents them, names what does not fit, and lays out the data; here is what memory safety needs, as assertions on
typed memoryviews.
"""

from libc.stdint cimport intptr_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc


cdef extern from "codec.h" nogil:
    ctypedef enum psd_codec:
        PSD_SIGN_CODEC
    ctypedef enum psd_codec_field:
        PSD_CODEC_SOUND
    ctypedef enum psd_topk_field:
        PSD_TOPK_SOUND
    enum:
        PSD_CODEC_BLOCK
        PSD_TOPK_CHUNK
    ctypedef struct psd_topk_parts:
        uint8_t *counts
        uint8_t *values
        uint8_t *offsets
    intptr_t psd_first_nonfinite_sum(const float *, const float *, intptr_t) noexcept
    intptr_t psd_codec_encode(psd_codec, const float *, float *, uint64_t, int, uint8_t *, uint8_t *, intptr_t) noexcept
    psd_codec_field psd_codec_fault(psd_codec, const uint8_t *, const uint8_t *, intptr_t, intptr_t *) noexcept
    void psd_codec_decode(psd_codec, const uint8_t *, const uint8_t *, float *, intptr_t) noexcept
    void psd_codec_accumulate(psd_codec, const uint8_t *, const uint8_t *, float *, float, intptr_t) noexcept
    intptr_t psd_codec_follow(psd_codec, const float *, const float *, float *, uint8_t *, uint8_t *, intptr_t) noexcept
    intptr_t psd_topk_room(intptr_t, intptr_t) noexcept
    intptr_t psd_topk_encode(const float *, float *, intptr_t, intptr_t, psd_topk_parts, float *, uint32_t *) noexcept
    psd_topk_field psd_topk_fault(psd_topk_parts, intptr_t, intptr_t, intptr_t *) noexcept
    void psd_topk_decode(psd_topk_parts, float *, intptr_t, intptr_t) noexcept
    void psd_topk_accumulate(psd_topk_parts, float *, float, intptr_t, intptr_t) noexcept


BLOCK = PSD_CODEC_BLOCK
CHUNK = PSD_TOPK_CHUNK


cdef float *_floats(float[::1] array) noexcept:
    return &array[0] if array is not None and array.shape[0] else NULL


def encode(
    int codec, const float[::1] values not None, float[::1] residual, uint64_t seed, bint is_stochastic, intptr_t codes_at,
    uint8_t[::1] out not None, bint is_finite,
):
    """Encode values + residual into `out`, scales first; returns the first index that is not finite, or -1.

    is_finite: the values are known to be; only with a residual.
    """
    cdef intptr_t n = values.shape[0], wrong = -1, found
    cdef float *kept = _floats(residual)
    assert 0 <= codec <= PSD_SIGN_CODEC and codes_at <= out.shape[0] and (residual is None or residual.shape[0] == n)
    if n == 0:
        return wrong
    with nogil:
        if kept != NULL and not is_finite:
            wrong = psd_first_nonfinite_sum(&values[0], kept, n)
        if wrong < 0:
            wrong = psd_codec_encode(<psd_codec>codec, &values[0], kept, seed, is_stochastic, &out[0], &out[0] + codes_at, n)
            if wrong >= 0:
                found = psd_first_nonfinite_sum(&values[wrong], kept + wrong if kept != NULL else NULL, n - wrong)
                wrong += found if found > 0 else 0
    return wrong


def fault(int codec, const uint8_t[::1] data not None, intptr_t codes_at, intptr_t n):
    """The field of the first flaw of encoded data, and its place there; the field is 0 if there is none."""
    cdef intptr_t at = 0
    cdef psd_codec_field field
    assert 0 <= codec <= PSD_SIGN_CODEC and codes_at <= data.shape[0]
    if n == 0:
        return 0, 0
    with nogil:
        field = psd_codec_fault(<psd_codec>codec, &data[0], &data[0] + codes_at, n, &at)
    return <int>field, at


def decode(int codec, const uint8_t[::1] data not None, intptr_t codes_at, float[::1] out not None):
    """Set `out` to the numbers of data in which `fault` has found none."""
    cdef intptr_t n = out.shape[0]
    assert 0 <= codec <= PSD_SIGN_CODEC and codes_at <= data.shape[0]
    if n:
        with nogil:
            psd_codec_decode(<psd_codec>codec, &data[0], &data[0] + codes_at, &out[0], n)


def accumulate(int codec, const uint8_t[::1] data not None, intptr_t codes_at, float[::1] acc not None, float weight):
    """Add the weighted numbers of data in which `fault` has found none."""
    cdef intptr_t n = acc.shape[0]
    assert 0 <= codec <= PSD_SIGN_CODEC and codes_at <= data.shape[0]
    if n:
        with nogil:
            psd_codec_accumulate(<psd_codec>codec, &data[0], &data[0] + codes_at, &acc[0], weight, n)


def follow(
    int codec, const float[::1] values not None, const float[::1] before not None, float[::1] after not None,
    intptr_t codes_at, uint8_t[::1] out not None,
):
    """Encode values - before into `out`, scales first, and set `after` to before + that; False if it is not finite."""
    cdef intptr_t n = values.shape[0], wrong = -1
    assert 0 <= codec <= PSD_SIGN_CODEC and codes_at <= out.shape[0] and before.shape[0] == after.shape[0] == n
    if n:
        with nogil:
            wrong = psd_codec_follow(<psd_codec>codec, &values[0], &before[0], &after[0], &out[0], &out[0] + codes_at, n)
    return wrong < 0


cdef int _set_parts(psd_topk_parts *parts, const uint8_t[::1] data, intptr_t n, intptr_t k) except -1:
    cdef intptr_t chunks = (n + PSD_TOPK_CHUNK - 1) // PSD_TOPK_CHUNK
    assert 0 < k <= n < 4294967296 and data.shape[0] == 4 * chunks + 6 * k
    parts.counts = <uint8_t *>&data[0]
    parts.values = parts.counts + 4 * chunks
    parts.offsets = parts.values + 4 * k
    return 0


def topk_encode(const float[::1] values not None, float[::1] residual, intptr_t k, uint8_t[::1] out not None):
    """Encode the k largest elements of values + residual; returns the first index that is not finite, or -1."""
    cdef intptr_t n = values.shape[0], room, wrong
    cdef float *kept = _floats(residual)
    cdef float *found
    cdef uint32_t *indices
    cdef psd_topk_parts parts
    assert residual is None or residual.shape[0] == n
    if n == 0:
        return -1
    _set_parts(&parts, out, n, k)
    room = psd_topk_room(n, k)
    found, indices = <float *>malloc(room * sizeof(float)), <uint32_t *>malloc(room * sizeof(uint32_t))
    try:
        if found == NULL or indices == NULL:
            raise MemoryError(f"no memory to find the largest {k} of {n} elements")
        with nogil:
            wrong = psd_topk_encode(&values[0], kept, n, k, parts, found, indices)
    finally:
        free(found)
        free(indices)
    return wrong


def topk_fault(const uint8_t[::1] data not None, intptr_t n, intptr_t k):
    """The field of the first flaw of encoded data, and its place there; the field is 0 if there is none."""
    cdef psd_topk_parts parts
    cdef psd_topk_field field
    cdef intptr_t at = 0
    if n == 0:
        return 0, 0
    _set_parts(&parts, data, n, k)
    with nogil:
        field = psd_topk_fault(parts, n, k, &at)
    return <int>field, at


def topk_decode(const uint8_t[::1] data not None, intptr_t k, float[::1] out not None):
    """Set `out` to the numbers of data in which `topk_fault` has found none."""
    cdef psd_topk_parts parts
    cdef intptr_t n = out.shape[0]
    if n:
        _set_parts(&parts, data, n, k)
        with nogil:
            psd_topk_decode(parts, &out[0], n, k)


def topk_accumulate(const uint8_t[::1] data not None, intptr_t k, float[::1] acc not None, float weight):
    """Add the weighted numbers of data in which `topk_fault` has found none."""
    cdef psd_topk_parts parts
    cdef intptr_t n = acc.shape[0]
    if n:
        _set_parts(&parts, data, n, k)
        with nogil:
            psd_topk_accumulate(parts, &acc[0], weight, n, k)
