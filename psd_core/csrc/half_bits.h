/* Meaning of the bits of float, float16 (IEEE binary16) and bfloat16 (the upper half of a float).
 *
 * Widening is integer arithmetic and one subtraction, without branches: compilers vectorise it for any instruction set, and no
 * operation has a subnormal float in it, so that neither its cost nor its result depends on the processor's mode.
 */
#ifndef PSD_HALF_BITS_H
#define PSD_HALF_BITS_H

#include "portable.h"

PSD_INLINE float as_float(uint32_t bits)
{
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

PSD_INLINE uint32_t as_bits(float number)
{
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

PSD_INLINE float from_bfloat16(uint16_t half)
{
    return as_float((uint32_t)half << 16);
}

#define REBIAS 0x38000000     /* from float16's bias, 15, to float's, 127, in the place of float's exponent */
#define SMALLEST 0x38800000   /* 2^-14, float16's smallest normal number, as a float */
#define FIRST_BEYOND 0x47800000 /* 2^16, where infinity and the NaNs lie when only rebiased */

/* Let N be the bits moved to where float has them, and rebiased. For a normal number that is all. For a subnormal one N is
 * 2^-15 + x / 2 instead of x, so x is 2 N - 2^-14; and as that is less than N there and not less elsewhere, the minimum is right
 * everywhere. The exponent of all ones is then rebiased once more, to float's. */
PSD_INLINE float from_float16(uint16_t half)
{
    const uint32_t extended = (uint32_t)(int16_t)half; /* the sign is where float has it, too */
    const int32_t moved = (int32_t)(extended << 13 & 0x0fffe000u);
    const float n = as_float((uint32_t)(moved + REBIAS)), other = as_float((uint32_t)(moved + SMALLEST)) - as_float(SMALLEST);
    const int32_t finite = (int32_t)as_bits(other < n ? other : n);
    return as_float((uint32_t)(finite + (finite >= FIRST_BEYOND ? REBIAS : 0)) | (extended & 0x80000000u));
}

#endif
