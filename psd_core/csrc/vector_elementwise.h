/* Template over `real`: elementwise operations on one stripe. Whole numbers wrap around, as NumPy's do.
 *
 * Needs ADD, SUB, MUL, NUMBER(psd_number), and IS_FLOAT with SQRT. */

#define EACH(expression)                     \
    PSD_ELEMENTWISE                          \
    for (intptr_t i = 0; i < n; i++)         \
        o[i] = (expression);                 \
    break

/* IEEE's roots, exponentials and logarithms are of doubles: a float's is that of the double, rounded. */
PSD_INLINE void FN(map)(const psd_vector_op *op, real *o, const real *x, intptr_t n)
{
    const real a = NUMBER(op->a), b = NUMBER(op->b);
    switch (op->function) {
    case PSD_MAP_ABS: EACH(x[i] < 0 ? SUB(0, x[i]) : ADD(x[i], 0));
    case PSD_MAP_NEG: EACH(NEGATIVE(x[i]));
    case PSD_MAP_SIGN: EACH(x[i] > 0 ? (real)1 : x[i] < 0 ? (real)-1 : ADD(x[i], 0));
    case PSD_MAP_SQUARE: EACH(MUL(x[i], x[i]));
    case PSD_MAP_CLIP: EACH(x[i] < a ? a : x[i] > b ? b : x[i]);
#if IS_FLOAT
    case PSD_MAP_SQRT: EACH(SQRT(x[i]));
    case PSD_MAP_EXP: EACH((real)psd_exp((double)x[i]));
    case PSD_MAP_LOG: EACH((real)psd_log((double)x[i]));
    case PSD_MAP_RECIPROCAL: EACH(1 / x[i]);
    case PSD_MAP_SOFT_THRESHOLD: EACH(x[i] > a ? x[i] - a : x[i] < -a ? x[i] + a : x[i] * 0 + 0);
#endif
    default: break;
    }
}

PSD_INLINE void FN(zip)(const psd_vector_op *op, real *o, const real *x, const real *y, intptr_t n)
{
    const real a = NUMBER(op->a);
    (void)a;
    switch (op->function) { /* NaN comes through, as it does in NumPy */
    case PSD_ZIP_ADD: EACH(ADD(x[i], y[i]));
    case PSD_ZIP_SUB: EACH(SUB(x[i], y[i]));
    case PSD_ZIP_MUL: EACH(MUL(x[i], y[i]));
    case PSD_ZIP_MIN: EACH(y[i] < x[i] || y[i] != y[i] ? y[i] : x[i]);
    case PSD_ZIP_MAX: EACH(y[i] > x[i] || y[i] != y[i] ? y[i] : x[i]);
#if IS_FLOAT
    case PSD_ZIP_DIV: EACH(x[i] / y[i]);
    case PSD_ZIP_PROJECT: EACH(x[i] != x[i] ? x[i] : y[i] != y[i] ? y[i] : (x[i] > 0) - (x[i] < 0) == (y[i] > 0) - (y[i] < 0) ? x[i] : 0);
    case PSD_ZIP_ORTHANT: EACH(x[i] > 0 ? 1 : x[i] < 0 ? -1 : x[i] != x[i] ? x[i] : y[i] < 0 ? 1 : y[i] > 0 ? -1 : y[i] * 0 + 0);
    case PSD_ZIP_PSEUDO_GRADIENT:
        EACH(x[i] > 0 ? y[i] + a : x[i] < 0 ? y[i] - a : x[i] != x[i] ? x[i] : y[i] + a < 0 ? y[i] + a : y[i] - a > 0 ? y[i] - a : y[i] * 0 + 0);
#endif
    default: break;
    }
}

/* Evenly from a to below b: the upper bits of a hash of seed and index. */
PSD_INLINE void FN(random)(const psd_vector_op *op, real *o, intptr_t n, uint64_t index)
{
    const real a = NUMBER(op->a), b = NUMBER(op->b);
    const uint64_t key = psd_mix(op->start);
    for (intptr_t i = 0; i < n; i++) {
        const uint64_t hash = psd_mix(key + (index + (uint64_t)i + 1) * 0x9e3779b97f4a7c15u);
#if IS_FLOAT
        const real number = a + (b - a) * ((real)(int64_t)(hash >> (64 - SIGNIFICANT)) / (real)((int64_t)1 << SIGNIFICANT));
        o[i] = number < b ? number : a; /* rounding may reach b */
#else
        o[i] = (real)((uint64_t)a + (uint64_t)((unsigned __int128)hash * ((uint64_t)b - (uint64_t)a) >> 64));
#endif
    }
}

