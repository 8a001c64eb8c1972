/* Template over `real`: the typed functions that kernels.c dispatches to. */
void FN(psd_accumulate)(real *acc, const real *grad, real weight, intptr_t n);
void FN(psd_scaled_copy)(real *out, const real *grad, real weight, intptr_t n);
intptr_t FN(psd_first_nonfinite)(const real *x, intptr_t n);
int FN(psd_add_squares)(uint64_t *limbs, const real *x, intptr_t n, intptr_t offset);
int FN(psd_add_products)(uint64_t *plus, uint64_t *minus, const real *x, const real *y, intptr_t n, intptr_t offset);
void FN(psd_step_block)(int rule, const psd_arrays *, const psd_hyper *, const psd_segments *);
