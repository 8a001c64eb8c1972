/* The distinct ids of a push, and for each its value: where it lies if the id came once, else the sum, in the order of the push. */
#include "portable.h"
#include "table.h"

#include <errno.h>
#include <stdlib.h>

uint64_t psd_slots_seed;

static int resize(void **array, size_t bytes)
{
    void *const bigger = realloc(*array, bytes);
    if (!bigger)
        return ENOMEM;
    *array = bigger;
    return 0;
}

static int make_room(psd_scratch *s, intptr_t n)
{
    if (n > s->capacity) {
        const size_t capacity = (size_t)n + (size_t)n / 4 + 64;
        s->capacity = 0;
        if (resize((void **)&s->ids, capacity * 8) || resize((void **)&s->words, capacity * sizeof(uint64_t *))
            || resize((void **)&s->values, capacity * sizeof(float *)) || resize((void **)&s->sum_of, capacity * 8))
            return ENOMEM;
        s->capacity = (intptr_t)capacity;
    }
    return 0;
}

static int make_slots(psd_scratch *s, intptr_t n, uint64_t *mask)
{
    uint64_t size = 64;
    while (size < 2 * (uint64_t)n)
        size *= 2;
    if (size > (uint64_t)s->slots_capacity) {
        s->slots_capacity = 0;
        if (resize((void **)&s->slots, size * 4))
            return ENOMEM;
        s->slots_capacity = (intptr_t)size;
    }
    memset(s->slots, 0, size * 4);
    *mask = size - 1;
    return 0;
}

static int add_to_sum(psd_scratch *s, intptr_t k, const float *value, intptr_t width, intptr_t *sums)
{
    if (s->sum_of[k] < 0) {
        if (*sums == s->sums_capacity || !s->sums) {
            const intptr_t capacity = 2 * *sums + 64;
            if (resize((void **)&s->sums, (size_t)(capacity * width) * 4))
                return ENOMEM;
            s->sums_capacity = capacity;
        }
        s->sum_of[k] = (*sums)++;
        memcpy(s->sums + s->sum_of[k] * width, s->values[k], (size_t)width * 4);
    }
    psd_accumulate_f32(s->sums + s->sum_of[k] * width, value, 1, width);
    return 0;
}

static int combine_part(psd_scratch *s, const psd_part *part, intptr_t width, uint64_t mask, int last, intptr_t *sums)
{
    for (intptr_t i = 0; i < part->n; i++) {
        const uint64_t id = part->ids[i];
        const float *const value = part->values + i * width;
        uint64_t slot = psd_slot(id, mask);
        while (s->slots[slot] && s->ids[s->slots[slot] - 1] != id)
            slot = (slot + 1) & mask;
        const intptr_t k = (intptr_t)s->slots[slot] - 1;
        if (k < 0) {
            s->ids[s->count] = id;
            s->values[s->count] = value;
            s->sum_of[s->count] = -1;
            s->slots[slot] = (uint32_t)++s->count;
        } else if (last)
            s->values[k] = value;
        else if (add_to_sum(s, k, value, width, sums))
            return ENOMEM;
    }
    return 0;
}

int psd_combine(psd_scratch *s, const psd_part *parts, int count, intptr_t width, int distinct, int last)
{
    uint64_t mask;
    intptr_t n = 0, sums = 0;
    for (int i = 0; i < count; i++)
        n += parts[i].n;
    if (psd_is_oversized(&s->use, n, s->capacity))
        psd_scratch_free(s);
    s->count = 0;
    if (make_room(s, n))
        return ENOMEM;
    if (distinct) {
        memcpy(s->ids, parts->ids, (size_t)n * 8);
        for (intptr_t i = 0; i < n; i++)
            s->values[i] = parts->values + i * width;
        s->count = n;
        return 0;
    }
    if (make_slots(s, n, &mask))
        return ENOMEM;
    for (int i = 0; i < count; i++)
        if (combine_part(s, &parts[i], width, mask, last, &sums))
            return ENOMEM;
    if (sums)
        for (intptr_t k = 0; k < s->count; k++)
            if (s->sum_of[k] >= 0)
                s->values[k] = s->sums + s->sum_of[k] * width;
    return 0;
}

void psd_scratch_free(psd_scratch *s)
{
    free(s->ids);
    free(s->words);
    free(s->values);
    free(s->sum_of);
    free(s->slots);
    free(s->sums);
    free(s->sightings);
    free(s->taken);
    memset(s, 0, sizeof *s);
}
