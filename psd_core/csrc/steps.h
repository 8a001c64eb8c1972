/* Armed steps: small push_pulls that are taken without Python. step_frames.h has their messages, and what AGAIN means.
 *
 * Here is what a step does to blocks (block.h) and to what is known of ranks (ranks.h); step_loop.c has the socket. A step is
 * begin, count for each block, end, then `reached` until it is true, pin: pure functions of a whole message, which say that it goes
 * on, or AGAIN. Who takes part, what is an error, when a cut is: Python's. It arms a rank while all is as a step expects, and
 * revokes before anything changes; a step relies on nothing else, and translates nothing. Needs _GNU_SOURCE, which Python.h defines.
 */
#ifndef PSD_STEPS_H
#define PSD_STEPS_H

#include "block.h"
#include "step_frames.h"
#include "step_tables.h"

enum { PSD_STEP_BLOCKS_MAX = 64 }; /* the tables' block, which is none of `place`, is one of them */

typedef struct { /* one block of a job, as it lies in messages */
    psd_block *block;
    psd_dtype gradient_dtype;
    size_t gradient_bytes, parameter_bytes; /* without what fills them up to a multiple of 8 */
    size_t first_scalar;
    size_t present_at; /* of its mask, behind the first one */
} psd_step_place;

typedef struct { /* what the workers of an open round, or of the one before, have said of its scalars */
    uint64_t round;
    int is_there, is_mixed; /* mixed: they differ, and a step decides nothing */
    double *scalars;
    uint64_t *spoke, *counted; /* masks of ranks that did so by steps */
    uint64_t *since;           /* by rank, of those that spoke */
} psd_step_voice;

typedef struct { /* a job's part on this shard */
    size_t blocks, scalars, mask_words;
    psd_step_place place[PSD_STEP_BLOCKS_MAX];
    psd_tables *tables; /* NULL: the job has none */
    double *low, *high; /* of each scalar */
    int has_rounds, has_bound;
    uint64_t bound; /* steps that a worker may be ahead of the slowest one */
    psd_ranks *ranks;
    uint64_t *waited;   /* mask; set while nobody is armed */
    uint64_t stop_at;   /* see psd_steps_stop; while somebody is armed it is only raised */
    uint32_t has_gates; /* callers wait until the slowest worker makes a step */
    size_t head_bytes, present_at, rows_at, gradient_bytes, parameter_bytes; /* as in StepOffer; ..._at: in the head */
    pthread_mutex_t speaking;
    int can_speak;
    psd_step_voice voice[2];
} psd_steps;

typedef struct { /* one step under way */
    psd_steps *steps;
    int64_t rank;
    const psd_step_head *head;
    const uint64_t *versions;
    const double *scalars;
    const uint8_t *present;
    uint64_t counted_blocks, received; /* bits of the blocks; bytes */
    int has_ended;
    int closes;     /* it has closed a round */
    int hands_back; /* somebody waits for that, or for its clock, by a ticket */
    int64_t page[PSD_STEP_BLOCKS_MAX];
    uint64_t use[PSD_STEP_BLOCKS_MAX];
    uint8_t *mask; /* room for the longest block's segments */
    psd_step_rows *rows;     /* one for each table */
    uint64_t tables_version; /* that the rows that were read have at least */
} psd_step;

/* The caller has set blocks, places, ranks, bounds, `scalars` and flags. 0, or -1: no memory. */
int psd_steps_init(psd_steps *);
void psd_steps_free(psd_steps *);
/* A worker, which has been there since that clock, states these scalars for a round by a step, or (rank -1) otherwise. 0: others
 * differ. */
int psd_steps_hear(psd_steps *, uint64_t round, int64_t rank, uint64_t since, const double *scalars, int is_alike);

/* Whether a push of this clock is made the long way, since a cut may be due by then. With rounds: from the clock `stop_at` on.
 * Without: by who comes to that clock when all others have. */
int psd_steps_stop(const psd_steps *, int64_t rank, uint64_t clock);

/* Copies what ranks have said of a round by steps, the even one or the odd one, to arrays that are as long. 0: none has spoken. */
int psd_steps_voice(psd_steps *, int odd, psd_step_voice *copy);

/* 0, or the reason for AGAIN; then the step has ended, and has left. `begin` enters. */
int psd_step_begin(psd_step *);
int psd_step_count(psd_step *, size_t i, const void *gradient);
int psd_step_count_rows(psd_step *); /* of all tables, after all blocks; only in a job that has some */
void psd_step_end(psd_step *);         /* all blocks have come; leaves */
int psd_step_reached(const psd_step *); /* whether the rounds have closed */
int psd_step_pin(psd_step *, double began); /* enters, pins the pages to answer with, reads rows, counts the step, leaves */
void psd_step_unpin(psd_step *);
void psd_step_abandon(psd_step *); /* nobody waits for the answer any more: the push has been made all the same */
/* Ends a step by AGAIN, when it has not pinned. */
int psd_step_again(psd_step *, int reason, int is_inside);

static inline size_t psd_eights(size_t nbytes)
{
    return (nbytes + 7) / 8 * 8;
}

/* The blocks of a step, the tables' block among them. */
static inline size_t psd_step_blocks(const psd_steps *s)
{
    return s->blocks + (s->tables != NULL);
}

#endif
