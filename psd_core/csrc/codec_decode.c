/* Decoding, alone and fused with a weighted sum, and the checks of what a peer has sent. */
#include "codec_elements.h"

enum { BLOCK = PSD_CODEC_BLOCK };

/* The rounding is that of decoding first and adding then: the value is exact; product and sum are rounded. */
PSD_INLINE void put(float *out, float value, float weight, int is_added)
{
    *out = is_added ? *out + weight * value : value;
}

PSD_INLINE void decode_block(psd_codec codec, const uint8_t *bytes, float scale, float *out, float weight, int is_added,
                             intptr_t n)
{
    const int per_byte = facts_of(codec).per_byte;
    const intptr_t w = (n + per_byte - 1) / per_byte;
    for (int place = 0; place < per_byte; place++) {
        const intptr_t left = n - place * w, count = left < w ? left : w;
        float *const to = out + place * w;
        for (intptr_t k = 0; k < count; k++)
            put(to + k, value_in_byte(codec, bytes[k], place, scale), weight, is_added);
    }
}

static void decode_rest(psd_codec codec, const uint8_t *bytes, float scale, float *out, float weight, int is_added,
                        intptr_t n)
{
    decode_block(codec, bytes, scale, out, weight, is_added, n);
}

PSD_INLINE void decode_all(psd_codec codec, const uint8_t *restrict scales, const uint8_t *restrict codes, float *restrict out,
                           float weight, int is_added, intptr_t n)
{
    if (codec == PSD_BF16_CODEC || codec == PSD_FP16_CODEC) {
        for (intptr_t i = 0; i < n; i++) {
            const uint16_t half = load16(codes, i);
            put(out + i, codec == PSD_BF16_CODEC ? from_bfloat16(half) : from_float16(half), weight, is_added);
        }
        return;
    }
    for (intptr_t begin = 0; begin < n; begin += BLOCK) {
        const float scale = from_bfloat16(load16(scales, begin / BLOCK));
        const uint8_t *const bytes = codes + bytes_before(codec, begin);
        if (n - begin >= BLOCK) /* a constant length makes the loops quicker */
            decode_block(codec, bytes, scale, out + begin, weight, is_added, BLOCK);
        else
            decode_rest(codec, bytes, scale, out + begin, weight, is_added, n - begin);
    }
}

#define PSD_DECODER(name, codec)                                                                                              \
    static PSD_KERNEL void psd_decode_##name(const uint8_t *scales, const uint8_t *codes, float *out, intptr_t n)             \
    {                                                                                                                         \
        decode_all(codec, scales, codes, out, 0, 0, n);                                                                       \
    }                                                                                                                         \
    static PSD_KERNEL void psd_accumulate_##name(const uint8_t *scales, const uint8_t *codes, float *acc, float weight,       \
                                                 intptr_t n)                                                                  \
    {                                                                                                                         \
        decode_all(codec, scales, codes, acc, weight, 1, n);                                                                  \
    }

PSD_DECODER(bf16, PSD_BF16_CODEC)
PSD_DECODER(fp16, PSD_FP16_CODEC)
PSD_DECODER(int8, PSD_INT8_CODEC)
PSD_DECODER(int4, PSD_INT4_CODEC)
PSD_DECODER(int4log, PSD_INT4LOG_CODEC)
PSD_DECODER(sign, PSD_SIGN_CODEC)

static void (*const DECODERS[])(const uint8_t *, const uint8_t *, float *, intptr_t) = {
    [PSD_BF16_CODEC] = psd_decode_bf16,       [PSD_FP16_CODEC] = psd_decode_fp16, [PSD_INT8_CODEC] = psd_decode_int8,
    [PSD_INT4_CODEC] = psd_decode_int4,       [PSD_INT4LOG_CODEC] = psd_decode_int4log, [PSD_SIGN_CODEC] = psd_decode_sign,
};

static void (*const ACCUMULATORS[])(const uint8_t *, const uint8_t *, float *, float, intptr_t) = {
    [PSD_BF16_CODEC] = psd_accumulate_bf16,       [PSD_FP16_CODEC] = psd_accumulate_fp16,
    [PSD_INT8_CODEC] = psd_accumulate_int8,       [PSD_INT4_CODEC] = psd_accumulate_int4,
    [PSD_INT4LOG_CODEC] = psd_accumulate_int4log, [PSD_SIGN_CODEC] = psd_accumulate_sign,
};

void psd_codec_decode(psd_codec codec, const uint8_t *scales, const uint8_t *codes, float *out, intptr_t n)
{
    DECODERS[codec](scales, codes, out, n);
}

void psd_codec_accumulate(psd_codec codec, const uint8_t *scales, const uint8_t *codes, float *acc, float weight, intptr_t n)
{
    ACCUMULATORS[codec](scales, codes, acc, weight, n);
}

/* The first number of 16 bits whose exponent bits are all set, or -1. */
static PSD_KERNEL intptr_t psd_first_nonfinite_code(const uint8_t *codes, uint16_t exponent, intptr_t n)
{
    for (intptr_t begin = 0; begin < n; begin += BLOCK) {
        const intptr_t end = n - begin < BLOCK ? n : begin + BLOCK;
        uint16_t found = 0;
        for (intptr_t i = begin; i < end; i++)
            found |= (uint16_t)((load16(codes, i) & exponent) == exponent);
        if (found)
            for (intptr_t i = begin; i < end; i++)
                if ((load16(codes, i) & exponent) == exponent)
                    return i;
    }
    return -1;
}

/* A byte of the codes with padding that is not 0, or -1. Only the last block has any. */
static intptr_t padded_wrongly(psd_codec codec, const uint8_t *codes, intptr_t n)
{
    const int per_byte = facts_of(codec).per_byte, bits = 8 / per_byte;
    const intptr_t begin = n / BLOCK * BLOCK, count = n - begin, w = (count + per_byte - 1) / per_byte;
    for (intptr_t i = count; i < w * per_byte; i++)
        if (codes[begin / per_byte + i % w] >> bits * (i / w) & ((1 << bits) - 1))
            return begin / per_byte + i % w;
    return -1;
}

psd_codec_field psd_codec_fault(psd_codec codec, const uint8_t *scales, const uint8_t *codes, intptr_t n, intptr_t *at)
{
    if (codec == PSD_BF16_CODEC || codec == PSD_FP16_CODEC) {
        *at = psd_first_nonfinite_code(codes, codec == PSD_BF16_CODEC ? 0x7f80 : 0x7c00, n);
        return *at < 0 ? PSD_CODEC_SOUND : PSD_CODEC_VALUE;
    }
    const psd_codec_facts facts = facts_of(codec);
    for (*at = 0; *at < (n + BLOCK - 1) / BLOCK; ++*at) {
        const uint16_t scale = load16(scales, *at);
        if (scale != 0 && (scale < facts.least || scale > facts.most)) /* the sign's bit makes it too large */
            return PSD_CODEC_SCALE;
    }
    *at = padded_wrongly(codec, codes, n);
    return *at < 0 ? PSD_CODEC_SOUND : PSD_CODEC_PADDING;
}
