/* Template over `real`: sums of doubles in a stripe, always in the same order: element i goes to lane i % 16, then the lanes are added
 * in one tree. So a dot product has the same bits alone and in a Gram matrix, on every instruction set. */

typedef double FN(lanes) __attribute__((vector_size(64), aligned(8)));
typedef real FN(eight) __attribute__((vector_size(8 * sizeof(real)), aligned(sizeof(real))));

#if defined(__GNUC__)
#define LOAD(p) __builtin_convertvector(*(const FN(eight) *)(p), FN(lanes))
#endif

PSD_INLINE double FN(add_lanes)(const FN(lanes) *low, const FN(lanes) *high)
{
    const FN(lanes) s = *low + *high;
    return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}

/* The last, incomplete 16 elements, with zeros for the others. */
PSD_INLINE void FN(last)(real *to, const real *x, intptr_t n)
{
    memset(to, 0, 16 * sizeof(real));
    memcpy(to, x + n / 16 * 16, (size_t)(n % 16) * sizeof(real));
}

PSD_INLINE void FN(dots)(const real *x, const real *const *y, const int count, intptr_t n, psd_vector_partial *out)
{
    FN(lanes) low[4] = {{0}}, high[4] = {{0}};
    real x_last[16], y_last[16];
    for (intptr_t at = 0; at + 16 <= n; at += 16) {
        const FN(lanes) a = LOAD(x + at), b = LOAD(x + at + 8);
        for (int k = 0; k < count; k++) {
            low[k] += a * LOAD(y[k] + at);
            high[k] += b * LOAD(y[k] + at + 8);
        }
    }
    if (n % 16) {
        FN(last)(x_last, x, n);
        for (int k = 0; k < count; k++) {
            FN(last)(y_last, y[k], n);
            low[k] += LOAD(x_last) * LOAD(y_last);
            high[k] += LOAD(x_last + 8) * LOAD(y_last + 8);
        }
    }
    for (int k = 0; k < count; k++)
        out[k].f = FN(add_lanes)(&low[k], &high[k]);
}

PSD_KERNEL void FN(psd_vector_dots)(const void *x, const void *const *y, intptr_t count, intptr_t n, psd_vector_partial *out)
{
    const real *some[4];
    for (intptr_t k = 0; k < count;) {
        const int m = count - k >= 4 ? 4 : 1;
        for (int j = 0; j < m; j++)
            some[j] = y[k + j];
        if (m == 4)
            FN(dots)(x, some, 4, n, out + k);
        else
            FN(dots)(x, some, 1, n, out + k);
        k += m;
    }
}

PSD_KERNEL void FN(psd_vector_sum)(const void *values, intptr_t n, psd_vector_partial *out)
{
    const real *const x = values;
    FN(lanes) low = {0}, high = {0};
    real x_last[16];
    for (intptr_t at = 0; at + 16 <= n; at += 16) {
        low += LOAD(x + at);
        high += LOAD(x + at + 8);
    }
    if (n % 16) {
        FN(last)(x_last, x, n);
        low += LOAD(x_last);
        high += LOAD(x_last + 8);
    }
    out->f = FN(add_lanes)(&low, &high);
}

#undef LOAD
