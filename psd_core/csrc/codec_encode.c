/* Encoding, block by block: scale, codes and what is lost, bytes. All of a block stays in the first cache.
 *
 * Each phase is a loop over a whole block without branches. A last block that is shorter is filled up with zeros, whose codes
 * are 0 and do not count.
 */
#include "codec_elements.h"
#include "mix.h"

enum { BLOCK = PSD_CODEC_BLOCK };

typedef union {
    uint64_t words[BLOCK / 4];
    uint16_t parts[BLOCK];
} noise_t;

/* Random numbers for a block: word j of SplitMix64 from the state `key` on has 16 bits for each of elements 4 j to 4 j + 3. */
PSD_INLINE void make_noise(noise_t *noise, uint64_t key, intptr_t begin)
{
    const uint64_t first = (uint64_t)begin / 4 + 1;
    PSD_ROLLED
    for (uint64_t j = 0; j < BLOCK / 4; j++)
        noise->words[j] = psd_mix(key + (first + j) * 0x9e3779b97f4a7c15u);
}

/* An element, and what was left of it. Computed where it is used: to keep a block of sums was measured to be slower. */
PSD_INLINE float sum_of(const float *values, const float *residual, intptr_t i)
{
    return residual ? values[i] + residual[i] : values[i];
}

PSD_INLINE uint32_t largest(const float *values, const float *residual)
{
    int32_t most = 0;
    PSD_ROLLED
    for (int i = 0; i < BLOCK; i++) {
        const int32_t magnitude = (int32_t)(as_bits(sum_of(values, residual, i)) & MAGNITUDE);
        most = magnitude > most ? magnitude : most;
    }
    return (uint32_t)most;
}

/* The mean magnitude of the first n elements, the others being zeros: added in 16 lanes, which are then folded. */
PSD_INLINE float mean_magnitude(const float *values, const float *residual, intptr_t n)
{
    double lanes[16] = {0};
    for (int i = 0; i < BLOCK; i += 16)
        for (int j = 0; j < 16; j++)
            lanes[j] += (double)as_float(as_bits(sum_of(values, residual, i + j)) & MAGNITUDE);
    for (int width = 8; width; width /= 2)
        for (int j = 0; j < width; j++)
            lanes[j] += lanes[j + width];
    return (float)(lanes[0] / (double)n);
}

/* The scale of a block. Those of levels are rounded up, so that no element is beyond the last level. */
PSD_INLINE uint16_t scale_of(psd_codec codec, const float *values, const float *residual, uint32_t most, intptr_t n)
{
    const psd_codec_facts facts = facts_of(codec);
    if (codec == PSD_SIGN_CODEC) {
        const uint16_t scale = to_bfloat16(mean_magnitude(values, residual, n), 0, 0);
        return scale < facts.least ? 0 : scale;
    }
    const uint32_t scale = (as_bits(as_float(most) / (float)facts.levels) + 0xffff) >> 16;
    return most == 0 ? 0 : (uint16_t)(scale < facts.least ? facts.least : scale > facts.most ? facts.most : scale);
}

/* Codes of a block with a scale, a byte for each; what is lost becomes the residual, which may be NULL. */
PSD_INLINE void code_block(psd_codec codec, const float *values, float *residual, float scale, int is_stochastic,
                           const noise_t *noise, uint8_t *codes)
{
    const int levels = facts_of(codec).levels;
    const float inverse = scale > 0 ? 1 / scale : 0;
    PSD_ELEMENTWISE
    PSD_ROLLED
    for (int i = 0; i < BLOCK; i++) {
        const float x = sum_of(values, residual, i);
        const uint16_t part = is_stochastic ? noise->parts[i] : 0;
        float value;
        if (codec == PSD_SIGN_CODEC) {
            codes[i] = (uint8_t)(as_bits(x) >> 31);
            value = value_in_byte(codec, codes[i], 0, scale);
        } else if (codec == PSD_INT4LOG_CODEC) {
            const uint32_t code = logarithmic_code(x, inverse, is_stochastic, part);
            codes[i] = (uint8_t)code;
            value = logarithmic_value(code, scale);
        } else {
            const int32_t level = linear_level(x, inverse, levels, is_stochastic, part);
            codes[i] = (uint8_t)level;
            value = (float)level * scale;
        }
        if (residual)
            residual[i] = x - value;
    }
}

