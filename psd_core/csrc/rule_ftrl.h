/* Template over `real`: FTRL-proximal.
 *
 * Source: McMahan et al. 2013, "Ad click prediction: a view from the trenches", alg. 1, with per-coordinate learning rates. One
 * thing is written differently: sigma = (sqrt(n + g^2) - sqrt(n)) / lr as g^2 / (lr * (sqrt(n + g^2) + sqrt(n))), which does not
 * cancel. The parameter is a function of the slots; an initial value other than 0 enters through sigma * parameter alone.
 */
#define FTRL_STEPS_ALIKE_FROM 1
typedef struct { real lr, beta, l1, l2; } FN(ftrl);

PSD_PREPARE(ftrl)
{
    (void)step;
    k->lr = h->lr;
    k->beta = h->beta;
    k->l1 = h->l1;
    k->l2 = h->l2;
}

PSD_TILE(ftrl)
{
    const FN(ftrl) c = *k;
    const real *const sum_in = slots_in[SLOT_FTRL_ACCUMULATOR], *const z_in = slots_in[SLOT_FTRL_LINEAR];
    real *const sum_out = slots_out[SLOT_FTRL_ACCUMULATOR], *const z_out = slots_out[SLOT_FTRL_LINEAR];
    PSD_ELEMENTWISE
    for (intptr_t i = 0; i < n; i++) {
        const real g = g_in[i], square = g * g;
        const real sum = sum_in[i] + square, root = REAL_SQRT(sum);
        const real roots = c.lr * (root + REAL_SQRT(sum_in[i]));
        const real quotient = square / roots;
        const real sigma = roots > 0 ? quotient : 0;
        const real z = z_in[i] + (g - sigma * p_in[i]);
        const real beyond = REAL_ABS(z) - c.l1;
        const real p = (z < 0 ? beyond : -beyond) / ((c.beta + root) / c.lr + c.l2);
        sum_out[i] = sum;
        z_out[i] = z;
        p_out[i] = beyond > 0 ? p : 0;
    }
}
