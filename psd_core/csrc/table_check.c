/* Checksums of what was committed: a row has its own from the moment it is written, and opening a partition looks at all of them.
 *
 * What it finds then is the bijection that every commit keeps: each place that was ever taken is spare, once, or has a row whose entry
 * of the index is where a search for its id comes by; and there are no other entries. So heads and rows are read in the order of
 * the file. Marks of use and sightings have no checksum: they are stored in place, and decide no more than which rows and counts go.
 */
#include "portable.h"
#include "table.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { AHEAD = 16, THREADS_MAX = 4, PART_MIN = 4096 };

typedef unsigned long long ull;

int psd_table_refuse(psd_table *t, const char *problem, ...)
{
    va_list arguments;
    va_start(arguments, problem);
    vsnprintf(t->problem, sizeof t->problem, problem, arguments);
    va_end(arguments);
    return -1;
}

/* Which changes with every change of one of the three. */
PSD_INLINE uint64_t row_check(const psd_table *t, const psd_head *head, uint64_t place)
{
    psd_content content = {0};
    psd_content_add(&content, psd_row(t, place), t->spec.stored * 4);
    return psd_content_check(&content) ^ psd_mix(head->id ^ psd_mix(head->changed));
}

void psd_seal_row(const psd_table *t, uint64_t place)
{
    psd_head *const head = &psd_heads(t)[place];
    head->check = row_check(t, head, place);
}

uint64_t psd_log_check(const psd_log_entry *entry)
{
    psd_content content = {0};
    psd_content_add(&content, &entry->from, sizeof *entry - sizeof entry->check);
    return psd_content_check(&content);
}

static int mark_spares(psd_table *t, uint8_t *spares)
{
    for (uint64_t i = 0; i < t->root->spares; i++) {
        const uint32_t place = psd_spares(t)[i];
        if (place >= t->root->places || spares[place / 8] >> place % 8 & 1)
            return psd_table_refuse(t, "spares: number %llu, place %lu, is there twice, or none that was ever taken", (ull)i, (unsigned long)place);
        spares[place / 8] |= (uint8_t)(1u << place % 8);
    }
    return 0;
}

/* The entries that searches come by; 0 or -1. */
static int count_entries(psd_table *t, int next, uint64_t *live)
{
    const psd_root *const r = t->root;
    const uint64_t *const entries = psd_bucket(t, next, 0), all = (next ? r->next_buckets : r->buckets) * PSD_BUCKET;
    uint64_t filled = 0;
    for (uint64_t i = 0; i < all; i++) {
        const uint64_t entry = entries[i];
        const uint32_t low = (uint32_t)entry;
        if (entry == 0)
            continue;
        filled++;
        if (low == 0 || (low != PSD_GRAVE && low > r->places) || (next && entry >> 32 >= r->moved))
            return psd_table_refuse(t, "index: entry %llu is none that was stored", (ull)i);
        *live += low != PSD_GRAVE && psd_is_moved(t, entry >> 32) == next;
    }
    if (filled > (next ? r->next_filled : r->filled))
        return psd_table_refuse(t, "index: it has %llu entries, more than were stored", (ull)filled);
    return 0;
}

/* The places that one thread looks at, up to the first where something is wrong. */
typedef struct {
    const psd_table *table;
    const uint8_t *spares;
    uint64_t begin, end, wrong;
    const char *problem; /* NULL: none */
    pthread_t thread;
    int has_thread;
} part;

static void *look(void *argument)
{
    part *const p = argument;
    const psd_table *const t = p->table;
    const psd_head *const heads = psd_heads(t);
    for (uint64_t place = p->begin; place < p->end && !p->problem; place++) {
        if (place + AHEAD < p->end)
            PSD_PREFETCH(psd_index_home(t, psd_tag(t, heads[place + AHEAD].id)));
        if (p->spares[place / 8] >> place % 8 & 1)
            continue;
        p->wrong = place;
        const uint64_t *const word = psd_index_find(t, heads[place].id, psd_tag(t, heads[place].id));
        if (row_check(t, &heads[place], place) != heads[place].check)
            p->problem = "row of place %llu: it does not have its checksum";
        else if (!word || (uint32_t)*word != place + 1)
            p->problem = "index: no entry leads to the row of place %llu, which is not spare";
    }
    return NULL;
}

/* On some threads; what the system has none for, on this one. */
static int look_at_rows(psd_table *t, const uint8_t *spares)
{
    part parts[THREADS_MAX];
    const uint64_t places = t->root->places, most = places / PART_MIN;
    const long processors = sysconf(_SC_NPROCESSORS_ONLN);
    uint64_t count = processors > THREADS_MAX ? THREADS_MAX : processors > 1 ? (uint64_t)processors : 1;
    count = count > most ? most > 1 ? most : 1 : count;
    for (uint64_t i = 0; i < count; i++) {
        parts[i] = (part){.table = t, .spares = spares, .begin = places * i / count, .end = places * (i + 1) / count};
        parts[i].has_thread = i > 0 && pthread_create(&parts[i].thread, NULL, look, &parts[i]) == 0;
    }
    for (uint64_t i = 0; i < count; i++)
        if (!parts[i].has_thread)
            look(&parts[i]);
    int status = 0;
    for (uint64_t i = 0; i < count; i++) {
        if (parts[i].has_thread)
            pthread_join(parts[i].thread, NULL);
        if (parts[i].problem && status == 0)
            status = psd_table_refuse(t, parts[i].problem, (ull)parts[i].wrong);
    }
    return status;
}

static int look_at_rings(psd_table *t)
{
    const psd_root *const r = t->root;
    uint64_t gone = 0;
    for (uint64_t i = psd_first_removal(t, r); i < psd_removals(r); i++)
        gone += psd_removal_check(t, i);
    if (gone != r->gone)
        return psd_table_refuse(t, "removals: the ids of rows that went do not have their checksum");
    for (uint64_t i = r->log_first; i < r->log_end; i++)
        if (psd_logged(t, i)->check != psd_log_check(psd_logged(t, i)))
            return psd_table_refuse(t, "log: entry %llu does not have its checksum", (ull)i);
    return 0;
}

int psd_table_is_whole(psd_table *t)
{
    uint8_t *const spares = calloc(t->root->places / 8 + 1, 1);
    uint64_t live = 0;
    if (!spares)
        return ENOMEM;
    int status = mark_spares(t, spares);
    for (int next = 0; next <= (t->root->next_buckets != 0) && status == 0; next++)
        status = count_entries(t, next, &live);
    if (status == 0)
        status = look_at_rows(t, spares);
    free(spares);
    if (status == 0 && live != t->root->rows)
        status = psd_table_refuse(t, "index: it has entries of %llu rows, the root says %llu", (ull)live, (ull)t->root->rows);
    return status ? status : look_at_rings(t);
}
