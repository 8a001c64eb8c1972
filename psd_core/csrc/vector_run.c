/* Batches: stripe by stripe, all operations of a group on one stripe before the next, each stripe a step that a kill leaves whole.
 *
 * New values of a stripe are computed in the staging area. `state` = 2 * step + 1 says that they are all there; then they are copied
 * to where they belong, which may be done again; `state` = 2 * step + 2 says that the next step begins. What a group writes and
 * never reads is computed in place: to do that again changes nothing. */
#include "portable.h"
#include "arena.h"
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

static program program_of(psd_vectors *t, const psd_vector_record *r)
{
    const psd_vector_group *const groups = (const psd_vector_group *)(r + 1);
    const psd_vector_operand *const operands = (const psd_vector_operand *)(groups + r->groups);
    const psd_vector_op *const ops = (const psd_vector_op *)(operands + r->operands);
    return (program){t, r, groups, operands, ops, (const uint32_t *)(ops + r->ops), 0};
}

static uint64_t head_bytes(const psd_vector_record *r)
{
    return sizeof *r + r->groups * sizeof(psd_vector_group) + r->operands * sizeof(psd_vector_operand) + r->ops * sizeof(psd_vector_op)
         + (r->inputs + 1) / 2 * 8;
}

void psd_vectors_plan(psd_vectors *t, uint64_t senders, uint64_t *sizes)
{
    const uint64_t unit = 4096;
    t->answer_bytes = (t->answers_max * PSD_ANSWER_MAX + unit - 1) / unit * unit;
    const uint64_t needed[PSD_V_REGIONS] = {
        [PSD_V_CONTROL] = 256 + t->operands_max,
        [PSD_V_SESSIONS] = senders * sizeof(psd_vector_session),
        [PSD_V_PARTIALS] = PSD_CHUNK * t->answers_max * sizeof(psd_vector_partial),
        [PSD_V_SUMS] = 2 * t->answers_max * sizeof(psd_vector_sum),
        [PSD_V_STAGING] = t->operands_max * PSD_STRIPE_BYTES,
        [PSD_V_ANSWERS] = senders * PSD_ENTRIES * t->answer_bytes,
    };
    uint64_t at = unit;
    for (int i = 0; i < PSD_V_REGIONS; i++) {
        t->at[i] = at;
        sizes[i] = (needed[i] + unit - 1) / unit * unit;
        at += sizes[i];
    }
}

void psd_vectors_attach(psd_vectors *t)
{
    char *const control = t->base + t->at[PSD_V_CONTROL];
    t->commit = (uint64_t *)control;
    t->applied = (uint64_t *)(control + 64);
    t->state = (uint64_t *)(control + 128);
    t->dirty = (uint8_t *)(control + 256);
}

static psd_vector_partial *partials_of(const program *p, uint64_t stripe)
{
    return (psd_vector_partial *)(p->t->base + p->t->at[PSD_V_PARTIALS]) + stripe % PSD_CHUNK * p->record->answers;
}

static psd_vector_sum *sums_of(const program *p, uint64_t folds)
{
    return (psd_vector_sum *)(p->t->base + p->t->at[PSD_V_SUMS]) + folds % 2 * p->t->answers_max;
}

static uint64_t folds_in(uint64_t stripes) { return (stripes + PSD_CHUNK - 1) / PSD_CHUNK; }

/* -- one operation on one stripe */

typedef struct {
    uint64_t stripe, first; /* among those that are here; first element, of the whole vector */
    intptr_t n;
} place;

static uint64_t max_of(uint64_t a, uint64_t b) { return a > b ? a : b; }
static uint64_t min_of(uint64_t a, uint64_t b) { return a < b ? a : b; }

static void compute(const psd_vector_op *op, void *out, const void *const *in, const void *coefficients, intptr_t n, uint64_t index)
{
    (op->dtype == PSD_V_F64   ? psd_vector_compute_f64
     : op->dtype == PSD_V_F32 ? psd_vector_compute_f32
                              : psd_vector_compute_i64)(op, out, in, coefficients, n, index);
}

static void add(uint32_t dtype, void *out, const void *values, intptr_t n)
{
    (dtype == PSD_V_F64 ? psd_vector_add_f64 : dtype == PSD_V_F32 ? psd_vector_add_f32 : psd_vector_add_i64)(out, values, n);
}

