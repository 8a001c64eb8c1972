/* The pages of a small block: a ring of places in an arena's mapping, of which one is current and others are read. */
#include "portable.h"

#include <stdlib.h>

#include "arena.h"
#include "block.h"
#include "content.h"

enum { HEAD_WORDS = 8, ENTRY_CHECK_BITS = 24, PAGES_FIRST = 8 };
static const uint64_t PAGE_MAGIC = 0x3145474150445350u; /* "PSDPAGE1" */

static int is_used_as(const psd_block *b, int64_t page, uint64_t use, psd_page_state state)
{
    return page >= 0 && page < b->pages && b->page[page].use == use && b->page[page].state == state;
}

int64_t psd_block_lend(psd_block *b, uint64_t *head, char *body, uint64_t number, uint64_t body_number)
{
    int64_t at = 0;
    pthread_mutex_lock(&b->ring);
    while (at < b->pages && b->page[at].state != PSD_NO_PAGE)
        at++;
    if (at == b->pages) {
        const int64_t pages = b->pages ? 2 * b->pages : PAGES_FIRST;
        psd_page *const more = calloc((size_t)pages, sizeof *more);
        if (!more) {
            pthread_mutex_unlock(&b->ring);
            return -1;
        }
        /* An update may be under way without `ring`, and read the old array: that stays, and is not written to any more but for the
         * content of a spare, which is then computed again. */
        if (b->page) {
            memcpy(more, b->page, (size_t)b->pages * sizeof *more);
            b->retired[b->retirements++] = b->page;
        }
        b->page = more, b->pages = pages;
    }
    psd_page *const p = &b->page[at];
    p->head = head, p->sessions = head + HEAD_WORDS, p->clocks = p->sessions + b->workers, p->steps = p->clocks + b->workers;
    p->body = body, p->number = number, p->body_number = body_number, p->state = PSD_FREE;
    /* Equal values have equal checksums, whatever has lain in this place before; nothing is written there from now on. */
    const size_t used = b->n * b->item, arrays = b->stride ? b->body_words * 8 / b->stride : 0;
    for (size_t i = 0; i < arrays && !body_number; i++)
        memset(body + i * b->stride + used, 0, b->stride - used);
    pthread_mutex_unlock(&b->ring);
    return at;
}

int64_t psd_block_surplus(psd_block *b, int64_t kept)
{
    int64_t found = -1, last = -1, free_pages = 0;
    pthread_mutex_lock(&b->ring);
    for (int64_t i = 0; i < b->pages; i++)
        if (b->page[i].state == PSD_FREE) {
            if (b->page[i].body_number)
                found = i;
            last = i, free_pages++;
        }
    if (found < 0 && free_pages > kept)
        found = last;
    if (found >= 0)
        b->page[found].state = PSD_NO_PAGE, b->page[found].use++;
    pthread_mutex_unlock(&b->ring);
    return found;
}

void psd_block_adopt(psd_block *b, int64_t page, uint64_t version, uint64_t content)
{
    pthread_mutex_lock(&b->ring);
    psd_page *const p = &b->page[page];
    p->version = version, p->content = content, p->pins = 1, p->state = PSD_PUBLISHED;
    b->current = page;
    pthread_mutex_unlock(&b->ring);
}

int64_t psd_block_spare(psd_block *b, psd_outcome *why)
{
    int64_t found = -1;
    *why = PSD_NEEDS_PAGE;
    pthread_mutex_lock(&b->ring);
    for (int64_t i = 0; i < b->pages && found < 0; i++)
        if (b->page[i].state == PSD_FREE && !b->page[i].body_number)
            found = i;
    if (b->is_closed)
        found = -1, *why = PSD_STORE_CLOSED;
    if (found >= 0)
        b->page[found].state = PSD_SPARE, b->page[found].content = 0;
    pthread_mutex_unlock(&b->ring);
    return found;
}

static void let_go(psd_page *p)
{
    if (--p->pins == 0)
        p->state = PSD_FREE, p->use++;
}

