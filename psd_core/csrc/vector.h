/* The store of a shard's part of all vectors: batches over mapped files, whole under kill -9.
 *
 * docs/design/vectors.md explains stripes, the record and staging; this file has the formats. It owns no file and no memory of the
 * mappings: vector.py makes files longer and maps them. One thread at a time.
 *
 * The log, native byte order, format 5, regions from multiples of 4096:
 *   superblock  4096 B: see _store_format.py; its facts are in _vector_format.py
 *   control     u64 commit; from the next cache lines u64 applied, u64 state, each sealed; then, from byte 256, for each operand the
 *               u64 check of what is staged, 0 for nothing; then for each stripe of a chunk the u64 check of its partials
 *   sessions    psd_vector_session
 *   partials    psd_vector_partial for each stripe of a chunk and each answer
 *   sums        psd_vector_sum, twice, for each answer
 *   staging     a stripe of 8-byte numbers for each operand
 *   answers     for each session and entry, room for the answers of a batch
 * The record, in a file of its own, since it grows: psd_vector_record, and what follows it there.
 * A vector's file: its elements; then, from a multiple of 64, the u64 check of each stripe, 0 while it is being written to.
 */
#ifndef PSD_VECTOR_H
#define PSD_VECTOR_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "content.h"
#include "mix.h"
#include "on_store.h"
#include "vector_operations.h"

enum { PSD_STRIPE = 4096, PSD_STRIPE_BYTES = PSD_STRIPE * 8, PSD_CHUNK = 64 /* stripes whose partials are added at a time */ };
enum { PSD_V_CONTROL, PSD_V_SESSIONS, PSD_V_PARTIALS, PSD_V_SUMS, PSD_V_STAGING, PSD_V_ANSWERS, PSD_V_REGIONS };
enum { PSD_V_F64, PSD_V_F32, PSD_V_I64 };
enum { PSD_ENTRIES = 9 /* the answers of 8 batches, and one that is being written */ };
enum { PSD_EXACT_LIMBS = 70, PSD_INPUTS_MAX = 1024, PSD_SUM_CHECK = 71 };
#define PSD_NONE UINT32_MAX

typedef union {
    double f;
    int64_t i;
} psd_number;

/* A sum without rounding: limbs of 32 bits in units of 2^-1074, each with room for carries; the last one has the sign. */
typedef struct {
    int64_t limbs[PSD_EXACT_LIMBS];
    uint64_t flags; /* 1: there was NaN, 2: infinity, 4: minus infinity */
} psd_exact;

typedef struct {
    psd_number value;
    int64_t index; /* in the whole vector; -1: none yet */
} psd_extreme;

/* What a reduction has found: in a stripe, and so far. */
typedef union {
    double f;
    struct {
        uint64_t low, middle;
        int64_t high;
    } wide; /* of whole numbers */
    psd_extreme extreme;
} psd_vector_partial;
typedef union {
    psd_exact exact;
    psd_extreme extreme;
    uint64_t words[PSD_SUM_CHECK + 1]; /* the last one: check of the others */
} psd_vector_sum;

typedef struct {
    uint64_t sequence, bytes;
    uint64_t check; /* of those, the session and the answers; 0: there are none */
} psd_vector_entry;
typedef struct {
    uint64_t session, check; /* check 0: nobody's */
    psd_vector_entry entries[PSD_ENTRIES]; /* the batch numbered n in entry n % PSD_ENTRIES */
} psd_vector_session;

typedef struct {
    uint64_t check;          /* of the other bytes of the head */
    uint64_t head, size;     /* bytes: of all but coefficients, keys and values; of all */
    uint64_t content;        /* check of the bytes behind the head; 0: it is made with the commit */
    uint64_t commit;         /* the one that this record belongs to */
    uint64_t kind;           /* 0: a batch; 1: a catalog, whose text follows */
    uint64_t slot, session, sequence; /* whose batch it is; session 0: nobody's */
    uint64_t groups, operands, ops, inputs, answers;
} psd_vector_record; /* then groups, operands, ops, inputs (u32, an even number of them), and whatever ops name */

/* Vectors of one size, and the operations on them: no group's results depend on another's. */
typedef struct {
    uint64_t size, first_stripe, stripes; /* stripes that are here */
    uint64_t first_op, ops, first_operand, operands;
} psd_vector_group;

typedef struct {
    uint32_t vector;
    uint32_t staging; /* which stripe of the staging area is its own, + 1; 0: it is not written, or in place */
} psd_vector_operand;

