/* Template over `real`: Adadelta.
 *
 * Source: Zeiler 2012 (arXiv:1212.5701) alg. 1, with a learning rate; torch.optim.Adadelta operation by operation.
 *
 * Scalars: lr, rho, eps, weight_decay. Flags: 1 maximize. Slots: averages of the squared gradients and of the squared updates.
 */
#ifndef PSD_RULE_ADADELTA_H
#define PSD_RULE_ADADELTA_H
enum { ADADELTA_LR, ADADELTA_RHO, ADADELTA_FRESH, ADADELTA_EPS, ADADELTA_DECAY, ADADELTA_SIGN };
#endif

static void FN(adadelta_prepare)(const psd_hyper *hyper, uint64_t step, FN(constants) *k)
{
    (void)step;
    k->of[ADADELTA_LR] = (real)hyper->scalars[0];
    k->of[ADADELTA_RHO] = (real)hyper->scalars[1];
    k->of[ADADELTA_FRESH] = (real)(1 - hyper->scalars[1]);
    k->of[ADADELTA_EPS] = (real)hyper->scalars[2];
    k->of[ADADELTA_DECAY] = (real)hyper->scalars[3];
    k->of[ADADELTA_SIGN] = hyper->flags & 1 ? (real)-1 : (real)1;
    k->variant = hyper->scalars[3] != 0;
}

PSD_INLINE void FN(adadelta_loop)(const real *p_in, real *p_out, const real *g_in, const real *const *slots_in,
                                  real *const *slots_out, intptr_t n, const FN(constants) *k, int decay)
{
    const real lr = k->of[ADADELTA_LR], rho = k->of[ADADELTA_RHO], fresh = k->of[ADADELTA_FRESH], eps = k->of[ADADELTA_EPS];
    const real weight_decay = k->of[ADADELTA_DECAY], sign = k->of[ADADELTA_SIGN];
    const real *const square_in = slots_in[0], *const delta_in = slots_in[1];
    real *const square_out = slots_out[0], *const delta_out = slots_out[1];
    PSD_ELEMENTWISE
    for (intptr_t i = 0; i < n; i++) {
        const real p = p_in[i], past = delta_in[i];
        real g = sign * g_in[i];
        if (decay)
            g = g + weight_decay * p;
        const real square = rho * square_in[i] + (fresh * g) * g;
        const real delta = (REAL_SQRT(past + eps) / REAL_SQRT(square + eps)) * g;
        square_out[i] = square;
        delta_out[i] = rho * past + (fresh * delta) * delta;
        p_out[i] = p - lr * delta;
    }
}

PSD_KERNEL void FN(psd_adadelta_tile)(const real *p_in, real *p_out, const real *g, const real *const *slots_in,
                                      real *const *slots_out, intptr_t n, const FN(constants) *k)
{
    if (k->variant)
        FN(adadelta_loop)(p_in, p_out, g, slots_in, slots_out, n, k, 1);
    else
        FN(adadelta_loop)(p_in, p_out, g, slots_in, slots_out, n, k, 0);
}
