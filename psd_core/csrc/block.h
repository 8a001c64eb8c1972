/* A small block of a job with fast aggregation: its version, its open round, its dedup window, and the pages that it goes round in.
 *
 * What is counted, summed, applied and published is decided here, and nowhere else; who takes part, what is an error and who waits
 * is the caller's. The pages lie in an arena's mapping (arena.py has the format): the caller lends places, and takes back what is
 * too many. Functions that change the round, the version or a spare are called by one thread at a time, which has `lock`: Python's
 * (_block.pyx), or that of an armed step (steps.h). `ring`, held for a few instructions, guards pins, lists and which page is
 * current, and is never held while anything waits.
 *
 * A call that cannot be made as it is says why, and has changed nothing. Needs _GNU_SOURCE, which Python.h defines.
 */
#ifndef PSD_BLOCK_H
#define PSD_BLOCK_H

#include <pthread.h>
#include <stdint.h>

#include "kernels.h"
#include "ranks.h"
#include "rounds.h"

enum { PSD_RETIRED_MAX = 48 }; /* each array of pages is twice as long as the one before: memory ends first */
enum { PSD_AGES = 66 }; /* gradients by age: of 0, 1, 2, 3 to 4, 5 to 8, and so on */

struct psd_block_calls;

typedef enum {
    PSD_COUNTED, PSD_DUPLICATE, PSD_LATE, PSD_EARLY, /* psd.state.aggregation.rounds.Outcome has these numbers, too */
    PSD_NEEDS_PAGE = 8, /* the ring is empty: lend a place, and call again */
    PSD_NOT_SENT,       /* would count, but the numbers were not sent */
    PSD_AHEAD,          /* the worker says that it has read a version that there is not yet */
    PSD_NO_MEMORY,
    PSD_STORE_CLOSED,
    PSD_GIVEN_BACK, /* the same, and a spare that was written has come back */
    PSD_STOPPED, /* by on_store: the process is about to die */
} psd_outcome;

typedef enum { PSD_NO_PAGE, PSD_FREE, PSD_SPARE, PSD_PUBLISHED } psd_page_state;

/* A place that was lent. Its head lies there; its body too, unless `body_number` names another place. */
typedef struct {
    uint64_t *head, *sessions, *clocks, *steps;
    char *body; /* parameter, slots and extra arrays, each from a multiple of `stride` */
    uint64_t number, body_number;
    uint64_t version, content;
    uint64_t use; /* of this entry; whoever holds a page of an earlier use cannot give it back by mistake */
    int64_t pins; /* readers, and 1 while it is current */
    psd_page_state state;
} psd_page;

typedef struct {
    int64_t rank;
    uint64_t session, clock, since;
    double weight, scale;
    const void *values; /* NULL: no gradient */
    psd_dtype values_dtype;
    const uint8_t *present; /* NULL: all segments */
    const double *scalars;
    uint64_t version_read; /* if it is known */
    int is_version_known;
    int is_newest; /* the rank's latest session sends it */
    int already;   /* the numbers were not sent */
} psd_part_of_push;

