/* One element in each form: its code, and the number that a code stands for. Everything is inlined where the form is constant.
 *
 * A level times a scale is exact in float: scales are bfloat16, of 8 bits, and levels have at most 7. No scale is so small that
 * a product were subnormal, none so large that one were infinite. Rounding to a whole number is an addition, which rounds to
 * nearest, ties to even: no instruction set does that differently, and all vectorise it.
 */
#ifndef PSD_CODEC_ELEMENTS_H
#define PSD_CODEC_ELEMENTS_H

#include "codec.h"
#include "half_bits.h"

#define MAGNITUDE 0x7fffffffu
#define INFINITE 0x7f800000u
#define WHOLE 12582912.0f /* 1.5 * 2^23: a sum with it is a whole number, which its low bits hold */

typedef struct {
    uint16_t least, most; /* scales beside 0, as bfloat16 */
    int levels;           /* above 0; the largest is `levels` times the scale */
    int per_byte;
} psd_codec_facts;

PSD_INLINE psd_codec_facts facts_of(psd_codec codec)
{
    switch (codec) {
    case PSD_INT8_CODEC:
        return (psd_codec_facts){0x0080, 0x7bff, 127, 1}; /* 2^-126; -128 times the largest is finite */
    case PSD_INT4_CODEC:
        return (psd_codec_facts){0x0080, 0x7dff, 7, 2};
    case PSD_INT4LOG_CODEC:
        return (psd_codec_facts){0x0380, 0x7e80, 1, 2}; /* 2^-120, with levels down to 2^-6; 2^126, whose inverse is normal */
    case PSD_SIGN_CODEC:
        return (psd_codec_facts){0x0080, 0x7f7f, 1, 8};
    default:
        return (psd_codec_facts){0, 0, 0, 0};
    }
}

/* Bytes of codes of whole blocks. */
PSD_INLINE intptr_t bytes_before(psd_codec codec, intptr_t elements)
{
    return facts_of(codec).per_byte ? elements / facts_of(codec).per_byte : 2 * elements;
}

/* The share of a step, less a half, that a random part stands for: unbiased but for 2^-17 of a step. */
PSD_INLINE float jitter(uint16_t noise)
{
    return ((float)(int32_t)noise - 32767.5f) * 0x1p-16f;
}

PSD_INLINE uint16_t to_bfloat16(float x, int is_stochastic, uint16_t noise)
{
    const uint32_t bits = as_bits(x), magnitude = bits & MAGNITUDE;
    const uint32_t rounded = (magnitude + (is_stochastic ? noise : 0x7fffu + (magnitude >> 16 & 1))) >> 16;
    return (uint16_t)((rounded < 0x7f7f ? rounded : 0x7f7f) | (bits >> 16 & 0x8000u));
}

PSD_INLINE uint16_t to_float16(float x, int is_stochastic, uint16_t noise)
{
    const uint32_t bits = as_bits(x), magnitude = bits & MAGNITUDE;
    const uint32_t kept = magnitude < INFINITE ? magnitude : 0; /* a block that is not finite is refused after this */
    const uint32_t moved = kept + (is_stochastic ? noise >> 3u : 0xfffu + (kept >> 13 & 1)) - REBIAS;
    const int32_t normal = (int32_t)moved >> 13;
    /* Below 2^-14 a code is a multiple of 2^-24. The minimum keeps what is not used within range. */
    const float tiny = kept < SMALLEST ? as_float(kept) : 0.0f;
    const float steps = is_stochastic ? tiny * 0x1p24f + jitter(noise) : tiny * 0x1p24f;
    const int32_t subnormal = (int32_t)as_bits(steps + WHOLE) - (int32_t)as_bits(WHOLE);
    const int32_t code = kept < SMALLEST ? subnormal : normal;
    return (uint16_t)((uint32_t)(code < 0x7bff ? code : 0x7bff) | (bits >> 16 & 0x8000u));
}

/* A level of a linear form, from minus `levels` to `levels`. */
PSD_INLINE int32_t linear_level(float x, float inverse, int levels, int is_stochastic, uint16_t noise)
{
    const float steps = is_stochastic ? x * inverse + jitter(noise) : x * inverse;
    const int32_t level = (int32_t)as_bits(steps + WHOLE) - (int32_t)as_bits(WHOLE);
    return level > levels ? levels : level < -levels ? -levels : level;
}

/* A code of 4 bits: the sign, and 0 for 0, or 7 + e for 2^e times the scale, e from -6 to 0. */
PSD_INLINE uint32_t logarithmic_code(float x, float inverse, int is_stochastic, uint16_t noise)
{
    const float share = as_float(as_bits(x) & MAGNITUDE) * inverse;
    const int32_t bits = (int32_t)as_bits(share);
    int32_t code, small;
    if (is_stochastic) {
        /* Between two powers of two, a float's mantissa is the share of the way from one to the other. */
        code = ((bits + ((int32_t)noise << 7) + 64) >> 23) - 120;
        small = share * 0x1p22f > (float)(int32_t)noise + 0.5f;
        code = bits >= 121 << 23 ? code : small;
    } else {
        code = ((bits + 0x400000) >> 23) - 120; /* from 1.5 times a power on, the next one is nearer */
        small = bits >= 120 << 23;              /* half of the least level */
        code = code > small ? code : small;
    }
    code = code < 7 ? code : 7;
    return (uint32_t)code | (code != 0 ? as_bits(x) >> 28 & 8 : 0);
}

PSD_INLINE float logarithmic_value(uint32_t code, float scale)
{
    const uint32_t power = (code & 7) ? ((code & 7) + 120) << 23 : 0;
    return as_float(as_bits(as_float(power) * scale) | (code & 8) << 28);
}

/* The number of the element in one of the places of a byte, of the forms with scales. */
PSD_INLINE float value_in_byte(psd_codec codec, uint8_t byte, int place, float scale)
{
    switch (codec) {
    case PSD_INT8_CODEC:
        return (float)(int8_t)byte * scale;
    case PSD_INT4_CODEC:
        return (float)((int32_t)((byte >> 4 * place & 15) ^ 8) - 8) * scale;
    case PSD_INT4LOG_CODEC:
        return logarithmic_value(byte >> 4 * place & 15, scale);
    default:
        return as_float(as_bits(scale) | (uint32_t)(byte >> place & 1) << 31);
    }
}

PSD_INLINE uint16_t load16(const uint8_t *bytes, intptr_t i)
{
    uint16_t x;
    memcpy(&x, bytes + 2 * i, 2);
    return x;
}

PSD_INLINE void store16(uint8_t *bytes, intptr_t i, uint16_t x)
{
    memcpy(bytes + 2 * i, &x, 2);
}

#endif
