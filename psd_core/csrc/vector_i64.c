/* The kernels of vectors of int64: sums of a stripe have 128 bits, so they are exact. */
#include "portable.h"
#include "vector.h"

typedef int64_t real;
#define FN(name) name##_i64
#define ADD(a, b) ((real)((uint64_t)(a) + (uint64_t)(b)))
#define SUB(a, b) ((real)((uint64_t)(a) - (uint64_t)(b)))
#define MUL(a, b) ((real)((uint64_t)(a) * (uint64_t)(b)))
#define NEGATIVE(a) SUB(0, a)
#define NUMBER(x) ((x).i)
#define IS_FLOAT 0

#include "vector_elementwise.h"

void psd_vector_dots_i64(const void *x, const void *const *y, intptr_t count, intptr_t n, psd_vector_partial *out)
{
    const real *const a = x;
    for (intptr_t k = 0; k < count; k++) {
        const real *const b = y[k];
        uint64_t low = 0;
        __int128 high = 0; /* a product has 127 bits, so its upper half is added apart */
        for (intptr_t i = 0; i < n; i++) {
            const __int128 product = (__int128)a[i] * b[i];
            const uint64_t before = low;
            low += (uint64_t)product;
            high += (int64_t)(product >> 64) + (int64_t)(low < before);
        }
        out[k].wide.low = low;
        out[k].wide.middle = (uint64_t)high;
        out[k].wide.high = (int64_t)(high >> 64);
    }
}

void psd_vector_sum_i64(const void *values, intptr_t n, psd_vector_partial *out)
{
    const real *const x = values;
    __int128 sum = 0;
    for (intptr_t i = 0; i < n; i++)
        sum += x[i];
    out->wide.low = (uint64_t)sum;
    out->wide.middle = (uint64_t)(sum >> 64);
    out->wide.high = sum < 0 ? -1 : 0;
}
