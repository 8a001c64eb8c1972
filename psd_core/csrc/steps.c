/* What an armed step does; see steps.h. */
#include "portable.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "arena.h"
#include "steps.h"

enum { LIVE = 2, STATE_SHIFT = 56, BELOW_SHIFT = 4, BELOW_MAX = 2 }; /* of a rank's record; see ShardCore._save_worker */
static const double WEIGHT_MIN = 1e-9, WEIGHT_MAX = 1e15;

int psd_steps_init(psd_steps *s)
{
    size_t present = 0;
    for (size_t i = 0; i < s->blocks; i++) {
        psd_step_place *p = &s->place[i];
        p->present_at = present;
        present += (p->block->segments + 7) / 8;
        s->gradient_bytes += psd_eights(p->gradient_bytes), s->parameter_bytes += psd_eights(p->parameter_bytes);
    }
    s->present_at = sizeof(psd_step_head) + 8 * (psd_step_blocks(s) + s->scalars);
    s->rows_at = s->present_at + psd_eights(present);
    s->head_bytes = s->rows_at + (s->tables ? s->tables->count * sizeof(psd_step_rows_head) : 0);
    s->mask_words = (s->ranks->count + 63) / 64;
    const size_t masks = 5 * s->mask_words;
    s->waited = calloc(masks + 2 * s->ranks->count + 1, 8);
    s->stop_at = UINT64_MAX;
    s->low = calloc(4 * s->scalars + 1, sizeof(double));
    s->can_speak = pthread_mutex_init(&s->speaking, NULL) == 0;
    if (!s->waited || !s->low || !s->can_speak)
        return -1;
    s->high = s->low + s->scalars;
    for (int i = 0; i < 2; i++) {
        s->voice[i].scalars = s->low + (size_t)(2 + i) * s->scalars;
        s->voice[i].spoke = s->waited + (size_t)(1 + 2 * i) * s->mask_words, s->voice[i].counted = s->voice[i].spoke + s->mask_words;
        s->voice[i].since = s->waited + masks + (size_t)i * s->ranks->count;
    }
    return 0;
}

void psd_steps_free(psd_steps *s)
{
    free(s->waited);
    free(s->low);
    if (s->can_speak)
        pthread_mutex_destroy(&s->speaking);
}

int psd_steps_hear(psd_steps *s, uint64_t round, int64_t rank, uint64_t since, const double *scalars, int is_alike)
{
    pthread_mutex_lock(&s->speaking);
    psd_step_voice *v = &s->voice[round % 2];
    if (!v->is_there || v->round < round) {
        v->is_there = 1, v->is_mixed = 0, v->round = round;
        memset(v->spoke, 0, s->mask_words * 8);
        memset(v->counted, 0, s->mask_words * 8);
        memcpy(v->scalars, scalars, s->scalars * sizeof(double));
    }
    int agree = v->round == round && is_alike && memcmp(v->scalars, scalars, s->scalars * sizeof(double)) == 0;
    if (v->round == round && !agree && rank < 0)
        v->is_mixed = 1;
    agree = agree && !v->is_mixed;
    if (agree && rank >= 0)
        v->spoke[rank / 64] |= (uint64_t)1 << (rank % 64), v->since[rank] = since;
    pthread_mutex_unlock(&s->speaking);
    return agree;
}

int psd_steps_voice(psd_steps *s, int odd, psd_step_voice *copy)
{
    pthread_mutex_lock(&s->speaking);
    const psd_step_voice *v = &s->voice[odd];
    copy->round = v->round;
    memcpy(copy->scalars, v->scalars, s->scalars * sizeof(double));
    memcpy(copy->spoke, v->spoke, s->mask_words * 8);
    memcpy(copy->counted, v->counted, s->mask_words * 8);
    memcpy(copy->since, v->since, s->ranks->count * 8);
    const int is_there = v->is_there;
    pthread_mutex_unlock(&s->speaking);
    return is_there;
}

static void counted(psd_steps *s, uint64_t round, int64_t rank)
{
    pthread_mutex_lock(&s->speaking);
    psd_step_voice *v = &s->voice[round % 2];
    if (v->round == round)
        v->counted[rank / 64] |= (uint64_t)1 << (rank % 64);
    pthread_mutex_unlock(&s->speaking);
}

/* ---- in and out ---- */

static psd_rank *rank_of(const psd_step *t)
{
    return &t->steps->ranks->rank[t->rank];
}

static int enter(const psd_step *t)
{
    psd_rank *r = rank_of(t);
    __atomic_store_n(&r->inside, 1, __ATOMIC_SEQ_CST);
    if (t->head->epoch % 2 == 0 && __atomic_load_n(&r->epoch, __ATOMIC_SEQ_CST) == t->head->epoch)
        return 1;
    __atomic_store_n(&r->inside, 0, __ATOMIC_SEQ_CST);
    return 0;
}

