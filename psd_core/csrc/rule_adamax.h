/* Template over `real`: Adamax.
 *
 * Source: Kingma and Ba 2015 (arXiv:1412.6980) alg. 2; torch.optim.Adamax operation by operation: epsilon is added to the
 * gradient's magnitude before the maximum.
 *
 * keras: epsilon is added after the maximum, where it divides, as in keras.optimizers.Adamax.
 */
#define ADAMAX_STEPS_ALIKE_FROM UINT64_MAX
typedef struct { real rate, fresh1, beta2, eps, late_eps, weight_decay, sign; int decays; } FN(adamax);

PSD_PREPARE(adamax)
{
    k->rate = h->lr / (1 - psd_power(h->beta1, step));
    k->fresh1 = 1 - h->beta1;
    k->beta2 = h->beta2;
    k->eps = h->is.keras ? 0 : h->eps;
    k->late_eps = h->is.keras ? h->eps : 0;
    k->weight_decay = h->weight_decay;
    k->sign = h->is.maximize ? -1 : 1;
    k->decays = h->weight_decay != 0;
}

PSD_LOOP(adamax, int decays)
{
    const FN(adamax) c = *k;
    const real *const m_in = slots_in[SLOT_ADAMAX_EXP_AVG], *const u_in = slots_in[SLOT_ADAMAX_EXP_INF];
    real *const m_out = slots_out[SLOT_ADAMAX_EXP_AVG], *const u_out = slots_out[SLOT_ADAMAX_EXP_INF];
    PSD_ELEMENTWISE
    for (intptr_t i = 0; i < n; i++) {
        const real p = p_in[i], g = FN(directed)(g_in[i], c.sign, p, c.weight_decay, decays);
        const real m = FN(lerp)(m_in[i], g, c.fresh1);
        const real faded = c.beta2 * u_in[i], now = REAL_ABS(g) + c.eps;
        const real u = faded > now ? faded : now;
        m_out[i] = m;
        u_out[i] = u;
        p_out[i] = p - (c.rate * m) / (u + c.late_eps);
    }
}

PSD_TILE_BY_DECAY(adamax)
