/* The store of one partition of a sparse table: rows by 64-bit id in a shared mapping of a file.
 *
 * docs/design/tables.md explains places, the record and the index; this file has the format. It owns no file and no memory of the
 * mapping: table.py makes the file longer and gives memory back. One thread at a time writes; any number read meanwhile.
 * Needs _GNU_SOURCE for its lock: portable.h defines it, and Python.h.
 *
 * The file, native byte order, format 6, regions from multiples of 64 KiB:
 *   superblock  4096 B: see _store_format.py; its facts are in _table_format.py
 *   control     u64 commit, from the next cache line u64 applied, then, from multiples of 64, the roots: root commit % 2 is valid
 *   record      psd_record, flips, backs (u32 each); the root has its checksum
 *   index 0, 1  u64 entries: tag << 32 | place + 1; GRAVE in the low half: removed; 0: never used
 *   sightings   u64: 56 bits of the hash of an id that is not admitted, 8 bits: how often it was seen; in buckets, as the index
 *   heads       psd_head by place
 *   rows        value and slots by place, without gaps; a value of 16 bits a number ends with a float; the head has the checksum
 *   spares      u32 places, a stack
 *   removals    u64 ids of rows that went, a ring: what went as the n-th lies at n % its length; the root has their sum
 *   log         psd_log_entry, a ring likewise: the scalars of past steps, where rows catch up
 */
#ifndef PSD_TABLE_H
#define PSD_TABLE_H

#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#include "content.h"
#include "kernels.h"
#include "mix.h"
#include "on_store.h"

enum { PSD_CONTROL, PSD_RECORD, PSD_INDEX, PSD_OTHER_INDEX, PSD_SIGHTINGS, PSD_HEADS, PSD_ROWS, PSD_SPARES, PSD_REMOVALS, PSD_LOG, PSD_REGIONS };
enum { PSD_BUCKET = 8, PSD_SUPERBLOCK_BYTES = 4096, PSD_REGION_ALIGN = 65536, PSD_CHUNK_BUCKETS = 1024, PSD_REMOVED_MAX = 2048,
       PSD_LOG_MAX = 16384 /* entries that are kept; the ring has room for twice as many */, PSD_OWN_SLOTS_MAX = 64 };
enum { PSD_USES = 256 }; /* after so many without need memory is given back */
#define PSD_PLACES_MAX (UINT32_MAX - 2u)
#define PSD_GRAVE UINT32_MAX
#define PSD_NOWHERE UINT64_MAX

static inline int psd_is_live(uint64_t entry) { return (uint32_t)entry != 0 && (uint32_t)entry != PSD_GRAVE; }

typedef struct {
    uint64_t id;
    uint64_t used;    /* clock of the last use */
    uint64_t changed; /* version of the table that this row came with */
    uint64_t check;   /* of id, changed and the row; not of `used`, which readers store to */
} psd_head;

/* All that changes with a commit, but for what the record says. The caller's notes follow it. */
typedef struct {
    uint64_t check, commit;
    uint64_t step;         /* updates of the table */
    uint64_t version;      /* commits that wrote rows */
    uint64_t clock;        /* of the last push; never falls */
    uint64_t rows;         /* in the index */
    uint64_t places, spares; /* places ever taken; those among them on the stack */
    uint64_t current;      /* 0 or 1: which index */
    uint64_t buckets, next_buckets; /* of the current one; of the next, 0: there is none */
    uint64_t moved;        /* tags below it are in the next index */
    uint64_t filled, next_filled;   /* entries in each that are not 0; never too few */
    uint64_t created, evicted, expired, removed, refused, unadmitted;
    uint64_t log_first, log_end; /* entries of the log, as numbers that only grow */
    uint64_t still_from;   /* a gradient of zeros changes no row at this step or later */
    uint64_t fresh_moves;  /* 1: it did change a row that nobody has trained */
    uint64_t salt; /* of tags: nobody outside knows it, so nobody can choose ids that collide */
    uint64_t record; /* checksum of this commit's record; 0: it has none */
    uint64_t gone; /* the sum of psd_removal_check over the removals that are known */
} psd_root;

