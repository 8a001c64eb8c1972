/* Rows that catch up: the steps that have passed a row by are made up for when it is touched or read, by the same kernel, with a
 * gradient of zeros and the scalars of that step. So the bits are those of a dense tensor; but for slots that are less than 2^-126 where
 * many steps were missed, which are 0.
 *
 * It costs a kernel for each step and row, but for steps that change nothing: those of which the spec says so, and those after one that
 * has left the row as it was.
 */
#include "portable.h"
#include "table.h"

#include <errno.h>
#include <stdlib.h>

/* A gap of more steps than RULES prepares them anew for each row. Of the memory for them a short gap touches little. */
enum { RULES = 4096, LOOK_EVERY = 16 };

/* Whether a gradient of zeros leaves rows as they are, under these scalars. is_fresh: all slots are as they begin. */
static int rests(const psd_table_spec *s, const double *scalars, int is_fresh)
{
    if (s->settles)
        return is_fresh && s->init == PSD_ZEROS; /* such a rule leaves zeros as they are */
    if (is_fresh && (s->decay_at < 0 || scalars[s->decay_at] == 0))
        return 1; /* its slots hold nothing that moves */
    if (!s->rests)
        return 0;
    for (int i = 0; i < PSD_SCALARS_MAX; i++)
        if (s->rest_without[i] && scalars[i] != 0)
            return 0;
    return 1;
}

static void append(const psd_table *t, psd_root *next, uint64_t from, const double *scalars)
{
    psd_log_entry *const entry = psd_logged(t, next->log_end++);
    *entry = (psd_log_entry){.from = from};
    memcpy(entry->scalars, scalars, sizeof entry->scalars);
    entry->check = psd_log_check(entry);
    if (next->log_end - next->log_first > PSD_LOG_MAX)
        next->log_first++;
    next->fresh_moves |= (uint64_t)!rests(&t->spec, scalars, 1);
}

/* Writes where the valid root names no entry, so nothing changes before the commit. */
void psd_log_push(const psd_table *t, psd_root *next, const psd_hyper *hyper)
{
    const psd_log_entry *const last = next->log_end > next->log_first ? psd_logged(t, next->log_end - 1) : NULL;
    const int is_new = !last || memcmp(last->scalars, hyper->scalars, sizeof last->scalars) != 0;
    if (is_new)
        append(t, next, next->step, hyper->scalars);
    if (t->spec.settles ? is_new : !rests(&t->spec, hyper->scalars, 0))
        next->still_from = next->step + 1;
}

void psd_log_replace(const psd_table *t, psd_root *next, const double *history, uint64_t entries, uint64_t scalars)
{
    next->log_first = next->log_end;
    next->still_from = next->fresh_moves = 0;
    for (uint64_t i = 0; i < entries; i++) {
        const double *const entry = history + i * (1 + scalars);
        double all[PSD_SCALARS_MAX] = {0};
        memcpy(all, entry + 1, scalars * sizeof *all);
        append(t, next, (uint64_t)entry[0], all);
        const uint64_t end = i + 1 < entries ? (uint64_t)entry[1 + scalars] : next->step + 1;
        if (!rests(&t->spec, all, 0))
            next->still_from = t->spec.settles ? (uint64_t)entry[0] + 1 : end;
    }
}

int psd_past_begin(psd_past *p, const psd_table *t)
{
    const size_t floats = t->spec.dim + t->spec.width;
    char *const memory = calloc(1, RULES * (sizeof(psd_row_rule) + sizeof(uint64_t)) + floats * sizeof(float));
    *p = (psd_past){.table = t, .step = t->root->step, .log_first = t->root->log_first, .log_end = t->root->log_end};
    if (!memory)
        return ENOMEM;
    p->rules = (psd_row_rule *)memory;
    p->steps = (uint64_t *)(p->rules + RULES);
    p->zeros = (float *)(p->steps + RULES);
    p->before = p->zeros + t->spec.dim;
    return 0;
}

