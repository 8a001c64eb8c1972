/* Template over `real`: sums of squares that do not depend on how an array was cut.
 *
 * Squares are rounded to double and added within runs of 16 elements, each run in one fixed tree. The runs' sums are then added
 * without any rounding, as integers in units of 2^-1074: so the order in which they come, and into how many pieces the array was
 * cut between runs, cannot matter. The tree sets the pace, not the integers: those cost once per run. */

/* Makes each limb less than 2^32 again. One call's additions grow a limb by less than 2^34. */
PSD_INLINE void FN(carry)(uint64_t *limbs)
{
    for (int i = 0; i + 1 < PSD_LIMBS; i++) {
        limbs[i + 1] += limbs[i] >> 32;
        limbs[i] &= UINT32_MAX;
    }
}

/* Adds a finite number >= 0: its 53 bits, shifted to their place, touch three limbs. Returns 0 if it is not finite. */
PSD_INLINE int FN(add_exactly)(uint64_t *limbs, double number)
{
    uint64_t bits;
    memcpy(&bits, &number, sizeof bits);
    const uint64_t exponent = bits >> 52 & 0x7ff;
    const uint64_t mantissa = (bits & (((uint64_t)1 << 52) - 1)) | (uint64_t)(exponent != 0) << 52;
    const uint64_t shift = exponent ? exponent - 1 : 0;
    const uint64_t low = (mantissa & UINT32_MAX) << (shift & 31), high = (mantissa >> 32) << (shift & 31);
    uint64_t *const at = limbs + (shift >> 5);
    at[0] += low & UINT32_MAX;
    at[1] += (low >> 32) + (high & UINT32_MAX);
    at[2] += high >> 32;
    return exponent != 0x7ff;
}

#define RUN 16

PSD_KERNEL int FN(psd_add_squares)(uint64_t *limbs, const real *x, intptr_t n, intptr_t offset)
{
    double sums[TILE / RUN];
    int is_finite = 1, uncarried = 0;
    for (intptr_t at = 0; at < n;) {
        intptr_t count = 0;
        if (offset || n - at < RUN) {
            /* A run that the array has a part of: zeros stand for the rest. */
            const intptr_t room = RUN - offset, there = n - at < room ? n - at : room;
            double q[RUN] = {0};
            for (intptr_t j = 0; j < there; j++)
                q[offset + j] = (double)x[at + j] * (double)x[at + j];
            for (int width = RUN / 2; width; width /= 2)
                for (int j = 0; j < width; j++)
                    q[j] += q[j + width];
            sums[count++] = q[0];
            at += there;
            offset = 0;
        } else {
            for (; count < TILE / RUN && n - at >= RUN; at += RUN) {
                double q[RUN];
                for (int j = 0; j < RUN; j++)
                    q[j] = (double)x[at + j] * (double)x[at + j];
                for (int j = 0; j < 8; j++)
                    q[j] += q[j + 8];
                for (int j = 0; j < 4; j++)
                    q[j] += q[j + 4];
                sums[count++] = (q[0] + q[2]) + (q[1] + q[3]);
            }
        }
        for (intptr_t j = 0; j < count; j++)
            is_finite &= FN(add_exactly)(limbs, sums[j]);
        if (++uncarried == 1 << 20) {
            FN(carry)(limbs);
            uncarried = 0;
        }
    }
    FN(carry)(limbs);
    return is_finite;
}

/* The products of two arrays, run by run as above: the runs whose sum is not negative go to one sum, the others, without their
 * sign, to another one, so that either is exact. */
PSD_KERNEL int FN(psd_add_products)(uint64_t *plus, uint64_t *minus, const real *x, const real *y, intptr_t n, intptr_t offset)
{
    int is_finite = 1, uncarried = 0;
    for (intptr_t at = 0; at < n; offset = 0) {
        const intptr_t room = RUN - offset, there = n - at < room ? n - at : room;
        double q[RUN] = {0};
        for (intptr_t j = 0; j < there; j++)
            q[offset + j] = (double)x[at + j] * (double)y[at + j];
        for (int width = RUN / 2; width; width /= 2)
            for (int j = 0; j < width; j++)
                q[j] += q[j + width];
        is_finite &= FN(add_exactly)(q[0] < 0 ? minus : plus, fabs(q[0]));
        if (++uncarried == 1 << 20) {
            FN(carry)(plus);
            FN(carry)(minus);
            uncarried = 0;
        }
        at += there;
    }
    FN(carry)(plus);
    FN(carry)(minus);
    return is_finite;
}

#undef RUN
