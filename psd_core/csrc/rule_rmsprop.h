/* Template over `real`: RMSprop.
 *
 * Source: Tieleman and Hinton 2012 (lecture 6.5); centered: Graves 2013 (arXiv:1308.0850) eq. 40. torch.optim.RMSprop operation by
 * operation, but for one: the centered second moment, a difference, is not let fall below zero, where torch takes the root of
 * what rounding has made negative and stores NaN.
 *
 * keras: epsilon is under the root, and the learning rate inside of the momentum buffer, as in keras.optimizers.RMSprop.
 *
 * Scalars: lr, alpha, eps, weight_decay, momentum. Flags: 1 maximize, 2 centered, 4 momentum (has the slot), 8 keras.
 * Slots: the average of the squares; of the gradients, if centered; the momentum buffer.
 */
#ifndef PSD_RULE_RMSPROP_H
#define PSD_RULE_RMSPROP_H
enum { RMSPROP_LR, RMSPROP_ALPHA, RMSPROP_FRESH, RMSPROP_EPS, RMSPROP_INNER_EPS, RMSPROP_DECAY, RMSPROP_MOMENTUM, RMSPROP_SIGN,
       RMSPROP_INNER_LR, RMSPROP_OUTER_LR };
#endif

static void FN(rmsprop_prepare)(const psd_hyper *hyper, uint64_t step, FN(constants) *k)
{
    const int keras = hyper->flags & 8;
    (void)step;
    k->of[RMSPROP_LR] = (real)hyper->scalars[0];
    k->of[RMSPROP_ALPHA] = (real)hyper->scalars[1];
    k->of[RMSPROP_FRESH] = (real)(1 - hyper->scalars[1]);
    k->of[RMSPROP_EPS] = keras ? (real)0 : (real)hyper->scalars[2];
    k->of[RMSPROP_INNER_EPS] = keras ? (real)hyper->scalars[2] : (real)0;
    k->of[RMSPROP_INNER_LR] = keras ? (real)hyper->scalars[0] : (real)1;
    k->of[RMSPROP_OUTER_LR] = keras ? (real)1 : (real)hyper->scalars[0];
    k->of[RMSPROP_DECAY] = (real)hyper->scalars[3];
    k->of[RMSPROP_MOMENTUM] = (real)hyper->scalars[4];
    k->of[RMSPROP_SIGN] = hyper->flags & 1 ? (real)-1 : (real)1;
    const int moves = (hyper->flags & 4) && hyper->scalars[4] != 0;
    k->variant = (hyper->scalars[3] != 0 ? 1 : 0) + (hyper->flags & 2 ? 2 : 0) + (moves ? 4 : 0);
}

PSD_INLINE void FN(rmsprop_loop)(const real *p_in, real *p_out, const real *g_in, const real *const *slots_in,
                                 real *const *slots_out, intptr_t n, const FN(constants) *k, int decay, int centered, int moves)
{
    const real lr = k->of[RMSPROP_LR], alpha = k->of[RMSPROP_ALPHA], fresh = k->of[RMSPROP_FRESH];
    const real eps = k->of[RMSPROP_EPS], inner_eps = k->of[RMSPROP_INNER_EPS];
    const real inner_lr = k->of[RMSPROP_INNER_LR], outer_lr = k->of[RMSPROP_OUTER_LR];
    const real weight_decay = k->of[RMSPROP_DECAY], momentum = k->of[RMSPROP_MOMENTUM], sign = k->of[RMSPROP_SIGN];
    const real *const square_in = slots_in[0], *const mean_in = slots_in[1], *const buffer_in = slots_in[2];
    real *const square_out = slots_out[0], *const mean_out = slots_out[1], *const buffer_out = slots_out[2];
    PSD_ELEMENTWISE
    for (intptr_t i = 0; i < n; i++) {
        const real p = p_in[i];
        real g = sign * g_in[i];
        if (decay)
            g = g + weight_decay * p;
        const real square = alpha * square_in[i] + (fresh * g) * g;
        square_out[i] = square;
        real moment = square;
        if (centered) {
            const real mean = FN(lerp)(mean_in[i], g, fresh);
            mean_out[i] = mean;
            moment = square - mean * mean;
            moment = moment < 0 ? 0 : moment;
        }
        const real root = REAL_SQRT(moment + inner_eps) + eps;
        if (moves) {
            const real buffer = momentum * buffer_in[i] + (inner_lr * g) / root;
            buffer_out[i] = buffer;
            p_out[i] = p - outer_lr * buffer;
        } else {
            p_out[i] = p - (lr * g) / root;
        }
    }
}

PSD_KERNEL void FN(psd_rmsprop_tile)(const real *p_in, real *p_out, const real *g, const real *const *slots_in,
                                     real *const *slots_out, intptr_t n, const FN(constants) *k)
{
#define VARIANT(number)                                                                                       \
    case number:                                                                                              \
        FN(rmsprop_loop)(p_in, p_out, g, slots_in, slots_out, n, k, number & 1, (number & 2) != 0, (number & 4) != 0); \
        break;
    switch (k->variant) {
        VARIANT(0) VARIANT(1) VARIANT(2) VARIANT(3) VARIANT(4) VARIANT(5) VARIANT(6) VARIANT(7)
    }
#undef VARIANT
    /* A buffer that is kept but not in use goes through unchanged. */
    if (!(k->variant & 4) && slots_out[2] != slots_in[2])
        memcpy(slots_out[2], slots_in[2], (size_t)n * sizeof(real));
}
