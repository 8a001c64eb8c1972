/* Template over `real`: Adam, AdamW, AMSGrad.
 *
 * Source: Kingma and Ba 2015 (arXiv:1412.6980) alg. 1; decoupled weight decay: Loshchilov and Hutter 2019 (arXiv:1711.05101)
 * alg. 2, scaled by the learning rate; amsgrad: Reddi et al. 2018, with the maximum taken before the bias is corrected. All in
 * torch.optim's form, where epsilon is added after correcting the second moment, but with that correction, the root of
 * 1 - beta2^t, multiplied into rate and epsilon: (rate * m) / (sqrt(v) / root + eps) has a second division per element, and
 * divisions and roots set the pace where the caches hold the blocks (measured: 2.0 against 2.6 elements per ns on a Zen 3 core).
 *
 * keras: epsilon is the paper's "epsilon hat", added to the second moment's root before correcting, as in keras.optimizers.Adam.
 */
#define ADAM_STEPS_ALIKE_FROM UINT64_MAX
typedef struct { real rate, fresh1, beta2, fresh2, eps, weight_decay, shrink, sign; int decays, amsgrad; } FN(adam);

PSD_PREPARE(adam)
{
    const int decoupled = h->is.decoupled_weight_decay;
    const double root = sqrt(1 - psd_power(h->beta2, step));
    k->rate = h->lr * root / (1 - psd_power(h->beta1, step));
    k->fresh1 = 1 - h->beta1;
    k->beta2 = h->beta2;
    k->fresh2 = 1 - h->beta2;
    k->eps = h->is.keras ? h->eps : h->eps * root;
    k->weight_decay = h->weight_decay;
    k->shrink = decoupled ? 1 - h->lr * h->weight_decay : 1;
    k->sign = h->is.maximize ? -1 : 1;
    k->decays = h->weight_decay != 0 && !decoupled;
    k->amsgrad = h->is.amsgrad;
}

PSD_LOOP(adam, int decays, int amsgrad)
{
    const FN(adam) c = *k;
    const real *const m_in = slots_in[SLOT_ADAM_EXP_AVG], *const v_in = slots_in[SLOT_ADAM_EXP_AVG_SQ];
    const real *const top_in = slots_in[SLOT_ADAM_MAX_EXP_AVG_SQ];
    real *const m_out = slots_out[SLOT_ADAM_EXP_AVG], *const v_out = slots_out[SLOT_ADAM_EXP_AVG_SQ];
    real *const top_out = slots_out[SLOT_ADAM_MAX_EXP_AVG_SQ];
    PSD_ELEMENTWISE
    for (intptr_t i = 0; i < n; i++) {
        const real p = c.shrink * p_in[i], g = FN(directed)(g_in[i], c.sign, p, c.weight_decay, decays);
        const real m = FN(lerp)(m_in[i], g, c.fresh1);
        real v = c.beta2 * v_in[i] + (c.fresh2 * g) * g;
        m_out[i] = m;
        v_out[i] = v;
        if (amsgrad) {
            v = top_in[i] > v ? top_in[i] : v;
            top_out[i] = v;
        }
        p_out[i] = p - (c.rate * m) / (REAL_SQRT(v) + c.eps);
    }
}

PSD_TILE(adam)
{
    if (k->amsgrad && k->decays)
        FN(adam_loop)(PSD_PASSED, 1, 1);
    else if (k->amsgrad)
        FN(adam_loop)(PSD_PASSED, 0, 1);
    else if (k->decays)
        FN(adam_loop)(PSD_PASSED, 1, 0);
    else
        FN(adam_loop)(PSD_PASSED, 0, 0);
}
