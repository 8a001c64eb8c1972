/* Hashes of ids, and initial values of rows: pure functions, the same bits on every machine, part of the format.
 *
 * Only operations that IEEE rounds exactly are used, so nothing of the C library's log: who draws a row's initial value anew, on
 * another shard or after an eviction, gets the same one.
 */
#include "portable.h"
#include "table.h"

#define GOLDEN 0x9e3779b97f4a7c15u

PSD_KERNEL void psd_mix_all(const uint64_t *in, uint64_t *out, intptr_t n)
{
    PSD_ELEMENTWISE
    for (intptr_t i = 0; i < n; i++)
        out[i] = psd_mix(in[i]);
}

/* Natural logarithm of a normal number in (0, 1): exponent and mantissa apart, the latter by the series of atanh. */
static double natural_log(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    int exponent = (int)(bits >> 52) - 1022; /* x = m * 2^exponent, m in [0.5, 1) */
    bits = (bits & 0xfffffffffffffu) | (uint64_t)1022 << 52;
    double m;
    memcpy(&m, &bits, sizeof m);
    if (m < 0.70710678118654752) {
        m *= 2;
        exponent--;
    }
    const double s = (m - 1) / (m + 1), square = s * s; /* |s| < 0.172: 11 terms are enough */
    double sum = 0;
    for (int i = 21; i > 0; i -= 2)
        sum = sum * square + 1.0 / i;
    return exponent * 0.69314718055994530942 + 2 * s * sum;
}

PSD_INLINE double polynomial(const double *c, double x) /* of degree 7, c[0] its constant */
{
    double sum = c[7];
    for (int i = 6; i >= 0; i--)
        sum = sum * x + c[i];
    return sum;
}

/* The normal distribution's quantile at 0.5 + q, |q| < 0.5: Wichura 1988, algorithm AS 241, PPND16. */
static double normal_quantile(double q)
{
    static const double a[] = {3.3871328727963666080, 133.14166789178437745, 1971.5909503065514427, 13731.693765509461125,
                               45921.953931549871457, 67265.770927008700853, 33430.575583588128105, 2509.0809287301226727};
    static const double b[] = {1, 42.313330701600911252, 687.18700749205790830, 5394.1960214247511077,
                               21213.794301586595867, 39307.895800092710610, 28729.085735721942674, 5226.4952788528545610};
    static const double c[] = {1.42343711074968357734, 4.63033784615654529590, 5.76949722146069140550, 3.64784832476320460504,
                               1.27045825245236838258, 0.241780725177450611770, 0.0227238449892691845833, 7.74545014278341407640e-4};
    static const double d[] = {1, 2.05319162663775882187, 1.67638483018380384940, 0.689767334985100004550,
                               0.148103976427480074590, 0.0151986665636164571966, 5.47593808499534494600e-4, 1.05075007164441684324e-9};
    static const double e[] = {6.65790464350110377720, 5.46378491116411436990, 1.78482653991729133580, 0.296560571828504891230,
                               0.0265321895265761230930, 1.24266094738807843860e-3, 2.71155556874348757815e-5, 2.01033439929228813265e-7};
    static const double f[] = {1, 0.599832206555887937690, 0.136929880922735805310, 0.0148753612908506148525,
                               7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15};
    if (q >= -0.425 && q <= 0.425) {
        const double r = 0.180625 - q * q;
        return q * polynomial(a, r) / polynomial(b, r);
    }
    double r = sqrt(-natural_log(q < 0 ? 0.5 + q : 0.5 - q));
    if (r <= 5) {
        r -= 1.6;
        r = polynomial(c, r) / polynomial(d, r);
    } else {
        r -= 5;
        r = polynomial(e, r) / polynomial(f, r);
    }
    return q < 0 ? -r : r;
}

#define TWO_SIGMA 0.47724986805182079 /* the share between the mean and two standard deviations above it */

/* Two numbers of 32 bits from each output of SplitMix64, whose state begins at a hash of seed and id. Each is centred in its cell of
 * 2^-32, so that none is 0 or 1. */
void psd_initial_value(const psd_table_spec *spec, uint64_t id, float *out)
{
    const intptr_t dim = (intptr_t)spec->dim;
    const uint64_t start = psd_mix(spec->seed ^ psd_mix(id + GOLDEN));
    if (spec->init == PSD_ZEROS || spec->init == PSD_CONSTANT) {
        const float value = spec->init == PSD_ZEROS ? 0 : (float)spec->a;
        for (intptr_t i = 0; i < dim; i++)
            out[i] = value;
        return;
    }
    uint64_t bits = 0;
    for (intptr_t i = 0; i < dim; i++) {
        bits = i % 2 ? bits >> 32 : psd_mix(start + GOLDEN * (uint64_t)(i / 2 + 1));
        const double cell = ((double)(uint32_t)bits + 0.5) * 0x1p-32, q = cell - 0.5;
        if (spec->init == PSD_UNIFORM)
            out[i] = (float)(spec->a + (spec->b - spec->a) * cell);
        else if (spec->init == PSD_NORMAL)
            out[i] = (float)(spec->a + spec->b * normal_quantile(q));
        else
            out[i] = (float)(spec->a + spec->b * normal_quantile(2 * TWO_SIGMA * q));
    }
}

void psd_initial_row(const psd_table_spec *spec, uint64_t id, float *out)
{
    for (uint64_t i = spec->dim; i < spec->width; i++)
        out[i] = 0;
    psd_initial_value(spec, id, out);
    for (int s = 0; s < spec->slots; s++)
        if (spec->slot_at[s] >= 0 && spec->slot_start[s] != 0)
            for (uint64_t i = 0; i < (spec->rowwise ? 1 : spec->dim); i++)
                out[spec->slot_at[s] + i] = spec->slot_start[s];
}
