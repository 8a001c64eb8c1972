/* Sleeping until a round closes. */
#include "portable.h"

#include <errno.h>
#include <limits.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include "ranks.h"

double psd_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void psd_ring(psd_ranks *r)
{
    __atomic_fetch_add(&r->bell, 1, __ATOMIC_SEQ_CST);
#ifdef __linux__
    if (__atomic_load_n(&r->sleepers, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, &r->bell, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, INT_MAX, NULL, NULL, 0);
#endif
}

void psd_sleep(psd_ranks *r, uint32_t bell, double until)
{
    const double left = until - psd_now();
    if (left <= 0)
        return;
#ifdef __linux__
    const struct timespec patience = {.tv_sec = (time_t)left, .tv_nsec = (long)((left - (double)(time_t)left) * 1e9)};
    __atomic_fetch_add(&r->sleepers, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &r->bell, FUTEX_WAIT | FUTEX_PRIVATE_FLAG, bell, &patience, NULL, 0);
    __atomic_fetch_sub(&r->sleepers, 1, __ATOMIC_SEQ_CST);
#else
    (void)bell;
    usleep(200); /* elsewhere rounds are looked at again and again: it is rare, and they are short */
#endif
}