static void leave(const psd_step *t)
{
    __atomic_store_n(&rank_of(t)->inside, 0, __ATOMIC_SEQ_CST);
}

static void ring(psd_step *t)
{
    if (t->closes)
        psd_ring(t->steps->ranks);
    t->closes = 0;
}

int psd_step_again(psd_step *t, int reason, int is_inside)
{
    psd_rank *r = rank_of(t);
    if (t->counted_blocks) {
        /* The push that is made in its place counts these blocks as its own: see SmallBlock and Exchange.push_block. */
        if (r->half_session != t->head->session || r->half_clock != t->head->clock)
            r->half_blocks = 0;
        r->half_session = t->head->session, r->half_clock = t->head->clock, r->half_blocks |= t->counted_blocks;
        r->half_has_ended = t->has_ended, r->half_received = t->received, r->half_weight = t->head->weight;
    }
    if (is_inside)
        leave(t);
    ring(t);
    return reason;
}

/* ---- the push ---- */

static int are_fit(const psd_steps *s, const double *scalars)
{
    for (size_t i = 0; i < s->scalars; i++)
        if (!(fabs(scalars[i]) <= FLT_MAX && s->low[i] <= scalars[i] && scalars[i] <= s->high[i]))
            return 0;
    return 1;
}

/* Whether the staleness bound lets this worker push at `clock`, and read the answer. */
static int may_pass(const psd_steps *s, int64_t rank, uint64_t clock)
{
    const uint64_t needed = clock + 1 > s->bound ? clock + 1 - s->bound : 0;
    for (size_t i = 0; i < s->mask_words && needed; i++)
        for (uint64_t left = s->waited[i]; left; left &= left - 1) {
            const int64_t other = (int64_t)(64 * i) + __builtin_ctzll(left);
            const uint64_t its = other == rank ? clock + 1 : __atomic_load_n(&s->ranks->rank[other].clock, __ATOMIC_ACQUIRE);
            if (its < needed)
                return 0;
        }
    return 1;
}

int psd_steps_stop(const psd_steps *s, int64_t rank, uint64_t clock)
{
    const uint64_t at = __atomic_load_n(&s->stop_at, __ATOMIC_SEQ_CST);
    if (s->has_rounds)
        return clock >= at;
    if (clock + 1 < at)
        return 0;
    for (size_t i = 0; i < s->mask_words; i++)
        for (uint64_t left = s->waited[i]; left; left &= left - 1) {
            const int64_t other = (int64_t)(64 * i) + __builtin_ctzll(left);
            if (other != rank && __atomic_load_n(&s->ranks->rank[other].clock, __ATOMIC_ACQUIRE) < at)
                return 0;
        }
    return 1;
}

int psd_step_begin(psd_step *t)
{
    const psd_step_head *h = t->head;
    psd_steps *s = t->steps;
    t->versions = (const uint64_t *)(h + 1), t->scalars = (const double *)(t->versions + psd_step_blocks(s));
    t->present = (const uint8_t *)h + s->present_at;
    t->counted_blocks = t->received = 0, t->closes = t->hands_back = t->has_ended = 0;
    if (!enter(t))
        return PSD_AGAIN_REVOKED;
    const psd_rank *r = rank_of(t);
    const int is_weight = h->weight == 0 || (h->weight >= WEIGHT_MIN && h->weight <= WEIGHT_MAX);
    if (h->session != r->session || h->flags & ~(uint32_t)PSD_STEP_FLAGS || !is_weight || h->clock > r->clock || h->since > h->clock + 1
        || !are_fit(s, t->scalars))
        return psd_step_again(t, PSD_AGAIN_CASE, 1);
    if (s->has_bound && !may_pass(s, t->rank, h->clock))
        return psd_step_again(t, PSD_AGAIN_CASE, 1);
    if (psd_steps_stop(s, t->rank, h->clock))
        return psd_step_again(t, PSD_AGAIN_CUT, 1);
    for (size_t i = 0; i < s->blocks && s->has_rounds; i++)
        if (__atomic_load_n(&s->place[i].block->version, __ATOMIC_ACQUIRE) != h->clock)
            return psd_step_again(t, PSD_AGAIN_CASE, 1);
    if (s->has_rounds && s->tables && __atomic_load_n(&s->tables->version, __ATOMIC_ACQUIRE) != h->clock)
        return psd_step_again(t, PSD_AGAIN_CASE, 1);
    if (s->has_rounds && !psd_steps_hear(s, h->clock, t->rank, h->since, t->scalars, 1))
        return psd_step_again(t, PSD_AGAIN_CASE, 1);
    return 0;
}