PSD_INLINE void code_half(psd_codec codec, const float *values, float *residual, int is_stochastic, const noise_t *noise,
                          uint16_t *codes)
{
    PSD_ELEMENTWISE
    PSD_ROLLED
    for (int i = 0; i < BLOCK; i++) {
        const float x = sum_of(values, residual, i);
        const uint16_t part = is_stochastic ? noise->parts[i] : 0;
        codes[i] = codec == PSD_BF16_CODEC ? to_bfloat16(x, is_stochastic, part) : to_float16(x, is_stochastic, part);
        if (residual)
            residual[i] = x - (codec == PSD_BF16_CODEC ? from_bfloat16(codes[i]) : from_float16(codes[i]));
    }
}

/* Byte k of w has the codes k, k + w, k + 2 w, ..., the first in its lowest bits: each place is a run of elements. */
PSD_INLINE void pack(psd_codec codec, const uint8_t *codes, uint8_t *bytes, intptr_t n)
{
    const int per_byte = facts_of(codec).per_byte, bits = 8 / per_byte;
    const intptr_t w = (n + per_byte - 1) / per_byte;
    for (intptr_t k = 0; k < w; k++) {
        uint32_t byte = 0;
        for (int place = 0; place < per_byte; place++)
            byte |= (uint32_t)(codes[place * w + k] & ((1 << bits) - 1)) << bits * place;
        bytes[k] = (uint8_t)byte;
    }
}

static void pack_rest(psd_codec codec, const uint8_t *codes, uint8_t *bytes, intptr_t n)
{
    pack(codec, codes, bytes, n);
}

/* One block, of which n elements count: its scale and its bytes. Returns 0 if an element is not finite. */
PSD_INLINE int encode_block(psd_codec codec, const float *values, float *residual, const noise_t *noise, uint8_t *scale,
                            uint8_t *to, intptr_t n)
{
    const int is_stochastic = noise != NULL;
    const uint32_t most = largest(values, residual);
    if (most >= INFINITE)
        return 0;
    if (codec == PSD_BF16_CODEC || codec == PSD_FP16_CODEC) {
        _Alignas(64) uint16_t codes[BLOCK];
        code_half(codec, values, residual, is_stochastic, noise, codes);
        memcpy(to, codes, 2 * (size_t)n);
        return 1;
    }
    _Alignas(64) uint8_t codes[BLOCK];
    const uint16_t bits = scale_of(codec, values, residual, most, n);
    store16(scale, 0, bits);
    code_block(codec, values, residual, from_bfloat16(bits), is_stochastic, noise, codes);
    if (n == BLOCK)
        pack(codec, codes, to, BLOCK);
    else
        pack_rest(codec, codes, to, n);
    return 1;
}

#define ARGUMENTS const float *values, float *residual, uint64_t key, uint8_t *scales, uint8_t *codes, intptr_t n

