/* Template over `real`: the direction of LAMB's update.
 *
 * Source: You et al. 2020 (arXiv:1904.00962) alg. 2: u = m_hat / (sqrt(v_hat) + eps) + weight_decay * p, with Adam's moments,
 * corrected for their bias. The step is p - lr * (|p| / |u|) * u, with norms over a whole tensor, which one tile, or one shard, does
 * not know. So the tile writes u where other rules write the new parameter, and the caller makes the step.
 *
 * Scalars: lr (not used here), beta1, beta2, eps, weight_decay. Flags: 1 maximize. Slots: first moment, second moment.
 */
#ifndef PSD_RULE_LAMB_H
#define PSD_RULE_LAMB_H
enum { LAMB_UNBIAS, LAMB_FRESH1, LAMB_BETA2, LAMB_FRESH2, LAMB_ROOT, LAMB_EPS, LAMB_DECAY, LAMB_SIGN };
#endif

static void FN(lamb_prepare)(const psd_hyper *hyper, uint64_t step, FN(constants) *k)
{
    const double beta1 = hyper->scalars[1], beta2 = hyper->scalars[2];
    k->of[LAMB_UNBIAS] = (real)(1 / (1 - psd_power(beta1, step)));
    k->of[LAMB_FRESH1] = (real)(1 - beta1);
    k->of[LAMB_BETA2] = (real)beta2;
    k->of[LAMB_FRESH2] = (real)(1 - beta2);
    k->of[LAMB_ROOT] = (real)sqrt(1 - psd_power(beta2, step));
    k->of[LAMB_EPS] = (real)hyper->scalars[3];
    k->of[LAMB_DECAY] = (real)hyper->scalars[4];
    k->of[LAMB_SIGN] = hyper->flags & 1 ? (real)-1 : (real)1;
    k->variant = 0;
}

PSD_KERNEL void FN(psd_lamb_tile)(const real *p_in, real *p_out, const real *g_in, const real *const *slots_in,
                                  real *const *slots_out, intptr_t n, const FN(constants) *k)
{
    const real unbias = k->of[LAMB_UNBIAS], fresh1 = k->of[LAMB_FRESH1], beta2 = k->of[LAMB_BETA2];
    const real fresh2 = k->of[LAMB_FRESH2], root = k->of[LAMB_ROOT], eps = k->of[LAMB_EPS];
    const real weight_decay = k->of[LAMB_DECAY], sign = k->of[LAMB_SIGN];
    const real *const m_in = slots_in[0], *const v_in = slots_in[1];
    real *const m_out = slots_out[0], *const v_out = slots_out[1];
    PSD_ELEMENTWISE
    for (intptr_t i = 0; i < n; i++) {
        const real p = p_in[i], g = sign * g_in[i];
        const real m = FN(lerp)(m_in[i], g, fresh1);
        const real v = beta2 * v_in[i] + (fresh2 * g) * g;
        m_out[i] = m;
        v_out[i] = v;
        p_out[i] = (unbias * m) / (REAL_SQRT(v) / root + eps) + weight_decay * p;
    }
}
