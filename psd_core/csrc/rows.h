/* Template over `real`: a rule on one row of a table at a time, by the same tiles as on blocks, so with the same bits.
 *
 * A row is its value, of dim numbers, and its slots, at offsets from the value. Row-wise Adagrad, which only tables have, is Adagrad
 * with one sum for the row, of the means of its squared gradients (as FBGEMM's EXACT_ROWWISE_ADAGRAD has it).
 */
_Static_assert(sizeof(FN(constants)) <= sizeof(((psd_row_rule *)0)->constants), "constants of a rule do not fit");

void FN(psd_prepare_rows)(psd_row_rule *r, int id, const psd_hyper *hyper, uint64_t step, double scale, int rowwise)
{
    const FN(rule) *const rule = &FN(rules)[id];
    r->rule = id;
    r->scale = scale;
    r->rowwise = rowwise;
    rule->prepare(hyper, step < rule->steps_alike_from ? step : rule->steps_alike_from, r->constants);
}

/* A whole row. Squares are added in 16 lanes and these in one tree, in double: the same bits for every vector width. */
PSD_KERNEL void FN(psd_rowwise_step)(const real *p_in, real *p_out, const real *g_in, const real *sum_in, real *sum_out, intptr_t n,
                                     const psd_row_rule *r)
{
    const FN(adagrad) c = *(const FN(adagrad) *)r->constants;
    const real scale = (real)r->scale;
    const real decay = c.decays ? c.weight_decay : 0;
    double lanes[16] = {0};
    for (intptr_t i = 0; i < n; i += 16)
        for (intptr_t j = 0; j < 16 && j < n - i; j++) {
            const real g = FN(directed)(scale * g_in[i + j], c.sign, p_in[i + j], decay, 1);
            lanes[j] += (double)g * (double)g;
        }
    for (int width = 8; width; width /= 2)
        for (int j = 0; j < width; j++)
            lanes[j] += lanes[j + width];
    const real sum = *sum_in + (real)(lanes[0] / (double)n), root = REAL_SQRT(sum + c.inner_eps) + c.eps;
    *sum_out = sum;
    PSD_ELEMENTWISE
    for (intptr_t i = 0; i < n; i++) {
        const real p = p_in[i], g = FN(directed)(scale * g_in[i], c.sign, p, decay, 1);
        p_out[i] = p - (c.rate * g) / root;
    }
}

void FN(psd_step_row)(const psd_row_rule *r, const real *in, real *out, const real *grad, intptr_t dim, const int64_t *slot_at)
{
    const FN(rule) *const rule = &FN(rules)[r->rule];
    _Alignas(64) real scratch[TILE];
    const real *slots_in[PSD_SLOTS_MAX] = {NULL};
    real *slots_out[PSD_SLOTS_MAX] = {NULL};
    if (r->rowwise) {
        FN(psd_rowwise_step)(in, out, grad, in + slot_at[0], out + slot_at[0], dim, r);
        return;
    }
    for (intptr_t begin = 0; begin < dim; begin += TILE) {
        const intptr_t n = dim - begin < TILE ? dim - begin : TILE;
        const real *g = grad + begin;
        if ((real)r->scale != 1) {
            FN(psd_reduce_tile)(g, NULL, 1, (real)r->scale, scratch, n);
            g = scratch;
        }
        for (int s = 0; s < rule->slot_count; s++)
            if (slot_at[s] >= 0) {
                slots_in[s] = in + slot_at[s] + begin;
                slots_out[s] = out + slot_at[s] + begin;
            }
        rule->tile(in + begin, out + begin, g, slots_in, slots_out, n, r->constants);
    }
}
