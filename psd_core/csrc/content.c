/* The sums of content.h. Integers only, so every version of a loop gives the same bits. */
#include "portable.h"

#include "content.h"

#define PSD_KEY 0x9e3779b97f4a7c15u /* odd: no two places have one key, and to multiply by it loses nothing */

PSD_INLINE uint64_t word_at(const char *bytes, size_t i)
{
    uint64_t word;
    memcpy(&word, bytes + 8 * i, 8);
    return word;
}

PSD_INLINE uint64_t product(uint64_t word, uint64_t key)
{
    word ^= key;
    return (word & UINT32_MAX) * (word >> 32);
}

PSD_KERNEL void psd_content_add(psd_content *c, const void *data, size_t nbytes)
{
    const size_t n = nbytes / 8;
    const uint64_t key = (c->count + 1) * PSD_KEY;
    uint64_t words = 0, products = 0;
    for (size_t i = 0; i < n; i++) {
        const uint64_t word = word_at(data, i);
        words += word;
        products += product(word, key + i * PSD_KEY);
    }
    c->count += n;
    if (nbytes % 8) {
        uint64_t word = 0;
        memcpy(&word, (const char *)data + 8 * n, nbytes % 8);
        words += word;
        products += product(word, key + n * PSD_KEY);
        c->count++;
    }
    c->words += words;
    c->products += products;
}

enum { ROW = PSD_PAGE_ROW };

/* Each row is changed first by a key of its place. Else the sums of words that are all alike would tell how many bits these have alone,
 * since the sum of a word's rotations does. first: number of the first row in its piece. */
PSD_INLINE void add_rows(uint64_t *lanes, const char *bytes, size_t first, size_t rows)
{
    for (size_t row = 0; row < rows; row++) {
        const uint64_t key = (first + row + 1) * PSD_KEY;
        for (size_t i = 0; i < PSD_PAGE_LANES; i++) {
            const uint64_t sum = lanes[i] + (word_at(bytes + row * ROW, i) ^ key);
            lanes[i] = sum << 29 | sum >> 35;
        }
    }
}

PSD_KERNEL void psd_page_add(psd_page_sums *sums, const void *data, size_t nbytes)
{
    const char *at = data;
    uint64_t lanes[PSD_PAGE_LANES];
    memcpy(lanes, sums->lanes, sizeof lanes);
    sums->nbytes += nbytes;
    for (; nbytes >= PSD_PAGE_PIECE; nbytes -= PSD_PAGE_PIECE, at += PSD_PAGE_PIECE) {
        add_rows(lanes, at, 0, PSD_PAGE_PIECE / ROW);
        for (size_t i = 0; i < PSD_PAGE_LANES; i++)
            sums->pieces[i] = (sums->pieces[i] + lanes[i]) * PSD_KEY;
    }
    add_rows(lanes, at, 0, nbytes / ROW);
    if (nbytes % ROW) {
        char last[ROW] = {0};
        memcpy(last, at + nbytes / ROW * ROW, nbytes % ROW);
        add_rows(lanes, last, nbytes / ROW, 1);
    }
    memcpy(sums->lanes, lanes, sizeof lanes);
}

PSD_KERNEL void psd_page_stream(psd_page_sums *sums, void *to, const void *from)
{
    add_rows(sums->lanes, from, sums->nbytes % PSD_PAGE_PIECE / ROW, 1);
    for (size_t line = 0; line < ROW; line += 64)
        psd_stream_line((char *)to + line, (const char *)from + line);
    sums->nbytes += ROW;
    for (size_t i = 0; sums->nbytes % PSD_PAGE_PIECE == 0 && i < PSD_PAGE_LANES; i++)
        sums->pieces[i] = (sums->pieces[i] + sums->lanes[i]) * PSD_KEY;
}

uint64_t psd_page_check(const psd_page_sums *sums)
{
    psd_content all = {0};
    psd_content_add(&all, sums, sizeof *sums);
    return psd_content_check(&all);
}