/* Scalars that held from a step on, until the next entry's. */
typedef struct {
    uint64_t check; /* of the rest */
    uint64_t from;
    double scalars[PSD_SCALARS_MAX];
} psd_log_entry;

typedef struct {
    uint64_t at;    /* byte in the file; 0: the index, wherever the entry's place in it is */
    uint64_t value;
} psd_flip;

typedef struct {
    uint64_t flips, backs, first_back; /* backs go onto the stack from this place of it */
} psd_record;

typedef enum { PSD_ZEROS, PSD_CONSTANT, PSD_UNIFORM, PSD_NORMAL, PSD_TRUNCATED_NORMAL } psd_init;

/* What never changes. Offsets and widths of rows are in floats, as the caller has them; the value is at 0. Where rows catch up the last two numbers of a
 * row are the bits of a u64: the step that it is at. */
typedef struct {
    uint64_t dim, width, rows_max, push_max, notes, seed; /* seed: of this table, its name included */
    int rule /* -1: the user's own */, rowwise, init;
    uint64_t admit_after; /* gradients of an id that are counted and dropped before it gets a row, plus 1 */
    uint64_t admit_below; /* of 2^32: which share of sightings counts */
    int evicts; /* at rows_max; else what is new is refused */
    double a, b; /* of the init: value; low, high; mean, std */
    psd_hyper flags; /* its scalars are not used */
    int slots;
    int64_t slot_at[PSD_OWN_SLOTS_MAX]; /* -1: not kept */
    float slot_start[PSD_OWN_SLOTS_MAX];
    int is_half;     /* values lie in the file as bfloat16 */
    uint64_t stored; /* width of a row in the file, in floats; set by psd_table_plan */
    int catches_up;
    int settles; /* a gradient of zeros does nothing more the second time */
    int rests;   /* it does nothing at all where all scalars of rest_without are 0 */
    uint8_t rest_without[PSD_SCALARS_MAX];
    int64_t decay_at; /* which scalar is the weight decay; -1: none is */
} psd_table_spec;

typedef struct {
    uint64_t at, size, backed; /* bytes; writing to the first `backed` of them cannot fail */
} psd_region;

/* A part of a push: ids, and a row of numbers for each. */
typedef struct {
    const uint64_t *ids;
    const float *values;
    intptr_t n;
} psd_part;

/* The largest of the last uses of memory that is kept from one to the next. */
typedef struct {
    intptr_t largest, uses;
} psd_use;
/* Notes a use of so many entries; whether memory for `capacity` of them is to be given back, which recent uses did not need. */
static inline int psd_is_oversized(psd_use *u, intptr_t count, intptr_t capacity)
{
    u->largest = count > u->largest ? count : u->largest;
    if (++u->uses < PSD_USES)
        return 0;
    const int is_oversized = capacity > 4 * u->largest + 4096;
    *u = (psd_use){0, 0};
    return is_oversized;
}

/* Scratch memory of a push, kept from one to the next: the distinct ids in the order in which they came first. */
typedef struct {
    intptr_t capacity, sums_capacity, slots_capacity, count, sightings_capacity, sightings_count;
    uint64_t *ids;
    uint64_t **words; /* of the index, NULL: not there */
    const float **values;
    int64_t *sum_of; /* which sum is the id's, -1: it came once */
    uint32_t *slots; /* hash table: position + 1 */
    float *sums;
    psd_use use;
    psd_flip *sightings;
    uint8_t *taken; /* of each bucket of sightings, the words that ids of this push have taken; zeros between pushes */
} psd_scratch;

/* A copy of the table as it was at one version, while that changes: rows that are about to be replaced or removed, and were not copied
 * yet, are saved. */
typedef struct {
    int is_active, is_failed, is_full;
    uint64_t version; /* rows that came later are not in it */
    uint64_t since, since_clock; /* unless it is full, only rows that came after this version, or were used after this clock, are */
    uint64_t cursor;  /* tags below it have been copied */
    uint64_t saved, capacity;
    psd_head *heads;
    float *rows;
} psd_snapshot;

