/* Reads of rows by id. A read asks for the memory of the ids ahead of the one that it copies, in three steps: bucket, row, copy. */
#include "portable.h"
#include "table.h"

enum { BATCH = 4096, AHEAD = 16, FAR = 2 * AHEAD };

typedef struct {
    uint64_t id;
    uint32_t tag;
    uint64_t *home, *word; /* the first bucket; the entry that is probably it */
} ahead;

PSD_INLINE void find_home(const psd_table *t, ahead *a, uint64_t id)
{
    a->id = id;
    a->tag = psd_tag(t, id);
    a->home = psd_index_home(t, a->tag);
    PSD_PREFETCH(a->home);
}

PSD_INLINE void find_row(const psd_table *t, ahead *a, uint64_t bytes)
{
    a->word = psd_index_probable(a->home, a->tag);
    if (!a->word)
        return;
    const uint64_t place = (uint32_t)*a->word - 1;
    PSD_PREFETCH(&psd_heads(t)[place]);
    psd_prefetch_range(psd_row(t, place), bytes, 0);
}

static uint64_t read_batch(psd_table *t, const uint64_t *ids, intptr_t n, float *out, uint64_t floats, uint8_t *found, int64_t clock)
{
    ahead ring[FAR];
    uint64_t hits = 0;
    for (intptr_t i = 0; i < n + FAR; i++) {
        if (i < n)
            find_home(t, &ring[i % FAR], ids[i]);
        if (i >= AHEAD && i - AHEAD < n)
            find_row(t, &ring[(i - AHEAD) % FAR], floats * 4);
        if (i < FAR - 1)
            continue;
        const intptr_t j = i - (FAR - 1);
        if (j >= n)
            break;
        const ahead *const a = &ring[j % FAR];
        const uint64_t *word = a->word;
        if (!word || psd_heads(t)[(uint32_t)*word - 1].id != a->id)
            word = psd_index_find(t, a->id, a->tag);
        float *const to = out + (uint64_t)j * floats;
        if (found)
            found[j] = word != NULL;
        if (!word) {
            if (floats == t->spec.width)
                psd_initial_row(&t->spec, a->id, to);
            else
                psd_initial_value(&t->spec, a->id, to);
            continue;
        }
        const uint64_t place = (uint32_t)*word - 1;
        psd_head *const head = &psd_heads(t)[place];
        hits++;
        if (clock >= 0 && head->used != (uint32_t)clock)
            __atomic_store_n(&head->used, (uint32_t)clock, __ATOMIC_RELAXED);
        memcpy(to, psd_row(t, place), floats * 4);
    }
    return hits;
}

/* Between batches a push may come, so that none waits for long. */
void psd_table_read(psd_table *t, const uint64_t *ids, intptr_t n, float *out, uint8_t *found, int whole, int64_t clock)
{
    const uint64_t floats = whole ? t->spec.width : t->spec.dim;
    for (intptr_t begin = 0; begin < n; begin += BATCH) {
        const intptr_t count = n - begin < BATCH ? n - begin : BATCH;
        pthread_rwlock_rdlock(&t->lock);
        const uint64_t hits = read_batch(t, ids + begin, count, out + (uint64_t)begin * floats, floats, found ? found + begin : NULL, clock);
        pthread_rwlock_unlock(&t->lock);
        __atomic_fetch_add(&t->reads, (uint64_t)count, __ATOMIC_RELAXED);
        __atomic_fetch_add(&t->hits, hits, __ATOMIC_RELAXED);
    }
}

uint64_t psd_table_walk(psd_table *t, uint64_t tag, psd_head *heads, float *rows, uint64_t max, uint64_t *count)
{
    uint64_t *words[BATCH];
    *count = 0;
    pthread_rwlock_rdlock(&t->lock);
    tag = psd_index_scan(t, tag, words, max < BATCH ? max : BATCH, count);
    for (uint64_t i = 0; i < *count; i++) {
        if (i + AHEAD < *count) {
            const uint64_t place = (uint32_t)*words[i + AHEAD] - 1;
            PSD_PREFETCH(&psd_heads(t)[place]);
            PSD_PREFETCH(psd_row(t, place));
        }
        const uint64_t place = (uint32_t)*words[i] - 1;
        heads[i] = psd_heads(t)[place];
        memcpy(rows + i * t->spec.width, psd_row(t, place), t->spec.width * 4);
    }
    pthread_rwlock_unlock(&t->lock);
    return tag;
}
