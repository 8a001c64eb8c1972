/* The hash of ids: part of every format, and of which shard has a row. */
#ifndef PSD_MIX_H
#define PSD_MIX_H

#include <stdint.h>

/* The finalizer of SplitMix64 (Steele, Lea and Flood 2014; constants of Stafford's variant 13): a bijection. */
static inline uint64_t psd_mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

#endif
