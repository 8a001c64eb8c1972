/* The messages of an armed step: a small push_pull whose whole meaning is fixed beforehand, so that both ends read and write it in C.
 *
 * A step is an optimisation of a push_pull that is like the one before, and never another semantics. What the shard does not take
 * it answers AGAIN: nothing was answered; make this push the long way, as a CALL of PUSH_PULL, under the same name (rank, session,
 * clock). Whether the shard had counted it or not, or some of its blocks, the dedup window makes that right.
 *
 * The offer. A worker that can do this sets BulkCall.wants_steps in its calls of PUSH_PULL. When the shard can take the next ones as
 * steps, BulkReply.step says so (message StepOffer): the epoch, which stands for run, incarnation, session, job and way of this
 * connection; the indices of this shard's trained blocks, in the order in which they lie in STEP and DONE; the sizes of all that is
 * of variable length. The offer holds until the worker sends anything but a STEP on this connection, or gets anything but a DONE, or
 * the connection ends; then it waits for the next one. The shard decides how often it offers, and after steps that were none for it
 * it lets some pushes pass. It never offers to connections by TLS, or of several sockets (BulkHello.streams), nor at all with
 * --never-armed (ServerConfig.never_armed), which is for tests, and to measure against.
 *
 * A worker sends a STEP only if the push is like this: the session of its Caller; no decisions, cuts that this shard has not had in a
 * header of this worker's, client_state, first_gradient, scale, part, norms, learner or held; PushHeader.scalars of all groups in
 * order; a gradient in which it has looked for NaN and infinity itself, unless the job's nan_policy is "allow" (is_finite); each
 * trained block of the shard sent once; all of them in memory or none, as offered (StepOffer.in_memory). All else goes the long way.
 *
 * Messages are framed as all are on the bulk lane (bulk.proto): u32 kind, u32 bytes of head, u64 bytes of payload, head, payload;
 * everything little-endian. Heads and payloads are multiples of 8 bytes, and begin at such a multiple of the message.
 *
 *   STEP (kind 12, worker)    psd_step_head
 *                             u64     for each block: PullFrame.version of the parameters from which the gradient was computed
 *                                     (PushHeader.versions); ignored without PSD_STEP_HAS_VERSIONS
 *                             f64     PushHeader.scalars of all groups, one after the other: StepOffer.scalars of them
 *                             bytes   PushFrame.present of all blocks, one after the other, each of (segments + 7) / 8 bytes, then zeros
 *                                     up to a multiple of 8; ignored without PSD_STEP_HAS_PRESENT, when all is present
 *                             psd_step_rows_head  for each of the job's tables, see below
 *                    payload: the gradients of all blocks, each as in PushFrame.payload in full, though it may be absent (then zeros),
 *                             and followed by ignored bytes up to a multiple of 8. In memory: none
 *                             then rows, see below
 *   DONE (kind 13, shard)     psd_done_head
 *                             u64     for each block: the version of the parameters (PullFrame.version)
 *                    payload: the parameters of all blocks, each as in PullFrame.payload, likewise. In memory: none
 *   AGAIN (kind 14, shard)    psd_again_head; no payload
 *
 * The sizes: STEP's head has StepOffer.head_bytes, its payload gradient_bytes, DONE's payload parameter_bytes, and the rows; in memory
 * these two are 0. A STEP of other sizes breaks the protocol: ERROR, and the end of the connection.
 *
 * Rows. In a job with tables the tables' block is the last of the blocks, of no bytes. For each table, those of JobSpec.tables in order,
 * psd_step_rows_head says how many rows of this shard are pushed, and how many are to come with the answer (BulkCall.ahead). Behind the
 * gradients of all blocks the payload has, for each table, the ids that are pushed (u64) and those that are pulled; then, for each
 * table, the gradients of the rows that are pushed (f32), up to a multiple of 8 bytes, unless they lie in attached memory, at pushed_at. DONE
 * has the rows that are pulled likewise behind the parameters, unless they were written to pulled_at. Both travel 0. Offsets are as in
 * PushFrame.rows_at; others: AGAIN. Rows have PSD_STEP_ROWS_MAX bytes at most in STEP, and in DONE.
 *
 * In memory (StepOffer.in_memory): a gradient lies where PushFrame.in_memory would have it, in the attached file at gradient_starts of
 * the block's space plus the block's offset in it; parameters are written where BulkCall.into_memory with `place` would have them.
 * Blocks that are not present at all may leave in that memory whatever they like; of a block that is present in part the segments
 * that are not are zeros, as ever.
 *
 * Answers. To one STEP comes one DONE, or AGAIN, or ERROR (BulkError; the connection ends). An ALIVE may come before it, as before
 * any other answer. SYNC: the shard waits for the round for PSD_STEP_WAIT_S at most, then AGAIN; the push that follows finds itself
 * counted and waits as ever. DONE stands for this PushReply: clock, blocks_counted, blocks_duplicate; all else of it is zero or
 * empty, wants_buffers false, `cuts` and `orders` as in the reply before. The DONE of a step is also the pull's answer.
 */
