/* The distinct ids of a batch, by shard, and rows of numbers from ids to distinct ids and back. Pure functions on the caller's memory. */
#ifndef PSD_DISTINCT_H
#define PSD_DISTINCT_H

#include <stdint.h>

/* Sets shards[i] to that of ids[i]: the high half of the id's hash, scaled to the number of shards. */
void psd_shards_of(const uint64_t *ids, intptr_t n, uint64_t shards, int64_t *out);

/* The place of the first id that is not of this shard, or -1. */
intptr_t psd_first_elsewhere(const uint64_t *ids, intptr_t n, uint64_t shards, uint64_t shard);

/* Sets distinct[0, k) to the distinct ids by shard, in the order in which they came first; starts[0, shards] to where each shard's
 * begin; inverse[i] to where ids[i] is among them. `seed` keeps others from choosing ids that collide. Returns k, or -1 without
 * memory. Lengths: ids, distinct, inverse: n < 2^31; starts: shards + 1. */
intptr_t psd_distinct(const uint64_t *ids, intptr_t n, uint64_t seed, uint64_t shards, uint64_t *distinct, int64_t *starts,
                      int32_t *inverse);

/* Sets each of k rows of `out`, each of which inverse names, to the sum of its rows, in the order in which they come. `seen`: k bytes
 * of 0. */
void psd_sum_rows(const float *rows, const int32_t *inverse, intptr_t n, intptr_t dim, uint8_t *seen, float *out);

/* Sets out[i] to rows[inverse[i]]. */
void psd_expand_rows(const float *rows, const int32_t *inverse, intptr_t n, intptr_t dim, float *out);

#endif