/* The first of the sorted rows that ends after an element. */
static uint64_t first_row(const psd_vector_op *op, const uint64_t *rows, uint64_t element)
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
static int is_touched(const program *p, const psd_vector_op *op, const place *w)
{
    const uint64_t end = w->first + (uint64_t)w->n;
    if (op->code == PSD_V_PUT || op->code == PSD_V_ADD)
        return op->start < end && op->start + op->count > w->first;
    if (op->code != PSD_V_ADD_ROWS)
        return 1;
    const uint64_t *const rows = (const uint64_t *)((const char *)p->record + op->keys), k = first_row(op, rows, w->first);
    return k < op->count && rows[k] * op->width < end;
}

static void add_rows(const program *p, const psd_vector_op *op, const place *w, char *out)
{
    const uint64_t *const rows = (const uint64_t *)((const char *)p->record + op->keys), end = w->first + (uint64_t)w->n;
    const char *const values = (const char *)p->record + op->values;
    const uint64_t item = item_bytes[op->dtype];
    for (uint64_t k = first_row(op, rows, w->first); k < op->count && rows[k] * op->width < end; k++) {
        const uint64_t begin = rows[k] * op->width, low = max_of(begin, w->first), high = min_of(begin + op->width, end);
        if (high > low)
            add(op->dtype, out + (low - w->first) * item, values + (k * op->width + low - begin) * item, (intptr_t)(high - low));
    }
}

static void reduce(const program *p, const psd_vector_op *op, const place *w)
{
    psd_vector_partial *out = partials_of(p, w->stripe) + op->first_answer;
    const uint32_t *const inputs = p->inputs + op->first_input;
    const void *x[PSD_INPUTS_MAX];
    void **const current = p->t->current;
    for (uint32_t i = 0; i < op->inputs; i++)
        x[i] = current[inputs[i]];
    const uint32_t d = op->dtype;
    if (op->code == PSD_V_MIN || op->code == PSD_V_MAX)
        (d == PSD_V_F64   ? psd_vector_extreme_f64
         : d == PSD_V_F32 ? psd_vector_extreme_f32
                          : psd_vector_extreme_i64)(x[0], w->n, op->code == PSD_V_MAX, w->first, out);
    else if (op->code == PSD_V_SUM)
        (d == PSD_V_F64 ? psd_vector_sum_f64 : d == PSD_V_F32 ? psd_vector_sum_f32 : psd_vector_sum_i64)(x[0], w->n, out);
    else {
        /* `count` is the number of the first factors; without any, each with itself and those before it. */
        const uint32_t rows = op->count ? (uint32_t)op->count : op->inputs;
        for (uint32_t i = 0; i < rows; i++) {
            const uint32_t columns = op->count ? op->inputs - rows : i + 1;
            const void *const *const y = op->count ? x + rows : x;
            (d == PSD_V_F64 ? psd_vector_dots_f64 : d == PSD_V_F32 ? psd_vector_dots_f32 : psd_vector_dots_i64)(
                x[i], y, columns, w->n, out);
            out += columns;
        }
    }
}

static int run_op(const program *p, const psd_vector_op *op, const place *w)
{
    psd_vectors *const t = p->t;
    if (op->out == PSD_NONE) {
        reduce(p, op, w);
        return 0;
    }
    if (!is_touched(p, op, w))
        return 0;
    const psd_vector_operand *const operand = p->operands + op->out;
    const uint64_t item = item_bytes[op->dtype], end = w->first + (uint64_t)w->n;
    char *const now = t->current[op->out];
    char *const out = operand->staging ? t->base + t->at[PSD_V_STAGING] + (operand->staging - 1) * PSD_STRIPE_BYTES : now;
    const void *in[PSD_INPUTS_MAX];
    const uint32_t *const inputs = p->inputs + op->first_input;
    for (uint32_t i = 0; i < op->inputs; i++)
        in[i] = t->current[inputs[i]];
    if (p->is_trial && op->code == PSD_V_CUSTOM) {
        const int status = t->apply(t->context, (uint64_t)(op - p->ops), in, (char *)p->record + op->values + (w->first - op->start) * item, w->n);
        if (status != 0)
            return status;
    }
    if (!operand->staging && t->snapshot.is_active && !p->is_trial)
        psd_vector_snapshot_save(t, operand->vector, w->stripe);
    if (op->code == PSD_V_PUT || op->code == PSD_V_ADD || op->code == PSD_V_CUSTOM || op->code == PSD_V_ADD_ROWS) {
        const uint64_t low = max_of(op->start, w->first), high = min_of(op->start + op->count, end);
        const int is_whole = op->code != PSD_V_ADD_ROWS && op->code != PSD_V_ADD && low == w->first && high == end;
        const char *const values = (const char *)p->record + op->values + (low - op->start) * item;
        if (out != now && !is_whole)
            memcpy(out, now, (size_t)w->n * item);
        if (op->code == PSD_V_ADD_ROWS)
            add_rows(p, op, w, out);
        else if (op->code == PSD_V_ADD)
            add(op->dtype, out + (low - w->first) * item, values, (intptr_t)(high - low));
        else
            memcpy(out + (low - w->first) * item, values, (high - low) * item);
    } else
        compute(op, out, in, (const char *)p->record + op->keys, w->n, w->first);
    t->current[op->out] = out;
    if (operand->staging)
        t->dirty[op->out] = 1;
    return 0;
}

