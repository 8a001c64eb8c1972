/* The socket of a connection whose steps are taken in C; see steps.h. Python's thread calls psd_steps_serve without the GIL. */
#ifndef PSD_STEP_LOOP_H
#define PSD_STEP_LOOP_H

#include "steps.h"

enum { PSD_STEP_PLACES_MAX = 4, PSD_READ_AHEAD = 16 << 10 };

typedef enum { /* why psd_steps_serve has returned */
    PSD_SERVED_CLOSED = 0, /* the peer has gone, or is hung up on */
    PSD_SERVED_OTHER,      /* another message comes: `have` of its bytes are in `buffer` */
    PSD_SERVED_WRONG,      /* a step of another size */
    PSD_SERVED_AGAIN,      /* AGAIN was sent */
    PSD_SERVED_TICKETS,    /* a round has closed, or a gate opened, for which somebody waits by a ticket: see to that, and call again */
    PSD_SERVED_ERROR       /* errno of the socket in `error` */
} psd_served;

typedef struct {
    psd_step step; /* `steps` and `rank` are set; `mask` is this connection's */
    int fd, error, in_memory, is_waiting, reason;
    size_t places;
    const void *gradient[PSD_STEP_BLOCKS_MAX];
    void *parameter[PSD_STEP_PLACES_MAX][PSD_STEP_BLOCKS_MAX];
    char *memory; /* attached, of `memory_bytes`; NULL: none is */
    size_t memory_bytes;
    char *rows; /* that are pulled, and travel */
    size_t rows_capacity;
    uint32_t is_cancelled; /* by another thread */
    uint64_t done; /* steps that were answered by DONE */
    double began;
    char *buffer;
    size_t capacity, have, message_bytes;
} psd_step_connection;

/* The caller has set step.steps, step.rank, fd, in_memory, its places and memory. 0, or -1: no memory. */
int psd_step_connection_init(psd_step_connection *);
void psd_step_connection_free(psd_step_connection *);
psd_served psd_steps_serve(psd_step_connection *);
/* From any thread: the peer is hung up on. */
void psd_step_cancel(psd_step_connection *);

/* A step without a socket, for tests, who then take its pieces. Puts a whole message into the buffer. PSD_SERVED_OTHER: it is one. */
psd_served psd_step_hold(psd_step_connection *, const char *message, size_t nbytes);
/* Finds the rows of the step in the buffer. 0, or the reason for AGAIN. */
int psd_step_find_rows(psd_step_connection *);
/* The bytes of rows that travel in DONE, which lie one behind the other in `rows`. */
size_t psd_step_answered_bytes(const psd_step_connection *);

#endif
