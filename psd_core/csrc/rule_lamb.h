/* Template over `real`: the direction of LAMB's update.
 *
 * Source: You et al. 2020 (arXiv:1904.00962) alg. 2: u = m_hat / (sqrt(v_hat) + eps) + weight_decay * p, with Adam's moments,
 * corrected for their bias. The step is p - lr * (|p| / |u|) * u, with norms over a whole tensor, which one tile, or one shard, does
 * not know. So the tile writes u where other rules write the new parameter, and the caller makes the step.
 */
#define LAMB_STEPS_ALIKE_FROM UINT64_MAX
typedef struct { real unbias, fresh1, beta2, fresh2, root, eps, weight_decay, sign; } FN(lamb);

PSD_PREPARE(lamb)
{
    k->unbias = 1 / (1 - psd_power(h->beta1, step));
    k->fresh1 = 1 - h->beta1;
    k->beta2 = h->beta2;
    k->fresh2 = 1 - h->beta2;
    k->root = sqrt(1 - psd_power(h->beta2, step));
    k->eps = h->eps;
    k->weight_decay = h->weight_decay;
    k->sign = h->is.maximize ? -1 : 1;
}

PSD_TILE(lamb)
{
    const FN(lamb) c = *k;
    const real *const m_in = slots_in[SLOT_LAMB_EXP_AVG], *const v_in = slots_in[SLOT_LAMB_EXP_AVG_SQ];
    real *const m_out = slots_out[SLOT_LAMB_EXP_AVG], *const v_out = slots_out[SLOT_LAMB_EXP_AVG_SQ];
    PSD_ELEMENTWISE
    for (intptr_t i = 0; i < n; i++) {
        const real p = p_in[i], g = c.sign * g_in[i];
        const real m = FN(lerp)(m_in[i], g, c.fresh1);
        const real v = c.beta2 * v_in[i] + (c.fresh2 * g) * g;
        m_out[i] = m;
        v_out[i] = v;
        p_out[i] = (c.unbias * m) / (REAL_SQRT(v) / c.root + c.eps) + c.weight_decay * p;
    }
}
