/* The index of a partition: entries in buckets of a cache line, in the order of their tags; docs/design/tables.md has its rules.
 *
 * Knows nothing of rows but their heads' ids. Only psd_index_move commits; the other changes are part of somebody's commit.
 */
#include "portable.h"
#include "table.h"

PSD_INLINE uint64_t tag_of(uint64_t entry) { return entry >> 32; }
/* The first tag whose home is this bucket or a later one. */
PSD_INLINE uint64_t first_tag(uint64_t bucket, uint64_t buckets) { return ((bucket << 32) + buckets - 1) / buckets; }

uint64_t *psd_index_find(const psd_table *t, uint64_t id, uint32_t tag)
{
    const int next = psd_is_moved(t, tag);
    const uint64_t buckets = next ? t->root->next_buckets : t->root->buckets;
    uint64_t b = psd_home(tag, buckets);
    for (uint64_t probes = 0; probes < buckets; probes++, b = b + 1 == buckets ? 0 : b + 1) {
        uint64_t *const bucket = psd_bucket(t, next, b);
        int full = 1;
        for (int i = 0; i < PSD_BUCKET; i++) {
            const uint64_t entry = bucket[i];
            if (tag_of(entry) == tag && psd_is_live(entry) && psd_heads(t)[(uint32_t)entry - 1].id == id)
                return &bucket[i];
            full &= entry != 0;
        }
        if (!full)
            return NULL;
    }
    return NULL;
}

/* Stores an entry in the first room from its home on, unless it is there already: returns 1 if what it took had been 0. It looks to
 * the end of the chain first, since the same record may have made room before the entry when it was applied the first time. Without
 * `graves` it takes none of them: then what it did can be undone by storing 0. */
static int place_in(const psd_table *t, int next, uint64_t entry, int graves)
{
    const uint64_t buckets = next ? t->root->next_buckets : t->root->buckets;
    uint64_t b = psd_home(tag_of(entry), buckets), *room = NULL;
    for (uint64_t probes = 0; probes < buckets; probes++, b = b + 1 == buckets ? 0 : b + 1) {
        uint64_t *const bucket = psd_bucket(t, next, b);
        int full = 1;
        for (int i = 0; i < PSD_BUCKET; i++) {
            if (bucket[i] == entry)
                return 0;
            if (!room && (graves ? !psd_is_live(bucket[i]) : bucket[i] == 0))
                room = &bucket[i];
            full &= bucket[i] != 0;
        }
        if (!full)
            break;
    }
    if (!room)
        return 0; /* the load is bounded, so the index is damaged, and the look at all of it will say so */
    const int fresh = *room == 0;
    __atomic_store_n(room, entry, __ATOMIC_RELEASE);
    return fresh;
}

void psd_index_place(const psd_table *t, uint64_t entry)
{
    place_in(t, psd_is_moved(t, tag_of(entry)), entry, 1);
}

uint64_t psd_index_grave(const uint64_t *entry)
{
    const uint64_t *const bucket = (const uint64_t *)((uintptr_t)entry / 64 * 64);
    for (int i = 0; i < PSD_BUCKET; i++)
        if (bucket[i] == 0)
            return 0;
    return (*entry & ~(uint64_t)UINT32_MAX) | PSD_GRAVE;
}

/* Rows that a push of n ids may add. */
static uint64_t added(const psd_table *t, uint64_t n)
{
    return n < t->spec.rows_max ? n : t->spec.rows_max;
}

/* Growth begins at a load of 0.8; a push that would bring it beyond 0.9 before its end waits for that end. */
int psd_index_must_move(const psd_table *t, uint64_t ids)
{
    const psd_root *const r = t->root;
    const uint64_t n = added(t, ids);
    if (!r->next_buckets)
        return (r->filled + n) * 5 > r->buckets * PSD_BUCKET * 4;
    return (r->filled + n) * 10 > r->buckets * PSD_BUCKET * 9 || (r->next_filled + n) * 10 > r->next_buckets * PSD_BUCKET * 9;
}

