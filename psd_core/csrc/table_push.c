/* A push: the rule on all of its rows, from their places to spare ones, up to its commit. Never stores into a row that has a name. */
#include "portable.h"
#include "table.h"

#include <errno.h>
#include <stdlib.h>

enum { AHEAD = 16, ROWS_AHEAD = 4, WORDS_AHEAD = 8 };

/* Finds the rows of all ids; returns how many are not there. The bucket of an id is asked for first, then the head that it names. */
static uint64_t find_all(psd_table *t)
{
    psd_scratch *const s = &t->scratch;
    uint32_t tags[2 * AHEAD];
    uint64_t missing = 0;
    for (intptr_t i = 0; i < s->count + 2 * AHEAD; i++) {
        const intptr_t head = i - AHEAD, found = i - (2 * AHEAD - 1);
        if (i < s->count) {
            const uint32_t tag = tags[i % (2 * AHEAD)] = psd_tag(t, s->ids[i]);
            s->words[i] = psd_index_home(t, tag);
            PSD_PREFETCH(s->words[i]);
        }
        if (head >= 0 && head < s->count) {
            s->words[head] = psd_index_probable(s->words[head], tags[head % (2 * AHEAD)]);
            if (s->words[head])
                PSD_PREFETCH(&psd_heads(t)[(uint32_t)*s->words[head] - 1]);
        }
        if (found < 0 || found >= s->count)
            continue;
        if (!s->words[found] || psd_heads(t)[(uint32_t)*s->words[found] - 1].id != s->ids[found])
            s->words[found] = psd_index_find(t, s->ids[found], tags[found % (2 * AHEAD)]);
        missing += s->words[found] == NULL;
    }
    return missing;
}

/* Makes room for rows that are missing; returns how many of the push's own rows went, or -1 without memory. Rows that were used at its clock are not
 * evicted, but a reader that is behind may mark one as used earlier, at the same time. Such a row begins anew. */
static int64_t evict(psd_table *t, uint64_t count, uint64_t clock)
{
    psd_scratch *const s = &t->scratch;
    int64_t own = 0;
    for (intptr_t k = 0; k < s->count; k++)
        if (s->words[k] && s->words[k] != PSD_PASSED_OVER) {
            uint64_t *const used = &psd_heads(t)[(uint32_t)*s->words[k] - 1].used;
            if (clock > __atomic_load_n(used, __ATOMIC_RELAXED))
                __atomic_store_n(used, clock, __ATOMIC_RELAXED);
        }
    if (psd_table_evict(t, count, clock))
        return -1;
    for (intptr_t k = 0; k < s->count; k++)
        if (s->words[k] && s->words[k] != PSD_PASSED_OVER && !psd_is_live(*s->words[k])) {
            s->words[k] = NULL;
            own++;
        }
    return own;
}

/* The place that the row number `taken` of a push is written to: spare ones from the top of the stack, then such as no row ever had. */
PSD_INLINE uint64_t spare_place(const psd_table *t, uint64_t taken)
{
    const psd_root *const r = t->root;
    return taken < r->spares ? psd_spares(t)[r->spares - 1 - taken] : r->places + (taken - r->spares);
}

/* Rows, and heads: that of an old row was asked for when it was found, which is as long ago as the push is large. */
PSD_INLINE void prefetch_rows(const psd_table *t, const uint64_t *word, uint64_t place)
{
    if (word) {
        psd_prefetch_range(psd_row(t, (uint32_t)*word - 1), t->spec.stored * 4, 0);
        PSD_PREFETCH(&psd_heads(t)[(uint32_t)*word - 1]);
    }
    psd_prefetch_range(psd_row(t, place), t->spec.stored * 4, 1);
    psd_prefetch_range(&psd_heads(t)[place], sizeof(psd_head), 1);
}

/* `row`: room for one. `past`: where rows catch up. */
static int write_row(psd_table *t, const psd_push *p, const psd_row_rule *rule, intptr_t k, uint64_t place, const psd_root *next,
                     float *row, psd_past *past, const float *first)
{
    const psd_scratch *const s = &t->scratch;
    const float *const old = s->words[k] ? psd_row(t, (uint32_t)*s->words[k] - 1) : NULL;
    float *const to = t->spec.is_half ? row : psd_row(t, place);
    uint64_t clock = p->clock;
    if (old && !p->whole) {
        const uint64_t used = __atomic_load_n(&psd_heads(t)[(uint32_t)*s->words[k] - 1].used, __ATOMIC_RELAXED);
        clock = used > clock ? used : clock; /* by a reader that is ahead */
    }
    if (p->clocks)
        clock = p->clocks[(uint64_t)(s->values[k] - first) / t->spec.width];
    psd_heads(t)[place] = (psd_head){s->ids[k], clock, next->version, 0};
    int status = 0;
    if (p->own) {
        status = psd_own_rule_add(t, p->own, s->ids[k], old, s->values[k], place, row);
    } else if (p->whole) {
        psd_store_row(t, s->values[k], psd_row(t, place), s->ids[k], next->step);
    } else {
        const int is_behind = old ? psd_is_behind(t, old) : psd_is_fresh_behind(t), as_it_lies = old && !is_behind && !t->spec.is_half;
        if (!old)
            psd_initial_row(&t->spec, s->ids[k], row);
        else if (!as_it_lies)
            psd_load_row(t, old, row, t->spec.width);
        if (is_behind)
            psd_catch_up(past, row);
        psd_step_row_f32(rule, as_it_lies ? old : row, to, s->values[k], (intptr_t)t->spec.dim, t->spec.slot_at);
        if (t->spec.catches_up) {
            memcpy(to + t->spec.width - 2, &next->step, sizeof next->step);
        }
        if (t->spec.is_half)
            psd_store_row(t, row, psd_row(t, place), s->ids[k], next->step);
    }
    if (!p->own)
        psd_seal_row(t, place);
    if (clock < t->oldest.bound && !(old && clock == __atomic_load_n(&psd_heads(t)[(uint32_t)*s->words[k] - 1].used, __ATOMIC_RELAXED)))
        psd_oldest_add(&t->oldest, s->ids[k], clock);
    return status;
}

