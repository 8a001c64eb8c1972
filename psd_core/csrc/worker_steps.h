/* The worker's end of armed steps (step_frames.h): one small push_pull at one or several shards, each over a connected stream socket.
 *
 * Sends a STEP to each, and receives each DONE in place. Whatever else comes ends the short way there: the caller learns what, and
 * what was read of it, and goes on as it would without steps. A socket's timeouts (SO_RCVTIMEO, SO_SNDTIMEO) and signals interrupt
 * a call, which may be made again and goes on where it was. Nothing is allocated; the memory is the caller's.
 */
#ifndef PSD_WORKER_STEPS_H
#define PSD_WORKER_STEPS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

typedef enum {
    PSD_STEP_UNSENT,  /* nothing of it has left */
    PSD_STEP_PENDING, /* it is being sent, or waits for its answer */
    PSD_STEP_TAKEN,   /* DONE has come, whole */
    PSD_STEP_REFUSED, /* AGAIN has come; behind it `received` bytes of `in` are what has come next, from byte `rest` on */
    PSD_STEP_FOREIGN, /* another message comes; `received` bytes of it lie in `in` */
    PSD_STEP_BROKEN,  /* `error`: an errno; 0: the peer has closed the connection */
} psd_step_state;

typedef struct {
    int fd;
    struct iovec *out; /* the STEP: prefix and head, then the gradients, if they travel */
    struct iovec *in;  /* its DONE: prefix, head and versions in one piece, then the parameters, if they travel */
    int outs, ins;
    size_t out_bytes, in_bytes; /* in all */
    uint64_t *versions;         /* of all blocks of the job, by index */
    const uint32_t *blocks;     /* which of them are this shard's, in the order of STEP and DONE */
    size_t count;
    psd_step_state state;
    int error;
    size_t sent, received, rest;
} psd_worker_step;

/* Whether the next step looks out for its answers, some microseconds long, before its thread sleeps. In the beginning `doubt` and
 * `passing` are 0.
 *
 * A shard on another core answers a small step sooner than a thread falls asleep and wakes up, which costs both sides time, and this
 * one what its core has forgotten meanwhile. But whoever looks out in vain, because the shard needs this very core, or is far away,
 * has wasted that time: the steps behind it sleep at once, more of them the more often that has happened. */
typedef struct {
    int is_wanted;
    uint32_t doubt;   /* how many steps slept at once after the last that looked out in vain, less what has come in time since */
    uint32_t passing; /* so many of the next steps sleep at once */
} psd_worker_lookout;

/* Be ready to send the next step, whose bytes lie in `out`. */
void psd_worker_step_begin(psd_worker_step *);

/* Send what is left, and receive. 0 if its state is not PENDING any more, else EAGAIN (a timeout has passed) or EINTR. */
int psd_worker_step_advance(psd_worker_step *);

/* Send to all of n shards, look out for their answers if that is due, then receive from one after the other, up to the first that has
 * not taken the step. 0, EAGAIN or EINTR, as above. */
int psd_worker_steps_advance(psd_worker_step *, size_t n, psd_worker_lookout *);

/* Copy what has been received, `received` bytes, to a caller's buffer. */
void psd_worker_step_copy(const psd_worker_step *, char *to);

#endif
