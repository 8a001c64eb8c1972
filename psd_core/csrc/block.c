/* Rounds of a small block: what a gradient counts as, the sum, and the update. block_pages.c has its pages. */
#include "portable.h"

#include <stdlib.h>

#include "block.h"

static int bits(const uint64_t *mask, size_t words)
{
    int count = 0;
    for (size_t i = 0; i < words; i++)
        count += __builtin_popcountll(mask[i]);
    return count;
}

int psd_block_has(const psd_block *b, int64_t rank)
{
    return psd_round_has(b->contributors, rank);
}

static int closes(const psd_block *b, const uint64_t *waited, int64_t more)
{
    return psd_round_closes(b->contributors, waited, b->mask_words, b->quorum, more);
}

static const psd_block_calls CALLS = {psd_block_contribute, psd_block_on_gradient, psd_block_on_close, psd_block_pin, psd_block_unpin};

int psd_block_init(psd_block *b)
{
    b->mask_words = (b->workers + 63) / 64;
    b->current = -1;
    b->calls = &CALLS;
    b->contributors = calloc(2 * b->mask_words + b->workers, sizeof(uint64_t));
    b->touched = calloc(2, b->segments ? b->segments : 1);
    if (!b->contributors || !b->touched)
        return -1;
    b->sessions = b->contributors + b->mask_words;
    b->times.awaited = b->sessions + b->workers;
    b->grown = b->touched + b->segments;
    b->has_ring = pthread_mutex_init(&b->ring, NULL) == 0;
    b->has_lock = pthread_mutex_init(&b->lock, NULL) == 0;
    return b->has_ring && b->has_lock ? 0 : -1;
}

void psd_block_free(psd_block *b)
{
    free(b->contributors);
    free(b->touched);
    free(b->sum);
    free(b->page);
    for (int i = 0; i < b->retirements; i++)
        free(b->retired[i]);
    if (b->has_ring)
        pthread_mutex_destroy(&b->ring);
    if (b->has_lock)
        pthread_mutex_destroy(&b->lock);
}

void psd_block_open(psd_block *b, uint64_t version)
{
    memset(b->contributors, 0, b->mask_words * sizeof(uint64_t));
    memset(b->touched, 0, b->segments);
    b->has_voice = b->has_sum = 0;
    b->total_weight = 0;
    __atomic_store_n(&b->version, version, __ATOMIC_RELEASE);
}

/* ---- an update ---- */

/* What an update is made of: scale * (acc + weight * grad), for the touched segments. */
typedef struct {
    const void *acc, *grad;
    psd_dtype grad_dtype;
    double weight, scale;
    const uint8_t *touched;
    const double *scalars;
    uint64_t age;
} psd_update;

static void *slot_of(const psd_block *b, const psd_page *page, int slot)
{
    return b->slot_at[slot] < 0 ? NULL : page->body + (size_t)(1 + b->slot_at[slot]) * b->stride;
}

/* Writes the values and steps of the next version; its content is then known only if it is that of the one before. */
static void write_values(const psd_block *b, const psd_page *before, psd_page *after, const psd_update *u)
{
    if (!u->acc && !u->grad) {
        memcpy(after->body, before->body, b->body_words * 8);
        memcpy(after->steps, before->steps, b->segments * 8);
        after->content = before->content;
        return;
    }
    psd_arrays arrays = {.param_in = before->body, .param_out = after->body, .acc = u->acc, .grad = u->grad, .weight = u->weight, .scale = u->scale};
    arrays.grad_dtype = u->grad ? u->grad_dtype : b->dtype;
    for (int i = 0; i < PSD_SLOTS_MAX; i++)
        arrays.slots_in[i] = slot_of(b, before, i), arrays.slots_out[i] = slot_of(b, after, i);
    psd_hyper hyper;
    memset(&hyper, 0, sizeof hyper);
    memcpy(hyper.flags, b->flags, sizeof hyper.flags);
    memcpy(hyper.scalars, u->scalars, (size_t)b->scalars * sizeof(double));
    if (b->rate >= 0)
        hyper.scalars[b->rate] /= (double)(1 + u->age);
    const psd_segments segments = {(intptr_t)b->segments, b->ends, u->touched, before->steps, after->steps};
    psd_step_block(b->dtype, b->rule, &arrays, &hyper, &segments);
    after->content = 0;
}