/* The segments of a block that have a gradient, one byte each; NULL: all. -1: none has. */
static int present_in(psd_step *t, size_t i, const uint8_t **found)
{
    *found = NULL;
    if (!(t->head->flags & PSD_STEP_HAS_PRESENT))
        return 1;
    const uint8_t *at = t->present + t->steps->place[i].present_at;
    const size_t segments = t->steps->place[i].block->segments;
    size_t there = 0;
    for (size_t k = 0; k < segments; k++)
        there += t->mask[k] = at[k / 8] >> (k % 8) & 1;
    if (there < segments)
        *found = t->mask;
    return there ? 1 : -1;
}

/* Whether the segments that have no gradient are zeros, as exchange.py wants it. */
static int are_zeros(const psd_step_place *p, const uint8_t *present, const char *gradient)
{
    const size_t item = p->block->n ? p->gradient_bytes / p->block->n : 0;
    size_t begin = 0;
    for (size_t k = 0; k < p->block->segments; begin = p->block->ends[k++])
        for (size_t at = begin; !present[k] && at < p->block->ends[k]; at++) {
            /* -0.0 is zero, too: the highest bit of the last byte does not count. */
            for (size_t byte = 0; byte < item; byte++)
                if ((uint8_t)gradient[at * item + byte] & (byte + 1 == item ? 0x7f : 0xff))
                    return 0;
        }
    return 1;
}

/* The i-th block's part of the push, but for what is of its kind. */
static psd_part_of_push part_of(const psd_step *t, size_t i)
{
    const psd_step_head *h = t->head;
    psd_part_of_push part = {.rank = t->rank, .session = h->session, .clock = h->clock, .since = h->since, .weight = h->weight, .scale = 1};
    part.is_newest = 1;
    if (h->flags & PSD_STEP_HAS_VERSIONS)
        part.version_read = t->versions[i], part.is_version_known = !t->steps->has_rounds;
    return part;
}

/* The i-th block has had the push. 0, or the reason for AGAIN. */
static int note_outcome(psd_step *t, size_t i, psd_outcome outcome, size_t received)
{
    if (outcome != PSD_COUNTED && outcome != PSD_DUPLICATE)
        return psd_step_again(t, PSD_AGAIN_CASE, 1);
    if (outcome == PSD_COUNTED) {
        if (t->steps->has_rounds && !t->counted_blocks)
            counted(t->steps, t->head->clock, t->rank);
        t->counted_blocks |= (uint64_t)1 << i;
    }
    t->received += received;
    return 0;
}

int psd_step_count(psd_step *t, size_t i, const void *gradient)
{
    psd_steps *s = t->steps;
    const psd_step_place *place = &s->place[i];
    psd_block *b = place->block;
    psd_part_of_push part = part_of(t, i);
    part.values_dtype = place->gradient_dtype, part.scalars = t->scalars + place->first_scalar;
    if (present_in(t, i, &part.present) > 0)
        part.values = gradient;
    if (part.values && part.present && !are_zeros(place, part.present, gradient))
        return psd_step_again(t, PSD_AGAIN_CASE, 1);
    if (!part.is_version_known && b->rate >= 0)
        return psd_step_again(t, PSD_AGAIN_CASE, 1);

    pthread_mutex_lock(&b->lock);
    const uint64_t before = b->version;
    psd_outcome outcome = PSD_STORE_CLOSED;
    if (!b->is_stuck && b->current >= 0)
        outcome = b->calls->contribute(b, &part, s->waited);
    if (outcome == PSD_COUNTED && s->has_rounds) {
        const double now = psd_now();
        b->calls->on_gradient(b, t->rank, now, s->waited);
        if (b->version != before) {
            b->calls->on_close(b, now, s->waited);
            t->closes = 1, t->hands_back |= b->has_tickets;
        }
    }
    pthread_mutex_unlock(&b->lock);
    return note_outcome(t, i, outcome, part.values ? place->gradient_bytes : 0);
}

