/* Template over `real`: stochastic gradient descent with momentum.
 *
 * Source: torch.optim.SGD, operation by operation, each rounded to `real`. The velocity is Polyak's (1964) in the form of
 * Sutskever et al. 2013, with the learning rate outside of it. At step 1 the momentum buffer becomes the gradient itself,
 * undampened. Torch on a CPU fuses some multiply-adds, so it differs from this by rounding.
 *
 * keras: the learning rate is inside of the velocity, as in keras.optimizers.SGD (the buffer is minus Keras's): a rate that
 * changes takes effect on new gradients alone.
 */
#define SGD_STEPS_ALIKE_FROM 2
typedef struct { real lr, momentum, fresh, weight_decay, sign; int buffer, decays; } FN(sgd);
enum { SGD_PLAIN, SGD_FIRST, SGD_HEAVY, SGD_NESTEROV_FIRST, SGD_NESTEROV }; /* what becomes of the momentum buffer */

PSD_PREPARE(sgd)
{
    const double inside = h->is.keras ? h->lr : 1; /* what a gradient is multiplied by before it enters the buffer */
    k->lr = h->is.keras ? 1 : h->lr;
    k->momentum = h->momentum;
    k->fresh = 1 - h->dampening;
    k->weight_decay = inside * h->weight_decay;
    k->sign = h->is.maximize ? -inside : inside;
    k->decays = h->weight_decay != 0;
    k->buffer = SGD_PLAIN;
    if (h->is.momentum && h->momentum != 0)
        k->buffer = (step == 1 ? SGD_FIRST : SGD_HEAVY) + (h->is.nesterov ? SGD_NESTEROV - SGD_HEAVY : 0);
}

/* `buffer` and `decays` are constants where this is inlined: each variant is a loop without branches. */
PSD_LOOP(sgd, int buffer, int decays)
{
    const FN(sgd) c = *k;
    const real *const b_in = slots_in[SLOT_SGD_MOMENTUM];
    real *const b_out = slots_out[SLOT_SGD_MOMENTUM];
    const int first = buffer == SGD_FIRST || buffer == SGD_NESTEROV_FIRST;
    const int nesterov = buffer == SGD_NESTEROV || buffer == SGD_NESTEROV_FIRST;
    PSD_ELEMENTWISE
    for (intptr_t i = 0; i < n; i++) {
        const real p = p_in[i];
        real g = FN(directed)(g_in[i], c.sign, p, c.weight_decay, decays);
        if (buffer != SGD_PLAIN) {
            const real b = first ? g : c.momentum * b_in[i] + c.fresh * g;
            b_out[i] = b;
            g = nesterov ? g + c.momentum * b : b;
        }
        p_out[i] = p - c.lr * g;
    }
}

PSD_TILE(sgd)
{
#define VARIANT(buffer)                          \
    case buffer:                                 \
        if (k->decays)                           \
            FN(sgd_loop)(PSD_PASSED, buffer, 1); \
        else                                     \
            FN(sgd_loop)(PSD_PASSED, buffer, 0); \
        break;
    switch (k->buffer) {
        VARIANT(SGD_PLAIN)
        VARIANT(SGD_FIRST)
        VARIANT(SGD_HEAVY)
        VARIANT(SGD_NESTEROV_FIRST)
        VARIANT(SGD_NESTEROV)
    }
#undef VARIANT
    if (k->buffer == SGD_PLAIN)
        FN(copy_run)(slots_in[SLOT_SGD_MOMENTUM], slots_out[SLOT_SGD_MOMENTUM], 0, n); /* kept, but not in use */
}
