/* Batches: stripe by stripe, all operations of a group on one stripe before the next, each stripe a step that a kill leaves whole.
 *
 * New values of a stripe are computed in the staging area. `state` = 2 * step + 1 says that they are all there; then they are copied
 * to where they belong, which may be done again; `state` = 2 * step + 2 says that the next step begins. What a group writes and
 * never reads is computed in place: to do that again changes nothing. A stripe's check goes to 0 before its elements change, and is stored
 * when they have. */
#include "portable.h"
#include "arena.h"
#include "vector_program.h"

void psd_vectors_plan(psd_vectors *t, uint64_t senders, uint64_t *sizes)
{
    const uint64_t unit = 4096;
    t->senders = senders;
    t->answer_bytes = (t->answers_max * PSD_ANSWER_MAX + unit - 1) / unit * unit;
    const uint64_t needed[PSD_V_REGIONS] = {
        [PSD_V_CONTROL] = 256 + 8 * (t->operands_max + PSD_CHUNK),
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
    t->staged = (uint64_t *)(control + 256);
    t->partial_checks = t->staged + t->operands_max;
}

enum { PSD_FETCHED = 8 /* operands whose next stripes are fetched ahead: 256 KiB */ };

/* -- one operation on one stripe */

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
    char *const out = operand->staging ? staging_of(p, operand) : now;
    const void *in[PSD_INPUTS_MAX];
    const uint32_t *const inputs = p->inputs + op->first_input;
    for (uint32_t i = 0; i < op->inputs; i++)
        in[i] = t->current[inputs[i]];
    if (p->is_trial && op->code == PSD_V_CUSTOM) {
        const int status = t->apply(t->context, (uint64_t)(op - p->ops), in, (char *)p->record + op->values + (w->first - op->start) * item, w->n);
        if (status != 0)
            return status;
    }
    if (!operand->staging && !p->is_trial) {
        if (t->snapshot.is_active)
            psd_vector_snapshot_save(t, operand->vector, w->stripe);
        psd_vector_store_check(psd_vector_checks_of(t, operand->vector) + w->stripe, 0);
    }
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
    t->touched[op->out] = 1;
    return 0;
}

/* -- one step: a stripe of a group */

static size_t bytes_of(const program *p, const psd_vector_operand *operand, const place *w)
{
    return (size_t)w->n * item_bytes[p->t->dtypes[operand->vector]];
}

/* Stores the checks of a step's new values: of those in their places there, and of those that are staged, which are still to be copied.
 * Returns whether there are any of these. */
static int check_written(const program *p, const psd_vector_group *g, const place *w)
{
    psd_vectors *const t = p->t;
    const uint64_t first = g->first_operand, end = first + min_of(g->operands, PSD_FETCHED);
    uint64_t written = 0, fetching = 0;
    int is_dirty = 0;
    for (uint64_t i = first; i < first + g->operands; i++)
        written += t->touched[i];
    for (uint64_t i = first; i < first + g->operands; i++) {
        const psd_vector_operand *const operand = p->operands + i;
        uint64_t check = 0;
        if (t->touched[i]) {
            const char *next[PSD_FETCHED]; /* its share of the next step's stripes */
            uint64_t count = 0;
            for (uint64_t k = first + fetching++; k < end && w->stripe + 1 < g->stripes; k += written)
                next[count++] = stripe_of(p, k, w->stripe + 1);
            check = psd_vector_check_and_fetch(t->current[i], bytes_of(p, operand, w), operand->vector, w->stripe, next, count);
        }
        if (operand->staging)
            t->staged[i] = check;
        else if (check) {
            PSD_BEFORE(t, "check");
            psd_vector_store_check(psd_vector_checks_of(t, operand->vector) + w->stripe, check);
        }
        is_dirty |= operand->staging && check;
    }
    return is_dirty;
}

/* Brings what is staged to where it belongs; may be repeated. */
static void copy_staged(const program *p, const psd_vector_group *g, const place *w)
{
    psd_vectors *const t = p->t;
    for (uint64_t i = g->first_operand; i < g->first_operand + g->operands; i++) {
        const psd_vector_operand *const operand = p->operands + i;
        if (!operand->staging || !t->staged[i])
            continue;
        if (t->snapshot.is_active)
            psd_vector_snapshot_save(t, operand->vector, w->stripe);
        uint64_t *const check = psd_vector_checks_of(t, operand->vector) + w->stripe;
        psd_vector_store_check(check, 0);
        PSD_BEFORE(t, "copy");
        memcpy(stripe_of(p, i, w->stripe), staging_of(p, operand), bytes_of(p, operand, w));
        PSD_BEFORE(t, "check");
        psd_vector_store_check(check, t->staged[i]);
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
            after[answer].words[PSD_SUM_CHECK] = psd_vector_sum_check(after + answer);
        }
}

