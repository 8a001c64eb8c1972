/* Template over `real`: Adagrad.
 *
 * Source: Duchi, Hazan and Singer 2011, diagonal form; torch.optim.Adagrad operation by operation, each rounded to `real`.
 *
 * keras: epsilon is under the root, as in keras.optimizers.Adagrad. The other form adds a 0 there, which changes no bit.
 */
#define ADAGRAD_STEPS_ALIKE_FROM UINT64_MAX
typedef struct { real rate, eps, inner_eps, weight_decay, sign; int decays; } FN(adagrad);

PSD_PREPARE(adagrad)
{
    k->rate = h->lr / (1 + (double)(step - 1) * h->lr_decay);
    k->eps = h->is.keras ? 0 : h->eps;
    k->inner_eps = h->is.keras ? h->eps : 0;
    k->weight_decay = h->weight_decay;
    k->sign = h->is.maximize ? -1 : 1;
    k->decays = h->weight_decay != 0;
}

PSD_LOOP(adagrad, int decays)
{
    const FN(adagrad) c = *k;
    const real *const sum_in = slots_in[SLOT_ADAGRAD_SUM];
    real *const sum_out = slots_out[SLOT_ADAGRAD_SUM];
    PSD_ELEMENTWISE
    for (intptr_t i = 0; i < n; i++) {
        const real p = p_in[i], g = FN(directed)(g_in[i], c.sign, p, c.weight_decay, decays);
        const real sum = sum_in[i] + g * g;
        sum_out[i] = sum;
        p_out[i] = p - (c.rate * g) / (REAL_SQRT(sum + c.inner_eps) + c.eps);
    }
}

PSD_TILE_BY_DECAY(adagrad)
