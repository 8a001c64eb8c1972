/* Sends steps and receives their answers; see worker_steps.h. */
#include "portable.h"

#include <errno.h>
#include <sys/socket.h>
#include <time.h>

#include "step_frames.h"
#include "worker_steps.h"

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0 /* Python ignores SIGPIPE */
#endif

enum { ALIVE = 11, PIECES_MAX = 64, DOUBT_MIN = 4, DOUBT_MAX = 256 };

/* Twice what a step of 1 KB takes at a shard that has to be woken first. To look in vain costs this, and to look with success saves a
 * fifth of it: so the one doubles `doubt`, and the other takes an eighth of it away. */
static const double LOOKOUT_S = 40e-6;

/* The pieces behind the first `done` bytes, at most PIECES_MAX; returns how many. */
static size_t pieces_behind(const struct iovec *all, int count, size_t done, struct iovec *found)
{
    int at = 0;
    size_t n = 0;
    while (at < count && done >= all[at].iov_len)
        done -= all[at++].iov_len;
    for (; at < count && n < PIECES_MAX; at++, n++) {
        found[n].iov_base = (char *)all[at].iov_base + done;
        found[n].iov_len = all[at].iov_len - done;
        done = 0;
    }
    return n;
}

static char *byte_at(const struct iovec *all, size_t at)
{
    while (at >= all->iov_len)
        at -= all++->iov_len;
    return (char *)all->iov_base + at;
}

static int is_passing(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

static void fail(psd_worker_step *s, int error)
{
    s->state = PSD_STEP_BROKEN;
    s->error = error;
}

void psd_worker_step_begin(psd_worker_step *s)
{
    s->state = PSD_STEP_UNSENT;
    s->error = 0;
    s->sent = s->received = s->rest = 0;
}

/* Sends what has not left, if anything is to. 0, EAGAIN or EINTR. */
static int send_rest(psd_worker_step *s)
{
    struct iovec behind[PIECES_MAX];
    while ((s->state == PSD_STEP_UNSENT || s->state == PSD_STEP_PENDING) && s->sent < s->out_bytes) {
        const struct msghdr message = {.msg_iov = behind, .msg_iovlen = pieces_behind(s->out, s->outs, s->sent, behind)};
        const ssize_t sent = sendmsg(s->fd, &message, MSG_NOSIGNAL);
        s->state = PSD_STEP_PENDING; /* also if it has failed: then nobody knows what has left */
        if (sent >= 0) {
            s->sent += (size_t)sent;
        } else if (is_passing(errno)) {
            return errno == EINTR ? EINTR : EAGAIN;
        } else {
            fail(s, errno);
        }
    }
    return 0;
}

static void take(psd_worker_step *s)
{
    const char *const versions = (const char *)s->in[0].iov_base + sizeof(psd_step_prefix) + sizeof(psd_done_head);
    for (size_t i = 0; i < s->count; i++)
        memcpy(&s->versions[s->blocks[i]], versions + 8 * i, 8);
    s->state = PSD_STEP_TAKEN;
}

/* Look at what has come. 1: more is needed. */
static int look(psd_worker_step *s)
{
    const size_t done_head = s->in[0].iov_len - sizeof(psd_step_prefix);
    for (;;) {
        psd_step_prefix prefix;
        if (s->received < sizeof prefix)
            return 1;
        memcpy(&prefix, s->in[0].iov_base, sizeof prefix);
        if (prefix.kind == PSD_DONE && prefix.head_bytes == done_head && prefix.payload_bytes == s->in_bytes - s->in[0].iov_len) {
            if (s->received < s->in_bytes)
                return 1;
            take(s);
            return 0;
        }
        if (prefix.kind == PSD_AGAIN && prefix.head_bytes == sizeof(psd_again_head) && prefix.payload_bytes == 0) {
            s->rest = sizeof prefix + sizeof(psd_again_head);
            if (s->received < s->rest)
                return 1;
            s->state = PSD_STEP_REFUSED;
            return 0;
        }
        if (prefix.kind != ALIVE || prefix.head_bytes || prefix.payload_bytes) {
            s->state = PSD_STEP_FOREIGN;
            return 0;
        }
        for (size_t i = sizeof prefix; i < s->received; i++) /* this is rare */
            *byte_at(s->in, i - sizeof prefix) = *byte_at(s->in, i);
        s->received -= sizeof prefix;
    }
}

/* flags: MSG_DONTWAIT, if it shall not wait. */
static int receive(psd_worker_step *s, int flags)
{
    struct iovec behind[PIECES_MAX];
    do {
        struct msghdr message = {.msg_iov = behind, .msg_iovlen = pieces_behind(s->in, s->ins, s->received, behind)};
        const ssize_t got = recvmsg(s->fd, &message, flags);
        if (got > 0) {
            s->received += (size_t)got;
        } else if (got < 0 && is_passing(errno)) {
            return errno == EINTR ? EINTR : EAGAIN;
        } else {
            fail(s, got < 0 ? errno : 0);
            return 0;
        }
    } while (look(s));
    return 0;
}

int psd_worker_step_advance(psd_worker_step *s)
{
    const int why = send_rest(s);
    if (why)
        return why;
    return s->state == PSD_STEP_PENDING ? receive(s, 0) : 0;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Looks for the answers again and again, for LOOKOUT_S in all. */
static void look_out(psd_worker_step *all, size_t n, psd_worker_lookout *l)
{
    const double until = now() + LOOKOUT_S;
    int has_waited = 0;
    for (size_t i = 0; i < n; i++) {
        while (all[i].state == PSD_STEP_PENDING && receive(&all[i], MSG_DONTWAIT)) {
            if (now() >= until) {
                l->doubt = l->doubt < DOUBT_MAX / 2 ? 2 * l->doubt + DOUBT_MIN : DOUBT_MAX;
                l->passing = l->doubt;
                return;
            }
            has_waited = 1;
        }
    }
    if (has_waited && l->doubt)
        l->doubt -= l->doubt / 8 + 1;
}

int psd_worker_steps_advance(psd_worker_step *all, size_t n, psd_worker_lookout *l)
{
    for (size_t i = 0; i < n; i++) {
        const int why = send_rest(&all[i]);
        if (why)
            return why;
        if (all[i].state == PSD_STEP_BROKEN)
            return 0;
    }
    if (l->passing)
        l->passing--;
    else if (l->is_wanted)
        look_out(all, n, l);
    for (size_t i = 0; i < n; i++) {
        const int why = psd_worker_step_advance(&all[i]);
        if (why)
            return why;
        if (all[i].state != PSD_STEP_TAKEN)
            return 0;
    }
    return 0;
}

void psd_worker_step_copy(const psd_worker_step *s, char *to)
{
    for (size_t i = 0; i < s->received; i++)
        to[i] = *byte_at(s->in, i);
}
