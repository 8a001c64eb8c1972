/* A user's own rule on the rows of a push: they are gathered, handed over some at a time, and written when they come back. */
#include "portable.h"
#include "table.h"

/* The piece of row i in its batch: 0 is the value, those behind it are the slots. */
PSD_INLINE float *piece_of(const psd_table *t, const psd_own_rule *own, uint64_t piece, intptr_t i)
{
    return own->pieces + (piece * (uint64_t)own->capacity + (uint64_t)i) * t->spec.dim;
}

int psd_own_rule_add(psd_table *t, psd_own_rule *own, uint64_t id, const float *old, const float *gradient, uint64_t place, float *row)
{
    const uint64_t dim = t->spec.dim;
    if (old)
        psd_load_row(t, old, row, t->spec.width);
    else
        psd_initial_row(&t->spec, id, row);
    for (uint64_t piece = 0; piece < t->spec.width / dim; piece++)
        memcpy(piece_of(t, own, piece, own->count), row + piece * dim, dim * sizeof *row);
    psd_scaled_copy_f32(own->gradients + (uint64_t)own->count * dim, gradient, (float)own->scale, (intptr_t)dim);
    own->ids[own->count] = id;
    own->places[own->count] = place;
    return ++own->count == own->capacity ? psd_own_rule_apply(t, own, row) : 0;
}

int psd_own_rule_apply(psd_table *t, psd_own_rule *own, float *row)
{
    const uint64_t dim = t->spec.dim;
    const int status = own->count ? own->apply(own->context, own->count) : 0;
    for (intptr_t i = 0; i < own->count && status == 0; i++) {
        for (uint64_t piece = 0; piece < t->spec.width / dim; piece++)
            memcpy(row + piece * dim, piece_of(t, own, piece, i), dim * sizeof *row);
        psd_store_row(t, row, psd_row(t, own->places[i]), own->ids[i], own->step);
        psd_seal_row(t, own->places[i]);
    }
    own->count = 0;
    return status;
}
