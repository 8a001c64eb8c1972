/* How long a block's rounds were open: psd.state.counts.RoundTimes, for blocks whose rounds are in C. */
#ifndef PSD_ROUND_TIMES_H
#define PSD_ROUND_TIMES_H

#include <stddef.h>
#include <stdint.h>

enum { PSD_SECONDS = 16 }; /* buckets: those of psd.state.counts.SECONDS, and one above */

typedef struct {
    int is_open, has_closed;    /* the open round has a gradient; some round has closed */
    double opened_at, closed_at;
    uint64_t *awaited;          /* mask of those that the open round still waits for */
    uint64_t closed[PSD_SECONDS];
    double closed_s;            /* sum */
} psd_round_times;

/* The first bucket whose bound is not below the seconds. */
static inline size_t psd_seconds_bucket(double seconds)
{
    static const double bounds[PSD_SECONDS - 1] = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0};
    size_t at = 0;
    while (at < PSD_SECONDS - 1 && bounds[at] < seconds)
        at++;
    return at;
}

#endif
