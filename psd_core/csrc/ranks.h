/* What is known of each rank of a job, for Python and for armed steps (steps.h): one place of memory, seen by both.
 *
 * A rank is armed while its connection's steps are taken in C. Python arms it under the shard's lock, by a new epoch; whoever is
 * about to change a fact that steps rely on revokes all of them first, or that one, and may then rely on it that no step is under
 * way, and that none begins. A step says that it is inside before it looks at the epoch; it leaves before it sends or sleeps.
 *
 * clock, last_seen, samples and the record are written by steps while the rank is armed and one is inside, else under the shard's
 * lock; awaited_s under the lock of the block that measures it. Others look at them at any time, so all of them are atomic.
 */
#ifndef PSD_RANKS_H
#define PSD_RANKS_H

#include <stddef.h>
#include <stdint.h>

#include "round_times.h"

enum { PSD_LINE = 128 }; /* bytes that two cores had better not both write to */

typedef struct {
    uint64_t accepted, duplicate, pulls, received, sent; /* as the shard's counters; differences since they were last taken */
    uint64_t took[PSD_SECONDS];
    double took_s;
} psd_step_counts;

typedef struct {
    uint64_t epoch; /* even: armed */
    uint32_t inside;
    uint64_t session, clock, floor; /* session and floor: when it was armed */
    double last_seen, samples, awaited_s;
    uint64_t *record; /* of the arena: clock, and above it 8 bits of state; set when it was armed */
    /* A step that was counted and then answered AGAIN: its name, and bits of the blocks that counted it. */
    uint64_t half_session, half_clock, half_blocks;
    int half_has_ended; /* it had come to its end, and had only to wait; then what it would have counted */
    uint64_t half_received;
    double half_weight;
    psd_step_counts counts;
    double told_s; /* of counts.took_s, which only grows */
    char apart[PSD_LINE];
} psd_rank;

typedef struct psd_ranks {
    size_t count;
    psd_rank *rank;
    char apart[PSD_LINE];
    uint32_t bell; /* rung when a round closes, or something is revoked */
    uint32_t sleepers;
} psd_ranks;

static inline void psd_add_count(uint64_t *count, uint64_t more)
{
    __atomic_fetch_add(count, more, __ATOMIC_RELAXED);
}

/* Numbers that others look at without the writer's lock. */
static inline void psd_put(double *at, double value)
{
    __atomic_store(at, &value, __ATOMIC_RELAXED);
}

static inline double psd_got(const double *at)
{
    double value;
    __atomic_load(at, &value, __ATOMIC_RELAXED);
    return value;
}

static inline void psd_add_to(double *at, double more) /* by its one writer */
{
    psd_put(at, *at + more);
}

/* Counts a push, and the pull that is its answer. */
static inline void psd_count_push(psd_rank *r, int is_counted, uint64_t received, double weight)
{
    psd_add_count(is_counted ? &r->counts.accepted : &r->counts.duplicate, 1);
    psd_add_count(&r->counts.pulls, 1);
    psd_add_count(&r->counts.received, received);
    if (is_counted)
        psd_add_to(&r->samples, weight);
}

void psd_ring(psd_ranks *);                             /* wakes who sleeps */
void psd_sleep(psd_ranks *, uint32_t bell, double until); /* until the bell has another number, or CLOCK_MONOTONIC has passed `until` */
double psd_now(void);

#endif
