/* A shard's part of all tables as armed steps push to it and read it: psd.state.tables.block.TablesBlock in the one case that
 * steps take. One push is one transaction in each partition.
 *
 * The open round, with the sums of its rows, is here, whoever pushes. Python makes room, creates, evicts and expires rows, and changes
 * the version and the clocks under the same lock. A step makes an update only if that needs none of this: all rows are there, and all
 * space is taken. A round that it completes otherwise is due: Python applies it. What steps have done Python reads from the
 * partitions' notes. Needs _GNU_SOURCE.
 */
#ifndef PSD_STEP_TABLES_H
#define PSD_STEP_TABLES_H

#include "block.h"
#include "table.h"

typedef struct {
    psd_table *table; /* gone once the tables are closed */
    uint64_t dim;     /* numbers of a row */
    psd_sums *sums;   /* of the open round */
    size_t scalars;             /* of its rule */
    size_t at[PSD_SCALARS_MAX]; /* where these lie among all of a step */
    int rate;                   /* the one that is divided by 1 + age; -1: none */
    uint64_t clock;             /* of the last update; read without the lock */
} psd_partition;

typedef struct { /* what a step has for one table */
    int is_present; /* there is a gradient, perhaps of no row here */
    const uint64_t *pushed, *pulled; /* ids */
    size_t pushes, pulls;
    const float *gradients;
    float *rows; /* where those that are pulled are to be written */
} psd_step_rows;

struct psd_tables_calls;

typedef struct psd_tables {
    /* What never changes. */
    size_t count, workers, mask_words, scalars;
    int has_rounds, is_mean;
    int64_t quorum;
    uint64_t shards, shard, ids_max;
    psd_partition *partition;
    pthread_mutex_t *lock;
    uint64_t *notes; /* room for those of one partition */
    psd_ranks *ranks; /* who sleeps until a round closes; NULL: nobody */
    int measures_ranks; /* as in psd_block */
    const struct psd_tables_calls *calls; /* of the library that has made this, for another one */

    uint64_t unit; /* of the clocks, in one update; set while nobody is armed, or to what it is */

    /* Under the lock. `version` is read without it, too. */
    uint64_t version;
    int has_tickets; /* callers wait for a version by tickets */
    int is_closed;   /* the partitions may be gone */
    uint64_t reads;  /* under way; they hold no lock */
    uint64_t updates; /* by steps */
    psd_round_times times;
    uint64_t ages[PSD_AGES], age_total;

    /* The open round, under the lock. */
    uint64_t *contributors, *sessions; /* mask, and by rank */
    int has_voice, has_sum; /* has_sum: somebody has brought a gradient, perhaps of no row */
    uint64_t since;         /* of the worker whose scalars hold, and its rank */
    int64_t rank;
    double *held, total_weight;
    int is_lent; /* Python has gradients that are not in the sums: steps do not count */
    uint64_t is_due; /* it is complete, and Python is to apply it: nor do they now. Read without the lock, too */
    int has_steps; /* steps have been offered: nothing is lent any more */
} psd_tables;

/* The caller has set what never changes, and zeros elsewhere. 0, or -1: no memory. */
int psd_tables_init(psd_tables *);
void psd_tables_free(psd_tables *);

/* Let the next round be open, in which nobody has a gradient. */
void psd_tables_open(psd_tables *);
/* Note that the open round has a worker's gradient, whose values are in the sums, lent, or none. */
void psd_tables_note(psd_tables *, const psd_part_of_push *);

/* Counts a push, whose values are `rows`, one for each table. PSD_COUNTED, PSD_DUPLICATE, or why it is none for a step: then
 * nothing has changed. Under the lock. `scalars` of the push: of all groups. waited: mask of those that the round waits for. */
psd_outcome psd_tables_count(psd_tables *, const psd_part_of_push *, const psd_step_rows *rows, const uint64_t *waited);

/* Reads the rows that are pulled, as a use, and the version before. 0; or -1: it is closed, an id is of another shard, no memory. */
int psd_tables_read(psd_tables *, const psd_step_rows *rows, uint64_t *version);

/* What another library calls. */
typedef struct psd_tables_calls {
    psd_outcome (*count)(psd_tables *, const psd_part_of_push *, const psd_step_rows *, const uint64_t *waited);
    int (*read)(psd_tables *, const psd_step_rows *, uint64_t *version);
} psd_tables_calls;

#endif
