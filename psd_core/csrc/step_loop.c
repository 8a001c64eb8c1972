/* Receives steps, and sends their answers; see step_loop.h. */
#include "portable.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "step_loop.h"

enum { PREFIX = sizeof(psd_step_prefix) };
static const char ZEROS[8];

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif

int psd_step_connection_init(psd_step_connection *c)
{
    const psd_steps *s = c->step.steps;
    size_t segments = 1;
    for (size_t i = 0; i < s->blocks; i++)
        segments = s->place[i].block->segments > segments ? s->place[i].block->segments : segments;
    c->message_bytes = PREFIX + s->head_bytes + (c->in_memory ? 0 : s->gradient_bytes);
    c->capacity = (c->message_bytes > PSD_READ_AHEAD ? c->message_bytes : PSD_READ_AHEAD);
    c->buffer = aligned_alloc(64, (c->capacity + 63) / 64 * 64);
    c->step.mask = calloc(1, segments);
    return c->buffer && c->step.mask ? 0 : -1;
}

void psd_step_connection_free(psd_step_connection *c)
{
    free(c->buffer);
    free(c->step.mask);
}

void psd_step_cancel(psd_step_connection *c)
{
    __atomic_store_n(&c->is_cancelled, 1, __ATOMIC_SEQ_CST);
    psd_ring(c->step.steps->ranks);
}

/* 0, or -1 and `error`. */
static int send_all(psd_step_connection *c, struct iovec *parts, size_t count)
{
    struct msghdr m = {.msg_iov = parts, .msg_iovlen = count};
    while (m.msg_iovlen) {
        ssize_t sent = sendmsg(c->fd, &m, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno == EINTR)
                continue;
            c->error = errno;
            return -1;
        }
        for (; m.msg_iovlen && (size_t)sent >= m.msg_iov->iov_len; m.msg_iov++, m.msg_iovlen--)
            sent -= (ssize_t)m.msg_iov->iov_len;
        if (m.msg_iovlen)
            m.msg_iov->iov_base = (char *)m.msg_iov->iov_base + sent, m.msg_iov->iov_len -= (size_t)sent;
    }
    return 0;
}

static psd_served send_again(psd_step_connection *c, int reason)
{
    struct {
        psd_step_prefix prefix;
        psd_again_head head;
    } message = {{PSD_AGAIN, sizeof(psd_again_head), 0}, {(uint32_t)reason, 0}};
    struct iovec part = {&message, sizeof message};
    c->reason = reason;
    return send_all(c, &part, 1) == 0 ? PSD_SERVED_AGAIN : PSD_SERVED_ERROR;
}

/* Sends the pages that are pinned, or writes them where the worker has its parameters. */
static int send_done(psd_step_connection *c)
{
    const psd_step *t = &c->step;
    const psd_steps *s = t->steps;
    const uint32_t counted = (uint32_t)__builtin_popcountll(t->counted_blocks);
    struct {
        psd_step_prefix prefix;
        psd_done_head head;
        uint64_t versions[PSD_STEP_BLOCKS_MAX];
    } message = {
        {PSD_DONE, (uint32_t)(sizeof(psd_done_head) + 8 * s->blocks), c->in_memory ? 0 : s->parameter_bytes},
        {t->head->clock + 1, counted, (uint32_t)s->blocks - counted},
    };
    struct iovec parts[1 + 2 * PSD_STEP_BLOCKS_MAX];
    size_t count = 1;
    for (size_t i = 0; i < s->blocks; i++) {
        const psd_page *page = &s->place[i].block->page[t->page[i]];
        const size_t nbytes = s->place[i].parameter_bytes, filled = psd_eights(nbytes) - nbytes;
        message.versions[i] = page->version;
        if (c->in_memory) {
            memcpy(c->parameter[t->head->place][i], page->body, nbytes);
            continue;
        }
        parts[count++] = (struct iovec){page->body, nbytes};
        if (filled)
            parts[count++] = (struct iovec){(void *)(uintptr_t)ZEROS, filled};
    }
    parts[0] = (struct iovec){&message, PREFIX + message.prefix.head_bytes};
    c->done++;
    return send_all(c, parts, count);
}