typedef struct {
    uint32_t code, dtype, function, out; /* out: an operand, or PSD_NONE */
    uint32_t first_input, inputs;        /* operands that are read, beside out */
    uint32_t first_answer, answers;
    uint64_t start, count, width; /* of ranges: first element of the whole vector, elements; of rows: their number and length */
    uint64_t values, keys;        /* bytes in the record */
    psd_number a, b;
} psd_vector_op;

/* Vectors as they were at one batch, while others come: stripes that are about to be written to, and were not copied yet, are saved. */
typedef struct {
    int is_active, is_failed;
    char ***saved; /* by vector and stripe; NULL: as it was, PSD_COPIED: nobody needs it any more. No vector's array: not in it */
} psd_vector_snapshot;

typedef struct psd_vectors {
    char *base; /* of the log */
    uint64_t at[PSD_V_REGIONS], answers_max, operands_max, senders, answer_bytes;
    uint64_t *commit, *applied, *state, *staged, *partial_checks;
    char *record;
    uint64_t record_bytes; /* of the mapping */
    uint64_t capacity;
    char **bases;       /* of vectors, by their number */
    uint64_t *elements; /* of them that are here */
    uint32_t *dtypes;
    void **current;     /* scratch: where an operand's stripe is now */
    uint8_t *touched;   /* scratch: whether a step has written to an operand */
    int (*apply)(void *, uint64_t op, const void *const *in, void *out, intptr_t n); /* a user's function */
    void (*on_store)(void *, const char *); /* for tests: called before each store of the protocol */
    psd_vector_snapshot snapshot;
    void *context;
    char problem[128];
} psd_vectors;

/* vector_f64.c, vector_f32.c, vector_i64.c: one operation on n elements of a stripe, the first of which is element `index` of the
 * vector. `in` and `out` may be the same. */
void psd_vector_compute_f64(const psd_vector_op *, void *out, const void *const *in, const void *coefficients, intptr_t n, uint64_t index);
void psd_vector_compute_f32(const psd_vector_op *, void *out, const void *const *in, const void *coefficients, intptr_t n, uint64_t index);
void psd_vector_compute_i64(const psd_vector_op *, void *out, const void *const *in, const void *coefficients, intptr_t n, uint64_t index);
void psd_vector_add_f64(void *out, const void *values, intptr_t n);
void psd_vector_add_f32(void *out, const void *values, intptr_t n);
void psd_vector_add_i64(void *out, const void *values, intptr_t n);
/* Dot products of x with each of `count` arrays. */
void psd_vector_dots_f64(const void *x, const void *const *y, intptr_t count, intptr_t n, psd_vector_partial *out);
void psd_vector_dots_f32(const void *x, const void *const *y, intptr_t count, intptr_t n, psd_vector_partial *out);
void psd_vector_dots_i64(const void *x, const void *const *y, intptr_t count, intptr_t n, psd_vector_partial *out);
void psd_vector_sum_f64(const void *x, intptr_t n, psd_vector_partial *out);
void psd_vector_sum_f32(const void *x, intptr_t n, psd_vector_partial *out);
void psd_vector_sum_i64(const void *x, intptr_t n, psd_vector_partial *out);
void psd_vector_extreme_f64(const void *x, intptr_t n, int greatest, uint64_t index, psd_vector_partial *out);
void psd_vector_extreme_f32(const void *x, intptr_t n, int greatest, uint64_t index, psd_vector_partial *out);
void psd_vector_extreme_i64(const void *x, intptr_t n, int greatest, uint64_t index, psd_vector_partial *out);

/* vector_sums.c */
void psd_exact_add(psd_exact *, double);
void psd_exact_add_words(psd_exact *, uint64_t low, uint64_t middle, int64_t high);
void psd_exact_carry(psd_exact *);
/* Adds what the stripes of a chunk have found to what was found before. */
void psd_vector_fold(const psd_vector_op *, const psd_vector_partial *partials, uint64_t stride, uint64_t stripes, psd_vector_sum *);
uint64_t psd_vector_pack(const psd_vector_op *, const psd_vector_sum *, char *out); /* at most PSD_ANSWER_MAX bytes an answer */
enum { PSD_ANSWER_MAX = 4 + 4 * PSD_EXACT_LIMBS };

