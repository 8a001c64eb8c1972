/* Which rows were not used for longest: the least recently used, exactly, and in an order that depends on nothing but clocks and ids.
 *
 * Marking a use stays one store into the row's head, so nothing is kept in order meanwhile. When the heap is empty one pass over all
 * heads fills it with the oldest sixteenth. Clocks only grow: what is used afterwards is younger than all of it, and what it names is
 * found by id and left out if it is gone or was used since. So a pass is paid for by as many rows that go, or are used, and the rows come
 * in the order in which a pass for each of them would find them.
 */
#include "portable.h"
#include "table.h"

#include <errno.h>
#include <stdlib.h>

enum { SHARE = 16, FEWEST = 256 };

PSD_INLINE int is_before(const psd_old *a, const psd_old *b)
{
    return a->used != b->used ? a->used < b->used : a->order < b->order;
}

PSD_INLINE void swap(psd_old *a, psd_old *b)
{
    const psd_old kept = *a;
    *a = *b;
    *b = kept;
}

static void sift_down(psd_old *rows, uint64_t count, uint64_t at)
{
    for (uint64_t child; (child = 2 * at + 1) < count; at = child) {
        child += child + 1 < count && is_before(&rows[child + 1], &rows[child]);
        if (!is_before(&rows[child], &rows[at]))
            return;
        swap(&rows[child], &rows[at]);
    }
}

/* Brings the first `most` of the order to the front (Hoare's selection); the last of them comes at most - 1. */
static void select_first(psd_old *rows, uint64_t count, uint64_t most)
{
    uint64_t low = 0, high = count - 1;
    while (low < high) {
        const psd_old pivot = rows[low + (high - low) / 2];
        uint64_t i = low, j = high;
        for (;;) {
            while (is_before(&rows[i], &pivot))
                i++;
            while (is_before(&pivot, &rows[j]))
                j--;
            if (i >= j)
                break;
            swap(&rows[i++], &rows[j--]);
        }
        if (most - 1 <= j) /* up to j none is behind the pivot */
            high = j;
        else
            low = j + 1;
    }
}

static int is_spare(const uint8_t *spares, uint64_t place) { return spares[place / 8] >> place % 8 & 1; }

int psd_oldest_fill(psd_table *t, uint64_t before, uint64_t clock)
{
    psd_oldest *const o = &t->oldest;
    if (o->count || o->bound >= before)
        return 0;
    const psd_root *const r = t->root;
    const uint64_t most = r->rows / SHARE + FEWEST;
    uint8_t *const spares = calloc(r->places / 8 + 1, 1);
    psd_old *const rows = malloc(2 * most * sizeof(psd_old));
    psd_old limit = {.used = clock, .order = 0};
    uint64_t count = 0;
    int is_cut = 0;
    if (!spares || !rows) {
        free(spares);
        free(rows);
        return ENOMEM;
    }
    for (uint64_t i = 0; i < r->spares; i++)
        spares[psd_spares(t)[i] / 8] |= (uint8_t)(1u << psd_spares(t)[i] % 8);
    for (uint64_t place = 0; place < r->places; place++) {
        const psd_head *const head = &psd_heads(t)[place];
        const uint64_t used = __atomic_load_n(&head->used, __ATOMIC_RELAXED);
        if (used > limit.used || is_spare(spares, place))
            continue;
        const psd_old row = {used, psd_mix(head->id), head->id};
        if (!is_before(&row, &limit))
            continue;
        rows[count++] = row;
        if (count == 2 * most) {
            select_first(rows, count, most);
            limit = rows[(count = most) - 1];
            is_cut = 1;
        }
    }
    free(spares);
    if (count > most) {
        select_first(rows, count, most);
        limit = rows[(count = most) - 1];
        is_cut = 1;
    }
    for (uint64_t at = count / 2; at-- > 0;)
        sift_down(rows, count, at);
    free(o->rows);
    *o = (psd_oldest){rows, count, 2 * most, is_cut ? limit.used : clock};
    return 0;
}

/* A row that went and came back as used at the same clock is named twice, and the caller may not have removed it yet when it comes again. */
uint64_t *psd_oldest_pop(psd_table *t, uint64_t before)
{
    psd_oldest *const o = &t->oldest;
    while (o->count && o->rows[0].used < before) {
        const psd_old oldest = o->rows[0];
        do {
            o->rows[0] = o->rows[--o->count];
            sift_down(o->rows, o->count, 0);
        } while (o->count && o->rows[0].used == oldest.used && o->rows[0].id == oldest.id);
        uint64_t *const word = psd_index_find(t, oldest.id, psd_tag(t, oldest.id));
        if (word && __atomic_load_n(&psd_heads(t)[(uint32_t)*word - 1].used, __ATOMIC_RELAXED) == oldest.used)
            return word;
    }
    return NULL;
}

/* Without memory the next pass over all heads finds it. */
void psd_oldest_add(psd_oldest *o, uint64_t id, uint64_t used)
{
    if (o->count == o->capacity) {
        psd_old *const rows = realloc(o->rows, (2 * o->capacity + FEWEST) * sizeof(psd_old));
        if (!rows) {
            o->count = o->bound = 0;
            return;
        }
        o->rows = rows;
        o->capacity = 2 * o->capacity + FEWEST;
    }
    uint64_t at = o->count++;
    o->rows[at] = (psd_old){used, psd_mix(id), id};
    for (; at && is_before(&o->rows[at], &o->rows[(at - 1) / 2]); at = (at - 1) / 2)
        swap(&o->rows[at], &o->rows[(at - 1) / 2]);
}

void psd_oldest_free(psd_oldest *o)
{
    free(o->rows);
    *o = (psd_oldest){0};
}
