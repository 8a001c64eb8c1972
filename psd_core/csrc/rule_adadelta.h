/* Template over `real`: Adadelta.
 *
 * Source: Zeiler 2012 (arXiv:1212.5701) alg. 1, with a learning rate; torch.optim.Adadelta operation by operation.
 */
#define ADADELTA_STEPS_ALIKE_FROM 1
typedef struct { real lr, rho, fresh, eps, weight_decay, sign; int decays; } FN(adadelta);

PSD_PREPARE(adadelta)
{
    (void)step;
    k->lr = h->lr;
    k->rho = h->rho;
    k->fresh = 1 - h->rho;
    k->eps = h->eps;
    k->weight_decay = h->weight_decay;
    k->sign = h->is.maximize ? -1 : 1;
    k->decays = h->weight_decay != 0;
}

PSD_LOOP(adadelta, int decays)
{
    const FN(adadelta) c = *k;
    const real *const square_in = slots_in[SLOT_ADADELTA_SQUARE_AVG], *const delta_in = slots_in[SLOT_ADADELTA_ACC_DELTA];
    real *const square_out = slots_out[SLOT_ADADELTA_SQUARE_AVG], *const delta_out = slots_out[SLOT_ADADELTA_ACC_DELTA];
    PSD_ELEMENTWISE
    for (intptr_t i = 0; i < n; i++) {
        const real p = p_in[i], past = delta_in[i];
        const real g = FN(directed)(g_in[i], c.sign, p, c.weight_decay, decays);
        const real square = c.rho * square_in[i] + (c.fresh * g) * g;
        const real delta = (REAL_SQRT(past + c.eps) / REAL_SQRT(square + c.eps)) * g;
        square_out[i] = square;
        delta_out[i] = c.rho * past + (c.fresh * delta) * delta;
        p_out[i] = p - c.lr * delta;
    }
}

PSD_TILE_BY_DECAY(adadelta)