int psd_step_count_rows(psd_step *t)
{
    psd_steps *s = t->steps;
    psd_tables *tables = s->tables;
    psd_part_of_push part = part_of(t, s->blocks);
    part.scalars = t->scalars;
    uint64_t pushes = 0, pulls = 0, received = 0;
    int is_rate_aged = 0;
    for (size_t i = 0; i < tables->count; i++) {
        const psd_step_rows *rows = &t->rows[i];
        pushes += rows->pushes, pulls += rows->pulls;
        received += rows->pushes * (8 + tables->partition[i].dim * 4);
        is_rate_aged |= tables->partition[i].rate >= 0;
        if (rows->pushes && !rows->is_present)
            return psd_step_again(t, PSD_AGAIN_CASE, 1);
    }
    if (pushes > tables->ids_max || pulls > tables->ids_max || (is_rate_aged && !part.is_version_known))
        return psd_step_again(t, PSD_AGAIN_CASE, 1);
    pthread_mutex_lock(tables->lock);
    const uint64_t before = tables->version;
    const double began = psd_now();
    const psd_outcome outcome = tables->calls->count(tables, &part, t->rows, s->waited);
    if (outcome == PSD_COUNTED && s->has_rounds) {
        const int has_closed = tables->version != before;
        psd_ranks *const measured = tables->measures_ranks ? tables->ranks : NULL;
        psd_times_on_gradient(&tables->times, measured, tables->mask_words, t->rank, began, s->waited);
        if (has_closed)
            psd_times_on_close(&tables->times, measured, tables->mask_words, psd_now(), s->waited);
        t->closes |= has_closed, t->hands_back |= tables->is_due || (has_closed && tables->has_tickets);
    }
    pthread_mutex_unlock(tables->lock);
    return note_outcome(t, s->blocks, outcome, received);
}

void psd_step_end(psd_step *t)
{
    psd_rank *r = rank_of(t);
    const uint64_t clock = t->head->clock + 1;
    t->has_ended = 1;
    psd_put(&r->last_seen, psd_now());
    if (clock > r->clock) {
        __atomic_store_n(&r->clock, clock, __ATOMIC_SEQ_CST);
        const uint64_t above = clock - r->floor, below = above < BELOW_MAX ? above : BELOW_MAX;
        const psd_block *b = t->steps->blocks ? t->steps->place[0].block : NULL;
        if (!(b && b->on_store && b->on_store(b->context, "arena.member")))
            psd_store_release(r->record, (LIVE | below << BELOW_SHIFT) << STATE_SHIFT | clock);
    }
    /* Python sets this before it looks at the clocks. */
    if (t->steps->has_bound && __atomic_load_n(&t->steps->has_gates, __ATOMIC_SEQ_CST))
        t->hands_back = 1;
    leave(t);
    ring(t);
}

/* ---- the answer ---- */

int psd_step_reached(const psd_step *t)
{
    for (size_t i = 0; i < t->steps->blocks && t->steps->has_rounds; i++)
        if (__atomic_load_n(&t->steps->place[i].block->version, __ATOMIC_ACQUIRE) <= t->head->clock)
            return 0;
    const psd_tables *tables = t->steps->tables;
    return !(tables && t->steps->has_rounds) || __atomic_load_n(&tables->version, __ATOMIC_ACQUIRE) > t->head->clock;
}

static void note_push(psd_step *t)
{
    psd_count_push(rank_of(t), t->counted_blocks != 0, t->received, t->head->weight);
}

static void note(psd_step *t, double began)
{
    psd_rank *r = rank_of(t);
    psd_step_counts *c = &r->counts;
    const double now = psd_now();
    note_push(t);
    for (size_t i = 0; i < t->steps->blocks; i++)
        psd_add_count(&c->sent, t->steps->place[i].parameter_bytes);
    for (size_t i = 0; t->steps->tables && i < t->steps->tables->count; i++) {
        psd_add_count(&c->received, 8 * t->rows[i].pulls);
        psd_add_count(&c->sent, t->rows[i].pulls * t->steps->tables->partition[i].dim * 4);
    }
    psd_add_count(&c->took[psd_seconds_bucket(now - began)], 1);
    psd_add_to(&c->took_s, now - began);
    psd_put(&r->last_seen, now);
}

void psd_step_abandon(psd_step *t)
{
    if (enter(t)) {
        note_push(t);
        leave(t);
    }
}

static void unpin(psd_step *t, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        psd_block *b = t->steps->place[i].block;
        b->calls->unpin(b, t->page[i], t->use[i]);
    }
}

int psd_step_pin(psd_step *t, double began)
{
    if (!enter(t))
        return psd_step_again(t, PSD_AGAIN_REVOKED, 0);
    for (size_t i = 0; i < t->steps->blocks; i++) {
        psd_block *b = t->steps->place[i].block;
        psd_outcome why;
        t->page[i] = b->calls->pin(b, &why);
        if (t->page[i] < 0) {
            unpin(t, i);
            return psd_step_again(t, PSD_AGAIN_REVOKED, 1);
        }
        t->use[i] = b->page[t->page[i]].use;
    }
    if (t->steps->tables && t->steps->tables->calls->read(t->steps->tables, t->rows, &t->tables_version)) {
        unpin(t, t->steps->blocks);
        return psd_step_again(t, PSD_AGAIN_CASE, 1);
    }
    note(t, began);
    leave(t);
    return 0;
}

void psd_step_unpin(psd_step *t)
{
    unpin(t, t->steps->blocks);
}