/* The step in the buffer, up to its end. 0, or the reason for AGAIN. */
static int take(psd_step_connection *c)
{
    psd_step *t = &c->step;
    const psd_steps *s = t->steps;
    const char *at = c->buffer + PREFIX + s->head_bytes;
    c->began = psd_now();
    t->head = (const psd_step_head *)(c->buffer + PREFIX);
    if (t->head->place >= c->places)
        return PSD_AGAIN_CASE;
    int reason = psd_step_begin(t);
    for (size_t i = 0; i < s->blocks && !reason; i++) {
        reason = psd_step_count(t, i, c->in_memory ? c->gradient[i] : at);
        at += psd_eights(s->place[i].gradient_bytes);
    }
    if (!reason)
        psd_step_end(t);
    return reason;
}

/* Waits until the step's rounds have closed. 0, or the reason for AGAIN, or -1: it is hung up on. */
static int await(psd_step_connection *c)
{
    psd_step *t = &c->step;
    psd_ranks *ranks = t->steps->ranks;
    const double until = c->began + PSD_STEP_WAIT_S;
    for (;;) {
        const uint32_t bell = __atomic_load_n(&ranks->bell, __ATOMIC_SEQ_CST);
        if (psd_step_reached(t))
            return 0;
        if (__atomic_load_n(&c->is_cancelled, __ATOMIC_SEQ_CST))
            return -1;
        if (__atomic_load_n(&ranks->rank[t->rank].epoch, __ATOMIC_SEQ_CST) != t->head->epoch)
            return psd_step_again(t, PSD_AGAIN_REVOKED, 0);
        if (psd_now() >= until)
            return psd_step_again(t, PSD_AGAIN_LONG_WAIT, 0);
        psd_sleep(ranks, bell, until);
    }
}

/* The rest of a step, once its round has closed: PSD_SERVED_OTHER stands for that all is well. */
static psd_served answer(psd_step_connection *c)
{
    int reason = await(c);
    c->is_waiting = 0;
    if (reason < 0) {
        psd_step_abandon(&c->step);
        return PSD_SERVED_CLOSED;
    }
    if (!reason)
        reason = psd_step_pin(&c->step, c->began);
    if (reason)
        return send_again(c, reason);
    /* A worker that has hung up may use its memory for something else. */
    const int is_cancelled = c->in_memory && __atomic_load_n(&c->is_cancelled, __ATOMIC_SEQ_CST);
    const int status = is_cancelled ? 0 : send_done(c);
    psd_step_unpin(&c->step);
    return is_cancelled ? PSD_SERVED_CLOSED : status == 0 ? PSD_SERVED_OTHER : PSD_SERVED_ERROR;
}

/* Receives until `count` bytes are there. PSD_SERVED_OTHER: they are. */
static psd_served receive(psd_step_connection *c, size_t count, size_t most)
{
    while (c->have < count) {
        const ssize_t got = recv(c->fd, c->buffer + c->have, most - c->have, 0);
        if (got == 0)
            return PSD_SERVED_CLOSED;
        if (got < 0 && errno != EINTR) {
            c->error = errno;
            return PSD_SERVED_ERROR;
        }
        if (got > 0)
            c->have += (size_t)got;
    }
    return PSD_SERVED_OTHER;
}

psd_served psd_steps_serve(psd_step_connection *c)
{
    const psd_steps *s = c->step.steps;
    const psd_step_prefix *prefix = (const psd_step_prefix *)c->buffer;
    const size_t first = c->message_bytes < PSD_READ_AHEAD ? c->message_bytes : PSD_READ_AHEAD;
    for (;;) {
        psd_served status;
        int reason = 0;
        if (!c->is_waiting) {
            status = receive(c, PREFIX, first);
            if (status != PSD_SERVED_OTHER)
                return status;
            if (prefix->kind != PSD_STEP)
                return PSD_SERVED_OTHER;
            if (prefix->head_bytes != s->head_bytes || prefix->payload_bytes != (c->in_memory ? 0 : s->gradient_bytes))
                return PSD_SERVED_WRONG;
            status = receive(c, c->message_bytes, c->message_bytes);
            if (status != PSD_SERVED_OTHER)
                return status;
            reason = take(c);
            c->is_waiting = !reason;
            if (c->is_waiting && c->step.hands_back)
                return PSD_SERVED_TICKETS;
        }
        status = reason ? send_again(c, reason) : answer(c);
        c->have -= c->message_bytes;
        memmove(c->buffer, c->buffer + c->message_bytes, c->have);
        if (status != PSD_SERVED_OTHER)
            return status;
    }
}
