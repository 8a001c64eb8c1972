/* Template over `real`: Adam, AdamW, AMSGrad.
 *
 * Source: Kingma and Ba 2015 (arXiv:1412.6980) alg. 1; decoupled weight decay: Loshchilov and Hutter 2019 (arXiv:1711.05101)
 * alg. 2, scaled by the learning rate; amsgrad: Reddi et al. 2018, with the maximum taken before the bias is corrected. All in
 * torch.optim's form, where epsilon is added after correcting the second moment, but with that correction, the root of
 * 1 - beta2^t, multiplied into rate and epsilon: (rate * m) / (sqrt(v) / root + eps) has a second division per element, and
 * divisions and roots set the pace where the caches hold the blocks (measured: 2.0 against 2.6 elements per ns on a Zen 3 core).
 *
 * keras: epsilon is the paper's "epsilon hat", added to the second moment's root before correcting, as in keras.optimizers.Adam.
 *
 * Scalars: lr, beta1, beta2, eps, weight_decay. Flags: 1 maximize, 2 amsgrad, 4 decoupled_weight_decay, 8 keras.
 * Slots: first moment, second moment; amsgrad: the largest second moment so far.
 */
#ifndef PSD_RULE_ADAM_H
#define PSD_RULE_ADAM_H
enum { ADAM_RATE, ADAM_FRESH1, ADAM_BETA2, ADAM_FRESH2, ADAM_EPS, ADAM_DECAY, ADAM_SHRINK, ADAM_SIGN };
#endif

static void FN(adam_prepare)(const psd_hyper *hyper, uint64_t step, FN(constants) *k)
{
    const double lr = hyper->scalars[0], beta1 = hyper->scalars[1], beta2 = hyper->scalars[2];
    const double weight_decay = hyper->scalars[4];
    const int decoupled = (hyper->flags & 4) != 0;
    const double root = sqrt(1 - psd_power(beta2, step));
    k->of[ADAM_RATE] = (real)(lr * root / (1 - psd_power(beta1, step)));
    k->of[ADAM_FRESH1] = (real)(1 - beta1);
    k->of[ADAM_BETA2] = (real)beta2;
    k->of[ADAM_FRESH2] = (real)(1 - beta2);
    k->of[ADAM_EPS] = (real)(hyper->flags & 8 ? hyper->scalars[3] : hyper->scalars[3] * root);
    k->of[ADAM_DECAY] = (real)weight_decay;
    k->of[ADAM_SHRINK] = decoupled ? (real)(1 - lr * weight_decay) : (real)1;
    k->of[ADAM_SIGN] = hyper->flags & 1 ? (real)-1 : (real)1;
    k->variant = (weight_decay != 0 && !decoupled ? 1 : 0) + (hyper->flags & 2);
}

PSD_INLINE void FN(adam_loop)(const real *p_in, real *p_out, const real *g_in, const real *const *slots_in,
                              real *const *slots_out, intptr_t n, const FN(constants) *k, int decay, int amsgrad)
{
    const real rate = k->of[ADAM_RATE], fresh1 = k->of[ADAM_FRESH1], beta2 = k->of[ADAM_BETA2], fresh2 = k->of[ADAM_FRESH2];
    const real eps = k->of[ADAM_EPS];
    const real weight_decay = k->of[ADAM_DECAY], shrink = k->of[ADAM_SHRINK], sign = k->of[ADAM_SIGN];
    const real *const m_in = slots_in[0], *const v_in = slots_in[1], *const top_in = slots_in[2];
    real *const m_out = slots_out[0], *const v_out = slots_out[1], *const top_out = slots_out[2];
    PSD_ELEMENTWISE
    for (intptr_t i = 0; i < n; i++) {
        const real p = shrink * p_in[i];
        real g = sign * g_in[i];
        if (decay)
            g = g + weight_decay * p;
        const real m = FN(lerp)(m_in[i], g, fresh1);
        real v = beta2 * v_in[i] + (fresh2 * g) * g;
        m_out[i] = m;
        v_out[i] = v;
        if (amsgrad) {
            v = top_in[i] > v ? top_in[i] : v;
            top_out[i] = v;
        }
        p_out[i] = p - (rate * m) / (REAL_SQRT(v) + eps);
    }
}

PSD_KERNEL void FN(psd_adam_tile)(const real *p_in, real *p_out, const real *g, const real *const *slots_in,
                                  real *const *slots_out, intptr_t n, const FN(constants) *k)
{
    switch (k->variant) {
    case 0:
        FN(adam_loop)(p_in, p_out, g, slots_in, slots_out, n, k, 0, 0);
        break;
    case 1:
        FN(adam_loop)(p_in, p_out, g, slots_in, slots_out, n, k, 1, 0);
        break;
    case 2:
        FN(adam_loop)(p_in, p_out, g, slots_in, slots_out, n, k, 0, 1);
        break;
    case 3:
        FN(adam_loop)(p_in, p_out, g, slots_in, slots_out, n, k, 1, 1);
        break;
    }
}
