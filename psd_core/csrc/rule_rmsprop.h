/* Template over `real`: RMSprop.
 *
 * Source: Tieleman and Hinton 2012 (lecture 6.5); centered: Graves 2013 (arXiv:1308.0850) eq. 40. torch.optim.RMSprop operation by
 * operation, but for one: the centered second moment, a difference, is not let fall below zero, where torch takes the root of
 * what rounding has made negative and stores NaN.
 *
 * keras: epsilon is under the root, and the learning rate inside of the momentum buffer, as in keras.optimizers.RMSprop.
 */
#define RMSPROP_STEPS_ALIKE_FROM 1
typedef struct { real lr, alpha, fresh, eps, inner_eps, weight_decay, momentum, sign, inner_lr, outer_lr; int variant; } FN(rmsprop);

PSD_PREPARE(rmsprop)
{
    const int keras = h->is.keras, moves = h->is.momentum && h->momentum != 0;
    (void)step;
    k->lr = h->lr;
    k->alpha = h->alpha;
    k->fresh = 1 - h->alpha;
    k->eps = keras ? 0 : h->eps;
    k->inner_eps = keras ? h->eps : 0;
    k->inner_lr = keras ? h->lr : 1;
    k->outer_lr = keras ? 1 : h->lr;
    k->weight_decay = h->weight_decay;
    k->momentum = h->momentum;
    k->sign = h->is.maximize ? -1 : 1;
    k->variant = (h->weight_decay != 0 ? 1 : 0) + (h->is.centered ? 2 : 0) + (moves ? 4 : 0);
}

PSD_LOOP(rmsprop, int decays, int centered, int moves)
{
    const FN(rmsprop) c = *k;
    const real *const square_in = slots_in[SLOT_RMSPROP_SQUARE_AVG], *const mean_in = slots_in[SLOT_RMSPROP_GRAD_AVG];
    const real *const buffer_in = slots_in[SLOT_RMSPROP_MOMENTUM_BUFFER];
    real *const square_out = slots_out[SLOT_RMSPROP_SQUARE_AVG], *const mean_out = slots_out[SLOT_RMSPROP_GRAD_AVG];
    real *const buffer_out = slots_out[SLOT_RMSPROP_MOMENTUM_BUFFER];
    PSD_ELEMENTWISE
    for (intptr_t i = 0; i < n; i++) {
        const real p = p_in[i], g = FN(directed)(g_in[i], c.sign, p, c.weight_decay, decays);
        const real square = c.alpha * square_in[i] + (c.fresh * g) * g;
        square_out[i] = square;
        real moment = square;
        if (centered) {
            const real mean = FN(lerp)(mean_in[i], g, c.fresh);
            mean_out[i] = mean;
            moment = square - mean * mean;
            moment = moment < 0 ? 0 : moment;
        }
        const real root = REAL_SQRT(moment + c.inner_eps) + c.eps;
        if (moves) {
            const real buffer = c.momentum * buffer_in[i] + (c.inner_lr * g) / root;
            buffer_out[i] = buffer;
            p_out[i] = p - c.outer_lr * buffer;
        } else {
            p_out[i] = p - (c.lr * g) / root;
        }
    }
}

PSD_TILE(rmsprop)
{
#define VARIANT(number)                                                                        \
    case number:                                                                               \
        FN(rmsprop_loop)(PSD_PASSED, number & 1, (number & 2) != 0, (number & 4) != 0);        \
        break;
    switch (k->variant) {
        VARIANT(0) VARIANT(1) VARIANT(2) VARIANT(3) VARIANT(4) VARIANT(5) VARIANT(6) VARIANT(7)
    }
#undef VARIANT
    if (!(k->variant & 4))
        FN(copy_run)(slots_in[SLOT_RMSPROP_MOMENTUM_BUFFER], slots_out[SLOT_RMSPROP_MOMENTUM_BUFFER], 0, n); /* kept, but not in use */
}
