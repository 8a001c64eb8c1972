"""What several extensions use of csrc/kernels.h."""

from libc.stdint cimport intptr_t


cdef extern from "kernels.h" nogil:
    ctypedef enum psd_dtype:
        PSD_F32
        PSD_F64
        PSD_F16
        PSD_BF16
    intptr_t psd_first_nonfinite(psd_dtype, const void *x, intptr_t n) noexcept


cdef inline psd_dtype dtype_of(char letter) noexcept nogil:
    """The type of one of the buffer protocol's letters "f", "d", "e" and "H", which stands for bfloat16."""
    return PSD_F32 if letter == c"f" else PSD_F64 if letter == c"d" else PSD_F16 if letter == c"e" else PSD_BF16
