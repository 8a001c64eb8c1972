/* A push of rows, and a read of rows, by a step; and the open round of tables. See step_tables.h. */
#include "portable.h"

#include <stdlib.h>

#include "step_tables.h"

static const psd_tables_calls CALLS = {psd_tables_count, psd_tables_read};

int psd_tables_init(psd_tables *b)
{
    b->calls = &CALLS;
    b->mask_words = (b->workers + 63) / 64;
    b->partition = calloc(b->count + 1, sizeof *b->partition);
    b->notes = calloc(1 + 2 * b->workers, sizeof(uint64_t));
    b->contributors = calloc(2 * b->mask_words + b->workers + 1, sizeof(uint64_t));
    b->held = calloc(b->scalars + 1, sizeof(double));
    if (!b->partition || !b->notes || !b->contributors || !b->held)
        return -1;
    b->sessions = b->contributors + b->mask_words;
    b->times.awaited = b->sessions + b->workers;
    return 0;
}

void psd_tables_free(psd_tables *b)
{
    free(b->partition);
    free(b->notes);
    free(b->contributors);
    free(b->held);
}

/* ---- the open round ---- */

void psd_tables_open(psd_tables *b)
{
    memset(b->contributors, 0, b->mask_words * sizeof(uint64_t));
    b->has_voice = b->has_sum = b->is_lent = 0;
    __atomic_store_n(&b->is_due, 0, __ATOMIC_RELEASE);
    b->total_weight = 0;
    for (size_t i = 0; i < b->count && !b->is_closed; i++)
        b->partition[i].table->calls->clear_sums(b->partition[i].sums);
}

/* Whether the round would be complete with this rank, while those are waited for. */
static int closes(const psd_tables *b, const uint64_t *waited, int64_t rank)
{
    return psd_round_closes(b->contributors, waited, b->mask_words, b->quorum, rank);
}

/* Whether this worker's scalars hold: it has taken part for longer than those before, or has the lower rank. */
static int is_heard(const psd_tables *b, const psd_part_of_push *p)
{
    return !b->has_voice || p->since < b->since || (p->since == b->since && p->rank < b->rank);
}

void psd_tables_note(psd_tables *b, const psd_part_of_push *p)
{
    if (is_heard(b, p)) {
        b->has_voice = 1, b->since = p->since, b->rank = p->rank;
        memcpy(b->held, p->scalars, b->scalars * sizeof(double));
    }
    b->contributors[p->rank / 64] |= (uint64_t)1 << (p->rank % 64);
    b->sessions[p->rank] = p->session;
    b->total_weight += p->weight;
}

/* Adds rows to the sums. 0, or -1: no memory, and no sum has changed. */
static int add(psd_tables *b, const psd_step_rows *rows, double weight)
{
    for (size_t i = 0; i < b->count; i++) {
        const psd_partition *at = &b->partition[i];
        const intptr_t n = (intptr_t)rows[i].pushes, dim = (intptr_t)at->dim;
        if (rows[i].is_present && at->table->calls->prepare_sums(at->sums, rows[i].pushed, rows[i].gradients, n, dim))
            return -1;
    }
    for (size_t i = 0; i < b->count; i++)
        if (rows[i].is_present)
            b->partition[i].table->calls->add_sums(b->partition[i].sums, (intptr_t)b->partition[i].dim, weight);
    b->has_sum = 1;
    return 0;
}

/* ---- updates ---- */

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
    if (b->has_rounds && psd_round_has(b->contributors, p->rank))
        return b->sessions[p->rank] == p->session ? PSD_DUPLICATE : PSD_LATE;
    if (p->is_version_known && p->version_read > b->version)
        return PSD_AHEAD;
    return PSD_COUNTED;
}

typedef struct { /* what an update is made of */
    const psd_part_of_push *alone; /* a push that is not in the round; NULL: there is none */
    const psd_step_rows *rows;     /* its rows; NULL: the sums */
    const double *scalars;
    double scale;
    uint64_t age;
} psd_update;

/* The notes of a partition after the update, in b->notes. */
static void note_pushes(psd_tables *b, const psd_table *t, const psd_update *u)
{
    memcpy(b->notes, psd_notes(t), t->spec.notes * 8);
    b->notes[0]++;
    for (size_t i = 0; i < b->mask_words; i++)
        for (uint64_t left = b->contributors[i]; left; left &= left - 1) {
            const size_t rank = 64 * i + (size_t)__builtin_ctzll(left);
            b->notes[1 + rank] = b->sessions[rank], b->notes[1 + b->workers + rank] = b->version + 1;
        }
    if (u->alone)
        b->notes[1 + u->alone->rank] = u->alone->session, b->notes[1 + b->workers + (size_t)u->alone->rank] = u->alone->clock + 1;
}