typedef struct {
    /* What never changes. */
    psd_dtype dtype;
    size_t item, n, segments, workers, mask_words, head_words, body_words, stride, slots;
    uint64_t index;
    uint64_t *entry; /* of the arena's block table */
    const uint32_t *ends;
    int rule;
    uint8_t flags[PSD_FLAGS_MAX];
    int slot_at[PSD_SLOTS_MAX]; /* of the rule's slots, which one of the page; -1: not kept */
    int scalars, rate;          /* `rate`: the scalar that is divided by 1 + age; -1: none */
    int has_rounds, is_mean;
    int64_t quorum;
    int (*on_store)(void *context, const char *what); /* before each store that matters after a kill; not 0: go no further */
    void *context;

    const struct psd_block_calls *calls; /* of the library that has made the block, for another one */
    psd_ranks *ranks;   /* who sleeps until a round closes, and whom others wait for; NULL: nobody */
    int measures_ranks; /* this block says by how much each rank's gradients come late */
    pthread_mutex_t lock;

    /* Under the block's lock. */
    int has_tickets; /* callers wait for a version by tickets: whoever closes a round tells the caller of this interface */
    int is_stuck;    /* nothing may be counted but by the caller of this interface */
    psd_round_times times;
    uint64_t version;
    int has_voice, has_sum;
    uint64_t since; /* of the worker whose scalars hold, and its rank */
    int64_t rank;
    double held[PSD_SCALARS_MAX], total_weight;
    uint64_t *contributors, *sessions; /* mask, and by rank */
    uint8_t *touched, *grown;
    void *sum;
    uint64_t ages[PSD_AGES], age_total;

    /* Under `ring`. */
    pthread_mutex_t ring;
    psd_page *page;
    int64_t pages, current; /* -1: nothing was published */
    int has_ring, has_lock, is_closed;
    psd_page *retired[PSD_RETIRED_MAX]; /* earlier arrays of pages, which somebody may be looking at */
    int retirements;
} psd_block;

/* What another library calls. */
typedef struct psd_block_calls {
    psd_outcome (*contribute)(psd_block *, const psd_part_of_push *, const uint64_t *waited);
    void (*on_gradient)(psd_block *, int64_t rank, double now, const uint64_t *waited);
    void (*on_close)(psd_block *, double now, const uint64_t *waited);
    int64_t (*pin)(psd_block *, psd_outcome *why);
    int (*unpin)(psd_block *, int64_t page, uint64_t use);
} psd_block_calls;

/* The caller has set what never changes, and zeros elsewhere. 0, or -1: no memory. */
int psd_block_init(psd_block *);
void psd_block_free(psd_block *);

/* Begin with a version, and with an open round that nobody has a gradient in. */
void psd_block_open(psd_block *, uint64_t version);

/* Count a gradient, and apply the update if it is complete then. waited: mask of those that the round waits for. */
psd_outcome psd_block_contribute(psd_block *, const psd_part_of_push *, const uint64_t *waited);
int psd_block_is_complete(const psd_block *, const uint64_t *waited, int is_void);
psd_outcome psd_block_close_round(psd_block *); /* apply a complete round */
int psd_block_has(const psd_block *, int64_t rank);

/* Times of rounds: a gradient that the open round is about to count; the round has closed, and those now waited for. */
void psd_block_on_gradient(psd_block *, int64_t rank, double now, const uint64_t *waited);
void psd_block_on_close(psd_block *, double now, const uint64_t *waited);

/* Pages: numbers of entries, or -1. `lend` gives a place to the ring, -1: no memory; `surplus` takes one back of which there are more
 * than `kept`, or which cannot be used again. */
int64_t psd_block_lend(psd_block *, uint64_t *head, char *body, uint64_t number, uint64_t body_number);
int64_t psd_block_surplus(psd_block *, int64_t kept);
void psd_block_adopt(psd_block *, int64_t page, uint64_t version, uint64_t content); /* as published by an earlier process */
int64_t psd_block_spare(psd_block *, psd_outcome *why);
psd_outcome psd_block_publish(psd_block *, int64_t spare, uint64_t version);
int psd_block_discard(psd_block *, int64_t page, uint64_t use); /* 0, or -1: it is no spare */
int64_t psd_block_pin(psd_block *, psd_outcome *why);
int psd_block_unpin(psd_block *, int64_t page, uint64_t use); /* 0, or -1: it is not published */
int64_t psd_block_pins(psd_block *, int64_t page, uint64_t use);
psd_page_state psd_block_state(psd_block *, int64_t page, uint64_t use);
/* Publish nothing more, and pin nothing. The pages that somebody has in hand, the first time; then 0. */
int64_t psd_block_stop(psd_block *);

#endif
