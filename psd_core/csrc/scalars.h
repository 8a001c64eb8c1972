/* Arithmetic on the hyper-parameters of a run, in double, once per run and rounded to the arrays' type afterwards.
 *
 * Only operations that IEEE rounds exactly, so that shards on different machines get the same bits: pow and exp of the C library
 * may differ between versions of it. */
#ifndef PSD_SCALARS_H
#define PSD_SCALARS_H

#include <math.h>
#include <stdint.h>

/* base^n by repeated squaring; relative error below n * 2^-53. */
static inline double psd_power(double base, uint64_t n)
{
    double result = 1;
    for (; n != 0; n >>= 1) {
        if (n & 1)
            result *= base;
        base *= base;
    }
    return result;
}

/* e^x for x <= 0: Taylor's series of x / 2^k, squared k times. Relative error below 2^k * 2^-50, where 2^k < 16 |x| + 1. */
static inline double psd_exp_negative(double x)
{
    int halvings = 0;
    if (x < -700)
        return 0;
    for (; x < -0.0625; x /= 2)
        halvings++;
    double sum = 1;
    for (int i = 10; i > 0; i--)
        sum = 1 + sum * x / i;
    return psd_power(sum, (uint64_t)1 << halvings);
}

#endif