PSD_INLINE intptr_t encode_all(psd_codec codec, int is_stochastic, ARGUMENTS)
{
    _Alignas(64) noise_t noise;
    _Alignas(64) float last_values[BLOCK], last_residual[BLOCK];
    for (intptr_t begin = 0; begin < n; begin += BLOCK) {
        const float *x = values + begin;
        float *lost = residual ? residual + begin : NULL;
        const intptr_t count = n - begin < BLOCK ? n - begin : BLOCK;
        if (count < BLOCK) {
            memset(last_values, 0, sizeof last_values);
            memset(last_residual, 0, sizeof last_residual);
            memcpy(last_values, x, (size_t)count * sizeof *x);
            x = last_values;
            if (residual) {
                memcpy(last_residual, lost, (size_t)count * sizeof *lost);
                lost = last_residual;
            }
        }
        if (is_stochastic)
            make_noise(&noise, key, begin);
        const noise_t *const random = is_stochastic ? &noise : NULL;
        uint8_t *const scale = scales + begin / BLOCK * 2, *const to = codes + bytes_before(codec, begin);
        /* NULL is a constant in the second one. */
        if (!(lost ? encode_block(codec, x, lost, random, scale, to, count)
                   : encode_block(codec, x, NULL, random, scale, to, count)))
            return begin;
        if (lost == last_residual)
            memcpy(residual + begin, last_residual, (size_t)count * sizeof *lost);
    }
    return -1;
}

#define PSD_ENCODER(name, codec)                                                                                              \
    static PSD_KERNEL intptr_t psd_encode_##name##_nearest(ARGUMENTS)                                                         \
    {                                                                                                                         \
        return encode_all(codec, 0, values, residual, key, scales, codes, n);                                                 \
    }                                                                                                                         \
    static PSD_KERNEL intptr_t psd_encode_##name##_stochastic(ARGUMENTS)                                                      \
    {                                                                                                                         \
        return encode_all(codec, 1, values, residual, key, scales, codes, n);                                                 \
    }

PSD_ENCODER(bf16, PSD_BF16_CODEC)
PSD_ENCODER(fp16, PSD_FP16_CODEC)
PSD_ENCODER(int8, PSD_INT8_CODEC)
PSD_ENCODER(int4, PSD_INT4_CODEC)
PSD_ENCODER(int4log, PSD_INT4LOG_CODEC)

static PSD_KERNEL intptr_t psd_encode_sign(ARGUMENTS)
{
    return encode_all(PSD_SIGN_CODEC, 0, values, residual, key, scales, codes, n);
}

typedef intptr_t encoder(ARGUMENTS);

static encoder *const ENCODERS[][2] = {
    [PSD_BF16_CODEC] = {psd_encode_bf16_nearest, psd_encode_bf16_stochastic},
    [PSD_FP16_CODEC] = {psd_encode_fp16_nearest, psd_encode_fp16_stochastic},
    [PSD_INT8_CODEC] = {psd_encode_int8_nearest, psd_encode_int8_stochastic},
    [PSD_INT4_CODEC] = {psd_encode_int4_nearest, psd_encode_int4_stochastic},
    [PSD_INT4LOG_CODEC] = {psd_encode_int4log_nearest, psd_encode_int4log_stochastic},
    [PSD_SIGN_CODEC] = {psd_encode_sign, psd_encode_sign},
};

intptr_t psd_codec_encode(psd_codec codec, const float *values, float *residual, uint64_t seed, int is_stochastic,
                          uint8_t *scales, uint8_t *codes, intptr_t n)
{
    /* Mixed, so that seeds that are near each other have streams far from each other. */
    return ENCODERS[codec][is_stochastic != 0](values, residual, psd_mix(seed), scales, codes, n);
}

PSD_KERNEL intptr_t psd_first_nonfinite_sum(const float *values, const float *residual, intptr_t n)
{
    for (intptr_t begin = 0; begin < n; begin += BLOCK) {
        const intptr_t end = n - begin < BLOCK ? n : begin + BLOCK;
        uint32_t found = 0;
        if (residual)
            for (intptr_t i = begin; i < end; i++)
                found |= (as_bits(values[i] + residual[i]) & INFINITE) == INFINITE;
        else
            for (intptr_t i = begin; i < end; i++)
                found |= (as_bits(values[i]) & INFINITE) == INFINITE;
        if (found)
            for (intptr_t i = begin; i < end; i++)
                if ((as_bits(residual ? values[i] + residual[i] : values[i]) & INFINITE) == INFINITE)
                    return i;
    }
    return -1;
}
