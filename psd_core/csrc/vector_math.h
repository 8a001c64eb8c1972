/* exp and log of doubles by operations that IEEE rounds exactly, so that the bits are the same on every machine: the argument
 * reductions and polynomials of FreeBSD's msun (e_exp.c, e_log.c, by Sun Microsystems), less than one unit in the last place off,
 * without branches, so that loops over them vectorise. */
#ifndef PSD_VECTOR_MATH_H
#define PSD_VECTOR_MATH_H

#include "portable.h"
#include <math.h>

#define LN2_HIGH 6.93147180369123816490e-01
#define LN2_LOW 1.90821492927058770002e-10

PSD_INLINE double psd_from_bits(uint64_t bits)
{
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

PSD_INLINE uint64_t psd_bits_of(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

PSD_INLINE double psd_exp(double x)
{
    x = x > 710.0 ? 710.0 : x;
    x = x < -750.0 ? -750.0 : x;
    const double shift = 6755399441055744.0; /* 1.5 * 2^52: adding it rounds to a whole number, which is then in the low bits */
    const double shifted = x * 1.44269504088896338700 + shift, k = shifted - shift;
    const double high = x - k * LN2_HIGH, low = k * LN2_LOW, r = high - low, t = r * r;
    const double c = r - t * (1.66666666666666019037e-01 + t * (-2.77777777770155933842e-03 + t * (6.61375632143793436117e-05
                     + t * (-1.65339022054652515390e-06 + t * 4.13813679705723846039e-08))));
    const double y = 1.0 - ((low - (r * c) / (2.0 - c)) - high);
    /* 2^k in two factors: k is from -1082 to 1024, and a result may be subnormal. */
    const int64_t n = (int64_t)((psd_bits_of(shifted) & 0xffffffffu) ^ 0x80000000u) - 0x80000000ll;
    const int64_t first = n >> 1, second = n - first;
    return y * psd_from_bits((uint64_t)(first + 1023) << 52) * psd_from_bits((uint64_t)(second + 1023) << 52);
}

PSD_INLINE double psd_log(double x)
{
    const int is_small = x < 2.2250738585072014e-308;
    const uint64_t bits = psd_bits_of(is_small ? x * 18014398509481984.0 : x) + ((uint64_t)(0x3ff00000 - 0x3fe6a09e) << 32);
    const double k = (double)(int32_t)((int32_t)(bits >> 52 & 0x7ff) - 1023 - (is_small ? 54 : 0));
    const double m = psd_from_bits((bits & 0xfffffffffffffu) + ((uint64_t)0x3fe6a09e << 32)); /* from sqrt(1/2) to sqrt(2) */
    const double f = m - 1.0, half = 0.5 * f * f, s = f / (2.0 + f), z = s * s, w = z * z;
    const double odd = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
    const double even = z * (6.666666666666735130e-01 + w * (2.857142874366239149e-01 + w * (1.818357216161805012e-01
                        + w * 1.479819860511658591e-01)));
    const double y = s * (half + (odd + even)) + k * LN2_LOW - half + f + k * LN2_HIGH;
    const double special = x == 0 ? -INFINITY : x < 0 ? NAN : x; /* infinity and NaN are their own logarithms */
    return x > 0 && x < INFINITY ? y : special;
}

#undef LN2_HIGH
#undef LN2_LOW

#endif
