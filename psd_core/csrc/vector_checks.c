/* Checks of all that a killed process leaves and the next one goes on with. vector_run.c stores them; here they are made and compared. */
#include "portable.h"
#include "arena.h"
#include "vector_program.h"

#include <stdio.h>

/* -- how they are made */

static uint64_t content_of(const void *data, size_t nbytes)
{
    psd_content c = {0};
    psd_content_add(&c, data, nbytes);
    return psd_content_check(&c);
}

/* So that stripes which change places show. */
static uint64_t key_of(uint64_t vector, uint64_t stripe) { return psd_mix((vector << 40 | stripe) + 1); }

void psd_vector_add_and_fetch(psd_content *c, const void *data, size_t nbytes, const char *const *next, uint64_t count)
{
    enum { PIECE = 1024, LINE = 64 };
    for (size_t at = 0; at < nbytes; at += PIECE) {
        const size_t n = min_of(PIECE, nbytes - at);
        for (uint64_t i = 0; i < count; i++)
            for (size_t line = 0; line < n; line += LINE)
                PSD_PREFETCH_FAR(next[i] + at + line);
        psd_content_add(c, (const char *)data + at, n);
    }
}

uint64_t psd_vector_check_and_fetch(const void *elements, size_t nbytes, uint64_t vector, uint64_t stripe, const char *const *next, uint64_t count)
{
    psd_content c = {.words = key_of(vector, stripe)};
    psd_vector_add_and_fetch(&c, elements, nbytes, next, count);
    return psd_content_check(&c);
}

uint64_t psd_vector_check(const void *elements, size_t nbytes, uint64_t vector, uint64_t stripe)
{
    return psd_vector_check_and_fetch(elements, nbytes, vector, stripe, NULL, 0);
}

uint64_t psd_vector_checks_at(uint64_t elements, uint32_t dtype) { return (elements * item_bytes[dtype] + 63) / 64 * 64; }

void psd_vector_checks_of_zeros(uint64_t vector, uint64_t elements, uint32_t dtype, uint64_t *checks)
{
    static const char zeros[PSD_STRIPE_BYTES];
    psd_content whole = {0};
    psd_content_add(&whole, zeros, PSD_STRIPE * item_bytes[dtype]);
    for (uint64_t stripe = 0; stripe * PSD_STRIPE < elements; stripe++) {
        const uint64_t rest = elements - stripe * PSD_STRIPE;
        whole.words = key_of(vector, stripe);
        checks[stripe] = rest < PSD_STRIPE ? psd_vector_check(zeros, rest * item_bytes[dtype], vector, stripe) : psd_content_check(&whole);
    }
}

uint64_t psd_vector_sum_check(const psd_vector_sum *sum) { return content_of(sum, PSD_SUM_CHECK * 8); }

uint64_t psd_vector_partials_check(const psd_vector_partial *partials, uint64_t answers)
{
    return content_of(partials, answers * sizeof *partials);
}

uint64_t psd_vector_session_check(uint64_t session) { return content_of(&session, sizeof session); }

uint64_t psd_vector_entry_check(const psd_vectors *t, uint64_t slot, uint64_t session, const psd_vector_entry *entry)
{
    const uint64_t words[] = {slot, session, entry->sequence, entry->bytes};
    psd_content c = {0};
    psd_content_add(&c, words, sizeof words);
    psd_content_add(&c, psd_vector_answer_at(t, slot, entry->sequence), entry->bytes);
    return psd_content_check(&c);
}

uint64_t psd_vector_record_check(const psd_vector_record *r)
{
    return content_of((const char *)r + r->head, r->size - r->head);
}

/* -- how they are compared */

static const char *sessions_problem(psd_vectors *t)
{
    for (uint64_t slot = 0; slot < t->senders; slot++) {
        const psd_vector_session *const s = psd_vector_session_at(t, slot);
        if (s->check && s->check != psd_vector_session_check(s->session)) {
            snprintf(t->problem, sizeof t->problem, "log: the session of sender %llu does not have its checksum", (unsigned long long)slot);
            return t->problem;
        }
        for (uint64_t i = 0; s->check && i < PSD_ENTRIES; i++) {
            const psd_vector_entry *const e = s->entries + i;
            if (e->check
                && (e->sequence % PSD_ENTRIES != i || e->bytes > t->answer_bytes
                    || e->check != psd_vector_entry_check(t, slot, s->session, e))) {
                snprintf(t->problem, sizeof t->problem, "log: answers kept for sender %llu do not have their checksum", (unsigned long long)slot);
                return t->problem;
            }
        }
    }
    return NULL;
}

