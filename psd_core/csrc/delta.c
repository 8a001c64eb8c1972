#include "delta.h"

enum { CHUNK = PSD_DELTA_CHUNK, SIZE_MAX_ = 8 };

/* What a chunk's elements differ by. */
typedef struct {
    uint8_t planes[SIZE_MAX_][CHUNK];   /* of old xor new, byte by byte */
    intptr_t changed, filled[SIZE_MAX_]; /* elements that have changed; bytes of each plane that are not 0 */
} difference;

static intptr_t bitmap_bytes(intptr_t m) { return (m + 7) / 8; }

/* For each width of an element: its xor, cut into planes, with counts. */
#define DEFINE_DIFFER(size, word)                                                                                          \
    PSD_KERNEL static void differ_##size(const uint8_t *old, const uint8_t *new_, intptr_t m, difference *d)                   \
    {                                                                                                                      \
        word x[CHUNK];                                                                                                     \
        int32_t changed = 0;                                                                                               \
        for (intptr_t i = 0; i < m; i++) {                                                                                 \
            word a, b;                                                                                                     \
            memcpy(&a, old + i * size, size);                                                                              \
            memcpy(&b, new_ + i * size, size);                                                                             \
            x[i] = a ^ b;                                                                                                  \
            changed += x[i] != 0;                                                                                          \
        }                                                                                                                  \
        d->changed = changed;                                                                                              \
        if (!changed)                                                                                                      \
            return;                                                                                                        \
        for (int p = 0; p < size; p++) {                                                                                   \
            int32_t filled = 0;                                                                                            \
            for (intptr_t i = 0; i < m; i++) {                                                                             \
                const uint8_t byte = (uint8_t)(x[i] >> (8 * p));                                                           \
                d->planes[p][i] = byte;                                                                                    \
                filled += byte != 0;                                                                                       \
            }                                                                                                              \
            d->filled[p] = filled;                                                                                         \
        }                                                                                                                  \
    }

DEFINE_DIFFER(1, uint8_t)
DEFINE_DIFFER(2, uint16_t)
DEFINE_DIFFER(4, uint32_t)
DEFINE_DIFFER(8, uint64_t)

static void differ(const uint8_t *old, const uint8_t *new_, intptr_t m, int size, difference *d)
{
    if (size == 1)
        differ_1(old, new_, m, d);
    else if (size == 2)
        differ_2(old, new_, m, d);
    else if (size == 4)
        differ_4(old, new_, m, d);
    else
        differ_8(old, new_, m, d);
}

/* bits[i] = bytes[i] != 0, behind m zeros up to a whole byte */
static void mark(const uint8_t *bytes, intptr_t m, uint8_t *bits)
{
    memset(bits, 0, (size_t)bitmap_bytes(m));
    for (intptr_t i = 0; i < m; i++)
        bits[i >> 3] |= (uint8_t)((bytes[i] != 0) << (i & 7));
}

static intptr_t plane_bytes(const difference *d, int p, intptr_t m)
{
    const intptr_t sparse = bitmap_bytes(m) + d->filled[p];
    return d->filled[p] == 0 ? 0 : sparse < m ? sparse : m;
}

static uint8_t *write_plane(const difference *d, int p, intptr_t m, uint8_t *out)
{
    const uint8_t *plane = d->planes[p];
    const intptr_t nbytes = plane_bytes(d, p, m);
    *out++ = nbytes == 0 ? PSD_PLANE_ZERO : nbytes < m ? PSD_PLANE_SPARSE : PSD_PLANE_WHOLE;
    if (nbytes == m) {
        memcpy(out, plane, (size_t)m);
    } else if (nbytes) {
        mark(plane, m, out);
        uint8_t *to = out + bitmap_bytes(m);
        for (intptr_t i = 0; i < m; i++)
            if (plane[i])
                *to++ = plane[i];
    }
    return out + nbytes;
}

