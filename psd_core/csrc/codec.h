/* Compressed forms of arrays of float: docs/design/codecs.md has each, byte by byte.
 *
 * Pure functions on memory that the caller owns; codecs.py checks lengths, types and overlap. What came over a wire is
 * looked at by psd_codec_fault or psd_topk_fault before it is decoded. Numbers in encoded data lie at any address.
 */
#ifndef PSD_CODEC_H
#define PSD_CODEC_H

#include "portable.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "encoded data is little-endian, and so must be the processor"
#endif

/* The forms with a code for each element; codecs.py has the same numbers. */
typedef enum {
    PSD_BF16_CODEC,
    PSD_FP16_CODEC,
    PSD_INT8_CODEC,
    PSD_INT4_CODEC,
    PSD_INT4LOG_CODEC,
    PSD_SIGN_CODEC
} psd_codec;

enum { PSD_CODEC_BLOCK = 256 }; /* elements with a scale of their own */

/* The index of the first element of values + residual that is NaN or infinite, or -1. residual may be NULL. */
intptr_t psd_first_nonfinite_sum(const float *values, const float *residual, intptr_t n);

/* Encodes values + residual; what is lost becomes the residual, which may be NULL: nothing is added, and nothing kept. Without
 * a residual, returns the start of the first block that is not finite, behind which nothing is written, or -1. With one, all
 * sums must be finite. `scales` is where blocks' scales go, which PSD_BF16_CODEC and PSD_FP16_CODEC do not have. */
intptr_t psd_codec_encode(psd_codec, const float *values, float *residual, uint64_t seed, int is_stochastic, uint8_t *scales,
                          uint8_t *codes, intptr_t n);

/* The first flaw of encoded data: its field, and where in this field's array; PSD_CODEC_SOUND if there is none. */
typedef enum { PSD_CODEC_SOUND, PSD_CODEC_SCALE, PSD_CODEC_PADDING, PSD_CODEC_VALUE } psd_codec_field;
psd_codec_field psd_codec_fault(psd_codec, const uint8_t *scales, const uint8_t *codes, intptr_t n, intptr_t *at);

/* out[i] = the number that element i stands for */
void psd_codec_decode(psd_codec, const uint8_t *scales, const uint8_t *codes, float *out, intptr_t n);

/* acc[i] += weight * the number that element i stands for */
void psd_codec_accumulate(psd_codec, const uint8_t *scales, const uint8_t *codes, float *acc, float weight, intptr_t n);

/* Encodes values - before, to nearest; after = before + the numbers of that, with the bits of psd_codec_accumulate. Returns the
 * start of the first block whose difference is not finite, behind which nothing is written, or -1. No two overlap. */
intptr_t psd_codec_follow(psd_codec, const float *values, const float *before, float *after, uint8_t *scales, uint8_t *codes,
                          intptr_t n);

/* The form that has only the k elements of largest magnitude. */

enum { PSD_TOPK_CHUNK = 1 << 16 }; /* elements that one offset of 16 bits reaches */

/* Where the parts of the data lie. */
typedef struct {
    uint8_t *counts;  /* of uint32: entries of each chunk */
    uint8_t *values;  /* k of float */
    uint8_t *offsets; /* k of uint16: places in the chunk, ascending */
} psd_topk_parts;

/* Entries that the scratch arrays of psd_topk_encode have. */
intptr_t psd_topk_room(intptr_t n, intptr_t k);

/* Encodes the k elements of values + residual of largest magnitude, of equal ones those that come first; the others become the
 * residual, which may be NULL. Returns the index of the first sum that is NaN or infinite, with nothing written, or -1.
 * n < 2^32. */
intptr_t psd_topk_encode(const float *values, float *residual, intptr_t n, intptr_t k, psd_topk_parts to,
                         float *scratch_values, uint32_t *scratch_indices);

typedef enum {
    PSD_TOPK_SOUND,
    PSD_TOPK_COUNT,  /* of chunk `at`: more than elements that the chunk has */
    PSD_TOPK_COUNTS, /* their sum, `at`, is not k */
    PSD_TOPK_OFFSET, /* of entry `at`: behind the end of its chunk */
    PSD_TOPK_ORDER,  /* of entry `at`: not above the one before */
    PSD_TOPK_VALUE   /* of entry `at`: not finite */
} psd_topk_field;
psd_topk_field psd_topk_fault(psd_topk_parts from, intptr_t n, intptr_t k, intptr_t *at);

void psd_topk_decode(psd_topk_parts from, float *out, intptr_t n, intptr_t k);

/* Touches only elements that the data has. */
void psd_topk_accumulate(psd_topk_parts from, float *acc, float weight, intptr_t n, intptr_t k);

#endif