/* A store beyond its vector would be a store into somebody else's memory. */
static const char *record_problem(psd_vectors *t)
{
    const psd_vector_record *const r = (const psd_vector_record *)t->record;
    if (t->record_bytes < sizeof *r || r->groups > t->record_bytes || r->operands > t->operands_max || r->ops > t->record_bytes
        || r->inputs > t->record_bytes || r->answers > t->answers_max || head_bytes(r) > r->size || r->size > t->record_bytes)
        return "record: its numbers do not fit it";
    if (r->head != head_bytes(r) || r->check != psd_checksum(&r->head, r->head / 8 - 1)
        || r->content != psd_vector_record_check(r))
        return "record: it does not have its checksum";
    if (r->commit != psd_unsealed(*t->commit))
        return "record: it belongs to another batch";
    const program p = program_of(t, r);
    for (uint64_t i = 0; i < r->groups; i++)
        for (uint64_t k = 0; k < p.groups[i].operands; k++) {
            const uint64_t operand = p.groups[i].first_operand + k, elements = p.groups[i].stripes * PSD_STRIPE;
            if (operand >= r->operands || p.operands[operand].vector >= t->capacity || !t->bases[p.operands[operand].vector]
                || t->elements[p.operands[operand].vector] + PSD_STRIPE <= elements
                || t->elements[p.operands[operand].vector] > elements)
                return "record: it names a vector that is not there";
        }
    return NULL;
}

/* What the batch has found so far, and what it has staged. */
static const char *progress_problem(const program *p)
{
    psd_vectors *const t = p->t;
    const uint64_t state = psd_unsealed(*t->state), from = state / 2;
    uint64_t step = 0, folds = 0;
    for (uint64_t i = 0; i < p->record->groups && step <= from; step += p->groups[i++].stripes) {
        const psd_vector_group *const g = p->groups + i;
        const uint64_t done = min_of(from - step, g->stripes);
        const int is_here = done < g->stripes, is_staged = is_here && state % 2;
        if (has_answers(p, g)) {
            folds += is_here ? done / PSD_CHUNK : folds_in(done);
            for (uint64_t k = done / PSD_CHUNK * PSD_CHUNK; is_here && k < done + (uint64_t)is_staged; k++)
                if (t->partial_checks[k % PSD_CHUNK] != psd_vector_partials_check(partials_of(p, k), p->record->answers))
                    return "log: partial sums do not have their checksum";
        }
        const place w = place_of(g, done);
        for (uint64_t k = g->first_operand; is_staged && k < g->first_operand + g->operands; k++) {
            const psd_vector_operand *const o = p->operands + k;
            if (o->staging && t->staged[k]
                && t->staged[k] != psd_vector_check(staging_of(p, o), (size_t)w.n * item_bytes[t->dtypes[o->vector]], o->vector, w.stripe))
                return "log: a stripe that is staged does not have its checksum";
        }
    }
    for (uint64_t i = 0; i < p->record->answers; i++) {
        const psd_vector_sum *const sum = sums_of(p, folds) + i;
        if (sum->words[PSD_SUM_CHECK] != psd_vector_sum_check(sum))
            return "log: sums do not have their checksum";
    }
    return NULL;
}

const char *psd_vectors_problem(psd_vectors *t)
{
    const uint64_t commit = psd_unsealed(*t->commit), applied = psd_unsealed(*t->applied);
    if (*t->commit != psd_sealed(commit) || *t->applied != psd_sealed(applied))
        return "log: the number of its batches does not have its checksum";
    if (applied != commit && applied + 1 != commit)
        return "log: the latest complete batch is neither the latest one nor the one before";
    const char *problem = sessions_problem(t);
    if (problem || applied == commit || (problem = record_problem(t)))
        return problem;
    if (*t->state != psd_sealed(psd_unsealed(*t->state)))
        return "log: the step of its batch does not have its checksum";
    const program p = program_of(t, (const psd_vector_record *)t->record);
    return p.record->kind ? NULL : progress_problem(&p);
}

/* Whether a stripe may have no check: the process died while it wrote to it, and the batch writes it again. */
static int is_in_flight(const psd_vectors *t, uint64_t vector, uint64_t stripe)
{
    if (*t->commit == *t->applied)
        return 0;
    const program p = program_of((psd_vectors *)(uintptr_t)t, (const psd_vector_record *)t->record);
    const uint64_t state = psd_unsealed(*t->state);
    uint64_t step = stripe;
    for (uint64_t i = 0; i < p.record->groups; step += p.groups[i++].stripes) {
        const psd_vector_group *const g = p.groups + i;
        const place w = place_of(g, stripe);
        for (uint64_t k = g->first_operand; k < g->first_operand + g->operands; k++)
            if (p.operands[k].vector == vector && p.operands[k].staging)
                return state == 2 * step + 1 && t->staged[k];
        for (uint64_t k = g->first_op; k < g->first_op + g->ops; k++)
            if (p.ops[k].out != PSD_NONE && p.operands[p.ops[k].out].vector == vector && is_touched(&p, p.ops + k, &w))
                return state % 2 == 0 && state <= 2 * step;
    }
    return 0;
}

uint64_t psd_vector_damaged(const psd_vectors *t, uint64_t vector)
{
    const uint64_t elements = t->elements[vector], item = item_bytes[t->dtypes[vector]];
    const uint64_t *const checks = psd_vector_checks_of(t, vector);
    uint64_t stripe = 0;
    for (uint64_t first = 0; first < elements; stripe++, first += PSD_STRIPE) {
        const size_t nbytes = (size_t)(min_of(PSD_STRIPE, elements - first) * item);
        if (checks[stripe] ? checks[stripe] != psd_vector_check(t->bases[vector] + first * item, nbytes, vector, stripe)
                           : !is_in_flight(t, vector, stripe))
            break;
    }
    return stripe;
}