/* A row that was not used for long. Rows of one clock go in the order of their ids' hash, which has no salt. */
typedef struct {
    uint64_t used, order, id;
} psd_old;

/* The rows not used for longest, a heap with the oldest first. It may name some that are gone, or were used since. */
typedef struct {
    psd_old *rows;
    uint64_t count, capacity;
    uint64_t bound; /* no row outside of the heap was used before this clock */
} psd_oldest;

struct psd_table_calls;

typedef struct psd_table {
    psd_table_spec spec;
    const struct psd_table_calls *calls; /* of the library that has made the partition, for another one */
    pthread_mutex_t *writing;            /* the caller's: whoever changes anything has it */
    psd_region region[PSD_REGIONS];
    uint64_t size;
    char *base;
    uint64_t *commit, *applied;
    psd_root *root; /* the valid one */
    uint64_t root_bytes;
    pthread_rwlock_t lock; /* readers against changes of the index */
    psd_scratch scratch;
    psd_snapshot snapshot;
    psd_oldest oldest;
    uint64_t reads, hits; /* of rows, since the partition was opened */
    void (*on_store)(void *, const char *); /* for tests: called before each store of the protocol */
    void *context;
    char problem[160]; /* of opening */
} psd_table;

static inline psd_head *psd_heads(const psd_table *t) { return (psd_head *)(t->base + t->region[PSD_HEADS].at); }
static inline uint32_t *psd_spares(const psd_table *t) { return (uint32_t *)(t->base + t->region[PSD_SPARES].at); }
static inline uint64_t *psd_notes(const psd_table *t) { return (uint64_t *)(t->root + 1); }
static inline float *psd_row(const psd_table *t, uint64_t place)
{
    return (float *)(t->base + t->region[PSD_ROWS].at) + place * t->spec.stored;
}
static inline uint64_t *psd_entries(const psd_table *t, uint64_t which)
{
    return (uint64_t *)(t->base + t->region[PSD_INDEX + which].at);
}

/* table_initial.c: initial values, pure functions. */
void psd_mix_all(const uint64_t *in, uint64_t *out, intptr_t n);
void psd_initial_value(const psd_table_spec *, uint64_t id, float *out);
void psd_initial_row(const psd_table_spec *, uint64_t id, float *out);

/* table_rows.c: rows between the file and the caller's numbers. `floats`: dim or width. */
void psd_widen_row(const psd_table *, const float *row, float *out, uint64_t floats);
static inline void psd_load_row(const psd_table *t, const float *row, float *out, uint64_t floats)
{
    if (t->spec.is_half)
        psd_widen_row(t, row, out, floats);
    else
        memcpy(out, row, floats * sizeof *row);
}
void psd_store_row(const psd_table *, const float *in, float *row, uint64_t id, uint64_t step);

/* table.c: life of a partition, and its commits. */
int psd_table_plan(psd_table *); /* sets regions and size from the spec; 0 if there are too many places */
int psd_table_make_lock(psd_table *); /* 0 or an errno */
void psd_table_drop_lock(psd_table *);
void psd_table_format(psd_table *, uint64_t salt); /* makes a new, empty partition of a file of zeros */
/* Takes over what a process has left, and looks at all that it had committed: 0, ENOMEM, or -1: `problem` says what is wrong. */
int psd_table_adopt(psd_table *);
psd_root *psd_table_next_root(psd_table *);   /* a copy of the valid root, to change and commit */
psd_record *psd_table_record(psd_table *);
void psd_table_record_end(psd_table *, psd_root *next); /* the record is written, and belongs to this commit */
void psd_table_commit(psd_table *, psd_root *);
void psd_table_commit_push(psd_table *); /* of what psd_table_push has made ready */
/* The region that has too few bytes that are backed for a push of n ids that brings entries of the log, or -1; `bytes` is what it needs. */
int psd_table_lack(const psd_table *, uint64_t n, uint64_t entries, uint64_t *bytes);

