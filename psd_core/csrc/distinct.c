/* The distinct ids of a batch: a hash table with open addressing, whose slots are asked for some ids ahead. */
#include "portable.h"
#include "distinct.h"
#include "mix.h"

#include <stdlib.h>

enum { AHEAD = 16, ROWS_AHEAD = 8 };

PSD_INLINE uint64_t shard_of(uint64_t id, uint64_t shards)
{
    return (psd_mix(id) >> 32) * shards >> 32;
}

PSD_KERNEL void psd_shards_of(const uint64_t *ids, intptr_t n, uint64_t shards, int64_t *out)
{
    PSD_ELEMENTWISE
    for (intptr_t i = 0; i < n; i++)
        out[i] = (int64_t)shard_of(ids[i], shards);
}

intptr_t psd_first_elsewhere(const uint64_t *ids, intptr_t n, uint64_t shards, uint64_t shard)
{
    for (intptr_t i = 0; i < n; i++)
        if (shard_of(ids[i], shards) != shard)
            return i;
    return -1;
}

/* The distinct ids in the order in which they came first. */
static intptr_t find(const uint64_t *ids, intptr_t n, uint64_t seed, uint32_t *slots, uint64_t mask, uint64_t *found, int32_t *inverse)
{
    intptr_t count = 0;
    for (intptr_t i = 0; i < n; i++) {
        if (i + AHEAD < n)
            PSD_PREFETCH(&slots[psd_mix(ids[i + AHEAD] ^ seed) & mask]);
        uint64_t slot = psd_mix(ids[i] ^ seed) & mask;
        while (slots[slot] && found[slots[slot] - 1] != ids[i])
            slot = (slot + 1) & mask;
        if (!slots[slot]) {
            found[count] = ids[i];
            slots[slot] = (uint32_t)++count;
        }
        inverse[i] = (int32_t)slots[slot] - 1;
    }
    return count;
}

/* Sorts ids by shard, each shard's in the order in which they are. */
static void by_shard(const uint64_t *found, intptr_t count, uint64_t shards, uint64_t *distinct, int64_t *starts, int32_t *place)
{
    for (intptr_t k = 0; k < count; k++)
        starts[shard_of(found[k], shards)]++;
    int64_t start = 0;
    for (uint64_t s = 0; s < shards; s++) {
        const int64_t size = starts[s];
        starts[s] = start;
        start += size;
    }
    for (intptr_t k = 0; k < count; k++) {
        place[k] = (int32_t)starts[shard_of(found[k], shards)]++;
        distinct[place[k]] = found[k];
    }
    memmove(starts + 1, starts, shards * sizeof *starts); /* each had become the next one's */
    starts[0] = 0;
}

intptr_t psd_distinct(const uint64_t *ids, intptr_t n, uint64_t seed, uint64_t shards, uint64_t *distinct, int64_t *starts,
                      int32_t *inverse)
{
    uint64_t size = 64;
    while (size < 2 * (uint64_t)n)
        size *= 2;
    memset(starts, 0, (shards + 1) * sizeof *starts);
    uint32_t *const slots = calloc(size, sizeof *slots);
    uint64_t *const found = shards > 1 ? malloc((size_t)n * sizeof *found + 1) : distinct;
    intptr_t count = -1;
    if (slots && found)
        count = find(ids, n, seed, slots, size - 1, found, inverse);
    if (count >= 0 && shards > 1) {
        int32_t *const place = (int32_t *)slots; /* of each id; there are at least twice as many slots */
        by_shard(found, count, shards, distinct, starts, place);
        for (intptr_t i = 0; i < n; i++)
            inverse[i] = place[inverse[i]];
    } else if (count >= 0)
        starts[1] = count;
    if (shards > 1)
        free(found);
    free(slots);
    return count;
}

PSD_INLINE void prefetch_row(const float *row, intptr_t dim)
{
    for (intptr_t i = 0; i < dim; i += 16)
        PSD_PREFETCH(row + i);
}

PSD_KERNEL void psd_sum_rows(const float *rows, const int32_t *inverse, intptr_t n, intptr_t dim, uint8_t *seen, float *out)
{
    for (intptr_t i = 0; i < n; i++) {
        const float *const from = rows + i * dim;
        float *const to = out + inverse[i] * dim;
        if (i + ROWS_AHEAD < n)
            prefetch_row(out + inverse[i + ROWS_AHEAD] * dim, dim);
        if (seen[inverse[i]]) {
            PSD_ELEMENTWISE
            for (intptr_t j = 0; j < dim; j++)
                to[j] = to[j] + from[j];
        } else {
            PSD_ELEMENTWISE
            for (intptr_t j = 0; j < dim; j++)
                to[j] = from[j];
        }
        seen[inverse[i]] = 1;
    }
}

PSD_KERNEL void psd_expand_rows(const float *rows, const int32_t *inverse, intptr_t n, intptr_t dim, float *out)
{
    for (intptr_t i = 0; i < n; i++) {
        const float *const from = rows + inverse[i] * dim;
        float *const to = out + i * dim;
        if (i + ROWS_AHEAD < n)
            prefetch_row(rows + inverse[i + ROWS_AHEAD] * dim, dim);
        PSD_ELEMENTWISE
        for (intptr_t j = 0; j < dim; j++)
            to[j] = from[j];
    }
}
