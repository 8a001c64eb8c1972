/* The k elements of largest magnitude, exactly: which they are does not depend on how they are found.
 *
 * A sample says below which magnitude hardly any of them lies. One pass collects what is not below; if these are at least k,
 * and fit into the scratch arrays, the k are among them. If not, as in an array of almost only zeros, they are found by
 * counting.
 */
#include "codec_elements.h"
#include "mix.h"

enum { SAMPLES = 1 << 16, TILE = 16 };

PSD_INLINE float sum_at(const float *values, const float *residual, intptr_t i)
{
    return residual ? values[i] + residual[i] : values[i];
}

PSD_INLINE uint32_t magnitude_at(const float *values, const float *residual, intptr_t i)
{
    return as_bits(sum_at(values, residual, i)) & MAGNITUDE;
}

/* The k-th largest magnitude, and how many elements that have exactly this one belong to the k. Three times a part of the bits
 * is counted, the highest first, of the elements that have the parts before. In four tables: neighbours often count alike. */
PSD_INLINE uint32_t find(const float *values, const float *residual, intptr_t n, intptr_t k, intptr_t *ties)
{
    static const int SHIFTS[] = {20, 10, 0}, WIDTHS[] = {11, 10, 10};
    uint32_t counts[4][(1 << 11) + 1], found = 0;
    for (int level = 0; level < 3; level++) {
        const int shift = SHIFTS[level], above = shift + WIDTHS[level];
        const uint32_t others = 1u << WIDTHS[level], mask = others - 1;
        memset(counts, 0, sizeof counts);
        for (intptr_t i = 0; i < n; i++) {
            const uint32_t magnitude = magnitude_at(values, residual, i);
            counts[i & 3][magnitude >> above == found >> above ? magnitude >> shift & mask : others]++;
        }
        uint32_t part = others;
        intptr_t here;
        do {
            part--;
            here = (intptr_t)counts[0][part] + counts[1][part] + counts[2][part] + counts[3][part];
            k -= here;
        } while (k > 0);
        k += here;
        found |= part << shift;
    }
    *ties = k;
    return found;
}

/* How many of the sample shall lie at or above the bound: more than expected, by some standard deviations. */
PSD_INLINE intptr_t rank_in_sample(intptr_t n, intptr_t k)
{
    const intptr_t expected = (intptr_t)((double)SAMPLES * (double)k / (double)n);
    return expected + expected / 4 + 32;
}

intptr_t psd_topk_room(intptr_t n, intptr_t k)
{
    /* Twice what is expected at or above the bound; k do for counting all, and the sample lies here, too. */
    const double expected = (double)n * (double)rank_in_sample(n > 0 ? n : 1, k) / SAMPLES;
    const intptr_t room = 2 * (intptr_t)expected + 4096, least = k > SAMPLES ? k : SAMPLES;
    const intptr_t most = n > SAMPLES ? n : SAMPLES;
    return (room < least ? least : room > most ? most : room) + TILE;
}

/* The bound, or 0 if a sample is of no use. */
PSD_INLINE uint32_t bound_of_sample(const float *values, const float *residual, intptr_t n, intptr_t k, float *scratch)
{
    intptr_t ties;
    const intptr_t rank = rank_in_sample(n, k);
    if (n <= SAMPLES || rank > SAMPLES / 2)
        return 0;
    for (uint64_t j = 0; j < SAMPLES; j++)
        scratch[j] = sum_at(values, residual, (intptr_t)((psd_mix(j) >> 32) * (uint64_t)n >> 32));
    const uint32_t bound = find(scratch, NULL, SAMPLES, rank, &ties);
    return bound < INFINITE ? bound : INFINITE; /* what is not finite must be seen */
}

/* Collects what is not below the bound; returns how many these are, -1 if they do not fit. */
PSD_INLINE intptr_t collect(const float *values, const float *residual, intptr_t n, uint32_t bound, intptr_t room, float *found,
                            uint32_t *indices)
{
    intptr_t count = 0, begin = 0;
    for (; begin + TILE <= n; begin += TILE) {
        uint32_t any = 0;
        for (int i = 0; i < TILE; i++)
            any |= bound - 1 - magnitude_at(values, residual, begin + i); /* negative if it is not below */
        if (!(any >> 31))
            continue;
        if (count + TILE > room)
            return -1;
        for (int i = 0; i < TILE; i++) {
            found[count] = sum_at(values, residual, begin + i);
            indices[count] = (uint32_t)(begin + i);
            count += magnitude_at(values, residual, begin + i) >= bound;
        }
    }
    if (count + TILE > room)
        return -1;
    for (; begin < n; begin++) {
        found[count] = sum_at(values, residual, begin);
        indices[count] = (uint32_t)begin;
        count += magnitude_at(values, residual, begin) >= bound;
    }
    return count;
}

/* Keeps the k largest of n elements, of equal ones the first, in their order; `found` may be `values`. */
PSD_INLINE void keep_largest(const float *values, const float *residual, const uint32_t *places, intptr_t n, intptr_t k,
                             float *found, uint32_t *indices)
{
    intptr_t ties;
    const uint32_t least = find(values, residual, n, k, &ties);
    for (intptr_t i = 0, count = 0; count < k; i++) {
        const float value = sum_at(values, residual, i);
        const uint32_t magnitude = as_bits(value) & MAGNITUDE;
        const int is_tie = magnitude == least && ties > 0;
        if (magnitude > least || is_tie) {
            ties -= is_tie;
            found[count] = value;
            indices[count++] = places ? places[i] : (uint32_t)i;
        }
    }
}

