/* From the untyped face to the typed templates. */
#include "kernels.h"
#include "half.h"

#include <stddef.h>

#define real float
#define FN(name) name##_f32
#include "typed.h"
#undef real
#undef FN
#define real double
#define FN(name) name##_f64
#include "typed.h"
#undef real
#undef FN

void psd_accumulate(psd_dtype dtype, void *acc, const void *grad, double weight, intptr_t n)
{
    if (dtype == PSD_F32)
        psd_accumulate_f32(acc, grad, (float)weight, n);
    else if (dtype == PSD_F64)
        psd_accumulate_f64(acc, grad, weight, n);
    else
        psd_accumulate_half(dtype, acc, grad, (float)weight, n);
}

void psd_scaled_copy(psd_dtype dtype, void *out, const void *grad, double weight, intptr_t n)
{
    if (dtype == PSD_F32)
        psd_scaled_copy_f32(out, grad, (float)weight, n);
    else if (dtype == PSD_F64)
        psd_scaled_copy_f64(out, grad, weight, n);
    else
        psd_scaled_copy_half(dtype, out, grad, (float)weight, n);
}

void psd_weigh_segments(psd_dtype dtype, void *out, const void *grad, intptr_t count, const uint32_t *ends, const double *weights,
                        int add)
{
    size_t out_size = dtype == PSD_F64 ? 8 : 4, grad_size = dtype == PSD_F64 ? 8 : dtype == PSD_F32 ? 4 : 2;
    uint32_t start = 0;
    for (intptr_t i = 0; i < count; i++) {
        void *to = (char *)out + start * out_size;
        const void *from = (const char *)grad + start * grad_size;
        (add ? psd_accumulate : psd_scaled_copy)(dtype, to, from, weights[i], ends[i] - start);
        start = ends[i];
    }
}

void psd_widen(psd_dtype dtype, float *out, const void *half, intptr_t n)
{
    psd_widen_half(dtype, out, half, n);
}

intptr_t psd_first_nonfinite(psd_dtype dtype, const void *x, intptr_t n)
{
    if (dtype == PSD_F32)
        return psd_first_nonfinite_f32(x, n);
    if (dtype == PSD_F64)
        return psd_first_nonfinite_f64(x, n);
    return psd_first_nonfinite_half(dtype, x, n);
}

int psd_add_squares(psd_dtype dtype, uint64_t *limbs, const void *x, intptr_t n, intptr_t offset)
{
    if (dtype == PSD_F32)
        return psd_add_squares_f32(limbs, x, n, offset);
    if (dtype == PSD_F64)
        return psd_add_squares_f64(limbs, x, n, offset);
    return psd_add_squares_half(dtype, limbs, x, n, offset);
}

int psd_add_products(psd_dtype dtype, uint64_t *plus, uint64_t *minus, const void *x, const void *y, intptr_t n, intptr_t offset)
{
    return dtype == PSD_F32 ? psd_add_products_f32(plus, minus, x, y, n, offset)
                            : psd_add_products_f64(plus, minus, x, y, n, offset);
}

void psd_step_block(psd_dtype dtype, int rule, const psd_arrays *arrays, const psd_hyper *hyper,
                    const psd_segments *segments)
{
    (dtype == PSD_F32 ? psd_step_block_f32 : psd_step_block_f64)(rule, arrays, hyper, segments);
}