psd_outcome psd_block_publish(psd_block *b, int64_t spare, uint64_t version)
{
    psd_page *const p = &b->page[spare];
    uint64_t *const h = p->head;
    if (!p->content) {
        psd_page_sums sums;
        memset(&sums, 0, sizeof sums);
        psd_page_add(&sums, p->body, b->body_words * 8);
        p->content = psd_page_check(&sums);
    }
    if (b->on_store && b->on_store(b->context, "arena.publish.before_header"))
        return PSD_STOPPED;
    h[1] = PAGE_MAGIC, h[2] = b->index, h[3] = p->number, h[4] = version, h[5] = b->head_words, h[6] = p->content, h[7] = 0;
    h[0] = psd_checksum(h + 1, b->head_words - 1);
    if (b->on_store && b->on_store(b->context, "arena.publish.before_flip"))
        return PSD_STOPPED;
    pthread_mutex_lock(&b->ring);
    if (b->is_closed) {
        p->state = PSD_FREE, p->use++;
        pthread_mutex_unlock(&b->ring);
        return PSD_GIVEN_BACK;
    }
    p->version = version, p->state = PSD_PUBLISHED, p->pins = 1;
    psd_store_release(b->entry, p->number << ENTRY_CHECK_BITS | (h[0] & ((1u << ENTRY_CHECK_BITS) - 1)));
    /* Until here, a reader could still pin the old page: it was whole, and free it is only from here on. */
    if (b->current >= 0)
        let_go(&b->page[b->current]);
    b->current = spare;
    pthread_mutex_unlock(&b->ring);
    return b->on_store && b->on_store(b->context, "arena.publish.after_flip") ? PSD_STOPPED : PSD_COUNTED;
}

int psd_block_discard(psd_block *b, int64_t page, uint64_t use)
{
    pthread_mutex_lock(&b->ring);
    const int is_spare = is_used_as(b, page, use, PSD_SPARE);
    if (is_spare)
        b->page[page].state = PSD_FREE, b->page[page].use++;
    pthread_mutex_unlock(&b->ring);
    return is_spare ? 0 : -1;
}

int64_t psd_block_pin(psd_block *b, psd_outcome *why)
{
    pthread_mutex_lock(&b->ring);
    *why = b->current < 0 ? PSD_NEEDS_PAGE : PSD_STORE_CLOSED;
    const int64_t found = b->is_closed ? -1 : b->current;
    if (found >= 0)
        b->page[found].pins++;
    pthread_mutex_unlock(&b->ring);
    return found;
}

int psd_block_unpin(psd_block *b, int64_t page, uint64_t use)
{
    pthread_mutex_lock(&b->ring);
    const int is_pinned = is_used_as(b, page, use, PSD_PUBLISHED);
    if (is_pinned)
        let_go(&b->page[page]);
    pthread_mutex_unlock(&b->ring);
    return is_pinned ? 0 : -1;
}

int64_t psd_block_pins(psd_block *b, int64_t page, uint64_t use)
{
    pthread_mutex_lock(&b->ring);
    const int64_t pins = is_used_as(b, page, use, PSD_PUBLISHED) ? b->page[page].pins : 0;
    pthread_mutex_unlock(&b->ring);
    return pins;
}

psd_page_state psd_block_state(psd_block *b, int64_t page, uint64_t use)
{
    pthread_mutex_lock(&b->ring);
    const psd_page_state state = b->page[page].use == use ? b->page[page].state : PSD_FREE;
    pthread_mutex_unlock(&b->ring);
    return state;
}

int64_t psd_block_stop(psd_block *b)
{
    int64_t held = 0;
    pthread_mutex_lock(&b->ring);
    for (int64_t i = 0; i < b->pages && !b->is_closed; i++)
        held += b->page[i].state == PSD_SPARE ? 1 : b->page[i].state == PSD_PUBLISHED ? b->page[i].pins - (i == b->current) : 0;
    b->is_closed = 1;
    pthread_mutex_unlock(&b->ring);
    return held;
}
