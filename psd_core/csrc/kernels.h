/* The C face of psd_core: pure functions on memory that the caller owns.
 *
 * They allocate nothing, raise nothing, keep nothing, and trust their arguments: lengths, types, alignment and overlap are
 * checked once, in _kernels.pyx. Arrays are void pointers with a psd_dtype; the typed bodies are templates (elementwise.h,
 * step.h, rule_*.h), compiled once per type by kernels_f32.c and kernels_f64.c. half.c widens what has 16 bits.
 */
#ifndef PSD_KERNELS_H
#define PSD_KERNELS_H

#include <stdint.h>

#include "content.h"

/* Half precision is for gradients, and for what only reads; whatever else a call has is then of PSD_F32. */
typedef enum { PSD_F32, PSD_F64, PSD_F16, PSD_BF16 } psd_dtype;

/* acc[i] += weight * grad[i]. The type is that of the gradient. */
void psd_accumulate(psd_dtype, void *acc, const void *grad, double weight, intptr_t n);

/* out[i] = weight * grad[i]. The type is that of the gradient. */
void psd_scaled_copy(psd_dtype, void *out, const void *grad, double weight, intptr_t n);

/* The sum over segments, end to end, the i-th of which has a weight of its own: out = weights[i] * grad, added to what is there
 * if `add`. */
void psd_weigh_segments(psd_dtype, void *out, const void *grad, intptr_t count, const uint32_t *ends, const double *weights, int add);

/* out[i] = half[i], of PSD_F16 or PSD_BF16, exactly */
void psd_widen(psd_dtype, float *out, const void *half, intptr_t n);

/* The index of the first NaN or infinity, or -1. */
intptr_t psd_first_nonfinite(psd_dtype, const void *x, intptr_t n);

#define PSD_LIMBS 68 /* of 32 bits, from 2^-1074 on: room for any sum of squares */

/* Adds the squares of x to a sum of PSD_LIMBS limbs in units of 2^-1074, whose limbs are less than 2^32 before and after. x begins `offset` elements
 * behind the start of a run of 16, 0 <= offset < 16; see squares.h. Returns 0 if a square or a run's sum is not finite. */
int psd_add_squares(psd_dtype, uint64_t *limbs, const void *x, intptr_t n, intptr_t offset);

/* Adds the products x[i] * y[i], of PSD_F32 or PSD_F64, likewise: to `plus`, and what is negative, without its sign, to `minus`. */
int psd_add_products(psd_dtype, uint64_t *plus, uint64_t *minus, const void *x, const void *y, intptr_t n, intptr_t offset);

#include "rules.h" /* made when building */

/* The arrays of one step, all of one length, and of one type but for the gradient. An output is its own input
 * (in place) or disjoint from everything else. */
typedef struct {
    const void *param_in;
    void *param_out;
    const void *slots_in[PSD_SLOTS_MAX]; /* a slot that the caller does not keep is NULL in both */
    void *slots_out[PSD_SLOTS_MAX];
    const void *acc; /* this or grad may be NULL, not both */
    const void *grad;
    double weight; /* of grad */
    double scale;  /* of acc + weight * grad */
    psd_dtype grad_dtype; /* that of all, or half precision where that is PSD_F32 */
    psd_page_sums *sums;  /* not NULL: param_out goes past the caches, and these become the sums of its whole pieces */
} psd_arrays;

/* The segments of a block: pieces of tensors, end to end. steps_out may be steps_in. */
typedef struct {
    intptr_t count;
    const uint32_t *ends;
    const uint8_t *touched;
    const uint64_t *steps_in; /* updates applied so far */
    uint64_t *steps_out;
} psd_segments;

/* One update of a block: touched segments are stepped, the others copied through. */
void psd_step_block(psd_dtype, int rule, const psd_arrays *, const psd_hyper *, const psd_segments *);

/* A rule on rows of float, prepared once for all rows of an update. `rowwise` is for Adagrad alone: one sum for a row. */
typedef struct {
    int rule, rowwise;
    double scale; /* of the gradient */
    _Alignas(16) char constants[128];
} psd_row_rule;

/* What tables need of the kernels for float, without those for double. */
void psd_accumulate_f32(float *acc, const float *grad, float weight, intptr_t n);
void psd_scaled_copy_f32(float *out, const float *grad, float weight, intptr_t n);
void psd_prepare_rows_f32(psd_row_rule *, int rule, const psd_hyper *, uint64_t step, double scale, int rowwise);

/* One update of a row, value first, from one place to another. slot_at: offsets of the rule's slots from the value, -1 for one
 * that is not kept. */
void psd_step_row_f32(const psd_row_rule *, const float *in, float *out, const float *grad, intptr_t dim, const int64_t *slot_at);

#endif
