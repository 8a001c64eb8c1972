/* Sums of sparse gradients by id, in ordinary memory: what a round has of the rows that its workers have sent. */
#include "portable.h"
#include "table.h"

#include <errno.h>
#include <stdlib.h>

enum { AHEAD = 8 };

static int rehash(psd_sums *s, uint64_t size)
{
    uint32_t *const slots = calloc(size, 4);
    if (!slots)
        return ENOMEM;
    free(s->slots);
    s->slots = slots;
    s->mask = size - 1;
    for (intptr_t k = 0; k < s->count; k++) {
        uint64_t slot = psd_slot(s->ids[k], s->mask);
        while (slots[slot])
            slot = (slot + 1) & s->mask;
        slots[slot] = (uint32_t)(k + 1);
    }
    return 0;
}

/* Room for n more sums; a sum begins on a cache line where the first one does. */
static int make_room(psd_sums *s, intptr_t n, intptr_t dim)
{
    const intptr_t needed = s->count + n;
    if (needed > s->capacity) {
        const size_t capacity = (size_t)needed + (size_t)needed / 2 + 64;
        uint64_t *const ids = realloc(s->ids, capacity * 8);
        if (ids)
            s->ids = ids;
        float *const values = ids ? realloc(s->values, capacity * (size_t)dim * 4) : NULL;
        if (!values)
            return ENOMEM;
        s->values = values;
        s->capacity = (intptr_t)capacity;
    }
    uint64_t size = s->slots ? s->mask + 1 : 64;
    while (size < 2 * (uint64_t)needed)
        size *= 2;
    return s->slots && size == s->mask + 1 ? 0 : rehash(s, size);
}

int psd_sums_prepare(psd_sums *s, const uint64_t *ids, const float *grads, intptr_t n, intptr_t dim)
{
    const psd_part part = {ids, grads, n};
    return psd_combine(&s->scratch, &part, 1, dim, 0, 0) || make_room(s, s->scratch.count, dim) ? ENOMEM : 0;
}

void psd_sums_add(psd_sums *s, intptr_t dim, double weight)
{
    psd_scratch *const c = &s->scratch;
    s->is_touched = 1;
    for (intptr_t i = 0; i < c->count; i++) {
        if (i + AHEAD < c->count)
            PSD_PREFETCH(&s->slots[psd_slot(c->ids[i + AHEAD], s->mask)]);
        uint64_t slot = psd_slot(c->ids[i], s->mask);
        while (s->slots[slot] && s->ids[s->slots[slot] - 1] != c->ids[i])
            slot = (slot + 1) & s->mask;
        if (s->slots[slot]) {
            psd_accumulate_f32(s->values + ((intptr_t)s->slots[slot] - 1) * dim, c->values[i], (float)weight, dim);
            continue;
        }
        psd_scaled_copy_f32(s->values + s->count * dim, c->values[i], (float)weight, dim);
        s->ids[s->count] = c->ids[i];
        s->slots[slot] = (uint32_t)++s->count;
    }
    c->count = 0;
}

void psd_sums_clear(psd_sums *s)
{
    const int is_oversized = psd_is_oversized(&s->use, s->count, s->capacity);
    s->count = 0, s->is_touched = 0;
    if (is_oversized)
        psd_sums_free(s);
    if (s->slots)
        memset(s->slots, 0, (s->mask + 1) * 4);
}

void psd_sums_free(psd_sums *s)
{
    psd_scratch_free(&s->scratch);
    free(s->ids);
    free(s->values);
    free(s->slots);
    memset(s, 0, sizeof *s);
}