/* table_check.c: checksums of what was committed. */
void psd_seal_row(const psd_table *, uint64_t place); /* of a row and its head that were written to a spare place */
uint64_t psd_log_check(const psd_log_entry *);
int psd_table_is_whole(psd_table *); /* as psd_table_adopt */
int psd_table_refuse(psd_table *, const char *problem, ...) __attribute__((format(printf, 2, 3))); /* notes it; returns -1 */

/* table_index.c */
static inline uint32_t psd_tag(const psd_table *t, uint64_t id) { return (uint32_t)(psd_mix(id ^ t->root->salt) >> 32); }
static inline uint64_t psd_home(uint64_t tag, uint64_t buckets) { return tag * buckets >> 32; }
static inline int psd_is_moved(const psd_table *t, uint64_t tag) { return t->root->next_buckets && tag < t->root->moved; }
static inline uint64_t *psd_bucket(const psd_table *t, int next, uint64_t bucket)
{
    return psd_entries(t, t->root->current ^ (uint64_t)next) + bucket * PSD_BUCKET;
}
static inline uint64_t *psd_index_home(const psd_table *t, uint32_t tag)
{
    const int next = psd_is_moved(t, tag);
    return psd_bucket(t, next, psd_home(tag, next ? t->root->next_buckets : t->root->buckets));
}
/* The entry of a bucket that is probably a tag's, or NULL. Looks at all eight, without a branch on each. */
static inline uint64_t *psd_index_probable(uint64_t *bucket, uint32_t tag)
{
    unsigned found = 0;
    for (int i = 0; i < PSD_BUCKET; i++)
        found |= (unsigned)(bucket[i] >> 32 == tag && (uint32_t)(bucket[i] + 1) > 1) << i;
    return found ? &bucket[__builtin_ctz(found)] : NULL;
}
/* Asks for the cache lines of a range. */
static inline __attribute__((always_inline)) void psd_prefetch_range(const void *start, uint64_t bytes, int to_write)
{
    for (uintptr_t at = (uintptr_t)start & ~(uintptr_t)63; at < (uintptr_t)start + bytes; at += 64)
        if (to_write)
            __builtin_prefetch((const void *)at, 1);
        else
            __builtin_prefetch((const void *)at);
}
uint64_t *psd_index_find(const psd_table *, uint64_t id, uint32_t tag);
void psd_index_place(const psd_table *, uint64_t entry);
uint64_t psd_index_grave(const uint64_t *entry); /* what to store to remove an entry */
int psd_index_must_move(const psd_table *, uint64_t n);
void psd_index_move(psd_table *, uint64_t n); /* a step of growth, so that n more entries will fit in the end */
void psd_index_clean(psd_table *);
/* Up to `max` entries' words from a tag on, whole buckets; returns the tag to go on from, 2^32 at the end. */
uint64_t psd_index_scan(const psd_table *, uint64_t tag, uint64_t **words, uint64_t max, uint64_t *count);

/* table_read.c */
/* Copies rows in the order of tags, from a tag on; returns the tag to go on from, 2^32 at the end. */
uint64_t psd_table_walk(psd_table *, uint64_t tag, psd_head *heads, float *rows, uint64_t max, uint64_t *count);
int psd_table_read(psd_table *, const uint64_t *ids, intptr_t n, float *out, uint8_t *found, int whole, int64_t clock); /* 0, or ENOMEM */

/* table_own_rule.c: rows wait in a batch, which is handed over when it is full, and then written to their places. */
typedef struct {
    int (*apply)(void *context, intptr_t count); /* changes the pieces of the first rows; 0, or what the push returns */
    void *context;
    intptr_t capacity, count; /* rows in the batch */
    float *pieces;    /* values of all rows, then one slot of all rows, and so on */
    float *gradients; /* times `scale` */
    uint64_t *ids, *places;
    double scale;
    uint64_t step; /* of this push */
} psd_own_rule;
int psd_own_rule_add(psd_table *, psd_own_rule *, uint64_t id, const float *old, const float *gradient, uint64_t place, float *row);
int psd_own_rule_apply(psd_table *, psd_own_rule *, float *row); /* `row`, here and above: room for one */

