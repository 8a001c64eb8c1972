/* How rows go: evicted for want of room, expired, or discarded by id. Each batch is one commit. */
#include "portable.h"
#include "table.h"

void psd_table_remove(psd_table *t, uint64_t *const *words, uint64_t count, uint64_t *(*counter)(psd_root *))
{
    if (count == 0)
        return;
    psd_root *const next = psd_table_next_root(t);
    psd_record *const record = psd_table_record(t);
    psd_flip *const flips = (psd_flip *)(record + 1);
    uint32_t *const backs = (uint32_t *)(flips + count);
    for (uint64_t i = 0; i < count; i++) {
        const uint64_t entry = *words[i], left = psd_index_grave(words[i]);
        flips[i] = (psd_flip){(uint64_t)((char *)words[i] - t->base), left};
        backs[i] = (uint32_t)entry - 1;
        *psd_removal(t, psd_removals(next) + i) = psd_heads(t)[(uint32_t)entry - 1].id;
        if (left == 0 && next->next_buckets && entry >> 32 < next->moved)
            next->next_filled--;
        else if (left == 0)
            next->filled--;
    }
    record->flips = record->backs = count;
    record->first_back = next->spares;
    record->commit = next->commit;
    next->rows -= count;
    next->spares += count;
    *counter(next) += count;
    psd_table_commit(t, next);
}

static uint64_t *evicted(psd_root *r) { return &r->evicted; }
static uint64_t *expired(psd_root *r) { return &r->expired; }
static uint64_t *removed(psd_root *r) { return &r->removed; }

/* The ages of the rows of index words, in clocks: 0 for what was used later than this one, by a reader that is ahead. */
static void ages_of(const psd_table *t, uint64_t *const *words, uint64_t count, uint32_t clock, uint32_t *ages)
{
    for (uint64_t i = 0; i < count; i++)
        PSD_PREFETCH(&psd_heads(t)[(uint32_t)*words[i] - 1]);
    for (uint64_t i = 0; i < count; i++) {
        const uint32_t used = __atomic_load_n(&psd_heads(t)[(uint32_t)*words[i] - 1].used, __ATOMIC_RELAXED);
        ages[i] = psd_is_later(clock, used) ? clock - used : 0;
    }
}

/* Keeps the words whose rows are at least this old, which is the age that so many of them have; at most `most`. */
static uint64_t oldest(uint64_t **words, const uint32_t *ages, uint64_t count, uint64_t most)
{
    uint32_t age = 0;
    for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
        uint64_t older = 0;
        for (uint64_t i = 0; i < count; i++)
            older += ages[i] >= (age | bit);
        if (older >= most)
            age |= bit;
    }
    uint64_t kept = 0;
    for (uint64_t i = 0; i < count && kept < most; i++)
        if (ages[i] >= age && ages[i] > 0)
            words[kept++] = words[i];
    return kept;
}

/* Nearly the least recently used: of each run of up to 2048 rows in the order of tags, the oldest quarter. What was used at this very
 * clock stays, so the rows of the push that needs the room do. Goes around again as long as there are others. */
uint64_t psd_table_evict(psd_table *t, uint64_t count, uint32_t clock)
{
    uint64_t *words[PSD_REMOVED_MAX];
    uint32_t ages[PSD_REMOVED_MAX];
    uint64_t done = 0, seen = 0, before = 0, all = t->root->rows;
    while (done < count) {
        uint64_t found;
        if (seen >= all) {
            if (done == before)
                break;
            before = done;
            seen = 0;
            all = t->root->rows;
        }
        const uint64_t tag = psd_index_scan(t, t->hand, words, PSD_REMOVED_MAX, &found);
        t->hand = tag >> 32 ? 0 : tag;
        ages_of(t, words, found, clock, ages);
        seen += found;
        const uint64_t quarter = (found + 3) / 4, most = count - done < quarter ? count - done : quarter;
        const uint64_t kept = most ? oldest(words, ages, found, most) : 0;
        psd_table_remove(t, words, kept, evicted);
        done += kept;
    }
    return done;
}

uint64_t psd_table_expire(psd_table *t, uint64_t tag, uint32_t clock, uint32_t age)
{
    uint64_t *words[PSD_REMOVED_MAX], found, kept = 0;
    uint32_t ages[PSD_REMOVED_MAX];
    tag = psd_index_scan(t, tag, words, PSD_REMOVED_MAX, &found);
    ages_of(t, words, found, clock, ages);
    for (uint64_t i = 0; i < found; i++)
        if (ages[i] > age)
            words[kept++] = words[i];
    psd_table_remove(t, words, kept, expired);
    return tag;
}

uint64_t psd_table_discard(psd_table *t, const uint64_t *ids, intptr_t n)
{
    uint64_t *words[PSD_REMOVED_MAX], found = 0;
    for (intptr_t i = 0; i < n && i < PSD_REMOVED_MAX; i++) {
        uint64_t *const word = psd_index_find(t, ids[i], psd_tag(t, ids[i]));
        if (word)
            words[found++] = word;
    }
    psd_table_remove(t, words, found, removed);
    return found;
}
