/* Template over `real`: Lion.
 *
 * Source: Chen et al. 2023 (arXiv:2302.06675) alg. 2, operation by operation. The decay is added to the sign, as there, not
 * multiplied as 1 - lr * weight_decay: as a float32 that is off by up to 3e-8, in every step. The sign of 0 is 0.
 */
#define LION_STEPS_ALIKE_FROM 1
typedef struct { real lr, beta1, fresh1, beta2, fresh2, weight_decay, sign; } FN(lion);

PSD_PREPARE(lion)
{
    (void)step;
    k->lr = h->lr;
    k->beta1 = h->beta1;
    k->fresh1 = 1 - h->beta1;
    k->beta2 = h->beta2;
    k->fresh2 = 1 - h->beta2;
    k->weight_decay = h->weight_decay;
    k->sign = h->is.maximize ? -1 : 1;
}

PSD_TILE(lion)
{
    const FN(lion) c = *k;
    const real *const m_in = slots_in[SLOT_LION_EXP_AVG];
    real *const m_out = slots_out[SLOT_LION_EXP_AVG];
    PSD_ELEMENTWISE
    for (intptr_t i = 0; i < n; i++) {
        const real p = p_in[i], g = c.sign * g_in[i], m = m_in[i];
        const real mixed = c.beta1 * m + c.fresh1 * g;
        const real direction = (mixed > 0 ? (real)1 : (real)0) - (mixed < 0 ? (real)1 : (real)0);
        m_out[i] = c.beta2 * m + c.fresh2 * g;
        p_out[i] = p - c.lr * (direction + c.weight_decay * p);
    }
}
