/* When a round is complete, and how long it was open: for those of a block (block.h), and of tables (step_tables.h). Masks have a bit
 * for each rank, and `words` words. */
#ifndef PSD_ROUNDS_H
#define PSD_ROUNDS_H

#include <string.h>

#include "ranks.h"
#include "round_times.h"

/* Whether a round of these contributors, and of rank `more` if that is not -1, is complete while those are waited for. */
static inline int psd_round_closes(const uint64_t *contributors, const uint64_t *waited, size_t words, int64_t quorum, int64_t more)
{
    int64_t count = 0, all = 0;
    for (size_t i = 0; i < words; i++) {
        uint64_t mask = contributors[i];
        if (more >= 0 && (size_t)more / 64 == i)
            mask |= (uint64_t)1 << (more % 64);
        count += __builtin_popcountll(mask);
        all += __builtin_popcountll(mask | waited[i]);
    }
    return count >= (quorum < all ? quorum : all);
}

static inline int psd_round_has(const uint64_t *contributors, int64_t rank)
{
    return contributors[rank / 64] >> (rank % 64) & 1;
}

/* A gradient that the open round counts. measured: to note by how much each rank's come late; NULL: nobody wants to know. */
static inline void psd_times_on_gradient(psd_round_times *t, psd_ranks *measured, size_t words, int64_t rank, double now, const uint64_t *waited)
{
    if (!t->is_open) {
        t->is_open = 1, t->opened_at = now;
        memcpy(t->awaited, waited, words * sizeof(uint64_t));
    } else if (measured) {
        psd_add_to(&measured->rank[rank].awaited_s, now - t->opened_at);
    }
    t->awaited[rank / 64] &= ~((uint64_t)1 << (rank % 64));
}

/* The round has closed. waited: mask of those waited for now. */
static inline void psd_times_on_close(psd_round_times *t, psd_ranks *measured, size_t words, double now, const uint64_t *waited)
{
    if (!t->is_open)
        return;
    const double took = now - t->opened_at;
    t->is_open = 0, t->has_closed = 1, t->closed_at = now;
    t->closed[psd_seconds_bucket(took)]++, t->closed_s += took;
    for (size_t i = 0; i < words && measured; i++) /* waited for, but gone since */
        for (uint64_t gone = t->awaited[i] & ~waited[i]; gone; gone &= gone - 1)
            psd_add_to(&measured->rank[64 * i + (size_t)__builtin_ctzll(gone)].awaited_s, took);
}

#endif