static int push(psd_table *t, const psd_push *p, const psd_part *parts, int count, float *row, psd_past *past)
{
    psd_scratch *const s = &t->scratch;
    if (psd_combine(s, parts, count, (intptr_t)(p->whole ? t->spec.width : t->spec.dim), p->distinct, p->whole))
        return ENOMEM;
    uint64_t absent = find_all(t);
    if (absent && p->is_of_known)
        return PSD_ABSENT;
    const int64_t passed_over = absent && !p->whole ? psd_table_admit(t) : 0;
    if (passed_over < 0)
        return ENOMEM;
    uint64_t missing = absent - (uint64_t)passed_over;
    const uint64_t seen = absent && !p->whole ? (uint64_t)s->sightings_count : 0;
    uint64_t room = t->spec.rows_max - t->root->rows;
    if (missing > room && t->spec.evicts) {
        const int64_t own = evict(t, missing - room, p->clock);
        if (own < 0)
            return ENOMEM;
        absent += (uint64_t)own;
        missing += (uint64_t)own;
        room = t->spec.rows_max - t->root->rows;
    }
    const uint64_t created = missing < room ? missing : room;

    psd_root *const next = psd_table_next_root(t);
    const psd_root *const now = t->root;
    next->version++;
    if (!p->clocks && p->clock > next->clock)
        next->clock = p->clock;
    if (!p->whole)
        next->step++;
    else if (p->step >= 0)
        next->step = (uint64_t)p->step;
    if (t->spec.catches_up && !p->whole)
        psd_log_push(t, next, &p->hyper);
    else if (p->history)
        psd_log_replace(t, next, p->history, p->entries, p->scalars);
    psd_row_rule rule;
    if (p->own)
        p->own->step = next->step;
    else if (!p->whole)
        psd_prepare_rows_f32(&rule, t->spec.rule, &p->hyper, next->step, p->scale, t->spec.rowwise);
    const uint64_t taken = (uint64_t)s->count - absent + created;
    psd_record *const record = psd_table_record(t);
    psd_flip *const flips = (psd_flip *)(record + 1);
    uint32_t *const backs = (uint32_t *)(flips + taken + seen);
    if (seen)
        memcpy(flips + taken, s->sightings, seen * sizeof(psd_flip));
    uint64_t done = 0, back = 0, made = 0, moved = 0;
    intptr_t asked = 0; /* rows are asked for some steps before they are computed */
    uint64_t asked_done = 0, asked_made = 0;
    for (intptr_t k = 0; k < s->count; k++) {
        for (; asked < s->count && asked < k + ROWS_AHEAD; asked++) {
            if (asked + WORDS_AHEAD < s->count)
                PSD_PREFETCH(s->words[asked + WORDS_AHEAD]);
            if (s->words[asked] == PSD_PASSED_OVER || (!s->words[asked] && asked_made++ >= created))
                continue;
            prefetch_rows(t, s->words[asked], spare_place(t, asked_done++));
        }
        uint64_t *const word = s->words[k];
        if (word == PSD_PASSED_OVER || (!word && made == created))
            continue;
        const uint64_t place = spare_place(t, done);
        PSD_BEFORE(t, "row");
        const int status = write_row(t, p, &rule, k, place, next, row, past, parts->values);
        if (status)
            return status;
        if (word) {
            backs[back++] = (uint32_t)*word - 1;
            flips[done++] = (psd_flip){(uint64_t)((char *)word - t->base), (*word & ~(uint64_t)UINT32_MAX) | (place + 1)};
        } else {
            const uint64_t tag = psd_tag(t, s->ids[k]);
            moved += now->next_buckets && tag < now->moved;
            made++;
            flips[done++] = (psd_flip){0, tag << 32 | (place + 1)};
        }
    }
    const int status = p->own ? psd_own_rule_apply(t, p->own, row) : 0;
    if (status)
        return status;
    const uint64_t from_stack = taken < now->spares ? taken : now->spares;
    PSD_BEFORE(t, "record");
    record->flips = done + seen;
    record->backs = back;
    record->first_back = now->spares - from_stack;
    psd_table_record_end(t, next);
    next->spares = record->first_back + back;
    next->places += taken - from_stack;
    next->rows += created;
    next->created += created;
    next->refused += missing - created;
    next->unadmitted += (uint64_t)passed_over;
    next->filled += created - moved;
    next->next_filled += moved;
    if (p->notes)
        memcpy(next + 1, p->notes, t->spec.notes * 8);
    return 0;
}

int psd_table_push(psd_table *t, const psd_push *p, const psd_part *parts, int count)
{
    float *const row = malloc(t->spec.width * 4);
    psd_past past = {.rules = NULL};
    const int may_catch_up = t->spec.catches_up && (t->root->still_from > 1 || t->root->fresh_moves);
    int status = row && !(may_catch_up && psd_past_begin(&past, t)) ? 0 : ENOMEM;
    if (status == 0)
        status = push(t, p, parts, count, row, &past);
    psd_past_end(&past);
    free(row);
    return status;
}
