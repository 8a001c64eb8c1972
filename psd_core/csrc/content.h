/* Checksums of what a store holds, quick enough to be made anew with each push. Against decay, not forgery; part of the stores' formats.
 * A change goes unseen once in 2^64 times or so. */
#ifndef PSD_CONTENT_H
#define PSD_CONTENT_H

#include <stddef.h>
#include <stdint.h>

#include "mix.h"

/* Of few bytes, such as a row: 10 ns for 256. Two sums over the words: of the words themselves; and of the products of their halves,
 * each word being changed first by a key of its place, so that words which change places show, too (the inner product of Black et
 * al. 1999, "UMAC", as in XXH3). */
typedef struct {
    uint64_t words, products;
    uint64_t count; /* of words so far */
} psd_content; /* begins as zeros */

/* Goes on with more bytes; what is missing to a whole word counts as zeros. */
void psd_content_add(psd_content *, const void *data, size_t nbytes);

/* The checksum of all that was added; never 0, so that a store can say by 0 that there is none. */
static inline uint64_t psd_content_check(const psd_content *c)
{
    const uint64_t check = psd_mix(c->products + psd_mix(c->words + psd_mix(c->count)));
    return check ? check : 1;
}

/* Of many bytes, such as a page: 100 GB/s from the cache, twice as quick. Word i, changed by a key of its place, is added to lane i % 32, which is
 * then rotated; every 8 KiB the lanes are added to others, which are multiplied, since rotation alone comes round after 16 KiB. */
enum { PSD_PAGE_LANES = 32, PSD_PAGE_PIECE = 8192 };
typedef struct {
    uint64_t lanes[PSD_PAGE_LANES], pieces[PSD_PAGE_LANES];
    uint64_t nbytes;
} psd_page_sums; /* begins as zeros */

/* Goes on with more bytes, a multiple of PSD_PAGE_PIECE but for the last ones. */
void psd_page_add(psd_page_sums *, const void *data, size_t nbytes);

/* Goes on with PSD_PAGE_ROW bytes that are copied from one place to another, past the caches: rows of whole pieces alone, one after the
 * other. Both addresses are multiples of 64. After the last one, PSD_STREAMED. */
enum { PSD_PAGE_ROW = 8 * PSD_PAGE_LANES };
void psd_page_stream(psd_page_sums *, void *to, const void *from);
uint64_t psd_page_check(const psd_page_sums *); /* never 0 */

#endif
