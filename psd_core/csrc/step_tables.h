/* A shard's part of all tables as armed steps push to it and read it: psd.state.tables.block.TablesBlock in the one case that
 * steps take. One push is one transaction in each partition.
 *
 * Python has the rounds of several workers, makes room, creates, evicts and expires rows, and changes the version and the clocks
 * under the same lock. A step takes only what needs none of that: all rows that are pushed are there, all space is taken, and no
 * other gradient is in the open round. What it has done Python reads from the partitions' notes. Needs _GNU_SOURCE.
 */
#ifndef PSD_STEP_TABLES_H
#define PSD_STEP_TABLES_H

#include "block.h"
#include "table.h"

typedef struct {
    psd_table *table;
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

typedef struct {
    /* What never changes. */
    size_t count, workers;
    int has_rounds;
    uint64_t shards, shard, ids_max;
    psd_partition *partition;
    pthread_mutex_t *lock;
    uint64_t *notes; /* room for those of one partition */

    uint64_t unit; /* of the clocks, in one update; set while nobody is armed, or to what it is */

    /* Under the lock. `version` is read without it, too. */
    uint64_t version;
    int is_open;     /* the open round has a gradient: steps wait for Python to close it */
    int has_tickets; /* callers wait for a version by tickets */
    int is_closed;   /* the partitions may be gone */
    uint64_t reads;  /* under way; they hold no lock */
    uint64_t updates; /* by steps */
    psd_round_times times; /* of the rounds that steps have made, each of one gradient */
    uint64_t ages[PSD_AGES], age_total;
} psd_tables;

/* Counts a push, whose values are `rows`, one for each table. PSD_COUNTED, PSD_DUPLICATE, or why it is none for a step: then
 * nothing has changed. Under the lock. `scalars` of the push: of all groups. */
psd_outcome psd_tables_count(psd_tables *, const psd_part_of_push *, const psd_step_rows *rows);

/* Reads the rows that are pulled, as a use, and the version before. 0; or -1: it is closed, an id is of another shard, no memory. */
int psd_tables_read(psd_tables *, const psd_step_rows *rows, uint64_t *version);

#endif