/* vector_run.c */
void psd_vectors_plan(psd_vectors *, uint64_t senders, uint64_t *sizes); /* sets regions; `sizes` in bytes */
void psd_vectors_attach(psd_vectors *);
static inline psd_vector_session *psd_vector_session_at(const psd_vectors *t, uint64_t slot)
{
    return (psd_vector_session *)(t->base + t->at[PSD_V_SESSIONS]) + slot;
}
static inline char *psd_vector_answer_at(const psd_vectors *t, uint64_t slot, uint64_t sequence)
{
    return t->base + t->at[PSD_V_ANSWERS] + (slot * PSD_ENTRIES + sequence % PSD_ENTRIES) * t->answer_bytes;
}
void psd_vector_seal(psd_vector_record *); /* sets its checksum */
/* Runs a batch that changes nothing, or tries one that has users' functions and keeps what these return. 0, or what `apply` said. */
int psd_vectors_try(psd_vectors *, const psd_vector_record *);
/* Copies to the record, and goes on with the check of its content while it is in the cache; `*checked`: how far that has come. */
void psd_vector_write(psd_vectors *, uint64_t at, const void *data, uint64_t nbytes, uint64_t *checked, psd_content *);
void psd_vectors_commit(psd_vectors *);  /* the record takes place from here on */
void psd_vectors_finish(psd_vectors *); /* does what is left of the batch of the record */

/* vector_checks.c */
/* Numbers that are stored as one word carry their check in its upper bits. */
enum { PSD_SEALED_BITS = 44 };
static inline uint64_t psd_sealed(uint64_t number) { return number | psd_mix(number) << PSD_SEALED_BITS; }
static inline uint64_t psd_unsealed(uint64_t word) { return word & (((uint64_t)1 << PSD_SEALED_BITS) - 1); }
uint64_t psd_vector_check(const void *elements, size_t nbytes, uint64_t vector, uint64_t stripe);
/* These have as much of other places brought into the cache meanwhile: the memory would have nothing to do. */
void psd_vector_add_and_fetch(psd_content *, const void *data, size_t nbytes, const char *const *next, uint64_t count);
uint64_t psd_vector_check_and_fetch(const void *elements, size_t nbytes, uint64_t vector, uint64_t stripe, const char *const *next, uint64_t count);
uint64_t psd_vector_checks_at(uint64_t elements, uint32_t dtype); /* where they begin in the vector's file */
static inline uint64_t *psd_vector_checks_of(const psd_vectors *t, uint64_t vector)
{
    return (uint64_t *)(t->bases[vector] + psd_vector_checks_at(t->elements[vector], t->dtypes[vector]));
}
void psd_vector_checks_of_zeros(uint64_t vector, uint64_t elements, uint32_t dtype, uint64_t *checks);
uint64_t psd_vector_sum_check(const psd_vector_sum *);
uint64_t psd_vector_partials_check(const psd_vector_partial *, uint64_t answers);
uint64_t psd_vector_session_check(uint64_t session);
uint64_t psd_vector_entry_check(const psd_vectors *, uint64_t slot, uint64_t session, const psd_vector_entry *);
uint64_t psd_vector_record_check(const psd_vector_record *);
/* Stores a check so that the compiler moves no store over it: a process that dies has made its stores in their order. */
static inline void psd_vector_store_check(uint64_t *place, uint64_t check)
{
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    __atomic_store_n(place, check, __ATOMIC_RELEASE);
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
}
/* What is wrong with the log, or with the record of a batch that is not complete; NULL: nothing. Of both nothing was used yet. */
const char *psd_vectors_problem(psd_vectors *);
/* First stripe of a vector that does not have its check; their number if all have. */
uint64_t psd_vector_damaged(const psd_vectors *, uint64_t vector);

/* vector_snapshot.c */
#define PSD_COPIED ((char *)1)
int psd_vector_snapshot_begin(psd_vectors *); /* 0, or ENOMEM */
void psd_vector_snapshot_save(psd_vectors *, uint32_t vector, uint64_t stripe); /* before it is written to */
/* Copies stripes, and forgets them. */
void psd_vector_snapshot_copy(psd_vectors *, uint32_t vector, uint64_t first, uint64_t count, char *out);
void psd_vector_snapshot_end(psd_vectors *);

/* Keeps the answers of a batch that has run; with no session, packs them into `out` alone. Returns their bytes. */
uint64_t psd_vectors_answer(psd_vectors *, const psd_vector_record *, char *out);
void psd_vectors_applied(psd_vectors *);

#endif
