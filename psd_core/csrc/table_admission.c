/* Admission: which ids get a row. Until an id was seen often enough its gradients are counted and dropped.
 *
 * Sightings lie in buckets of eight, by a hash of the id and the table's seed; in a full one the id that was seen least makes room. So the count of an id may be
 * lost among many others, and it then begins anew; an id is never admitted too early, but for one in 2^48 or so that another's hash meets.
 * What a push has counted is stored when it commits, so empty words that its ids take are marked until then: each id gets one of its own.
 */
#include "portable.h"
#include "table.h"

#include <stdlib.h>

#define COUNT 0xffu

/* Whether this sighting counts: a function of the table's seed, the id and the step. */
static int is_counted(const psd_table *t, uint64_t id)
{
    return psd_mix(psd_mix(t->spec.seed ^ 0x5bd1e995u) ^ psd_mix(id + psd_mix(t->root->step + 1))) >> 32 < t->spec.admit_below;
}

/* Without the index's salt, which nobody knows: what is counted follows from what was pushed. Whoever chooses ids of one bucket makes them
 * forget each other, and no other id. */
static uint64_t sighting_hash(const psd_table *t, uint64_t id) { return psd_mix(id ^ psd_mix(t->spec.seed ^ 0x2545f491u)); }

static const uint64_t *sightings(const psd_table *t) { return (const uint64_t *)(t->base + t->region[PSD_SIGHTINGS].at); }

static uint8_t *taken_beside(const psd_table *t, const uint64_t *word, uint8_t *bit)
{
    const uint64_t number = (uint64_t)(word - sightings(t));
    *bit = (uint8_t)(1u << number % PSD_BUCKET);
    return &t->scratch.taken[number / PSD_BUCKET];
}

/* The word of an id in its bucket, or the one that gives way to it: empty, or else one that another id of this push has taken, or else the
 * one seen least. */
static const uint64_t *sighting_of(const psd_table *t, uint64_t hash)
{
    const uint64_t number = psd_home(hash >> 32, t->region[PSD_SIGHTINGS].size / 64);
    const uint64_t *const bucket = sightings(t) + number * PSD_BUCKET, *least = NULL;
    const uint8_t taken = t->scratch.taken[number];
    uint64_t fewest = ~(uint64_t)0;
    for (int i = 0; i < PSD_BUCKET; i++) {
        const uint64_t seen = taken >> i & 1 ? 1 : 2 * (bucket[i] & COUNT);
        if (bucket[i] != 0 && (bucket[i] | COUNT) == (hash | COUNT))
            return &bucket[i];
        if (seen < fewest) {
            fewest = seen;
            least = &bucket[i];
        }
    }
    return least;
}

int64_t psd_table_admit(psd_table *t)
{
    psd_scratch *const s = &t->scratch;
    int64_t passed_over = 0;
    s->sightings_count = 0;
    if (t->spec.admit_after <= 1 && t->spec.admit_below >> 32)
        return 0;
    if (!s->taken && !(s->taken = calloc(t->region[PSD_SIGHTINGS].size / 64 + 1, 1)))
        return -1;
    if (s->count > s->sightings_capacity) {
        psd_flip *const bigger = realloc(s->sightings, (size_t)s->capacity * sizeof(psd_flip));
        if (!bigger)
            return -1;
        s->sightings = bigger;
        s->sightings_capacity = s->capacity;
    }
    for (intptr_t k = 0; k < s->count; k++) {
        if (s->words[k])
            continue;
        int is_admitted = is_counted(t, s->ids[k]);
        if (is_admitted && t->spec.admit_after > 1) {
            const uint64_t hash = sighting_hash(t, s->ids[k]);
            const uint64_t *const word = sighting_of(t, hash);
            const uint64_t seen = 1 + ((*word | COUNT) == (hash | COUNT) ? *word & COUNT : 0);
            is_admitted = seen >= t->spec.admit_after;
            s->sightings[s->sightings_count++] =
                (psd_flip){(uint64_t)((const char *)word - t->base), is_admitted ? 0 : (hash & ~(uint64_t)COUNT) | seen};
            if (*word == 0) {
                uint8_t bit, *const taken = taken_beside(t, word, &bit);
                *taken |= bit;
            }
        }
        if (!is_admitted) {
            s->words[k] = PSD_PASSED_OVER;
            passed_over++;
        }
    }
    for (intptr_t i = 0; i < s->sightings_count; i++) {
        uint8_t bit, *const taken = taken_beside(t, (const uint64_t *)(t->base + s->sightings[i].at), &bit);
        *taken &= (uint8_t)~bit;
    }
    return passed_over;
}