static void begin(psd_table *t, uint64_t n)
{
    psd_root *const r = psd_table_next_root(t);
    const uint64_t grown = r->buckets < 8192 ? 2 * r->buckets : r->buckets + r->buckets / 4;
    const uint64_t needed = (r->rows + added(t, n)) * 3 / 2 / PSD_BUCKET + 1; /* a load of 2/3 */
    /* Graves alone may have filled it: then it is written anew in its old size. */
    r->next_buckets = r->rows * 3 / 2 < r->filled && needed < r->buckets ? r->buckets : grown > needed ? grown : needed;
    if (r->next_buckets > t->region[PSD_INDEX].size / 64)
        r->next_buckets = t->region[PSD_INDEX].size / 64;
    r->moved = r->next_filled = 0;
    psd_table_commit(t, r);
}

/* Copies the entries whose homes are in the next few buckets; then a commit says that they are there. */
void psd_index_move(psd_table *t, uint64_t n)
{
    if (!t->root->next_buckets) {
        begin(t, n);
        return;
    }
    const uint64_t buckets = t->root->buckets, low = t->root->moved;
    const uint64_t from = psd_home(low, buckets), to = from + PSD_CHUNK_BUCKETS < buckets ? from + PSD_CHUNK_BUCKETS : buckets;
    const uint64_t high = first_tag(to, buckets);
    uint64_t placed = 0;
    for (uint64_t at = from, probes = 0; probes < buckets; at++, probes++) {
        const uint64_t *const bucket = psd_bucket(t, 0, at >= buckets ? at - buckets : at);
        int full = 1;
        for (int i = 0; i < PSD_BUCKET; i++) {
            full &= bucket[i] != 0;
            if (psd_is_live(bucket[i]) && tag_of(bucket[i]) >= low && tag_of(bucket[i]) < high) {
                PSD_BEFORE(t, "index.copy");
                placed += (uint64_t)place_in(t, 1, bucket[i], 0);
            }
        }
        if (at + 1 >= to && !full)
            break;
    }
    psd_root *const r = psd_table_next_root(t);
    r->moved = high;
    r->next_filled += placed;
    if (to == buckets) {
        r->current ^= 1;
        r->buckets = r->next_buckets;
        r->filled = r->next_filled;
        r->next_buckets = r->moved = r->next_filled = 0;
    }
    psd_table_commit(t, r);
}

/* After a crash: removes from the next index what a step of growth that was not committed has left there. It lies from the home of
 * `moved` on, no farther than the homes of one step and the full buckets behind them. */
void psd_index_clean(psd_table *t)
{
    const psd_root *const r = t->root;
    if (!r->next_buckets)
        return;
    const uint64_t to = psd_home(r->moved, r->buckets) + PSD_CHUNK_BUCKETS;
    const uint64_t from = psd_home(r->moved, r->next_buckets);
    const uint64_t last = to < r->buckets ? psd_home(first_tag(to, r->buckets), r->next_buckets) : r->next_buckets;
    for (uint64_t at = from, probes = 0; probes < r->next_buckets; at++, probes++) {
        uint64_t *const bucket = psd_bucket(t, 1, at >= r->next_buckets ? at - r->next_buckets : at);
        int full = 1;
        for (int i = 0; i < PSD_BUCKET; i++)
            full &= bucket[i] != 0;
        for (int i = 0; i < PSD_BUCKET; i++)
            if (bucket[i] != 0 && tag_of(bucket[i]) >= r->moved)
                bucket[i] = 0;
        if (at > last && !full)
            break;
    }
}

uint64_t psd_index_scan(const psd_table *t, uint64_t tag, uint64_t **words, uint64_t max, uint64_t *count)
{
    *count = 0;
    while (tag < (uint64_t)1 << 32) {
        const int next = psd_is_moved(t, tag);
        const uint64_t buckets = next ? t->root->next_buckets : t->root->buckets, home = psd_home(tag, buckets);
        /* One home at a time, and no farther than where the other index begins. */
        uint64_t end = first_tag(home + 1, buckets), found = 0;
        if (next && end > t->root->moved)
            end = t->root->moved;
        for (uint64_t at = home, probes = 0; probes < buckets; at++, probes++) {
            uint64_t *const bucket = psd_bucket(t, next, at >= buckets ? at - buckets : at);
            int full = 1;
            for (int i = 0; i < PSD_BUCKET; i++) {
                full &= bucket[i] != 0;
                if (psd_is_live(bucket[i]) && tag_of(bucket[i]) >= tag && tag_of(bucket[i]) < end) {
                    if (*count + found == max) { /* the caller has room for at least the entries of one home */
                        return tag;
                    }
                    words[*count + found++] = &bucket[i];
                }
            }
            if (!full)
                break;
        }
        *count += found;
        tag = end;
    }
    return tag;
}
