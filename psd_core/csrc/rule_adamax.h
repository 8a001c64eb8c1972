/* Template over `real`: Adamax.
 *
 * Source: Kingma and Ba 2015 (arXiv:1412.6980) alg. 2; torch.optim.Adamax operation by operation: epsilon is added to the
 * gradient's magnitude before the maximum.
 *
 * keras: epsilon is added after the maximum, where it divides, as in keras.optimizers.Adamax.
 *
 * Scalars: lr, beta1, beta2, eps, weight_decay. Flags: 1 maximize, 2 keras. Slots: first moment, infinity norm.
 */
#ifndef PSD_RULE_ADAMAX_H
#define PSD_RULE_ADAMAX_H
enum { ADAMAX_RATE, ADAMAX_FRESH1, ADAMAX_BETA2, ADAMAX_EPS, ADAMAX_LATE_EPS, ADAMAX_DECAY, ADAMAX_SIGN };
#endif

static void FN(adamax_prepare)(const psd_hyper *hyper, uint64_t step, FN(constants) *k)
{
    k->of[ADAMAX_RATE] = (real)(hyper->scalars[0] / (1 - psd_power(hyper->scalars[1], step)));
    k->of[ADAMAX_FRESH1] = (real)(1 - hyper->scalars[1]);
    k->of[ADAMAX_BETA2] = (real)hyper->scalars[2];
    k->of[ADAMAX_EPS] = hyper->flags & 2 ? (real)0 : (real)hyper->scalars[3];
    k->of[ADAMAX_LATE_EPS] = hyper->flags & 2 ? (real)hyper->scalars[3] : (real)0;
    k->of[ADAMAX_DECAY] = (real)hyper->scalars[4];
    k->of[ADAMAX_SIGN] = hyper->flags & 1 ? (real)-1 : (real)1;
    k->variant = hyper->scalars[4] != 0;
}

PSD_INLINE void FN(adamax_loop)(const real *p_in, real *p_out, const real *g_in, const real *const *slots_in,
                                real *const *slots_out, intptr_t n, const FN(constants) *k, int decay)
{
    const real rate = k->of[ADAMAX_RATE], fresh1 = k->of[ADAMAX_FRESH1], beta2 = k->of[ADAMAX_BETA2];
    const real eps = k->of[ADAMAX_EPS], late_eps = k->of[ADAMAX_LATE_EPS];
    const real weight_decay = k->of[ADAMAX_DECAY], sign = k->of[ADAMAX_SIGN];
    const real *const m_in = slots_in[0], *const u_in = slots_in[1];
    real *const m_out = slots_out[0], *const u_out = slots_out[1];
    PSD_ELEMENTWISE
    for (intptr_t i = 0; i < n; i++) {
        const real p = p_in[i];
        real g = sign * g_in[i];
        if (decay)
            g = g + weight_decay * p;
        const real m = FN(lerp)(m_in[i], g, fresh1);
        const real faded = beta2 * u_in[i], now = REAL_ABS(g) + eps;
        const real u = faded > now ? faded : now;
        m_out[i] = m;
        u_out[i] = u;
        p_out[i] = p - (rate * m) / (u + late_eps);
    }
}

PSD_KERNEL void FN(psd_adamax_tile)(const real *p_in, real *p_out, const real *g, const real *const *slots_in,
                                    real *const *slots_out, intptr_t n, const FN(constants) *k)
{
    if (k->variant)
        FN(adamax_loop)(p_in, p_out, g, slots_in, slots_out, n, k, 1);
    else
        FN(adamax_loop)(p_in, p_out, g, slots_in, slots_out, n, k, 0);
}
