/* What differs between two arrays of as many elements: docs/design/deltas.md has the form, byte by byte.
 *
 * Pure functions on memory that the caller owns; deltas.py checks lengths, types and overlap. What came over a wire is looked at
 * by psd_delta_fault before it is applied. Elements in a delta lie at any address.
 */
#ifndef PSD_DELTA_H
#define PSD_DELTA_H

#include "portable.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "deltas are little-endian, and so must be the processor"
#endif

enum { PSD_DELTA_CHUNK = 4096 }; /* elements that have a form of their own */

/* How a chunk is told. */
typedef enum {
    PSD_DELTA_SAME,    /* nothing has changed, and nothing follows */
    PSD_DELTA_CHANGED, /* a bit for each element, then the changed ones */
    PSD_DELTA_PLANES,  /* of old xor new: for each byte of an element, the lowest first, a plane */
    PSD_DELTA_WHOLE    /* all elements */
} psd_delta_form;

/* How a plane is told. */
typedef enum {
    PSD_PLANE_ZERO,   /* all its bytes are 0, and nothing follows */
    PSD_PLANE_SPARSE, /* a bit for each element, then the bytes that are not 0 */
    PSD_PLANE_WHOLE   /* all bytes */
} psd_plane_form;

/* Writes the delta from `old` to `new`, n elements of `size` bytes (1, 2, 4 or 8), to at most `room` bytes. Returns its length, or -1 if
 * there is not room enough; what lies at `out` is then undefined. */
intptr_t psd_delta_encode(const uint8_t *old, const uint8_t *new_, intptr_t n, int size, uint8_t *out, intptr_t room);

/* The first flaw of a delta of n elements, and the chunk that it is in; PSD_DELTA_SOUND if there is none. */
typedef enum {
    PSD_DELTA_SOUND,
    PSD_DELTA_FORM,    /* of the chunk: none of psd_delta_form */
    PSD_DELTA_PLANE,   /* of one of its planes: none of psd_plane_form */
    PSD_DELTA_PADDING, /* bits behind the chunk's last element that are not 0 */
    PSD_DELTA_ENDS,    /* the delta ends within the chunk */
    PSD_DELTA_BEYOND   /* it goes on behind the last chunk */
} psd_delta_field;
psd_delta_field psd_delta_fault(const uint8_t *delta, intptr_t nbytes, intptr_t n, int size, intptr_t *chunk);

/* Makes `new` of `old`, in place, by a delta in which psd_delta_fault has found nothing. */
void psd_delta_apply(const uint8_t *delta, uint8_t *values, intptr_t n, int size);

#endif