/* table_push.c */
typedef struct {
    psd_hyper hyper;
    psd_own_rule *own; /* where the rule is the user's own */
    double scale; /* of the sums */
    uint64_t clock;
    int distinct; /* ids are */
    int whole;    /* what comes are whole rows, to be stored as they are; no step. Of repeated ids the last counts */
    int64_t step; /* with `whole`: what the table's is from now on; -1: as it is */
    const uint64_t *clocks; /* with `whole`: one for each row that comes, which do not move the table's; NULL: `clock` for all */
    const uint64_t *notes; /* all, or NULL: as they are */
    const double *history; /* with `whole`: of each entry of the log the step and the scalars; NULL: the log is as it is */
    uint64_t entries, scalars; /* of the history: how many, and of how many scalars */
    int is_of_known; /* make no row: if one is not there, PSD_ABSENT */
} psd_push;
enum { PSD_ABSENT = -2 };
/* Does all of a push but its commit, for psd_table_commit_push, before which nothing else may be committed. 0, ENOMEM, or what the
 * user's own rule returned: then there is nothing to commit. Several parts are one push, as if they followed each other
 * in one array; one alone where `distinct`, `whole` or `clocks`. */
int psd_table_push(psd_table *, const psd_push *, const psd_part *, int parts);

/* table_sums.c */
typedef struct {
    intptr_t count, capacity;
    uint64_t mask, *ids;
    float *values;
    uint32_t *slots; /* hash table: position + 1 */
    int is_touched; /* something was added, perhaps of no row */
    psd_use use;
    psd_scratch scratch;
} psd_sums;
/* Makes ready what psd_sums_add is to add, in which gradients of one id are added to each other: 0, or ENOMEM. No sum changes. */
int psd_sums_prepare(psd_sums *, const uint64_t *ids, const float *grads, intptr_t n, intptr_t dim);
/* Adds weight * gradient to the sum of each id. What was made ready is where it was. */
void psd_sums_add(psd_sums *, intptr_t dim, double weight);
void psd_sums_clear(psd_sums *); /* keeps the memory, unless it has long not been needed */
void psd_sums_free(psd_sums *);

/* What another library calls. */
typedef struct psd_table_calls {
    int (*lack)(const psd_table *, uint64_t n, uint64_t entries, uint64_t *bytes);
    int (*must_move)(const psd_table *, uint64_t n);
    int (*push)(psd_table *, const psd_push *, const psd_part *, int parts);
    void (*commit_push)(psd_table *);
    int (*read)(psd_table *, const uint64_t *ids, intptr_t n, float *out, uint8_t *found, int whole, int64_t clock);
    int (*prepare_sums)(psd_sums *, const uint64_t *ids, const float *grads, intptr_t n, intptr_t dim);
    void (*add_sums)(psd_sums *, intptr_t dim, double weight);
    void (*clear_sums)(psd_sums *);
} psd_table_calls;

/* table_catch_up.c: what a table of dense rows would have made of a row since it was touched. */
typedef struct {
    const psd_table *table;
    uint64_t step, log_first, log_end; /* up to which rows are brought */
    uint64_t *steps;  /* of these rules, 0: none yet */
    psd_row_rule *rules;
    float *zeros, *before;
} psd_past;
static inline psd_log_entry *psd_logged(const psd_table *t, uint64_t number)
{
    return (psd_log_entry *)(t->base + t->region[PSD_LOG].at) + number % (2 * PSD_LOG_MAX);
}
/* Whether steps have passed a row of the file by that would have changed it. Needs the lock, or to be the writer. */
static inline int psd_is_behind(const psd_table *t, const float *row)
{
    uint64_t last;
    if (!t->spec.catches_up || t->root->still_from <= 1)
        return 0;
    memcpy(&last, row + t->spec.stored - 2, sizeof last);
    return last < t->root->step && last + 1 < t->root->still_from;
}
void psd_log_push(const psd_table *, psd_root *next, const psd_hyper *); /* notes the scalars of the step next->step */
void psd_log_replace(const psd_table *, psd_root *next, const double *history, uint64_t entries, uint64_t scalars);
int psd_past_begin(psd_past *, const psd_table *); /* 0, or ENOMEM. Needs the lock, or to be the writer; the other functions do not */
void psd_past_end(psd_past *);
void psd_catch_up(psd_past *, float *row);
/* Whether steps may have passed by a row that nobody has trained. */
static inline int psd_is_fresh_behind(const psd_table *t) { return t->spec.catches_up && t->root->fresh_moves; }

