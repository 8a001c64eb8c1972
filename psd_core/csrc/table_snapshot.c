/* A snapshot: all rows of one version, copied little by little while others go on reading and writing.
 *
 * Rows are copied in the order of tags. A commit that replaces or removes a row that was not copied yet saves it first; rows that come
 * later are known by their version. So a writer waits for nobody, and memory grows by what is changed before it is copied.
 */
#include "portable.h"
#include "table.h"

#include <stdlib.h>

enum { BATCH = 4096, AHEAD = 8 };

PSD_INLINE int belongs(const psd_snapshot *s, const psd_head *head)
{
    return head->changed <= s->version
        && (s->is_full || head->changed > s->since || __atomic_load_n(&head->used, __ATOMIC_RELAXED) > s->since_clock);
}

void psd_snapshot_begin(psd_table *t, int is_full, uint64_t since, uint64_t since_clock)
{
    psd_snapshot *const s = &t->snapshot;
    pthread_rwlock_wrlock(&t->lock);
    *s = (psd_snapshot){.is_active = 1, .is_full = is_full, .since = since, .since_clock = since_clock, .version = t->root->version};
    pthread_rwlock_unlock(&t->lock);
}

void psd_snapshot_end(psd_table *t)
{
    psd_snapshot *const s = &t->snapshot;
    pthread_rwlock_wrlock(&t->lock);
    free(s->heads);
    free(s->rows);
    *s = (psd_snapshot){0};
    pthread_rwlock_unlock(&t->lock);
}

static int make_room(psd_snapshot *s, uint64_t width)
{
    if (s->saved < s->capacity)
        return 1;
    const uint64_t capacity = 2 * s->capacity + 1024;
    psd_head *const heads = realloc(s->heads, capacity * sizeof(psd_head));
    if (heads)
        s->heads = heads;
    float *const rows = heads ? realloc(s->rows, capacity * width * 4) : NULL;
    if (!rows)
        return 0;
    s->rows = rows;
    s->capacity = capacity;
    return 1;
}

static void copy_row(const psd_table *t, uint64_t place, psd_head *head, float *row)
{
    *head = psd_heads(t)[place];
    psd_load_row(t, psd_row(t, place), row, t->spec.width);
}

void psd_snapshot_save(psd_table *t, const psd_record *record, const psd_flip *flips)
{
    psd_snapshot *const s = &t->snapshot;
    for (uint64_t i = 0; i < record->flips && !s->is_failed; i++) {
        if (flips[i].at == 0 || flips[i].at >= t->region[PSD_SIGHTINGS].at)
            continue;
        const uint64_t entry = *(const uint64_t *)(t->base + flips[i].at), place = (uint32_t)entry - 1;
        if (entry >> 32 < s->cursor || !belongs(s, &psd_heads(t)[place]))
            continue;
        if (make_room(s, t->spec.width)) {
            copy_row(t, place, &s->heads[s->saved], s->rows + s->saved * t->spec.width);
            s->saved++;
        } else
            s->is_failed = 1;
    }
}

int psd_snapshot_next(psd_table *t, psd_head *heads, float *rows, uint64_t max, uint64_t *count)
{
    psd_snapshot *const s = &t->snapshot;
    const uint64_t width = t->spec.width;
    uint64_t *words[BATCH], found = 0;
    *count = 0;
    pthread_rwlock_rdlock(&t->lock);
    if (s->saved) {
        *count = s->saved < max ? s->saved : max;
        s->saved -= *count;
        memcpy(heads, s->heads + s->saved, *count * sizeof(psd_head));
        memcpy(rows, s->rows + s->saved * width, *count * width * 4);
    } else {
        s->cursor = psd_index_scan(t, s->cursor, words, max < BATCH ? max : BATCH, &found);
        for (uint64_t i = 0; i < found; i++) {
            if (i + AHEAD < found)
                PSD_PREFETCH(&psd_heads(t)[(uint32_t)*words[i + AHEAD] - 1]);
            const uint64_t place = (uint32_t)*words[i] - 1;
            if (belongs(s, &psd_heads(t)[place])) {
                copy_row(t, place, &heads[*count], rows + *count * width);
                ++*count;
            }
        }
    }
    const int more = s->saved > 0 || s->cursor >> 32 == 0;
    pthread_rwlock_unlock(&t->lock);
    return more;
}
