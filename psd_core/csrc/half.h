/* Gradients in half precision: 16 bits per number, widened to float where a kernel reads them. The typed face of half.c.
 *
 * Each function takes the type of the half-precision array, PSD_F16 or PSD_BF16; its other arrays are float.
 */
#ifndef PSD_HALF_H
#define PSD_HALF_H

#include "kernels.h"

/* out[i] = half[i], which float holds exactly: infinities, NaNs, zeros' signs and all. */
void psd_widen_half(psd_dtype, float *out, const uint16_t *half, intptr_t n);

void psd_accumulate_half(psd_dtype, float *acc, const uint16_t *grad, float weight, intptr_t n);
void psd_scaled_copy_half(psd_dtype, float *out, const uint16_t *grad, float weight, intptr_t n);
intptr_t psd_first_nonfinite_half(psd_dtype, const uint16_t *x, intptr_t n);
int psd_add_squares_half(psd_dtype, uint64_t *limbs, const uint16_t *x, intptr_t n, intptr_t offset);

#endif