/* table_admission.c: marks the ids that are not there, and are not to have a row yet, as PSD_PASSED_OVER; notes what to store about
 * their sightings. Returns how many it has marked, or -1 without memory. */
#define PSD_PASSED_OVER ((uint64_t *)1)
int64_t psd_table_admit(psd_table *);

/* table_scratch.c: the distinct ids of a push and the sums of their gradients. The hash tables in ordinary memory have a seed of the
 * process's own, on which no result depends. */
extern uint64_t psd_slots_seed;
static inline uint64_t psd_slot(uint64_t id, uint64_t mask) { return psd_mix(id ^ psd_slots_seed) & mask; }
int psd_combine(psd_scratch *, const psd_part *, int parts, intptr_t width, int distinct, int last);
void psd_scratch_free(psd_scratch *);

/* table_snapshot.c. One at a time; `next` copies rows that belong to it, in no order, and returns 0 when there are no more. */
void psd_snapshot_begin(psd_table *, int is_full, uint64_t since, uint64_t since_clock);
int psd_snapshot_next(psd_table *, psd_head *heads, float *rows, uint64_t max, uint64_t *count);
void psd_snapshot_end(psd_table *);
void psd_snapshot_save(psd_table *, const psd_record *, const psd_flip *); /* within a commit, before it is applied */

/* table_removal.c */
static inline uint64_t psd_removals(const psd_root *r) { return r->evicted + r->expired + r->removed; }
static inline uint64_t *psd_removal(const psd_table *t, uint64_t number)
{
    return (uint64_t *)(t->base + t->region[PSD_REMOVALS].at) + number % (t->region[PSD_REMOVALS].size / 8);
}
/* The number of the first removal that is still known. A commit that was cut off may have written over the oldest ones. */
static inline uint64_t psd_first_removal(const psd_table *t, const psd_root *r)
{
    const uint64_t kept = t->region[PSD_REMOVALS].size / 8 - PSD_REMOVED_MAX, all = psd_removals(r);
    return all > kept ? all - kept : 0;
}
static inline uint64_t psd_removal_check(const psd_table *t, uint64_t number) { return psd_mix(*psd_removal(t, number) ^ psd_mix(number)); }
void psd_table_remove(psd_table *, uint64_t *const *words, uint64_t count, uint64_t *(*counter)(psd_root *));
int psd_table_evict(psd_table *, uint64_t count, uint64_t clock); /* as many as it can; 0, or -1 without memory */
/* Removes rows that were not used for more than `age`, at most PSD_REMOVED_MAX; 1 if there may be more of them, 0, or -1 without memory. */
int psd_table_expire(psd_table *, uint64_t clock, uint64_t age);
uint64_t psd_table_discard(psd_table *, const uint64_t *ids, intptr_t n); /* at most PSD_REMOVED_MAX distinct ones */

/* table_oldest.c */
/* Fills the heap, if it is empty and there may be rows that were used before `before`, which is not beyond `clock`, that of now. 0, or
 * ENOMEM. */
int psd_oldest_fill(psd_table *, uint64_t before, uint64_t clock);
/* The index word of the row that was not used for longest, which is the heap's no more; NULL if the heap has none used before then. */
uint64_t *psd_oldest_pop(psd_table *, uint64_t before);
void psd_oldest_add(psd_oldest *, uint64_t id, uint64_t used); /* a row that is marked with a clock below the bound */
/* A clock before which no row was used. */
static inline uint64_t psd_oldest_used(const psd_oldest *o) { return o->count ? o->rows[0].used : o->bound; }
void psd_oldest_free(psd_oldest *);

#endif
