/* What memory allows: rows at known places, without an index, ids, versions or safety. Built by _loops.py, for the instruction
 * sets that the kernels are built for. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "portable.h"

enum { AHEAD = 8 };

static void prefetch(const float *row, long floats)
{
    for (long at = 0; at < floats; at += 16)
        __builtin_prefetch(row + at);
}

PSD_KERNEL void gather(const float *rows, const int64_t *places, long n, long dim, float *out)
{
    for (long i = 0; i < n; i++) {
        if (i + AHEAD < n)
            prefetch(rows + places[i + AHEAD] * 2 * dim, dim);
        memcpy(out + i * dim, rows + places[i] * 2 * dim, (size_t)dim * 4);
    }
}

PSD_KERNEL void adagrad(float *rows, const int64_t *places, long n, long dim, const float *grads)
{
    for (long i = 0; i < n; i++) {
        if (i + AHEAD < n)
            prefetch(rows + places[i + AHEAD] * 2 * dim, 2 * dim);
        float *const row = rows + places[i] * 2 * dim, *const sum = row + dim;
        const float *const g = grads + i * dim;
        for (long j = 0; j < dim; j++) {
            sum[j] += g[j] * g[j];
            row[j] -= 0.05f * g[j] / (sqrtf(sum[j]) + 1e-10f);
        }
    }
}
