/* What the block store needs of C: ordered stores to shared memory, a checksum, and two calls that Python has not.
 *
 * Needs _GNU_SOURCE for hole punching; Python.h, which comes first in every extension, defines it. */
#ifndef PSD_ARENA_H
#define PSD_ARENA_H

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static inline uint64_t psd_load_acquire(const uint64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

/* Everything stored before is in memory before this is, weakly ordered stores of other instructions too. */
static inline void psd_store_release(uint64_t *word, uint64_t value)
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

/* Checksum of n 8-byte words. Each step is a bijection of the sum so far and of the word, so that a change within one word
 * always changes the result. One multiplication per word: about 4 GB/s. Part of the arena's format. */
static inline uint64_t psd_checksum(const void *data, size_t n)
{
    const char *at = data;
    uint64_t sum = 0x9e3779b97f4a7c15u ^ n;
    for (size_t i = 0; i < n; i++) {
        uint64_t word;
        memcpy(&word, at + 8 * i, 8);
        sum = (sum ^ word) * 0xff51afd7ed558ccdu;
        sum ^= sum >> 32;
    }
    sum *= 0xc4ceb9fe1a85ec53u;
    return sum ^ (sum >> 33);
}

/* Map pages for writing before anybody waits for them. Returns 0 or an errno; ENOTSUP where the kernel cannot. */
static inline int psd_populate(void *address, size_t nbytes)
{
#ifdef __linux__
    const size_t unit = (size_t)sysconf(_SC_PAGESIZE);
    const uintptr_t start = (uintptr_t)address / unit * unit;
    /* MADV_POPULATE_WRITE: Linux 5.14, younger than many a C library's headers. */
    return madvise((void *)start, nbytes + ((uintptr_t)address - start), 23) == 0 ? 0 : errno;
#else
    (void)address, (void)nbytes;
    return ENOTSUP;
#endif
}

enum { PSD_LARGE_PAGE = 2 << 20 };

/* Map a file, at an address that is a multiple of PSD_LARGE_PAGE. Returns NULL and sets errno if it cannot. */
static inline void *psd_map_large(int fd, size_t nbytes, int is_read_only)
{
    const size_t room = nbytes + PSD_LARGE_PAGE;
    char *const all = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED)
        return NULL;
    const size_t unit = (size_t)sysconf(_SC_PAGESIZE), before = -(uintptr_t)all % PSD_LARGE_PAGE;
    const size_t end = (before + nbytes + unit - 1) / unit * unit;
    void *const found = mmap(all + before, nbytes, is_read_only ? PROT_READ : PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
    const int status = errno;
    if (found == MAP_FAILED) {
        munmap(all, room);
        errno = status;
        return NULL;
    }
    if (before)
        munmap(all, before);
    munmap(all + end, room - end);
    return found;
}

/* Have one large page hold what PSD_LARGE_PAGE bytes of a file in memory hold, which must not be all of them a hole: the address is a
 * multiple of it. Whatever the system's settings for large pages say, since nobody else pays for it. Returns 0 or an errno. */
static inline int psd_make_large(void *address)
{
#ifdef __linux__
    /* MADV_COLLAPSE: Linux 6.1, younger than many a C library's headers. */
    return madvise(address, PSD_LARGE_PAGE, 25) == 0 ? 0 : errno;
#else
    (void)address;
    return ENOTSUP;
#endif
}

/* Give a range of a file back to the file system; it reads as zero afterwards. Returns 0 or an errno. */
static inline int psd_punch_hole(int fd, int64_t start, int64_t nbytes)
{
#ifdef FALLOC_FL_PUNCH_HOLE
    int status;
    do
        status = fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, start, nbytes);
    while (status != 0 && errno == EINTR);
    return status == 0 ? 0 : errno;
#else
    (void)fd, (void)start, (void)nbytes;
    return ENOTSUP;
#endif
}

#endif
