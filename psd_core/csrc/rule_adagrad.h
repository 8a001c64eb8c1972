/* Template over `real`: Adagrad.
 *
 * Source: Duchi, Hazan and Singer 2011, diagonal form; torch.optim.Adagrad operation by operation, each rounded to `real`.
 *
 * keras: epsilon is under the root, as in keras.optimizers.Adagrad. The other form adds a 0 there, which changes no bit.
 *
 * Scalars: lr, lr_decay, eps, weight_decay. Flags: 1 maximize, 2 keras. Slots: the sum of squares.
 */
#ifndef PSD_RULE_ADAGRAD_H
#define PSD_RULE_ADAGRAD_H
enum { ADAGRAD_RATE, ADAGRAD_EPS, ADAGRAD_INNER_EPS, ADAGRAD_DECAY, ADAGRAD_SIGN };
#endif

static void FN(adagrad_prepare)(const psd_hyper *hyper, uint64_t step, FN(constants) *k)
{
    k->of[ADAGRAD_RATE] = (real)(hyper->scalars[0] / (1 + (double)(step - 1) * hyper->scalars[1]));
    k->of[ADAGRAD_EPS] = hyper->flags & 2 ? (real)0 : (real)hyper->scalars[2];
    k->of[ADAGRAD_INNER_EPS] = hyper->flags & 2 ? (real)hyper->scalars[2] : (real)0;
    k->of[ADAGRAD_DECAY] = (real)hyper->scalars[3];
    k->of[ADAGRAD_SIGN] = hyper->flags & 1 ? (real)-1 : (real)1;
    k->variant = hyper->scalars[3] != 0;
}

PSD_INLINE void FN(adagrad_loop)(const real *p_in, real *p_out, const real *g_in, const real *sum_in, real *sum_out, intptr_t n,
                                 const FN(constants) *k, int decay)
{
    const real rate = k->of[ADAGRAD_RATE], eps = k->of[ADAGRAD_EPS], inner_eps = k->of[ADAGRAD_INNER_EPS];
    const real weight_decay = k->of[ADAGRAD_DECAY], sign = k->of[ADAGRAD_SIGN];
    PSD_ELEMENTWISE
    for (intptr_t i = 0; i < n; i++) {
        const real p = p_in[i];
        real g = sign * g_in[i];
        if (decay)
            g = g + weight_decay * p;
        const real sum = sum_in[i] + g * g;
        sum_out[i] = sum;
        p_out[i] = p - (rate * g) / (REAL_SQRT(sum + inner_eps) + eps);
    }
}

PSD_KERNEL void FN(psd_adagrad_tile)(const real *p_in, real *p_out, const real *g, const real *const *slots_in,
                                     real *const *slots_out, intptr_t n, const FN(constants) *k)
{
    if (k->variant)
        FN(adagrad_loop)(p_in, p_out, g, slots_in[0], slots_out[0], n, k, 1);
    else
        FN(adagrad_loop)(p_in, p_out, g, slots_in[0], slots_out[0], n, k, 0);
}