static uint8_t *write_changed(const difference *d, const uint8_t *new_, intptr_t m, int size, uint8_t *out)
{
    uint8_t any[CHUNK];
    memcpy(any, d->planes[0], (size_t)m);
    for (int p = 1; p < size; p++)
        for (intptr_t i = 0; i < m; i++)
            any[i] |= d->planes[p][i];
    mark(any, m, out);
    uint8_t *to = out + bitmap_bytes(m);
    for (intptr_t i = 0; i < m; i++)
        if (any[i]) {
            memcpy(to, new_ + i * size, (size_t)size);
            to += size;
        }
    return to;
}

intptr_t psd_delta_encode(const uint8_t *old, const uint8_t *new_, intptr_t n, int size, uint8_t *out, intptr_t room)
{
    const uint8_t *start = out, *end = out + room;
    difference d;
    for (intptr_t at = 0; at < n; at += CHUNK) {
        const intptr_t m = n - at < CHUNK ? n - at : CHUNK;
        const uint8_t *to = new_ + at * size;
        differ(old + at * size, to, m, size, &d);
        psd_delta_form form = PSD_DELTA_SAME;
        intptr_t nbytes = 0;
        if (d.changed) {
            const intptr_t changed = bitmap_bytes(m) + d.changed * size;
            intptr_t planes = size;
            for (int p = 0; p < size; p++)
                planes += plane_bytes(&d, p, m);
            form = PSD_DELTA_WHOLE, nbytes = m * size;
            if (planes < nbytes)
                form = PSD_DELTA_PLANES, nbytes = planes;
            if (changed < nbytes)
                form = PSD_DELTA_CHANGED, nbytes = changed;
        }
        if (end - out < 1 + nbytes)
            return -1;
        *out++ = (uint8_t)form;
        if (form == PSD_DELTA_CHANGED) {
            out = write_changed(&d, to, m, size, out);
        } else if (form == PSD_DELTA_PLANES) {
            for (int p = 0; p < size; p++)
                out = write_plane(&d, p, m, out);
        } else if (form == PSD_DELTA_WHOLE) {
            memcpy(out, to, (size_t)nbytes);
            out += nbytes;
        }
    }
    return out - start;
}

/* The number of bits of a bitmap of m, or -1 if there is one behind them. */
static intptr_t count_bits(const uint8_t *bits, intptr_t m)
{
    intptr_t count = 0;
    for (intptr_t i = 0; i < bitmap_bytes(m); i++)
        for (unsigned rest = bits[i]; rest; rest &= rest - 1)
            count++;
    return m % 8 && bits[m / 8] >> (m % 8) ? -1 : count;
}

/* What follows a chunk's or a plane's form, with a bitmap before items of `size` bytes: its length, or a flaw as a negative number. */
static intptr_t marked_bytes(const uint8_t *at, const uint8_t *end, intptr_t m, int size)
{
    if (end - at < bitmap_bytes(m))
        return -PSD_DELTA_ENDS;
    const intptr_t count = count_bits(at, m);
    return count < 0 ? -PSD_DELTA_PADDING : bitmap_bytes(m) + count * size;
}

static intptr_t planes_bytes(const uint8_t *at, const uint8_t *end, intptr_t m, int size)
{
    const uint8_t *start = at;
    for (int p = 0; p < size; p++) {
        if (at >= end)
            return -PSD_DELTA_ENDS;
        const uint8_t form = *at++;
        if (form > PSD_PLANE_WHOLE)
            return -PSD_DELTA_PLANE;
        const intptr_t nbytes = form == PSD_PLANE_ZERO ? 0 : form == PSD_PLANE_WHOLE ? m : marked_bytes(at, end, m, 1);
        if (nbytes < 0)
            return nbytes;
        if (end - at < nbytes)
            return -PSD_DELTA_ENDS;
        at += nbytes;
    }
    return at - start;
}

