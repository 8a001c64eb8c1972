/* Template over `real`: Lion.
 *
 * Source: Chen et al. 2023 (arXiv:2302.06675) alg. 2, operation by operation. The decay is added to the sign, as there, not
 * multiplied as 1 - lr * weight_decay: as a float32 that is off by up to 3e-8, in every step. The sign of 0 is 0.
 *
 * Scalars: lr, beta1, beta2, weight_decay. Flags: 1 maximize. Slots: the momentum.
 */
#ifndef PSD_RULE_LION_H
#define PSD_RULE_LION_H
enum { LION_LR, LION_BETA1, LION_FRESH1, LION_BETA2, LION_FRESH2, LION_DECAY, LION_SIGN };
#endif

static void FN(lion_prepare)(const psd_hyper *hyper, uint64_t step, FN(constants) *k)
{
    (void)step;
    k->of[LION_LR] = (real)hyper->scalars[0];
    k->of[LION_BETA1] = (real)hyper->scalars[1];
    k->of[LION_FRESH1] = (real)(1 - hyper->scalars[1]);
    k->of[LION_BETA2] = (real)hyper->scalars[2];
    k->of[LION_FRESH2] = (real)(1 - hyper->scalars[2]);
    k->of[LION_DECAY] = (real)hyper->scalars[3];
    k->of[LION_SIGN] = hyper->flags & 1 ? (real)-1 : (real)1;
    k->variant = 0;
}

PSD_KERNEL void FN(psd_lion_tile)(const real *p_in, real *p_out, const real *g_in, const real *const *slots_in,
                                  real *const *slots_out, intptr_t n, const FN(constants) *k)
{
    const real lr = k->of[LION_LR], beta1 = k->of[LION_BETA1], fresh1 = k->of[LION_FRESH1];
    const real beta2 = k->of[LION_BETA2], fresh2 = k->of[LION_FRESH2], weight_decay = k->of[LION_DECAY], sign = k->of[LION_SIGN];
    const real *const m_in = slots_in[0];
    real *const m_out = slots_out[0];
    PSD_ELEMENTWISE
    for (intptr_t i = 0; i < n; i++) {
        const real p = p_in[i], g = sign * g_in[i], m = m_in[i];
        const real mixed = beta1 * m + fresh1 * g;
        const real direction = (mixed > 0 ? (real)1 : (real)0) - (mixed < 0 ? (real)1 : (real)0);
        m_out[i] = beta2 * m + fresh2 * g;
        p_out[i] = p - lr * (direction + weight_decay * p);
    }
}
