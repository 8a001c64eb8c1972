/* What differs between compilers and machines, and nothing else.
 *
 * Every kernel is compiled for plain x86-64, AVX2 and AVX-512 and chosen when the library is loaded (GCC's target_clones,
 * which needs ifunc: x86-64, glibc). Everywhere else there is one plain version. The versions give the same bits: each
 * loop applies IEEE operations element by element, in one order, and the build forbids contraction into fused
 * multiply-add (-ffp-contract=off). Reductions are over integers only.
 */
#ifndef PSD_PORTABLE_H
#define PSD_PORTABLE_H

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

#if defined(__SSE2__)
#include <emmintrin.h>

/* Copies past the cache: the destination's old lines are not fetched only to be overwritten. Ends unfenced, see
 * psd_stream_fence. */
PSD_INLINE void psd_stream_copy(void *to, const void *from, intptr_t bytes)
{
    char *out = (char *)to;
    const char *in = (const char *)from;
    intptr_t head = (intptr_t)(-(uintptr_t)out & 15);
    if (head > bytes)
        head = bytes;
    memcpy(out, in, (size_t)head);
    intptr_t at = head;
    for (; at + 64 <= bytes; at += 64) { /* a whole cache line at a time fills one write-combining buffer */
        const __m128i a = _mm_loadu_si128((const __m128i *)(in + at));
        const __m128i b = _mm_loadu_si128((const __m128i *)(in + at + 16));
        const __m128i c = _mm_loadu_si128((const __m128i *)(in + at + 32));
        const __m128i d = _mm_loadu_si128((const __m128i *)(in + at + 48));
        _mm_stream_si128((__m128i *)(out + at), a);
        _mm_stream_si128((__m128i *)(out + at + 16), b);
        _mm_stream_si128((__m128i *)(out + at + 32), c);
        _mm_stream_si128((__m128i *)(out + at + 48), d);
    }
    memcpy(out + at, in + at, (size_t)(bytes - at));
}

/* Streaming stores are weakly ordered: without this a reader could see a published block before its contents. */
PSD_INLINE void psd_stream_fence(void) { _mm_sfence(); }
#else
PSD_INLINE void psd_stream_copy(void *to, const void *from, intptr_t bytes) { memcpy(to, from, (size_t)bytes); }
PSD_INLINE void psd_stream_fence(void) {}
#endif

#endif
