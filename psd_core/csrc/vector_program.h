/* A record, taken apart: for vector_run.c, which runs it, and vector_checks.c, which says whether it is whole. */
#ifndef PSD_VECTOR_PROGRAM_H
#define PSD_VECTOR_PROGRAM_H

#include "vector.h"

typedef struct {
    psd_vectors *t;
    const psd_vector_record *record;
    const psd_vector_group *groups;
    const psd_vector_operand *operands;
    const psd_vector_op *ops;
    const uint32_t *inputs;
    int is_trial; /* nothing may change: results of users' functions are kept, and all else is scratch */
} program;

static const uint64_t item_bytes[] = {[PSD_V_F64] = 8, [PSD_V_F32] = 4, [PSD_V_I64] = 8};

static inline program program_of(psd_vectors *t, const psd_vector_record *r)
{
    const psd_vector_group *const groups = (const psd_vector_group *)(r + 1);
    const psd_vector_operand *const operands = (const psd_vector_operand *)(groups + r->groups);
    const psd_vector_op *const ops = (const psd_vector_op *)(operands + r->operands);
    return (program){t, r, groups, operands, ops, (const uint32_t *)(ops + r->ops), 0};
}

static inline uint64_t head_bytes(const psd_vector_record *r)
{
    return sizeof *r + r->groups * sizeof(psd_vector_group) + r->operands * sizeof(psd_vector_operand) + r->ops * sizeof(psd_vector_op)
         + (r->inputs + 1) / 2 * 8;
}

static inline psd_vector_partial *partials_of(const program *p, uint64_t stripe)
{
    return (psd_vector_partial *)(p->t->base + p->t->at[PSD_V_PARTIALS]) + stripe % PSD_CHUNK * p->record->answers;
}

static inline psd_vector_sum *sums_of(const program *p, uint64_t folds)
{
    return (psd_vector_sum *)(p->t->base + p->t->at[PSD_V_SUMS]) + folds % 2 * p->t->answers_max;
}

static inline uint64_t folds_in(uint64_t stripes) { return (stripes + PSD_CHUNK - 1) / PSD_CHUNK; }

typedef struct {
    uint64_t stripe, first; /* among those that are here; first element, of the whole vector */
    intptr_t n;
} place;

static inline uint64_t max_of(uint64_t a, uint64_t b) { return a > b ? a : b; }
static inline uint64_t min_of(uint64_t a, uint64_t b) { return a < b ? a : b; }

static inline place place_of(const psd_vector_group *g, uint64_t stripe)
{
    const uint64_t first = (g->first_stripe + stripe) * PSD_STRIPE;
    return (place){stripe, first, (intptr_t)min_of(PSD_STRIPE, g->size - first)};
}

static inline char *stripe_of(const program *p, uint64_t operand, uint64_t stripe)
{
    const uint32_t vector = p->operands[operand].vector;
    return p->t->bases[vector] + stripe * PSD_STRIPE * item_bytes[p->t->dtypes[vector]];
}

static inline char *staging_of(const program *p, const psd_vector_operand *operand)
{
    return p->t->base + p->t->at[PSD_V_STAGING] + (operand->staging - 1) * PSD_STRIPE_BYTES;
}

/* The first of the sorted rows that ends after an element. */
static inline uint64_t first_row(const psd_vector_op *op, const uint64_t *rows, uint64_t element)
{
    uint64_t low = 0, high = op->count;
    while (low < high) {
        const uint64_t middle = (low + high) / 2;
        if (rows[middle] * op->width + op->width <= element)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Whether an operation changes anything of a stripe. */
static inline int is_touched(const program *p, const psd_vector_op *op, const place *w)
{
    const uint64_t end = w->first + (uint64_t)w->n;
    if (op->code == PSD_V_PUT || op->code == PSD_V_ADD)
        return op->start < end && op->start + op->count > w->first;
    if (op->code != PSD_V_ADD_ROWS)
        return 1;
    const uint64_t *const rows = (const uint64_t *)((const char *)p->record + op->keys), k = first_row(op, rows, w->first);
    return k < op->count && rows[k] * op->width < end;
}

/* Whether a group's reductions find anything. */
static inline int has_answers(const program *p, const psd_vector_group *g)
{
    for (uint64_t i = g->first_op; i < g->first_op + g->ops; i++)
        if (p->ops[i].answers)
            return 1;
    return 0;
}

#endif
