/* Template over `real`: NAdam, Adam with Nesterov's look-ahead.
 *
 * Source: Dozat 2016, with its schedule of the momentum; torch.optim.NAdam operation by operation, but for one scalar: the product
 * of all momenta so far is computed from the present beta1 and momentum_decay, as Adam's powers of beta are, while torch keeps a
 * running product. They differ only if those two change during the job.
 */
#define NADAM_STEPS_ALIKE_FROM UINT64_MAX
typedef struct { real now, past, fresh1, beta2, fresh2, unbiased, eps, weight_decay, shrink, sign; int decays; } FN(nadam);

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

PSD_PREPARE(nadam)
{
    const int decoupled = h->is.decoupled_weight_decay;
    double last, next;
    const double product = nadam_momenta(h->beta1, h->momentum_decay, step, &last, &next);
    k->now = h->lr * (1 - last) / (1 - product);
    k->past = h->lr * next / (1 - product * next);
    k->fresh1 = 1 - h->beta1;
    k->beta2 = h->beta2;
    k->fresh2 = 1 - h->beta2;
    k->unbiased = 1 - psd_power(h->beta2, step);
    k->eps = h->eps;
    k->weight_decay = h->weight_decay;
    k->shrink = decoupled ? 1 - h->lr * h->weight_decay : 1;
    k->sign = h->is.maximize ? -1 : 1;
    k->decays = h->weight_decay != 0 && !decoupled;
}

PSD_LOOP(nadam, int decays)
{
    const FN(nadam) c = *k;
    const real *const m_in = slots_in[SLOT_NADAM_EXP_AVG], *const v_in = slots_in[SLOT_NADAM_EXP_AVG_SQ];
    real *const m_out = slots_out[SLOT_NADAM_EXP_AVG], *const v_out = slots_out[SLOT_NADAM_EXP_AVG_SQ];
    PSD_ELEMENTWISE
    for (intptr_t i = 0; i < n; i++) {
        const real p = c.shrink * p_in[i], g = FN(directed)(g_in[i], c.sign, p, c.weight_decay, decays);
        const real m = FN(lerp)(m_in[i], g, c.fresh1);
        const real v = c.beta2 * v_in[i] + (c.fresh2 * g) * g;
        const real root = REAL_SQRT(v / c.unbiased) + c.eps;
        m_out[i] = m;
        v_out[i] = v;
        p_out[i] = (p - (c.now * g) / root) - (c.past * m) / root;
    }
}

PSD_TILE_BY_DECAY(nadam)
