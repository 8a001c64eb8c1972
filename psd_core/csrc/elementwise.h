/* Template over `real`: sums, scaled copies and the finite check. */

/* Multiplying by a weight of 1 is exact, so one loop serves both cases; memory sets the pace, not the multiplier. */
PSD_KERNEL void FN(psd_accumulate)(real *acc, const real *grad, real weight, intptr_t n)
{
    PSD_ELEMENTWISE
    for (intptr_t i = 0; i < n; i++)
        acc[i] = acc[i] + weight * grad[i];
}

PSD_KERNEL void FN(psd_scaled_copy)(real *out, const real *grad, real weight, intptr_t n)
{
    PSD_ELEMENTWISE
    for (intptr_t i = 0; i < n; i++)
        out[i] = weight * grad[i];
}

typedef real_bits __attribute__((may_alias)) FN(bits_t);

/* A number is NaN or infinite exactly if all bits of its exponent are set: an integer test, which vectorises without
 * comparisons that raise floating-point flags. Early exit per tile, because a branch per element would prevent that. */
PSD_KERNEL intptr_t FN(psd_first_nonfinite)(const real *x, intptr_t n)
{
    const FN(bits_t) *bits = (const FN(bits_t) *)x;
    for (intptr_t begin = 0; begin < n; begin += TILE) {
        const intptr_t end = n - begin < TILE ? n : begin + TILE;
        real_bits found = 0;
        for (intptr_t i = begin; i < end; i++)
            found |= (real_bits)((bits[i] & REAL_EXPONENT) == REAL_EXPONENT);
        if (found)
            for (intptr_t i = begin; i < end; i++)
                if ((bits[i] & REAL_EXPONENT) == REAL_EXPONENT)
                    return i;
    }
    return -1;
}
