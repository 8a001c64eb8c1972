/* Numbers of 16 bits, widened to float on the way: half.h says which functions.
 *
 * Widening (half_bits.h) is exact, so every result has the bits of widening first and calling the function for floats; the
 * arithmetic is the same, in the same order.
 */
#include "portable.h"
#include "half.h"
#include "half_bits.h"

#define real float
#define FN(name) name##_f32
#include "typed.h"
#undef real
#undef FN

/* `dtype` is a constant where these are inlined: each type is a loop without branches. */
PSD_INLINE float widened(psd_dtype dtype, uint16_t half)
{
    return dtype == PSD_F16 ? from_float16(half) : from_bfloat16(half);
}

PSD_INLINE void widen_loop(psd_dtype dtype, float *out, const uint16_t *half, intptr_t n)
{
    PSD_ELEMENTWISE
    for (intptr_t i = 0; i < n; i++)
        out[i] = widened(dtype, half[i]);
}

PSD_INLINE void accumulate_loop(psd_dtype dtype, float *acc, const uint16_t *grad, float weight, intptr_t n)
{
    PSD_ELEMENTWISE
    for (intptr_t i = 0; i < n; i++)
        acc[i] = acc[i] + weight * widened(dtype, grad[i]);
}

PSD_INLINE void scaled_copy_loop(psd_dtype dtype, float *out, const uint16_t *grad, float weight, intptr_t n)
{
    PSD_ELEMENTWISE
    for (intptr_t i = 0; i < n; i++)
        out[i] = weight * widened(dtype, grad[i]);
}

PSD_KERNEL void psd_widen_half(psd_dtype dtype, float *out, const uint16_t *half, intptr_t n)
{
    if (dtype == PSD_F16)
        widen_loop(PSD_F16, out, half, n);
    else
        widen_loop(PSD_BF16, out, half, n);
}

PSD_KERNEL void psd_accumulate_half(psd_dtype dtype, float *acc, const uint16_t *grad, float weight, intptr_t n)
{
    if (dtype == PSD_F16)
        accumulate_loop(PSD_F16, acc, grad, weight, n);
    else
        accumulate_loop(PSD_BF16, acc, grad, weight, n);
}

PSD_KERNEL void psd_scaled_copy_half(psd_dtype dtype, float *out, const uint16_t *grad, float weight, intptr_t n)
{
    if (dtype == PSD_F16)
        scaled_copy_loop(PSD_F16, out, grad, weight, n);
    else
        scaled_copy_loop(PSD_BF16, out, grad, weight, n);
}

#define F16_EXPONENT 0x7c00u
#define BF16_EXPONENT 0x7f80u

/* As in elementwise.h, on patterns of 16 bits. */
PSD_KERNEL intptr_t psd_first_nonfinite_half(psd_dtype dtype, const uint16_t *x, intptr_t n)
{
    const uint16_t exponent = dtype == PSD_F16 ? F16_EXPONENT : BF16_EXPONENT;
    const intptr_t tile = 512;
    for (intptr_t begin = 0; begin < n; begin += tile) {
        const intptr_t end = n - begin < tile ? n : begin + tile;
        uint16_t found = 0;
        for (intptr_t i = begin; i < end; i++)
            found |= (uint16_t)((x[i] & exponent) == exponent);
        if (found)
            for (intptr_t i = begin; i < end; i++)
                if ((x[i] & exponent) == exponent)
                    return i;
    }
    return -1;
}

/* The parts of an array that is cut between runs of 16 add up to the whole (squares.h), so tiles end on the grid of runs. They are
 * four times as long as elsewhere, because each call for floats carries through all limbs once. */
int psd_add_squares_half(psd_dtype dtype, uint64_t *limbs, const uint16_t *x, intptr_t n, intptr_t offset)
{
    enum { TILE = 1024 };
    _Alignas(64) float wide[TILE];
    int is_finite = 1;
    for (intptr_t begin = 0; begin < n;) {
        const intptr_t room = TILE - offset, count = n - begin < room ? n - begin : room;
        psd_widen_half(dtype, wide, x + begin, count);
        is_finite &= psd_add_squares_f32(limbs, wide, count, offset);
        begin += count;
        offset = 0;
    }
    return is_finite;
}
