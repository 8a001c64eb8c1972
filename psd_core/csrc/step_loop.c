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
    c->buffer = malloc(c->capacity);
    c->step.mask = calloc(1, segments);
    c->step.rows = calloc(s->tables ? s->tables->count : 1, sizeof(psd_step_rows));
    return c->buffer && c->step.mask && c->step.rows ? 0 : -1;
}

void psd_step_connection_free(psd_step_connection *c)
{
    free(c->buffer);
    free(c->step.mask);
    free(c->step.rows);
    free(c->rows);
}

/* Has an array have so many bytes, whatever it held before. 0, or -1: no memory, and it is as it was. */
static int make_room(char **array, size_t *capacity, size_t nbytes)
{
    if (nbytes <= *capacity)
        return 0;
    char *bigger = realloc(*array, nbytes);
    if (!bigger)
        return -1;
    *array = bigger, *capacity = nbytes;
    return 0;
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

/* ---- rows: the only part of a message whose length it says itself ---- */

static const psd_step_rows_head *rows_heads(const psd_step_connection *c)
{
    return (const psd_step_rows_head *)(c->buffer + PREFIX + c->step.steps->rows_at);
}

static size_t row_bytes(const psd_tables *tables, size_t i)
{
    return tables->partition[i].dim * sizeof(float);
}

/* The bytes of rows in the payload of the step whose head has come; more than PSD_STEP_ROWS_MAX stands for any such number. */
static size_t rows_bytes(const psd_step_connection *c)
{
    const psd_tables *tables = c->step.steps->tables;
    size_t nbytes = 0;
    for (size_t i = 0; tables && i < tables->count && nbytes <= PSD_STEP_ROWS_MAX; i++) {
        const psd_step_rows_head *h = &rows_heads(c)[i];
        if (h->pushed > PSD_STEP_ROWS_MAX / 8 || h->pulled > PSD_STEP_ROWS_MAX / 8)
            return PSD_STEP_ROWS_MAX + 1;
        nbytes += 8 * (h->pushed + h->pulled) + (h->pushed_at ? 0 : psd_eights(h->pushed * row_bytes(tables, i)));
    }
    return nbytes;
}

/* Whether rows lie in the attached memory, where PushFrame.rows_at may say so. */
static int are_in_memory(const psd_step_connection *c, uint64_t at, uint64_t nbytes)
{
    return c->memory && at >= 64 && at % sizeof(float) == 0 && at <= c->memory_bytes && nbytes <= c->memory_bytes - at;
}

int psd_step_find_rows(psd_step_connection *c)
{
    const psd_steps *s = c->step.steps;
    const psd_tables *tables = s->tables;
    const char *ids = c->buffer + PREFIX + s->head_bytes + (c->in_memory ? 0 : s->gradient_bytes);
    size_t pulled = 0;
    for (size_t i = 0; tables && i < tables->count; i++) {
        const psd_step_rows_head *h = &rows_heads(c)[i];
        psd_step_rows *rows = &c->step.rows[i];
        const uint64_t pushed_bytes = h->pushed * row_bytes(tables, i), pulled_bytes = h->pulled * row_bytes(tables, i);
        if (h->flags & ~(uint64_t)PSD_ROWS_PRESENT || (h->pushed_at && !are_in_memory(c, h->pushed_at, pushed_bytes))
            || (h->pulled_at && !are_in_memory(c, h->pulled_at, pulled_bytes)))
            return PSD_AGAIN_CASE;
        rows->is_present = h->flags & PSD_ROWS_PRESENT;
        rows->pushes = h->pushed, rows->pulls = h->pulled;
        rows->pushed = (const uint64_t *)ids, rows->pulled = rows->pushed + h->pushed;
        ids += 8 * (h->pushed + h->pulled);
        pulled += h->pulled_at ? 0 : psd_eights(pulled_bytes);
        if (pulled > PSD_STEP_ROWS_MAX)
            return PSD_AGAIN_CASE;
    }
    if (make_room(&c->rows, &c->rows_capacity, pulled) != 0)
        return PSD_AGAIN_CASE;
    char *to = c->rows;
    for (size_t i = 0; tables && i < tables->count; i++) {
        const psd_step_rows_head *h = &rows_heads(c)[i];
        psd_step_rows *rows = &c->step.rows[i];
        rows->gradients = (const float *)(h->pushed_at ? c->memory + h->pushed_at : ids);
        rows->rows = (float *)(h->pulled_at ? c->memory + h->pulled_at : to);
        ids += h->pushed_at ? 0 : psd_eights(h->pushed * row_bytes(tables, i));
        to += h->pulled_at ? 0 : psd_eights(h->pulled * row_bytes(tables, i));
    }
    return 0;
}

size_t psd_step_answered_bytes(const psd_step_connection *c)
{
    const psd_tables *tables = c->step.steps->tables;
    size_t nbytes = 0;
    for (size_t i = 0; tables && i < tables->count; i++)
        nbytes += rows_heads(c)[i].pulled_at ? 0 : psd_eights(rows_heads(c)[i].pulled * row_bytes(tables, i));
    return nbytes;
}

/* Sends the pages that are pinned, or writes them where the worker has its parameters. */
static int send_done(psd_step_connection *c)
{
    const psd_step *t = &c->step;
    const psd_steps *s = t->steps;
    const uint32_t counted = (uint32_t)__builtin_popcountll(t->counted_blocks), blocks = (uint32_t)psd_step_blocks(s);
    const size_t rows = psd_step_answered_bytes(c);
    struct {
        psd_step_prefix prefix;
        psd_done_head head;
        uint64_t versions[PSD_STEP_BLOCKS_MAX];
    } message = {
        {PSD_DONE, (uint32_t)sizeof(psd_done_head) + 8 * blocks, (c->in_memory ? 0 : s->parameter_bytes) + rows},
        {t->head->clock + 1, counted, blocks - counted},
    };
    struct iovec parts[2 + 2 * PSD_STEP_BLOCKS_MAX];
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
    if (s->tables)
        message.versions[s->blocks] = t->tables_version;
    if (rows)
        parts[count++] = (struct iovec){c->rows, rows};
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
    int reason = psd_step_find_rows(c);
    if (reason)
        return reason;
    reason = psd_step_begin(t);
    for (size_t i = 0; i < s->blocks && !reason; i++) {
        reason = psd_step_count(t, i, c->in_memory ? c->gradient[i] : at);
        at += psd_eights(s->place[i].gradient_bytes);
    }
    if (!reason && s->tables)
        reason = psd_step_count_rows(t);
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
    if (!reason && c->memory && __atomic_load_n(&c->is_cancelled, __ATOMIC_SEQ_CST)) {
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

/* Receives the whole step whose prefix is there. PSD_SERVED_OTHER: it is there. */
static psd_served receive_step(psd_step_connection *c)
{
    const psd_steps *s = c->step.steps;
    const psd_step_prefix prefix = *(const psd_step_prefix *)c->buffer;
    const size_t front = PREFIX + s->head_bytes;
    uint64_t payload = c->in_memory ? 0 : s->gradient_bytes;
    if (prefix.head_bytes != s->head_bytes || (!s->tables && prefix.payload_bytes != payload))
        return PSD_SERVED_WRONG;
    if (s->tables) {
        const psd_served status = receive(c, front, front > PSD_READ_AHEAD ? front : PSD_READ_AHEAD);
        if (status != PSD_SERVED_OTHER)
            return status;
        const size_t rows = rows_bytes(c);
        payload += rows;
        if (rows > PSD_STEP_ROWS_MAX || prefix.payload_bytes != payload)
            return PSD_SERVED_WRONG;
        if (make_room(&c->buffer, &c->capacity, front + payload) != 0) {
            c->error = ENOMEM;
            return PSD_SERVED_ERROR;
        }
    }
    c->message_bytes = front + payload;
    return receive(c, c->message_bytes, c->message_bytes);
}

psd_served psd_step_hold(psd_step_connection *c, const char *message, size_t nbytes)
{
    if (nbytes < PREFIX + c->step.steps->head_bytes)
        return PSD_SERVED_WRONG;
    if (make_room(&c->buffer, &c->capacity, nbytes) != 0)
        return PSD_SERVED_ERROR;
    memcpy(c->buffer, message, nbytes);
    c->have = nbytes, c->began = psd_now(), c->step.head = (const psd_step_head *)(c->buffer + PREFIX);
    const psd_served status = receive_step(c); /* finds all of it there */
    return status == PSD_SERVED_OTHER && c->message_bytes == nbytes ? PSD_SERVED_OTHER : PSD_SERVED_WRONG;
}

psd_served psd_steps_serve(psd_step_connection *c)
{
    const psd_steps *s = c->step.steps;
    for (;;) {
        psd_served status;
        int reason = 0;
        if (!c->is_waiting) {
            const size_t most = s->tables || c->message_bytes > PSD_READ_AHEAD ? PSD_READ_AHEAD : c->message_bytes;
            status = receive(c, PREFIX, most);
            if (status != PSD_SERVED_OTHER)
                return status;
            if (((const psd_step_prefix *)c->buffer)->kind != PSD_STEP)
                return PSD_SERVED_OTHER;
            status = receive_step(c);
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
