/* Template over `real`: FTRL-proximal.
 *
 * Source: McMahan et al. 2013, "Ad click prediction: a view from the trenches", alg. 1, with per-coordinate learning rates. One
 * thing is written differently: sigma = (sqrt(n + g^2) - sqrt(n)) / lr as g^2 / (lr * (sqrt(n + g^2) + sqrt(n))), which does not
 * cancel. The parameter is a function of the slots; an initial value other than 0 enters through sigma * parameter alone.
 *
 * Scalars: lr (alpha), beta, l1, l2. Flags: none. Slots: n, the sum of squares ("accumulator"), and z ("linear").
 */
#ifndef PSD_RULE_FTRL_H
#define PSD_RULE_FTRL_H
enum { FTRL_LR, FTRL_BETA, FTRL_L1, FTRL_L2 };
#endif

static void FN(ftrl_prepare)(const psd_hyper *hyper, uint64_t step, FN(constants) *k)
{
    (void)step;
    for (int i = FTRL_LR; i <= FTRL_L2; i++)
        k->of[i] = (real)hyper->scalars[i];
    k->variant = 0;
}

PSD_KERNEL void FN(psd_ftrl_tile)(const real *p_in, real *p_out, const real *g_in, const real *const *slots_in,
                                  real *const *slots_out, intptr_t n, const FN(constants) *k)
{
    const real lr = k->of[FTRL_LR], beta = k->of[FTRL_BETA], l1 = k->of[FTRL_L1], l2 = k->of[FTRL_L2];
    const real *const sum_in = slots_in[0], *const z_in = slots_in[1];
    real *const sum_out = slots_out[0], *const z_out = slots_out[1];
    PSD_ELEMENTWISE
    for (intptr_t i = 0; i < n; i++) {
        const real g = g_in[i], square = g * g;
        const real sum = sum_in[i] + square, root = REAL_SQRT(sum);
        const real roots = lr * (root + REAL_SQRT(sum_in[i]));
        const real quotient = square / roots;
        const real sigma = roots > 0 ? quotient : 0;
        const real z = z_in[i] + (g - sigma * p_in[i]);
        const real beyond = REAL_ABS(z) - l1;
        const real p = (z < 0 ? beyond : -beyond) / ((beta + root) / lr + l2);
        sum_out[i] = sum;
        z_out[i] = z;
        p_out[i] = beyond > 0 ? p : 0;
    }
}