/* -- one step: a stripe of a group */

static place place_of(const psd_vector_group *g, uint64_t stripe)
{
    const uint64_t first = (g->first_stripe + stripe) * PSD_STRIPE;
    return (place){stripe, first, (intptr_t)min_of(PSD_STRIPE, g->size - first)};
}

static char *stripe_of(const program *p, uint64_t operand, uint64_t stripe)
{
    const uint32_t vector = p->operands[operand].vector;
    return p->t->bases[vector] + stripe * PSD_STRIPE * item_bytes[p->t->dtypes[vector]];
}

/* Brings what is staged to where it belongs; may be repeated. */
static void copy_staged(const program *p, const psd_vector_group *g, const place *w)
{
    psd_vectors *const t = p->t;
    for (uint64_t i = g->first_operand; i < g->first_operand + g->operands; i++) {
        const psd_vector_operand *const operand = p->operands + i;
        if (!operand->staging || !t->dirty[i])
            continue;
        if (t->snapshot.is_active)
            psd_vector_snapshot_save(t, operand->vector, w->stripe);
        PSD_BEFORE(t, "copy");
        memcpy(stripe_of(p, i, w->stripe), t->base + t->at[PSD_V_STAGING] + (operand->staging - 1) * PSD_STRIPE_BYTES,
               (size_t)w->n * item_bytes[t->dtypes[operand->vector]]);
    }
}

/* Adds the partials of the chunk that ends with a stripe; may be repeated until the next chunk begins. */
static void fold(const program *p, const psd_vector_group *g, uint64_t stripe, uint64_t folds)
{
    const psd_vector_sum *const before = sums_of(p, folds);
    psd_vector_sum *const after = sums_of(p, folds + 1);
    memcpy(after, before, p->record->answers * sizeof *after);
    const uint64_t first = stripe / PSD_CHUNK * PSD_CHUNK;
    for (uint64_t i = g->first_op; i < g->first_op + g->ops; i++)
        for (uint32_t k = 0; k < p->ops[i].answers; k++) {
            const uint32_t answer = p->ops[i].first_answer + k;
            psd_vector_fold(p->ops + i, partials_of(p, first) + answer, p->record->answers, stripe + 1 - first, after + answer);
        }
}

/* Runs from a step on. `is_staged`: the step's new values are in the staging area already. */
static int run(program *p, uint64_t from, int is_staged)
{
    psd_vectors *const t = p->t;
    uint64_t step = 0, folds = 0;
    for (uint64_t i = 0; i < p->record->groups; i++) {
        const psd_vector_group *const g = p->groups + i;
        int has_answers = 0, has_staging = 0;
        for (uint64_t k = g->first_op; k < g->first_op + g->ops; k++)
            has_answers |= p->ops[k].answers > 0;
        for (uint64_t k = g->first_operand; k < g->first_operand + g->operands; k++)
            has_staging |= p->operands[k].staging > 0;
        uint64_t stripe = 0;
        if (from > step) { /* skip what was done */
            stripe = min_of(from - step, g->stripes);
            step += stripe;
            folds += has_answers ? (stripe == g->stripes ? folds_in(stripe) : stripe / PSD_CHUNK) : 0;
        }
        for (; stripe < g->stripes; stripe++, step++) {
            const place w = place_of(g, stripe);
            const int ends_chunk = has_answers && (stripe % PSD_CHUNK == PSD_CHUNK - 1 || stripe == g->stripes - 1);
            int is_dirty = is_staged && step == from;
            if (!is_dirty) {
                for (uint64_t k = g->first_operand; k < g->first_operand + g->operands; k++) {
                    t->current[k] = stripe_of(p, k, stripe);
                    if (has_staging)
                        t->dirty[k] = 0;
                }
                for (uint64_t k = g->first_op; k < g->first_op + g->ops; k++) {
                    const int status = run_op(p, p->ops + k, &w);
                    if (status != 0)
                        return status;
                }
                if (!p->is_trial) {
                    is_dirty = ends_chunk; /* the sums before the chunk go with the next one, so a kill must not go back */
                    for (uint64_t k = g->first_operand; has_staging && !is_dirty && k < g->first_operand + g->operands; k++)
                        is_dirty = t->dirty[k];
                }
                if (is_dirty) {
                    PSD_BEFORE(t, "staged");
                    psd_store_release(t->state, 2 * step + 1);
                }
            }
            if (is_dirty)
                copy_staged(p, g, &w);
            if (ends_chunk) {
                PSD_BEFORE(t, "fold");
                fold(p, g, stripe, folds++);
            }
            if (is_dirty) {
                PSD_BEFORE(t, "state");
                psd_store_release(t->state, 2 * (step + 1));
            }
        }
    }
    return 0;
}