psd_delta_field psd_delta_fault(const uint8_t *delta, intptr_t nbytes, intptr_t n, int size, intptr_t *chunk)
{
    const uint8_t *at = delta, *end = delta + nbytes;
    for (*chunk = 0; *chunk * CHUNK < n; ++*chunk) {
        const intptr_t rest = n - *chunk * CHUNK, m = rest < CHUNK ? rest : CHUNK;
        if (at >= end)
            return PSD_DELTA_ENDS;
        const uint8_t form = *at++;
        if (form > PSD_DELTA_WHOLE)
            return PSD_DELTA_FORM;
        intptr_t length = 0;
        if (form == PSD_DELTA_CHANGED)
            length = marked_bytes(at, end, m, size);
        else if (form == PSD_DELTA_PLANES)
            length = planes_bytes(at, end, m, size);
        else if (form == PSD_DELTA_WHOLE)
            length = m * size;
        if (length < 0)
            return (psd_delta_field)-length;
        if (end - at < length)
            return PSD_DELTA_ENDS;
        at += length;
    }
    return at < end ? PSD_DELTA_BEYOND : PSD_DELTA_SOUND;
}

/* values[i], byte p, ^= plane[i] */
#define DEFINE_FLIP(size, word)                                                                                            \
    PSD_KERNEL static void flip_##size(const uint8_t *plane, int p, uint8_t *values, intptr_t m)                             \
    {                                                                                                                      \
        for (intptr_t i = 0; i < m; i++) {                                                                                 \
            word x;                                                                                                        \
            memcpy(&x, values + i * size, size);                                                                           \
            x ^= (word)((word)plane[i] << (8 * p));                                                                        \
            memcpy(values + i * size, &x, size);                                                                           \
        }                                                                                                                  \
    }

DEFINE_FLIP(1, uint8_t)
DEFINE_FLIP(2, uint16_t)
DEFINE_FLIP(4, uint32_t)
DEFINE_FLIP(8, uint64_t)

static const uint8_t *apply_plane(const uint8_t *at, int p, uint8_t *values, intptr_t m, int size)
{
    const uint8_t form = *at++;
    if (form == PSD_PLANE_WHOLE) {
        if (size == 1)
            flip_1(at, p, values, m);
        else if (size == 2)
            flip_2(at, p, values, m);
        else if (size == 4)
            flip_4(at, p, values, m);
        else
            flip_8(at, p, values, m);
        return at + m;
    }
    if (form == PSD_PLANE_ZERO)
        return at;
    const uint8_t *from = at + bitmap_bytes(m);
    for (intptr_t i = 0; i < m; i += 8)
        for (unsigned rest = at[i >> 3], k = 0; rest; rest >>= 1, k++)
            if (rest & 1)
                values[(i + k) * size + p] ^= *from++;
    return from;
}

static const uint8_t *apply_changed(const uint8_t *at, uint8_t *values, intptr_t m, int size)
{
    const uint8_t *from = at + bitmap_bytes(m);
    for (intptr_t i = 0; i < m; i += 8)
        for (unsigned rest = at[i >> 3], k = 0; rest; rest >>= 1, k++)
            if (rest & 1) {
                memcpy(values + (i + k) * size, from, (size_t)size);
                from += size;
            }
    return from;
}

void psd_delta_apply(const uint8_t *at, uint8_t *values, intptr_t n, int size)
{
    for (intptr_t done = 0; done < n; done += CHUNK, values += CHUNK * size) {
        const intptr_t m = n - done < CHUNK ? n - done : CHUNK;
        switch ((psd_delta_form)*at++) {
        case PSD_DELTA_SAME:
            break;
        case PSD_DELTA_CHANGED:
            at = apply_changed(at, values, m, size);
            break;
        case PSD_DELTA_PLANES:
            for (int p = 0; p < size; p++)
                at = apply_plane(at, p, values, m, size);
            break;
        case PSD_DELTA_WHOLE:
            memcpy(values, at, (size_t)(m * size));
            at += m * size;
            break;
        }
    }
}
