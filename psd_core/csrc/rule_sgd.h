/* Template over `real`: stochastic gradient descent with momentum.
 *
 * Source: torch.optim.SGD, operation by operation, each rounded to `real`. The velocity is Polyak's (1964) in the form of
 * Sutskever et al. 2013, with the learning rate outside of it. At step 1 the momentum buffer becomes the gradient itself,
 * undampened. Torch on a CPU fuses some multiply-adds, so it differs from this by rounding.
 *
 * keras: the learning rate is inside of the velocity, as in keras.optimizers.SGD (the buffer is minus Keras's): a rate that
 * changes takes effect on new gradients alone.
 *
 * Scalars: lr, momentum, dampening, weight_decay. Flags: 1 maximize, 2 nesterov, 4 momentum (has the slot), 8 keras.
 * Slots: the momentum buffer.
 */
#ifndef PSD_RULE_SGD_H
#define PSD_RULE_SGD_H
enum { SGD_LR, SGD_MOMENTUM, SGD_FRESH, SGD_WEIGHT_DECAY, SGD_SIGN };   /* constants */
enum { SGD_PLAIN, SGD_FIRST, SGD_HEAVY, SGD_NESTEROV_FIRST, SGD_NESTEROV }; /* what becomes of the momentum buffer */
#endif

static void FN(sgd_prepare)(const psd_hyper *hyper, uint64_t step, FN(constants) *k)
{
    const double momentum = hyper->scalars[1], weight_decay = hyper->scalars[3];
    const int maximize = hyper->flags & 1, nesterov = hyper->flags & 2, keras = hyper->flags & 8;
    const double inside = keras ? hyper->scalars[0] : 1; /* what a gradient is multiplied by before it enters the buffer */
    k->of[SGD_LR] = keras ? (real)1 : (real)hyper->scalars[0];
    k->of[SGD_MOMENTUM] = (real)momentum;
    k->of[SGD_FRESH] = (real)(1.0 - hyper->scalars[2]);
    k->of[SGD_WEIGHT_DECAY] = (real)(inside * weight_decay);
    k->of[SGD_SIGN] = (real)(maximize ? -inside : inside);
    const int buffer = momentum == 0 || !(hyper->flags & 4) ? SGD_PLAIN : (step == 1 ? SGD_FIRST : SGD_HEAVY) + (nesterov ? 2 : 0);
    k->variant = 2 * buffer + (weight_decay != 0);
}

/* `buffer` and `decay` are constants where this is inlined: each variant is a loop without branches. */
PSD_INLINE void FN(sgd_loop)(const real *p_in, real *p_out, const real *g_in, const real *b_in, real *b_out, intptr_t n,
                             const FN(constants) *k, int buffer, int decay)
{
    const real lr = k->of[SGD_LR], momentum = k->of[SGD_MOMENTUM], fresh = k->of[SGD_FRESH];
    const real weight_decay = k->of[SGD_WEIGHT_DECAY], sign = k->of[SGD_SIGN];
    const int first = buffer == SGD_FIRST || buffer == SGD_NESTEROV_FIRST;
    const int nesterov = buffer == SGD_NESTEROV || buffer == SGD_NESTEROV_FIRST;
    PSD_ELEMENTWISE
    for (intptr_t i = 0; i < n; i++) {
        const real p = p_in[i];
        real g = sign * g_in[i];
        if (decay)
            g = g + weight_decay * p;
        if (buffer != SGD_PLAIN) {
            const real b = first ? g : momentum * b_in[i] + fresh * g;
            b_out[i] = b;
            g = nesterov ? g + momentum * b : b;
        }
        p_out[i] = p - lr * g;
    }
}

PSD_KERNEL void FN(psd_sgd_tile)(const real *p_in, real *p_out, const real *g, const real *const *slots_in,
                                 real *const *slots_out, intptr_t n, const FN(constants) *k)
{
#define VARIANT(buffer)                                                                       \
    case 2 * buffer:                                                                          \
        FN(sgd_loop)(p_in, p_out, g, slots_in[0], slots_out[0], n, k, buffer, 0);             \
        break;                                                                                \
    case 2 * buffer + 1:                                                                      \
        FN(sgd_loop)(p_in, p_out, g, slots_in[0], slots_out[0], n, k, buffer, 1);             \
        break;
    switch (k->variant) {
        VARIANT(SGD_PLAIN)
        VARIANT(SGD_FIRST)
        VARIANT(SGD_HEAVY)
        VARIANT(SGD_NESTEROV_FIRST)
        VARIANT(SGD_NESTEROV)
    }
#undef VARIANT
    /* A buffer that is kept but not in use goes through unchanged. */
    if (k->variant / 2 == SGD_PLAIN && slots_out[0] != slots_in[0])
        memcpy(slots_out[0], slots_in[0], (size_t)n * sizeof(real));
}