/* Writes the next version but for what it counts. A spare's number; or none, and why. */
static int64_t write_update(psd_block *b, const psd_update *u, psd_outcome *why)
{
    const int64_t spare = psd_block_spare(b, why);
    if (spare < 0)
        return -1;
    const psd_page *before = &b->page[b->current];
    psd_page *after = &b->page[spare];
    write_values(b, before, after, u);
    memcpy(after->sessions, before->sessions, b->workers * 8);
    memcpy(after->clocks, before->clocks, b->workers * 8);
    return spare;
}

static void count(psd_page *after, int64_t rank, uint64_t session, uint64_t clock)
{
    after->sessions[rank] = session, after->clocks[rank] = clock + 1;
}

/* Makes the spare current, and opens the next round. */
static psd_outcome apply(psd_block *b, int64_t spare)
{
    const uint64_t version = b->version + 1;
    const psd_outcome status = psd_block_publish(b, spare, version);
    if (status == PSD_COUNTED)
        psd_block_open(b, version);
    return status;
}

/* ---- without rounds: each push is an update of its own ---- */

static size_t bucket(uint64_t age)
{
    return age < 2 ? (size_t)age : (size_t)(64 - __builtin_clzll(age - 1)) + 1;
}

static psd_outcome apply_alone(psd_block *b, const psd_part_of_push *p)
{
    if (p->is_version_known && p->version_read > b->version)
        return PSD_AHEAD;
    const uint64_t age = p->is_version_known ? b->version - p->version_read : 0;
    if (!p->present)
        memset(b->grown, 1, b->segments);
    const psd_update u = {.grad = p->weight != 0 ? p->values : NULL, .grad_dtype = p->values_dtype, .weight = 1, .scale = p->scale,
                          .touched = p->present ? p->present : b->grown, .scalars = p->scalars, .age = age};
    psd_outcome status;
    const int64_t spare = write_update(b, &u, &status);
    if (spare < 0)
        return status;
    count(&b->page[spare], p->rank, p->session, p->clock);
    status = apply(b, spare);
    if (status == PSD_COUNTED && p->is_version_known)
        b->ages[bucket(age)]++, b->age_total += age;
    return status;
}

/* ---- rounds ---- */

/* The segments that have a gradient, with those of this one. */
static const uint8_t *grown(psd_block *b, const psd_part_of_push *p, const void *values)
{
    if (!values)
        return b->touched;
    for (size_t i = 0; i < b->segments; i++)
        b->grown[i] = !p->present || p->present[i] || b->touched[i];
    return b->grown;
}

/* Whether this worker's scalars hold: it has taken part for longer than those before, or has the lower rank. */
static int is_heard(const psd_block *b, const psd_part_of_push *p)
{
    return !b->has_voice || p->since < b->since || (p->since == b->since && p->rank < b->rank);
}

/* Adds a gradient to the sum. 0, or -1: no memory, and nothing has changed. */
static int add(psd_block *b, const psd_part_of_push *p, const void *values, double weight)
{
    if (!values)
        return 0;
    if (b->has_sum) {
        psd_accumulate(p->values_dtype, b->sum, values, weight, (intptr_t)b->n);
        return 0;
    }
    if (!b->sum && !(b->sum = aligned_alloc(64, (b->n * b->item + 64) / 64 * 64)))
        return -1;
    psd_scaled_copy(p->values_dtype, b->sum, values, weight, (intptr_t)b->n);
    b->has_sum = 1;
    return 0;
}

static void note(psd_block *b, const psd_part_of_push *p, const uint8_t *touched)
{
    if (is_heard(b, p)) {
        b->has_voice = 1, b->since = p->since, b->rank = p->rank;
        memcpy(b->held, p->scalars, (size_t)b->scalars * sizeof(double));
    }
    if (touched != b->touched)
        memcpy(b->touched, touched, b->segments);
    b->contributors[p->rank / 64] |= (uint64_t)1 << (p->rank % 64);
    b->sessions[p->rank] = p->session;
    b->total_weight += p->weight;
}