/* What the update has for one partition. 0: it has no step there. */
static int given(const psd_tables *b, size_t i, const psd_update *u, psd_part *part)
{
    const psd_sums *s = b->partition[i].sums;
    if (!u->rows)
        *part = (psd_part){s->ids, s->values, s->count};
    else if (u->rows[i].is_present && u->alone->weight != 0)
        *part = (psd_part){u->rows[i].pushed, u->rows[i].gradients, (intptr_t)u->rows[i].pushes};
    else
        return 0;
    return u->rows || s->is_touched;
}

/* Makes the update of one partition but for its commit. */
static int make(psd_tables *b, size_t i, const psd_update *u)
{
    psd_partition *at = &b->partition[i];
    psd_table *t = at->table;
    psd_part part = {NULL, NULL, 0};
    psd_push push;
    memset(&push, 0, sizeof push);
    push.whole = !given(b, i, u, &part); /* without a gradient the notes and the clock change alone */
    if (push.whole)
        part = (psd_part){NULL, NULL, 0};
    push.hyper = t->spec.flags;
    for (size_t k = 0; k < at->scalars; k++)
        push.hyper.scalars[k] = u->scalars[at->at[k]];
    if (at->rate >= 0)
        push.hyper.scalars[at->rate] /= (double)(1 + u->age);
    push.scale = u->scale, push.step = -1, push.clock = at->clock + b->unit, push.distinct = !u->rows;
    push.is_of_known = 1;
    note_pushes(b, t, u);
    push.notes = b->notes;
    return t->calls->push(t, &push, &part, 1);
}

/* Makes an update, and opens the next round. 0, or -1: it needs more than that, and nothing has changed. */
static int apply(psd_tables *b, const psd_update *u)
{
    psd_part part = {NULL, NULL, 0};
    for (size_t i = 0; i < b->count; i++)
        if (!has_room(b->partition[i].table, given(b, i, u, &part) ? (uint64_t)part.n : 0))
            return -1;
    for (size_t i = 0; i < b->count; i++)
        if (make(b, i, u) != 0)
            return -1;
    for (size_t i = 0; i < b->count; i++) {
        psd_partition *at = &b->partition[i];
        at->table->calls->commit_push(at->table);
        __atomic_store_n(&at->clock, at->clock + b->unit, __ATOMIC_RELEASE);
    }
    __atomic_fetch_add(&b->updates, 1, __ATOMIC_RELEASE);
    __atomic_store_n(&b->version, b->version + 1, __ATOMIC_RELEASE);
    if (b->has_rounds)
        psd_tables_open(b);
    return 0;
}

static void note_age(psd_tables *b, uint64_t age)
{
    b->ages[age < 2 ? (size_t)age : (size_t)(64 - __builtin_clzll(age - 1)) + 1]++;
    b->age_total += age;
}

static psd_outcome count_alone(psd_tables *b, const psd_part_of_push *p, const psd_step_rows *rows)
{
    const uint64_t age = p->is_version_known ? b->version - p->version_read : 0;
    const double *const scalars = is_heard(b, p) ? p->scalars : b->held; /* its own, but in a round to which others brought nothing */
    const psd_update u = {.alone = p, .rows = rows, .scalars = scalars, .scale = 1, .age = age};
    if (apply(b, &u) != 0)
        return PSD_NEEDS_PAGE;
    if (p->is_version_known && !b->has_rounds)
        note_age(b, age);
    return PSD_COUNTED;
}

/* A gradient that completes a round is added before it is known whether the update can be made here; if not, the round is due. */
static psd_outcome count_in_round(psd_tables *b, const psd_part_of_push *p, const psd_step_rows *rows, const uint64_t *waited)
{
    const int is_last = closes(b, waited, p->rank);
    if (is_last && !b->has_sum)
        return count_alone(b, p, rows); /* a single gradient is its own mean, to the bit */
    if (p->weight != 0 && add(b, rows, b->is_mean ? p->weight : 1) != 0)
        return PSD_NO_MEMORY;
    psd_tables_note(b, p);
    const double scale = b->is_mean && b->total_weight > 0 ? 1 / b->total_weight : 1;
    const psd_update u = {.scalars = b->held, .scale = scale};
    if (is_last && apply(b, &u) != 0)
        __atomic_store_n(&b->is_due, 1, __ATOMIC_RELEASE);
    return PSD_COUNTED;
}

psd_outcome psd_tables_count(psd_tables *b, const psd_part_of_push *p, const psd_step_rows *rows, const uint64_t *waited)
{
    psd_outcome outcome = PSD_NEEDS_PAGE;
    if (b->is_closed || b->is_lent || b->is_due)
        return outcome;
    for (size_t i = 0; i < b->count; i++)
        pthread_mutex_lock(b->partition[i].table->writing);
    if (are_alike(b, p->rank))
        outcome = standing(b, p);
    if (outcome == PSD_COUNTED)
        outcome = b->has_rounds ? count_in_round(b, p, rows, waited) : count_alone(b, p, rows);
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
