/* The sums of content.h. One plain loop: integers only, so every version of it gives the same bits. */
#include "portable.h"

#include "content.h"

#define PSD_KEY 0x9e3779b97f4a7c15u /* odd, so no two places have one key */

PSD_INLINE uint64_t product(uint64_t word, uint64_t key)
{
    word ^= key;
    return (word & UINT32_MAX) * (word >> 32);
}

PSD_KERNEL void psd_content_add(psd_content *c, const void *data, size_t nbytes)
{
    const char *const bytes = data;
    const size_t n = nbytes / 8;
    const uint64_t key = (c->count + 1) * PSD_KEY;
    uint64_t words = 0, products = 0;
    for (size_t i = 0; i < n; i++) {
        uint64_t word;
        memcpy(&word, bytes + 8 * i, 8);
        words += word;
        products += product(word, key + i * PSD_KEY);
    }
    c->count += n;
    if (nbytes % 8) {
        uint64_t word = 0;
        memcpy(&word, bytes + 8 * n, nbytes % 8);
        words += word;
        products += product(word, key + n * PSD_KEY);
        c->count++;
    }
    c->words += words;
    c->products += products;
}