/* Runs from a step on. `is_staged`: the step's new values are in the staging area already. */
static int run(program *p, uint64_t from, int is_staged)
{
    psd_vectors *const t = p->t;
    uint64_t step = 0, folds = 0;
    for (uint64_t i = 0; i < p->record->groups; i++) {
        const psd_vector_group *const g = p->groups + i;
        const int is_asked = has_answers(p, g);
        uint64_t stripe = 0;
        if (from > step) { /* skip what was done */
            stripe = min_of(from - step, g->stripes);
            step += stripe;
            folds += is_asked ? (stripe == g->stripes ? folds_in(stripe) : stripe / PSD_CHUNK) : 0;
        }
        for (; stripe < g->stripes; stripe++, step++) {
            const place w = place_of(g, stripe);
            const int ends_chunk = is_asked && (stripe % PSD_CHUNK == PSD_CHUNK - 1 || stripe == g->stripes - 1);
            int is_dirty = is_staged && step == from;
            if (!is_dirty) {
                for (uint64_t k = g->first_operand; k < g->first_operand + g->operands; k++) {
                    t->current[k] = stripe_of(p, k, stripe);
                    t->touched[k] = 0;
                }
                for (uint64_t k = g->first_op; k < g->first_op + g->ops; k++) {
                    const int status = run_op(p, p->ops + k, &w);
                    if (status != 0)
                        return status;
                }
                if (!p->is_trial) {
                    if (is_asked)
                        t->partial_checks[stripe % PSD_CHUNK] = psd_vector_partials_check(partials_of(p, stripe), p->record->answers);
                    is_dirty = check_written(p, g, &w) || ends_chunk; /* the sums before the chunk go with the next one: never back */
                }
                if (is_dirty) {
                    PSD_BEFORE(t, "staged");
                    psd_store_release(t->state, psd_sealed(2 * step + 1));
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
                psd_store_release(t->state, psd_sealed(2 * (step + 1)));
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
    for (uint64_t i = 0; i < p->record->answers && !p->is_trial; i++)
        sums[i].words[PSD_SUM_CHECK] = psd_vector_sum_check(sums + i);
}

/* -- batches */

void psd_vector_seal(psd_vector_record *r)
{
    r->head = head_bytes(r);
    r->check = psd_checksum(&r->head, r->head / 8 - 1);
}

void psd_vector_write(psd_vectors *t, uint64_t at, const void *data, uint64_t nbytes, uint64_t *checked, psd_content *content)
{
    enum { PIECE = 1 << 16 };
    for (uint64_t copied = 0; copied < nbytes; copied += min_of(PIECE, nbytes - copied)) {
        const uint64_t n = min_of(PIECE, nbytes - copied), end = at + copied + n, words = (end - *checked) / 8 * 8;
        const char *const next[] = {t->record + end, (const char *)data + copied + n};
        memcpy(t->record + at + copied, (const char *)data + copied, n);
        psd_vector_add_and_fetch(content, t->record + *checked, words, next, nbytes - copied > 2 * PIECE ? 2 : 0);
        *checked += words;
    }
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
    record->commit = psd_unsealed(*t->commit) + 1;
    if (!record->content)
        record->content = psd_vector_record_check(record);
    psd_vector_seal(record);
    PSD_BEFORE(t, "state");
    psd_store_release(t->state, 0);
    PSD_BEFORE(t, "commit");
    psd_store_release(t->commit, psd_sealed(record->commit));
}

void psd_vectors_finish(psd_vectors *t)
{
    program p = program_of(t, (const psd_vector_record *)t->record);
    const uint64_t state = psd_unsealed(*t->state);
    run(&p, state / 2, (int)(state % 2));
}

uint64_t psd_vectors_answer(psd_vectors *t, const psd_vector_record *record, char *out)
{
    const program p = program_of(t, record);
    uint64_t folds = 0, bytes = 0;
    for (uint64_t i = 0; i < record->groups; i++)
        folds += has_answers(&p, p.groups + i) ? folds_in(p.groups[i].stripes) : 0;
    psd_vector_session *const s = psd_vector_session_at(t, record->slot);
    psd_vector_entry *const entry = s->entries + record->sequence % PSD_ENTRIES;
    if (record->session) {
        out = psd_vector_answer_at(t, record->slot, record->sequence);
        PSD_BEFORE(t, "entry");
        psd_vector_store_check(&entry->check, 0);
    }
    const psd_vector_sum *const sums = sums_of(&p, folds);
    for (uint64_t answer = 0; answer < record->answers;) /* in the order of the operations, whatever their groups */
        for (uint64_t i = 0; i < record->ops; i++)
            for (; p.ops[i].answers && answer >= p.ops[i].first_answer && answer < p.ops[i].first_answer + p.ops[i].answers; answer++)
                bytes += psd_vector_pack(p.ops + i, sums + answer, out + bytes);
    if (record->session) {
        entry->sequence = record->sequence;
        entry->bytes = bytes;
        PSD_BEFORE(t, "entry");
        psd_vector_store_check(&entry->check, psd_vector_entry_check(t, record->slot, record->session, entry));
        s->session = record->session;
        PSD_BEFORE(t, "session");
        psd_vector_store_check(&s->check, psd_vector_session_check(record->session));
    }
    return bytes;
}

void psd_vectors_applied(psd_vectors *t)
{
    PSD_BEFORE(t, "applied");
    psd_store_release(t->applied, *t->commit);
    PSD_BEFORE(t, "done");
}