/* Runs of numbers that stay in the nearest cache while all terms are added. */
PSD_INLINE void FN(combine)(real *o, const void *const *in, const real *c, uint32_t terms, intptr_t n)
{
    enum { RUN = 1024 };
    real sums[RUN];
    for (intptr_t at = 0; at < n; at += RUN) {
        const intptr_t m = n - at < RUN ? n - at : RUN;
        const real *const x = (const real *)in[0] + at;
        for (intptr_t i = 0; i < m; i++)
            sums[i] = MUL(c[0], x[i]);
        for (uint32_t k = 1; k < terms; k++) {
            const real *const z = (const real *)in[k] + at;
            for (intptr_t i = 0; i < m; i++)
                sums[i] = ADD(sums[i], MUL(c[k], z[i]));
        }
        memcpy(o + at, sums, (size_t)m * sizeof(real));
    }
}

PSD_KERNEL void FN(psd_vector_compute)(const psd_vector_op *op, void *out, const void *const *in, const void *coefficients, intptr_t n,
                                      uint64_t index)
{
    real *const o = out;
    const real *const x = op->inputs ? in[0] : NULL, *const y = op->inputs > 1 ? in[1] : NULL;
    const real a = NUMBER(op->a);
    switch (op->code) {
    case PSD_V_FILL: EACH(a);
    case PSD_V_COPY: memcpy(o, x, (size_t)n * sizeof(real)); break;
    case PSD_V_SCALE: EACH(MUL(a, x[i]));
    case PSD_V_AXPY: EACH(ADD(x[i], MUL(a, y[i])));
    case PSD_V_COMBINE: FN(combine)(o, in, coefficients, op->inputs, n); break;
    case PSD_V_RANDOM: FN(random)(op, o, n, index); break;
    case PSD_V_MAP: FN(map)(op, o, x, n); break;
    case PSD_V_ZIP: FN(zip)(op, o, x, y, n); break;
    default: break;
    }
}

PSD_KERNEL void FN(psd_vector_add)(void *out, const void *values, intptr_t n)
{
    real *const o = out;
    const real *const x = values;
    PSD_ELEMENTWISE
    for (intptr_t i = 0; i < n; i++)
        o[i] = ADD(o[i], x[i]);
}

/* NaN wins; of equal ones the first. Lanes, since a choice between two numbers that waits for the one before would set the pace. */
PSD_KERNEL void FN(psd_vector_extreme)(const void *values, intptr_t n, int greatest, uint64_t index, psd_vector_partial *out)
{
    enum { LANES = 32 };
    const real *const x = values;
    real best[LANES];
    int odd = 0;
    for (int j = 0; j < LANES; j++)
        best[j] = x[j < n ? j : 0];
    if (greatest)
        for (intptr_t at = 0; at + LANES <= n; at += LANES)
            for (int j = 0; j < LANES; j++) {
                best[j] = x[at + j] > best[j] ? x[at + j] : best[j];
                odd |= x[at + j] != x[at + j];
            }
    else
        for (intptr_t at = 0; at + LANES <= n; at += LANES)
            for (int j = 0; j < LANES; j++) {
                best[j] = x[at + j] < best[j] ? x[at + j] : best[j];
                odd |= x[at + j] != x[at + j];
            }
    for (intptr_t i = n / LANES * LANES; i < n; i++) {
        best[0] = (greatest ? x[i] > best[0] : x[i] < best[0]) ? x[i] : best[0];
        odd |= x[i] != x[i];
    }
    for (int j = 1; j < LANES; j++)
        best[0] = (greatest ? best[j] > best[0] : best[j] < best[0]) ? best[j] : best[0];
    intptr_t first = 0;
    while (odd ? x[first] == x[first] : x[first] != best[0])
        first++;
    out->extreme.index = (int64_t)(index + (uint64_t)first);
#if IS_FLOAT
    out->extreme.value.f = (double)x[first];
#else
    out->extreme.value.i = x[first];
#endif
}

#undef EACH