void psd_past_end(psd_past *p)
{
    free(p->rules);
    p->rules = NULL;
}

/* The number of the entry that holds at a step; the first one, if that came later. */
static uint64_t entry_at(const psd_past *p, uint64_t step)
{
    uint64_t low = p->log_first, high = p->log_end; /* low: at or before, or the first; high: later */
    while (high - low > 1) {
        const uint64_t middle = low + (high - low) / 2;
        if (psd_logged(p->table, middle)->from <= step)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static const psd_row_rule *rule_of(psd_past *p, const psd_log_entry *entry, uint64_t step)
{
    const psd_table_spec *const s = &p->table->spec;
    psd_row_rule *const rule = &p->rules[step % RULES];
    if (p->steps[step % RULES] != step) {
        psd_hyper hyper = s->flags;
        memcpy(hyper.scalars, entry->scalars, sizeof hyper.scalars);
        psd_prepare_rows_f32(rule, s->rule, &hyper, step, 1, s->rowwise);
        p->steps[step % RULES] = step;
    }
    return rule;
}

static void make_step(psd_past *p, const psd_log_entry *entry, uint64_t step, float *row)
{
    const psd_table_spec *const s = &p->table->spec;
    psd_step_row_f32(rule_of(p, entry, step), row, row, p->zeros, (intptr_t)s->dim, s->slot_at);
}

/* Sets slots that are no normal numbers any more to 0: what has died out would never get there by rounding, and would take ten times as
 * long to compute with. */
static void flush(const psd_table_spec *s, float *row)
{
    for (uint64_t i = s->dim; i + 2 < s->width; i++)
        row[i] = fabsf(row[i]) < 0x1p-126f ? 0 : row[i];
}

/* The steps from `step` to `end`, of one entry. Ends early where a step has changed nothing and the next one computes with the same
 * numbers. */
static void make_steps(psd_past *p, const psd_log_entry *entry, uint64_t step, uint64_t end, float *row)
{
    const size_t bytes = p->table->spec.width * sizeof *row;
    for (; step <= end; step++) {
        const int looks = step % LOOK_EVERY == 0 && step < end;
        if (looks)
            memcpy(p->before, row, bytes);
        make_step(p, entry, step, row);
        if (looks && memcmp(p->before, row, bytes) == 0
            && memcmp(rule_of(p, entry, step)->constants, rule_of(p, entry, step + 1)->constants, sizeof p->rules->constants) == 0)
            return;
        if (looks)
            flush(&p->table->spec, row);
    }
}

/* So are those of a row that came from elsewhere as a value alone. */
static int has_begun(const psd_table_spec *s, const float *row)
{
    for (int slot = 0; slot < s->slots; slot++)
        for (uint64_t i = 0; s->slot_at[slot] >= 0 && i < (s->rowwise ? 1 : s->dim); i++)
            if (row[s->slot_at[slot] + i] != s->slot_start[slot])
                return 1;
    return 0;
}

void psd_catch_up(psd_past *p, float *row)
{
    const psd_table_spec *const s = &p->table->spec;
    uint64_t last;
    memcpy(&last, row + s->width - 2, sizeof last);
    if (p->log_first == p->log_end || last >= p->step)
        return;
    int is_fresh = !has_begun(s, row);
    if (s->settles) {
        make_step(p, psd_logged(p->table, p->log_end - 1), p->step, row);
        last = p->step;
    }
    for (uint64_t number = entry_at(p, last + 1); last < p->step; number++) {
        const psd_log_entry *const entry = psd_logged(p->table, number);
        uint64_t end = number + 1 < p->log_end ? psd_logged(p->table, number + 1)->from - 1 : p->step;
        end = end < p->step ? end : p->step;
        if (!rests(s, entry->scalars, is_fresh)) {
            make_steps(p, entry, last + 1, end, row);
            is_fresh = 0;
        }
        last = end;
    }
    memcpy(row + s->width - 2, &p->step, sizeof p->step);
}