#ifndef PSD_STEP_FRAMES_H
#define PSD_STEP_FRAMES_H

#include <stdint.h>

enum { PSD_STEP = 12, PSD_DONE = 13, PSD_AGAIN = 14 };

enum {
    PSD_STEP_HAS_VERSIONS = 1,
    PSD_STEP_HAS_PRESENT = 2,
    PSD_STEP_FLAGS = 3, /* all that there are; another one: AGAIN */
};

/* Why AGAIN; for tests and counts: the worker does the same whatever it is. */
enum {
    PSD_AGAIN_REVOKED = 1,  /* something has changed, or nothing was ever offered on this connection, or the epoch is an older one */
    PSD_AGAIN_CASE = 2,     /* this push is none for the short way: early, late, other scalars, no room, ... */
    PSD_AGAIN_LONG_WAIT = 3, /* the round is still open */
    PSD_AGAIN_CUT = 4 /* a cut may be due at the end of this push */
};

#define PSD_STEP_WAIT_S 0.05

typedef struct { /* begins every message */
    uint32_t kind, head_bytes;
    uint64_t payload_bytes;
} psd_step_prefix;

typedef struct {
    uint64_t epoch;   /* StepOffer.epoch */
    uint64_t session; /* Caller.session, and PushHeader.session */
    uint64_t clock;   /* PushHeader.clock */
    uint64_t since;   /* PushHeader.since */
    double weight;    /* PushHeader.weight */
    uint32_t flags;   /* PSD_STEP_HAS_... */
    uint32_t place;   /* BulkCall.place; 0 if not in memory */
} psd_step_head;

typedef struct {
    uint64_t pushed, pulled;       /* rows */
    uint64_t pushed_at, pulled_at; /* bytes in attached memory; 0: they travel */
    uint64_t flags;                /* PSD_ROWS_PRESENT: there is a gradient for the table, perhaps of no row here. Another one: AGAIN */
} psd_step_rows_head;

enum { PSD_ROWS_PRESENT = 1, PSD_STEP_ROWS_MAX = 8 << 20 };

typedef struct {
    uint64_t clock;   /* PushReply.clock */
    uint32_t counted; /* PushReply.blocks_counted */
    uint32_t duplicate;
} psd_done_head;

typedef struct {
    uint32_t reason; /* PSD_AGAIN_... */
    uint32_t unused; /* 0 */
} psd_again_head;

_Static_assert(sizeof(psd_step_prefix) == 16 && sizeof(psd_step_head) == 48, "the layout of a step");
_Static_assert(sizeof(psd_step_rows_head) == 40, "the layout of its rows");
_Static_assert(sizeof(psd_done_head) == 16 && sizeof(psd_again_head) == 8, "the layout of its answers");

#endif