static void clear_sums(const program *p)
{
    psd_vector_sum *const sums = sums_of(p, 0);
    memset(sums, 0, p->record->answers * sizeof *sums);
    for (uint64_t i = 0; i < p->record->ops; i++)
        if (p->ops[i].code == PSD_V_MIN || p->ops[i].code == PSD_V_MAX)
            sums[p->ops[i].first_answer].extreme.index = -1;
}

/* -- batches */

void psd_vector_seal(psd_vector_record *r)
{
    r->head = head_bytes(r);
    r->check = psd_checksum(&r->head, r->head / 8 - 1);
}

int psd_vectors_try(psd_vectors *t, const psd_vector_record *record)
{
    program p = program_of(t, record);
    p.is_trial = 1;
    clear_sums(&p);
    return run(&p, 0, 0);
}

void psd_vectors_commit(psd_vectors *t)
{
    psd_vector_record *const record = (psd_vector_record *)t->record;
    program p = program_of(t, record);
    if (record->kind == 0)
        clear_sums(&p);
    PSD_BEFORE(t, "record");
    record->commit = *t->commit + 1;
    psd_vector_seal(record);
    PSD_BEFORE(t, "state");
    psd_store_release(t->state, 0);
    PSD_BEFORE(t, "commit");
    psd_store_release(t->commit, record->commit);
}

void psd_vectors_finish(psd_vectors *t)
{
    program p = program_of(t, (const psd_vector_record *)t->record);
    run(&p, *t->state / 2, (int)(*t->state % 2));
}

uint64_t psd_vectors_answer(psd_vectors *t, const psd_vector_record *record, char *out)
{
    const program p = program_of(t, record);
    uint64_t folds = 0, bytes = 0;
    for (uint64_t i = 0; i < record->groups; i++) {
        int has_answers = 0;
        for (uint64_t k = p.groups[i].first_op; k < p.groups[i].first_op + p.groups[i].ops; k++)
            has_answers |= p.ops[k].answers > 0;
        folds += has_answers ? folds_in(p.groups[i].stripes) : 0;
    }
    if (record->session)
        out = psd_vector_answer_at(t, record->slot, record->sequence);
    psd_vector_session *const s = psd_vector_session_at(t, record->slot);
    if (record->session) {
        PSD_BEFORE(t, "entry");
        psd_store_release(&s->entries[record->sequence % PSD_ENTRIES].sequence, 0);
    }
    const psd_vector_sum *const sums = sums_of(&p, folds);
    for (uint64_t answer = 0; answer < record->answers;) /* in the order of the operations, whatever their groups */
        for (uint64_t i = 0; i < record->ops; i++)
            for (; p.ops[i].answers && answer >= p.ops[i].first_answer && answer < p.ops[i].first_answer + p.ops[i].answers; answer++)
                bytes += psd_vector_pack(p.ops + i, sums + answer, out + bytes);
    if (record->session) {
        s->entries[record->sequence % PSD_ENTRIES].bytes = bytes;
        PSD_BEFORE(t, "entry");
        psd_store_release(&s->entries[record->sequence % PSD_ENTRIES].sequence, record->sequence);
        PSD_BEFORE(t, "session");
        psd_store_release(&s->session, record->session);
    }
    return bytes;
}

void psd_vectors_applied(psd_vectors *t)
{
    PSD_BEFORE(t, "applied");
    psd_store_release(t->applied, *t->commit);
    PSD_BEFORE(t, "done");
}

/* A store beyond its vector would be a store into somebody else's memory. */
const char *psd_vector_problem(const psd_vectors *t, const psd_vector_record *r, uint64_t size)
{
    if (size < sizeof *r || r->groups > size || r->operands > t->operands_max || r->ops > size || r->inputs > size
        || r->answers > t->answers_max || head_bytes(r) > r->size || r->size > size)
        return "record: its numbers do not fit it";
    if (r->head != head_bytes(r) || r->check != psd_checksum(&r->head, r->head / 8 - 1))
        return "record: it does not have its checksum";
    const program p = program_of((psd_vectors *)(uintptr_t)t, r);
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
