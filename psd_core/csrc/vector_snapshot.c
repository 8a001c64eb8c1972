/* Snapshots: vectors as they were at one batch, copied while others come. What a batch writes over is saved in ordinary memory. */
#include "portable.h"
#include "vector.h"

#include <errno.h>
#include <stdlib.h>

static uint64_t stripes_of(const psd_vectors *t, uint64_t vector) { return (t->elements[vector] + PSD_STRIPE - 1) / PSD_STRIPE; }

static size_t bytes_of(const psd_vectors *t, uint64_t vector, uint64_t stripe)
{
    const uint64_t rest = t->elements[vector] - stripe * PSD_STRIPE;
    return (size_t)(rest < PSD_STRIPE ? rest : PSD_STRIPE) * (t->dtypes[vector] == PSD_V_F32 ? 4 : 8);
}

static char *place_of(const psd_vectors *t, uint64_t vector, uint64_t stripe)
{
    return t->bases[vector] + stripe * PSD_STRIPE * (t->dtypes[vector] == PSD_V_F32 ? 4 : 8);
}

int psd_vector_snapshot_begin(psd_vectors *t)
{
    t->snapshot.is_failed = 0;
    t->snapshot.saved = calloc(t->capacity, sizeof *t->snapshot.saved);
    if (!t->snapshot.saved)
        return ENOMEM;
    t->snapshot.is_active = 1;
    for (uint64_t i = 0; i < t->capacity; i++)
        if (t->bases[i] && !(t->snapshot.saved[i] = calloc(stripes_of(t, i) + 1, sizeof(char *)))) {
            psd_vector_snapshot_end(t);
            return ENOMEM;
        }
    return 0;
}

void psd_vector_snapshot_save(psd_vectors *t, uint32_t vector, uint64_t stripe)
{
    char **const saved = t->snapshot.saved[vector];
    if (!saved || saved[stripe])
        return;
    const size_t bytes = bytes_of(t, vector, stripe);
    if (!(saved[stripe] = malloc(bytes))) {
        t->snapshot.is_failed = 1;
        return;
    }
    memcpy(saved[stripe], place_of(t, vector, stripe), bytes);
}

void psd_vector_snapshot_copy(psd_vectors *t, uint32_t vector, uint64_t first, uint64_t count, char *out)
{
    char **const saved = t->snapshot.saved[vector];
    for (uint64_t stripe = first; stripe < first + count; stripe++) {
        const size_t bytes = bytes_of(t, vector, stripe);
        memcpy(out, saved[stripe] ? saved[stripe] : place_of(t, vector, stripe), bytes);
        free(saved[stripe]);
        saved[stripe] = PSD_COPIED;
        out += bytes;
    }
}

void psd_vector_snapshot_end(psd_vectors *t)
{
    for (uint64_t i = 0; t->snapshot.is_active && i < t->capacity; i++) {
        for (uint64_t k = 0; t->snapshot.saved[i] && t->bases[i] && k < stripes_of(t, i); k++)
            if (t->snapshot.saved[i][k] != PSD_COPIED)
                free(t->snapshot.saved[i][k]);
        free(t->snapshot.saved[i]);
    }
    free(t->snapshot.saved);
    t->snapshot.saved = NULL;
    t->snapshot.is_active = 0;
}
