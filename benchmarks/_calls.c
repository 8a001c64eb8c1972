/* Small calls without an interpreter: a ping-pong of some bytes, both ends; messages of the bulk lane (bulk.proto) that were
 * recorded and are sent again; armed steps. Built by _loops.py. Functions return 0, or an errno; the end of a stream is ECONNRESET. */
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#include "step_frames.h"

enum { REPLY = 9, ERROR = 10, ALIVE = 11, PREFIX_BYTES = 16, BUFFER_BYTES = 1 << 16 };

static double now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

static int send_all(int fd, const char *from, long bytes)
{
    while (bytes) {
        const ssize_t sent = send(fd, from, (size_t)bytes, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno == EINTR || errno == EAGAIN) /* a socket of psd's has a timeout */
                continue;
            return errno;
        }
        from += sent, bytes -= sent;
    }
    return 0;
}

/* At least one byte, and as many as there are; their number into `got`. */
static int receive_some(int fd, char *to, long bytes, long *got)
{
    for (;;) {
        const ssize_t count = recv(fd, to, (size_t)bytes, 0);
        if (count > 0) {
            *got = count;
            return 0;
        }
        if (count == 0)
            return ECONNRESET;
        if (errno != EINTR && errno != EAGAIN)
            return errno;
    }
}

static int receive_all(int fd, char *to, long bytes)
{
    while (bytes) {
        long got;
        const int failed = receive_some(fd, to, bytes, &got);
        if (failed)
            return failed;
        to += got, bytes -= got;
    }
    return 0;
}

/* Answers each `in` bytes by `out` bytes, until the other side ends. memory: of the larger of both. */
int serve_calls(int fd, char *memory, long in, long out)
{
    for (;;) {
        int failed = receive_all(fd, memory, in);
        if (!failed)
            failed = send_all(fd, memory, out);
        if (failed)
            return failed;
    }
}

/* n calls: `out` bytes there, `in` bytes back. times: when each began and ended, of 2 n. */
int make_calls(int fd, char *memory, long out, long in, long n, double *times)
{
    for (long i = 0; i < n; i++) {
        times[2 * i] = now();
        int failed = send_all(fd, memory, out);
        if (!failed)
            failed = receive_all(fd, memory, in);
        if (failed)
            return failed;
        times[2 * i + 1] = now();
    }
    return 0;
}

static int64_t number_at(const char *from, int bytes)
{
    uint64_t value = 0;
    memcpy(&value, from, (size_t)bytes);
    return (int64_t)value;
}

/* Sends n calls, call i being messages[starts[i]] to messages[starts[i + 1]], each after the answer to the one before; an answer
 * ends with a REPLY. An ERROR ends all: EPROTO, and the beginning of its head in `said`, of said_bytes. */
int replay_calls(int fd, const char *messages, const int64_t *starts, long n, char *said, long said_bytes)
{
    char *const buffer = malloc(BUFFER_BYTES);
    long start = 0, end = 0;
    int failed = buffer ? 0 : ENOMEM;
    for (long i = 0; i < n && !failed; i++) {
        failed = send_all(fd, messages + starts[i], starts[i + 1] - starts[i]);
        int is_over = 0;
        while (!failed && !is_over) {
            if (end - start >= PREFIX_BYTES) {
                const char *const message = buffer + start;
                const int64_t kind = number_at(message, 4), head_bytes = number_at(message + 4, 4);
                const int64_t bytes = PREFIX_BYTES + head_bytes + number_at(message + 8, 8);
                if (bytes > BUFFER_BYTES) {
                    failed = EMSGSIZE;
                    continue;
                }
                if (end - start >= bytes) {
                    if (kind == ERROR) {
                        memcpy(said, message + PREFIX_BYTES, (size_t)(head_bytes < said_bytes ? head_bytes : said_bytes));
                        failed = EPROTO;
                    }
                    is_over = kind == REPLY;
                    start += bytes;
                    continue;
                }
            }
            memmove(buffer, buffer + start, (size_t)(end - start));
            end -= start, start = 0;
            long got = 0;
            failed = receive_some(fd, buffer + end, BUFFER_BYTES - end, &got);
            end += got;
        }
    }
    free(buffer);
    return failed;
}

/* Makes n steps, which begin with `message`: each has the next clock, and the versions of the DONE before it. Returns how many were
 * taken; if fewer, the shard has answered the next one by AGAIN (`failed` 0), or something is wrong. answer: of answer_bytes, a DONE's. */
long make_steps(int fd, char *message, long bytes, char *answer, long answer_bytes, long versions, long n, int *failed)
{
    psd_step_head head;
    psd_step_prefix prefix;
    *failed = 0;
    for (long i = 0; i < n; i++) {
        if ((*failed = send_all(fd, message, bytes)))
            return i;
        do {
            if ((*failed = receive_all(fd, answer, sizeof prefix)))
                return i;
            memcpy(&prefix, answer, sizeof prefix);
        } while (prefix.kind == ALIVE);
        const long rest = (long)prefix.head_bytes + (long)prefix.payload_bytes;
        if ((prefix.kind != PSD_DONE && prefix.kind != PSD_AGAIN) || rest > answer_bytes - (long)sizeof prefix)
            *failed = EPROTO;
        else
            *failed = receive_all(fd, answer + sizeof prefix, rest);
        if (*failed || prefix.kind == PSD_AGAIN)
            return i;
        memcpy(&head, message + sizeof prefix, sizeof head);
        head.clock++;
        memcpy(message + sizeof prefix, &head, sizeof head);
        memcpy(message + sizeof prefix + sizeof head, answer + sizeof prefix + sizeof(psd_done_head), (size_t)(8 * versions));
    }
    return n;
}
