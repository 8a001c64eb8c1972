/* Reads of rows by id. A read asks for the memory of the ids ahead of the one that it copies, in three steps: bucket, row, copy. */
#include "portable.h"
#include "table.h"

#include <errno.h>
#include <stdlib.h>

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

/* Rows of a batch that have to catch up, as they were found; they do so when the lock is free again. */
typedef struct {
    psd_past past;
    intptr_t count;
    intptr_t *numbers; /* in the batch */
    uint8_t *is_fresh;
    float *rows;
} behind;

static int begin_behind(behind *b, const psd_table *t, intptr_t n)
{
    const size_t each = sizeof *b->numbers + t->spec.width * sizeof(float) + 1;
    if (psd_past_begin(&b->past, t))
        return ENOMEM;
    if (!(b->numbers = malloc((size_t)n * each))) {
        psd_past_end(&b->past);
        return ENOMEM;
    }
    b->rows = (float *)(b->numbers + n);
    b->is_fresh = (uint8_t *)(b->rows + (size_t)n * t->spec.width);
    return 0;
}

/* Keeps a row for later; NULL: one that nobody has trained. */
static int put_off(behind *b, const psd_table *t, const float *row, intptr_t number, intptr_t n)
{
    if (!b->numbers && begin_behind(b, t, n))
        return ENOMEM;
    b->numbers[b->count] = number;
    b->is_fresh[b->count] = row == NULL;
    if (row)
        psd_load_row(t, row, b->rows + (uint64_t)b->count * t->spec.width, t->spec.width);
    b->count++;
    return 0;
}

/* Returns whether the log still has what was used of it. */
static int finish_behind(behind *b, psd_table *t, const uint64_t *ids, float *out, uint64_t floats)
{
    for (intptr_t i = 0; i < b->count; i++) {
        float *const row = b->rows + (uint64_t)i * t->spec.width;
        if (b->is_fresh[i])
            psd_initial_row(&t->spec, ids[b->numbers[i]], row);
        psd_catch_up(&b->past, row);
        memcpy(out + (uint64_t)b->numbers[i] * floats, row, floats * sizeof *row);
    }
    pthread_rwlock_rdlock(&t->lock);
    /* A push under way may be writing one entry more. */
    const int is_there = t->root->log_end - b->past.log_first < 2 * PSD_LOG_MAX;
    pthread_rwlock_unlock(&t->lock);
    return is_there;
}

static int read_batch(psd_table *t, const uint64_t *ids, intptr_t n, float *out, uint64_t floats, uint8_t *found, int64_t clock,
                      uint64_t *hits, behind *late)
{
    ahead ring[FAR];
    const int is_fresh_behind = psd_is_fresh_behind(t);
    const uint64_t bytes = (floats - (t->spec.is_half ? t->spec.dim / 2 : 0)) * 4;
    *hits = 0;
    for (intptr_t i = 0; i < n + FAR; i++) {
        if (i < n)
            find_home(t, &ring[i % FAR], ids[i]);
        if (i >= AHEAD && i - AHEAD < n)
            find_row(t, &ring[(i - AHEAD) % FAR], bytes);
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
            if (is_fresh_behind) {
                if (put_off(late, t, NULL, j, n))
                    return ENOMEM;
            } else if (floats == t->spec.width)
                psd_initial_row(&t->spec, a->id, to);
            else
                psd_initial_value(&t->spec, a->id, to);
            continue;
        }
        const uint64_t place = (uint32_t)*word - 1;
        psd_head *const head = &psd_heads(t)[place];
        ++*hits;
        if (clock >= 0 && (uint64_t)clock > __atomic_load_n(&head->used, __ATOMIC_RELAXED))
            __atomic_store_n(&head->used, (uint64_t)clock, __ATOMIC_RELAXED);
        const float *const row = psd_row(t, place);
        if (!psd_is_behind(t, row))
            psd_load_row(t, row, to, floats);
        else if (put_off(late, t, row, j, n))
            return ENOMEM;
    }
    return 0;
}

/* Between batches a push may come, so that none waits for long. */
int psd_table_read(psd_table *t, const uint64_t *ids, intptr_t n, float *out, uint8_t *found, int whole, int64_t clock)
{
    const uint64_t floats = whole ? t->spec.width : t->spec.dim;
    int status = 0;
    for (intptr_t begin = 0; begin < n && status == 0;) {
        const intptr_t count = n - begin < BATCH ? n - begin : BATCH;
        behind late = {.count = 0};
        uint64_t hits;
        float *const to = out + (uint64_t)begin * floats;
        pthread_rwlock_rdlock(&t->lock);
        status = read_batch(t, ids + begin, count, to, floats, found ? found + begin : NULL, clock, &hits, &late);
        pthread_rwlock_unlock(&t->lock);
        const int is_done = status != 0 || !late.count || finish_behind(&late, t, ids + begin, to, floats);
        if (late.numbers) {
            free(late.numbers);
            psd_past_end(&late.past);
        }
        if (!is_done)
            continue;
        __atomic_fetch_add(&t->reads, (uint64_t)count, __ATOMIC_RELAXED);
        __atomic_fetch_add(&t->hits, hits, __ATOMIC_RELAXED);
        begin += count;
    }
    return status;
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
        psd_load_row(t, psd_row(t, place), rows + i * t->spec.width, t->spec.width);
    }
    pthread_rwlock_unlock(&t->lock);
    return tag;
}
