/* A push of rows, and a read of rows, by a step; see step_tables.h. */
#include "portable.h"

#include "step_tables.h"

/* Whether all partitions have the same version, and the last push of this rank: none lacks a push after a kill. */
static int are_alike(const psd_tables *b, int64_t rank)
{
    const uint64_t *first = psd_notes(b->partition[0].table);
    for (size_t i = 0; i < b->count; i++) {
        const uint64_t *notes = psd_notes(b->partition[i].table);
        const size_t session = 1 + (size_t)rank, clock = session + b->workers;
        if (notes[0] != b->version || notes[session] != first[session] || notes[clock] != first[clock])
            return 0;
    }
    return 1;
}

/* Whether a push of n ids needs nothing but to be made. */
static int has_room(const psd_table *t, uint64_t n)
{
    uint64_t nbytes;
    return n <= t->spec.push_max && !t->root->next_buckets && t->calls->lack(t, n, 1, &nbytes) < 0
        && !(n && t->calls->must_move(t, n));
}

static psd_outcome standing(const psd_tables *b, const psd_part_of_push *p)
{
    const uint64_t *notes = psd_notes(b->partition[0].table), session = notes[1 + p->rank];
    if (session == p->session && notes[1 + b->workers + (size_t)p->rank] > p->clock)
        return PSD_DUPLICATE;
    if (session > p->session)
        return PSD_LATE;
    if (b->has_rounds && p->clock != b->version)
        return p->clock > b->version ? PSD_EARLY : PSD_LATE;
    if (p->is_version_known && p->version_read > b->version)
        return PSD_AHEAD;
    return PSD_COUNTED;
}

/* Makes the push of one partition but for its commit. */
static int make(psd_tables *b, psd_partition *at, const psd_part_of_push *p, const psd_step_rows *rows, uint64_t age)
{
    psd_table *t = at->table;
    const int is_step = rows->is_present && p->weight != 0;
    psd_push push;
    memset(&push, 0, sizeof push);
    push.hyper = t->spec.flags;
    for (size_t i = 0; i < at->scalars; i++)
        push.hyper.scalars[i] = p->scalars[at->at[i]];
    if (at->rate >= 0)
        push.hyper.scalars[at->rate] /= (double)(1 + age);
    push.scale = 1, push.step = -1, push.clock = at->clock + b->unit;
    push.whole = !is_step; /* without a gradient the notes and the clock change alone */
    push.is_of_known = 1;
    memcpy(b->notes, psd_notes(t), t->spec.notes * 8);
    b->notes[0]++, b->notes[1 + p->rank] = p->session, b->notes[1 + b->workers + (size_t)p->rank] = p->clock + 1;
    push.notes = b->notes;
    const psd_part part = {is_step ? rows->pushed : NULL, is_step ? rows->gradients : NULL, is_step ? (intptr_t)rows->pushes : 0};
    return t->calls->push(t, &push, &part, 1);
}

static void note_round(psd_tables *b, double began)
{
    const double now = psd_now();
    b->times.has_closed = 1, b->times.closed_at = now;
    b->times.closed[psd_seconds_bucket(now - began)]++, b->times.closed_s += now - began;
}

static void note_age(psd_tables *b, uint64_t age)
{
    b->ages[age < 2 ? (size_t)age : (size_t)(64 - __builtin_clzll(age - 1)) + 1]++;
    b->age_total += age;
}

psd_outcome psd_tables_count(psd_tables *b, const psd_part_of_push *p, const psd_step_rows *rows)
{
    const double began = psd_now();
    psd_outcome outcome = PSD_NEEDS_PAGE;
    if (b->is_closed || b->is_open)
        return outcome;
    for (size_t i = 0; i < b->count; i++)
        pthread_mutex_lock(b->partition[i].table->writing);
    int is_ready = are_alike(b, p->rank);
    if (is_ready)
        outcome = standing(b, p);
    const uint64_t age = p->is_version_known && outcome == PSD_COUNTED ? b->version - p->version_read : 0;
    is_ready = is_ready && outcome == PSD_COUNTED;
    for (size_t i = 0; i < b->count && is_ready; i++)
        is_ready = has_room(b->partition[i].table, rows[i].is_present && p->weight != 0 ? rows[i].pushes : 0);
    for (size_t i = 0; i < b->count && is_ready; i++)
        is_ready = make(b, &b->partition[i], p, &rows[i], age) == 0;
    if (is_ready) {
        for (size_t i = 0; i < b->count; i++) {
            psd_partition *at = &b->partition[i];
            at->table->calls->commit_push(at->table);
            __atomic_store_n(&at->clock, at->clock + b->unit, __ATOMIC_RELEASE);
        }
        __atomic_fetch_add(&b->updates, 1, __ATOMIC_RELEASE);
        __atomic_store_n(&b->version, b->version + 1, __ATOMIC_RELEASE);
        if (b->has_rounds)
            note_round(b, began);
        else if (p->is_version_known)
            note_age(b, age);
    } else if (outcome == PSD_COUNTED) {
        outcome = PSD_NEEDS_PAGE;
    }
    for (size_t i = b->count; i-- > 0;)
        pthread_mutex_unlock(b->partition[i].table->writing);
    return outcome;
}

int psd_tables_read(psd_tables *b, const psd_step_rows *rows, uint64_t *version)
{
    pthread_mutex_lock(b->lock);
    const int is_closed = b->is_closed;
    *version = b->version;
    if (!is_closed)
        __atomic_fetch_add(&b->reads, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(b->lock);
    if (is_closed)
        return -1;
    int status = 0;
    for (size_t i = 0; i < b->count && status == 0; i++) {
        psd_partition *at = &b->partition[i];
        const uint64_t used = __atomic_load_n(&at->clock, __ATOMIC_ACQUIRE) + b->unit;
        for (size_t k = 0; k < rows[i].pulls && b->shards > 1 && status == 0; k++)
            if (psd_home(psd_mix(rows[i].pulled[k]) >> 32, b->shards) != b->shard)
                status = -1;
        if (rows[i].pulls && status == 0)
            status = at->table->calls->read(at->table, rows[i].pulled, (intptr_t)rows[i].pulls, rows[i].rows, NULL, 0, (int64_t)used);
    }
    __atomic_fetch_sub(&b->reads, 1, __ATOMIC_SEQ_CST);
    return status == 0 ? 0 : -1;
}
