/* What differs between compilers and machines, and nothing else.
 *
 * Every kernel is compiled for plain x86-64, AVX2 and AVX-512 and chosen when the library is loaded (GCC's target_clones,
 * which needs ifunc: x86-64, glibc). Everywhere else there is one plain version. The versions give the same bits: each
 * loop applies IEEE operations element by element, in one order, and the build forbids contraction into fused
 * multiply-add (-ffp-contract=off). Reductions are over integers only.
 */
#ifndef PSD_PORTABLE_H
#define PSD_PORTABLE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* before any other header: for table.h's lock, and for arena.h */
#endif

#include <stdint.h>
#include <string.h>

#if defined(__FAST_MATH__)
#error "psd_core must not be built with -ffast-math: it deletes NaN checks and reorders sums"
#endif

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12 \
    && !defined(PSD_ONE_VERSION)
#define PSD_KERNEL __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define PSD_KERNEL
#endif

#define PSD_INLINE static inline __attribute__((always_inline))

/* Before a loop over i that touches only element i of each array, so that an output may be an input (the same array, never
 * one shifted against the other). `restrict` would promise too much there. */
#if defined(__clang__)
#define PSD_ELEMENTWISE _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define PSD_ELEMENTWISE _Pragma("GCC ivdep")
#else
#define PSD_ELEMENTWISE
#endif

/* Before a loop over a constant number of elements that shall stay one: unrolled, GCC mixes it with the loops before and after, and
 * spills; encoding bfloat16 then took twice as long. */
#if defined(__GNUC__) && !defined(__clang__)
#define PSD_ROLLED _Pragma("GCC unroll 1")
#else
#define PSD_ROLLED
#endif

#if defined(__GNUC__)
#define PSD_PREFETCH(address) __builtin_prefetch(address)
#define PSD_PREFETCH_FAR(address) __builtin_prefetch(address, 0, 2) /* into the second cache */
#else
#define PSD_PREFETCH(address) ((void)(address))
#define PSD_PREFETCH_FAR(address) ((void)(address))
#endif

/* Copies one line of 64 bytes, both aligned to it, past the caches: memory is not read before it is written. Weakly ordered: whoever
 * lets others read what was copied calls PSD_STREAMED first. */
#if defined(__SSE2__)
#include <emmintrin.h>
PSD_INLINE void psd_stream_line(void *to, const void *from)
{
    for (int i = 0; i < 4; i++)
        _mm_stream_si128((__m128i *)to + i, _mm_load_si128((const __m128i *)from + i));
}
#define PSD_STREAMED() _mm_sfence()
#else
PSD_INLINE void psd_stream_line(void *to, const void *from)
{
    memcpy(to, from, 64);
}
#define PSD_STREAMED() ((void)0)
#endif

#endif