/* The mean, or the sum, of what is summed, which is weighted already, and of `weight` times the last gradient. */
static void reduce(const psd_block *b, psd_update *u, double total_weight)
{
    u->scale = 1;
    if (!b->is_mean || !(total_weight > 0))
        return;
    if (!u->acc && u->weight == total_weight)
        u->weight = 1; /* a single gradient is its own mean, to the bit */
    else
        u->scale = 1 / total_weight;
}

static void count_round(const psd_block *b, psd_page *after)
{
    for (size_t i = 0; i < b->mask_words; i++)
        for (uint64_t left = b->contributors[i]; left; left &= left - 1) {
            const int64_t rank = (int64_t)(64 * i) + __builtin_ctzll(left);
            count(after, rank, b->sessions[rank], b->version);
        }
}

/* The last gradient of a round is not added: the update reads it, and if that cannot be made nothing has changed. */
static psd_outcome close_with(psd_block *b, const psd_part_of_push *p, const void *values, double weight)
{
    psd_update u = {.acc = b->has_sum ? b->sum : NULL, .grad = values, .grad_dtype = p->values_dtype, .weight = weight,
                    .touched = grown(b, p, values), .scalars = is_heard(b, p) ? p->scalars : b->held};
    reduce(b, &u, b->total_weight + p->weight);
    psd_outcome status;
    const int64_t spare = write_update(b, &u, &status);
    if (spare < 0)
        return status;
    count_round(b, &b->page[spare]);
    count(&b->page[spare], p->rank, p->session, p->clock);
    return apply(b, spare);
}

psd_outcome psd_block_contribute(psd_block *b, const psd_part_of_push *p, const uint64_t *waited)
{
    const psd_page *page = &b->page[b->current];
    const uint64_t session = page->sessions[p->rank];
    if (session == p->session && page->clocks[p->rank] > p->clock)
        return PSD_DUPLICATE;
    if (session > p->session || !p->is_newest)
        return PSD_LATE;
    if (!b->has_rounds)
        return p->already ? PSD_NOT_SENT : apply_alone(b, p);
    if (p->clock != b->version)
        return p->clock > b->version ? PSD_EARLY : PSD_LATE;
    if (psd_block_has(b, p->rank))
        return b->sessions[p->rank] == p->session ? PSD_DUPLICATE : PSD_LATE;
    if (p->already)
        return PSD_NOT_SENT;
    const void *values = p->weight != 0 ? p->values : NULL;
    const double weight = b->is_mean ? p->weight : 1;
    if (closes(b, waited, p->rank))
        return close_with(b, p, values, weight);
    if (add(b, p, values, weight) != 0)
        return PSD_NO_MEMORY;
    note(b, p, grown(b, p, values));
    return PSD_COUNTED;
}

void psd_block_on_gradient(psd_block *b, int64_t rank, double now, const uint64_t *waited)
{
    psd_times_on_gradient(&b->times, b->measures_ranks ? b->ranks : NULL, b->mask_words, rank, now, waited);
}

void psd_block_on_close(psd_block *b, double now, const uint64_t *waited)
{
    psd_times_on_close(&b->times, b->measures_ranks ? b->ranks : NULL, b->mask_words, now, waited);
}

int psd_block_is_complete(const psd_block *b, const uint64_t *waited, int is_void)
{
    return bits(b->contributors, b->mask_words) ? closes(b, waited, -1) : is_void;
}

psd_outcome psd_block_close_round(psd_block *b)
{
    psd_update u = {.acc = b->has_sum ? b->sum : NULL, .touched = b->touched, .scalars = b->held};
    reduce(b, &u, b->total_weight);
    psd_outcome status;
    const int64_t spare = write_update(b, &u, &status);
    if (spare < 0)
        return status;
    count_round(b, &b->page[spare]);
    return apply(b, spare);
}
