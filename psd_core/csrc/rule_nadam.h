/* Template over `real`: NAdam, Adam with Nesterov's look-ahead.
 *
 * Source: Dozat 2016, with its schedule of the momentum; torch.optim.NAdam operation by operation, but for one scalar: the product
 * of all momenta so far is computed from the present beta1 and momentum_decay, as Adam's powers of beta are, while torch keeps a
 * running product. They differ only if those two change during the job.
 *
 * Scalars: lr, beta1, beta2, eps, weight_decay, momentum_decay. Flags: 1 maximize, 2 decoupled_weight_decay.
 * Slots: first moment, second moment.
 */
#ifndef PSD_RULE_NADAM_H
#define PSD_RULE_NADAM_H
enum { NADAM_NOW, NADAM_PAST, NADAM_FRESH1, NADAM_BETA2, NADAM_FRESH2, NADAM_UNBIASED, NADAM_EPS, NADAM_DECAY, NADAM_SHRINK,
       NADAM_SIGN };

/* The momentum of step i is beta1 * (1 - 0.96^(i * decay) / 2): sets *last to that of `step`, *next to that of the step after it,
 * and returns the product of the momenta of 1 to `step`. Once the product can no longer be told from 0, beside 1, it is not
 * followed further. */
static inline double nadam_momenta(double beta1, double decay, uint64_t step, double *last, double *next)
{
    const double ln_0_96 = -0.040821994520255166;
    const double fade = psd_exp_negative(decay * ln_0_96);
    double product = 1, power = 1;
    for (uint64_t i = 1; i <= step && product > 1e-20; i++) {
        power *= fade;
        product *= beta1 * (1 - 0.5 * power);
    }
    power = psd_power(fade, step);
    *last = beta1 * (1 - 0.5 * power);
    *next = beta1 * (1 - 0.5 * (power * fade));
    return product;
}
#endif

static void FN(nadam_prepare)(const psd_hyper *hyper, uint64_t step, FN(constants) *k)
{
    const double lr = hyper->scalars[0], beta1 = hyper->scalars[1], beta2 = hyper->scalars[2];
    const double weight_decay = hyper->scalars[4];
    const int decoupled = (hyper->flags & 2) != 0;
    double last, next;
    const double product = nadam_momenta(beta1, hyper->scalars[5], step, &last, &next);
    k->of[NADAM_NOW] = (real)(lr * (1 - last) / (1 - product));
    k->of[NADAM_PAST] = (real)(lr * next / (1 - product * next));
    k->of[NADAM_FRESH1] = (real)(1 - beta1);
    k->of[NADAM_BETA2] = (real)beta2;
    k->of[NADAM_FRESH2] = (real)(1 - beta2);
    k->of[NADAM_UNBIASED] = (real)(1 - psd_power(beta2, step));
    k->of[NADAM_EPS] = (real)hyper->scalars[3];
    k->of[NADAM_DECAY] = (real)weight_decay;
    k->of[NADAM_SHRINK] = decoupled ? (real)(1 - lr * weight_decay) : (real)1;
    k->of[NADAM_SIGN] = hyper->flags & 1 ? (real)-1 : (real)1;
    k->variant = weight_decay != 0 && !decoupled;
}

PSD_INLINE void FN(nadam_loop)(const real *p_in, real *p_out, const real *g_in, const real *const *slots_in,
                               real *const *slots_out, intptr_t n, const FN(constants) *k, int decay)
{
    const real now = k->of[NADAM_NOW], past = k->of[NADAM_PAST], fresh1 = k->of[NADAM_FRESH1];
    const real beta2 = k->of[NADAM_BETA2], fresh2 = k->of[NADAM_FRESH2], unbiased = k->of[NADAM_UNBIASED];
    const real eps = k->of[NADAM_EPS], weight_decay = k->of[NADAM_DECAY], shrink = k->of[NADAM_SHRINK], sign = k->of[NADAM_SIGN];
    const real *const m_in = slots_in[0], *const v_in = slots_in[1];
    real *const m_out = slots_out[0], *const v_out = slots_out[1];
    PSD_ELEMENTWISE
    for (intptr_t i = 0; i < n; i++) {
        const real p = shrink * p_in[i];
        real g = sign * g_in[i];
        if (decay)
            g = g + weight_decay * p;
        const real m = FN(lerp)(m_in[i], g, fresh1);
        const real v = beta2 * v_in[i] + (fresh2 * g) * g;
        const real root = REAL_SQRT(v / unbiased) + eps;
        m_out[i] = m;
        v_out[i] = v;
        p_out[i] = (p - (now * g) / root) - (past * m) / root;
    }
}

PSD_KERNEL void FN(psd_nadam_tile)(const real *p_in, real *p_out, const real *g, const real *const *slots_in,
                                   real *const *slots_out, intptr_t n, const FN(constants) *k)
{
    if (k->variant)
        FN(nadam_loop)(p_in, p_out, g, slots_in, slots_out, n, k, 1);
    else
        FN(nadam_loop)(p_in, p_out, g, slots_in, slots_out, n, k, 0);
}
