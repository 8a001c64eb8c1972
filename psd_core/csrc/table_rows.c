/* Rows as they lie in the file, and as the caller has them: the same, but where values have 16 bits.
 *
 * A value is then rounded stochastically: up with the probability that makes the mean exact, so that many small steps are not lost. What
 * bfloat16 holds stays as it is, so rows that were read round-trip. The random bits are a pure function of the table's seed, the row's
 * id and the table's step, part of the format: no result depends on which shard has the row.
 */
#include "portable.h"
#include "half.h"
#include "table.h"

#define GOLDEN 0x9e3779b97f4a7c15u

enum { WORDS = 16, RUN = 4 * WORDS };

/* In each run of 64 numbers, number i takes 16 bits of the random word i % 16, from bit i / 16 * 16 on. */
PSD_KERNEL static void round_value(const float *value, uint16_t *out, intptr_t n, uint64_t start)
{
    uint64_t words[WORDS];
    for (intptr_t begin = 0; begin < n; begin += RUN) {
        for (intptr_t j = 0; j < WORDS; j++)
            words[j] = psd_mix(start + GOLDEN * (uint64_t)(begin / 4 + j + 1));
        for (intptr_t part = 0; part < 4; part++) {
            const intptr_t first = begin + part * WORDS, count = n - first < WORDS ? n - first : WORDS;
            PSD_ELEMENTWISE
            for (intptr_t j = 0; j < count; j++) {
                uint32_t bits;
                memcpy(&bits, &value[first + j], sizeof bits);
                const uint32_t magnitude = bits & 0x7fffffffu;
                /* What is finite stays so, and a NaN a NaN. */
                const uint32_t random = magnitude < 0x7f7f0000u ? (uint32_t)(words[j] >> part * 16) & 0xffffu : 0;
                out[first + j] = (uint16_t)((bits + random) >> 16 | (magnitude > 0x7f800000u ? 0x40u : 0));
            }
        }
    }
}

void psd_widen_row(const psd_table *t, const float *row, float *out, uint64_t floats)
{
    const psd_table_spec *const s = &t->spec;
    psd_widen_half(PSD_BF16, out, (const uint16_t *)row, (intptr_t)s->dim);
    memcpy(out + s->dim, row + (s->dim + 1) / 2, (floats - s->dim) * sizeof *row);
}

void psd_store_row(const psd_table *t, const float *in, float *row, uint64_t id, uint64_t step)
{
    const psd_table_spec *const s = &t->spec;
    if (!s->is_half) {
        memcpy(row, in, s->width * sizeof *row);
        return;
    }
    const uint64_t of_row = psd_mix(s->seed ^ psd_mix(id + GOLDEN));
    uint16_t *const half = (uint16_t *)row;
    half[(s->dim + 1) / 2 * 2 - 1] = 0; /* beside an odd number of them */
    round_value(in, half, (intptr_t)s->dim, psd_mix(of_row ^ psd_mix(step + GOLDEN)));
    memcpy(row + (s->dim + 1) / 2, in + s->dim, (s->width - s->dim) * sizeof *row);
}