PSD_INLINE void write_parts(psd_topk_parts to, const float *found, const uint32_t *indices, intptr_t n, intptr_t k)
{
    const intptr_t chunks = (n + PSD_TOPK_CHUNK - 1) / PSD_TOPK_CHUNK;
    intptr_t entry = 0;
    for (intptr_t chunk = 0; chunk < chunks; chunk++) {
        const intptr_t first = entry;
        for (; entry < k && indices[entry] / PSD_TOPK_CHUNK == chunk; entry++)
            store16(to.offsets, entry, (uint16_t)indices[entry]);
        const uint32_t count = (uint32_t)(entry - first);
        memcpy(to.counts + 4 * chunk, &count, 4);
    }
    memcpy(to.values, found, (size_t)k * sizeof *found);
}

PSD_KERNEL intptr_t psd_topk_encode(const float *values, float *residual, intptr_t n, intptr_t k, psd_topk_parts to,
                                    float *scratch_values, uint32_t *scratch_indices)
{
    intptr_t count = -1;
    const uint32_t bound = n > 0 ? bound_of_sample(values, residual, n, k, scratch_values) : 0;
    if (bound > 0)
        count = residual ? collect(values, residual, n, bound, psd_topk_room(n, k), scratch_values, scratch_indices)
                         : collect(values, NULL, n, bound, psd_topk_room(n, k), scratch_values, scratch_indices);
    const intptr_t wrong = count >= 0 ? psd_first_nonfinite_sum(scratch_values, NULL, count)
                                      : psd_first_nonfinite_sum(values, residual, n);
    if (wrong >= 0)
        return count >= 0 ? (intptr_t)scratch_indices[wrong] : wrong;
    if (count >= k)
        keep_largest(scratch_values, NULL, scratch_indices, count, k, scratch_values, scratch_indices);
    else
        keep_largest(values, residual, NULL, n, k, scratch_values, scratch_indices);
    write_parts(to, scratch_values, scratch_indices, n, k);
    if (residual) {
        PSD_ELEMENTWISE
        for (intptr_t i = 0; i < n; i++)
            residual[i] = values[i] + residual[i];
        for (intptr_t entry = 0; entry < k; entry++)
            residual[scratch_indices[entry]] = 0;
    }
    return -1;
}

PSD_INLINE uint32_t count_of(psd_topk_parts from, intptr_t chunk)
{
    uint32_t count;
    memcpy(&count, from.counts + 4 * chunk, 4);
    return count;
}

PSD_INLINE float value_of(psd_topk_parts from, intptr_t entry)
{
    float value;
    memcpy(&value, from.values + 4 * entry, 4);
    return value;
}

psd_topk_field psd_topk_fault(psd_topk_parts from, intptr_t n, intptr_t k, intptr_t *at)
{
    const intptr_t chunks = (n + PSD_TOPK_CHUNK - 1) / PSD_TOPK_CHUNK;
    intptr_t entry = 0;
    for (*at = 0; *at < chunks; ++*at) {
        const intptr_t left = n - *at * PSD_TOPK_CHUNK;
        if (count_of(from, *at) > (uint32_t)(left < PSD_TOPK_CHUNK ? left : PSD_TOPK_CHUNK))
            return PSD_TOPK_COUNT;
        entry += count_of(from, *at);
    }
    *at = entry;
    if (entry != k)
        return PSD_TOPK_COUNTS;
    *at = 0;
    for (intptr_t chunk = 0; chunk < chunks; chunk++) {
        const intptr_t left = n - chunk * PSD_TOPK_CHUNK, end = *at + count_of(from, chunk);
        for (intptr_t before = -1; *at < end; ++*at) {
            const intptr_t offset = load16(from.offsets, *at);
            if (offset >= left)
                return PSD_TOPK_OFFSET;
            if (offset <= before)
                return PSD_TOPK_ORDER;
            before = offset;
        }
    }
    for (*at = 0; *at < k; ++*at)
        if ((as_bits(value_of(from, *at)) & INFINITE) == INFINITE)
            return PSD_TOPK_VALUE;
    return PSD_TOPK_SOUND;
}

/* Memory may be shared with who wrote the data, and change after the check: no place is used without a look at it. */
PSD_INLINE void each_entry(psd_topk_parts from, intptr_t n, intptr_t k, float *to, float weight, int is_added)
{
    intptr_t entry = 0;
    for (intptr_t begin = 0; begin < n; begin += PSD_TOPK_CHUNK) {
        const intptr_t count = count_of(from, begin / PSD_TOPK_CHUNK), end = k - entry < count ? k : entry + count;
        for (; entry < end; entry++) {
            const intptr_t i = begin + load16(from.offsets, entry);
            if (i < n)
                to[i] = is_added ? to[i] + weight * value_of(from, entry) : value_of(from, entry);
        }
    }
}

void psd_topk_decode(psd_topk_parts from, float *out, intptr_t n, intptr_t k)
{
    memset(out, 0, (size_t)n * sizeof *out);
    each_entry(from, n, k, out, 0, 0);
}

void psd_topk_accumulate(psd_topk_parts from, float *acc, float weight, intptr_t n, intptr_t k)
{
    each_entry(from, n, k, acc, weight, 1);
}
