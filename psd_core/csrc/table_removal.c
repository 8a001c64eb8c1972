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
        next->gone += psd_removal_check(t, psd_removals(next) + i);
        if (left == 0 && next->next_buckets && entry >> 32 < next->moved)
            next->next_filled--;
        else if (left == 0)
            next->filled--;
    }
    record->flips = record->backs = count;
    record->first_back = next->spares;
    psd_table_record_end(t, next);
    next->rows -= count;
    next->spares += count;
    *counter(next) += count;
    for (uint64_t i = psd_first_removal(t, t->root); i < psd_first_removal(t, next); i++)
        next->gone -= psd_removal_check(t, i);
    psd_table_commit(t, next);
}

static uint64_t *evicted(psd_root *r) { return &r->evicted; }
static uint64_t *expired(psd_root *r) { return &r->expired; }
static uint64_t *removed(psd_root *r) { return &r->removed; }

/* Removes the rows that were not used for longest, of those used before a clock: some, at most `most`, which is not above
 * PSD_REMOVED_MAX. Returns how many, 0 if there are none, or -1 without memory. */
static int64_t remove_oldest(psd_table *t, uint64_t most, uint64_t before, uint64_t clock, uint64_t *(*counter)(psd_root *))
{
    uint64_t *words[PSD_REMOVED_MAX], count = 0;
    do {
        if (psd_oldest_fill(t, before, clock))
            return -1;
        while (count < most && (words[count] = psd_oldest_pop(t, before)))
            count++;
    } while (count == 0 && t->oldest.count == 0 && t->oldest.bound < before);
    psd_table_remove(t, words, count, counter);
    return (int64_t)count;
}

/* The least recently used, exactly, and of those in the order of their ids' hash: which go is a function of what was used when. What was
 * used at this very clock stays, so the rows of the push that needs the room do. */
int psd_table_evict(psd_table *t, uint64_t count, uint64_t clock)
{
    int64_t now = 1;
    for (uint64_t done = 0; done < count && now > 0; done += (uint64_t)now)
        now = remove_oldest(t, count - done < PSD_REMOVED_MAX ? count - done : PSD_REMOVED_MAX, clock, clock, evicted);
    return now < 0 ? -1 : 0;
}

int psd_table_expire(psd_table *t, uint64_t clock, uint64_t age)
{
    const int64_t now = clock > age ? remove_oldest(t, PSD_REMOVED_MAX, clock - age, clock, expired) : 0;
    return now < 0 ? -1 : now > 0;
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
