/* A copy of an array that follows it by encoded differences: what the copy still lacks is in the next one, so that it never
 * drifts away. Block by block, so that a block's difference stays in the first cache.
 */
#include "codec_elements.h"

enum { BLOCK = PSD_CODEC_BLOCK };

static PSD_KERNEL void subtract(const float *values, const float *before, float *out, intptr_t n)
{
    for (intptr_t i = 0; i < n; i++)
        out[i] = values[i] - before[i];
}

intptr_t psd_codec_follow(psd_codec codec, const float *values, const float *before, float *after, uint8_t *scales,
                          uint8_t *codes, intptr_t n)
{
    _Alignas(64) float difference[BLOCK];
    for (intptr_t begin = 0; begin < n; begin += BLOCK) {
        const intptr_t count = n - begin < BLOCK ? n - begin : BLOCK;
        uint8_t *const scale = scales + begin / BLOCK * 2, *const to = codes + bytes_before(codec, begin);
        subtract(values + begin, before + begin, difference, count);
        if (psd_codec_encode(codec, difference, NULL, 0, 0, scale, to, count) >= 0)
            return begin;
        memcpy(after + begin, before + begin, (size_t)count * sizeof *after);
        psd_codec_accumulate(codec, scale, to, after + begin, 1, count);
    }
    return -1;
}
