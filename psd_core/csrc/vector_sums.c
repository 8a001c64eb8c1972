/* Exact sums, as integers in units of 2^-1074: so the order in which partial results come, and how many there are, cannot matter. */
#include "portable.h"
#include "vector.h"

#define ONE_LIMB (1074 / 32)
#define ONE_BIT (1074 % 32)

void psd_exact_add(psd_exact *sum, double number)
{
    uint64_t bits;
    memcpy(&bits, &number, sizeof bits);
    const uint64_t exponent = bits >> 52 & 0x7ff, fraction = bits & (((uint64_t)1 << 52) - 1);
    const int64_t sign = bits >> 63 ? -1 : 1;
    if (exponent == 0x7ff) {
        sum->flags |= fraction ? 1 : sign > 0 ? 2 : 4;
        return;
    }
    const uint64_t mantissa = fraction | (uint64_t)(exponent != 0) << 52, shift = exponent ? exponent - 1 : 0;
    const uint64_t low = (mantissa & UINT32_MAX) << (shift & 31), high = (mantissa >> 32) << (shift & 31);
    int64_t *const at = sum->limbs + (shift >> 5);
    at[0] += sign * (int64_t)(low & UINT32_MAX);
    at[1] += sign * (int64_t)((low >> 32) + (high & UINT32_MAX));
    at[2] += sign * (int64_t)(high >> 32);
}

void psd_exact_add_words(psd_exact *sum, uint64_t low, uint64_t middle, int64_t high)
{
    const uint64_t words[] = {low, middle};
    int64_t *at = sum->limbs + ONE_LIMB;
    for (int i = 0; i < 4; i++) {
        const uint64_t half = (words[i / 2] >> (32 * (i % 2)) & UINT32_MAX) << ONE_BIT;
        at[i] += (int64_t)(half & UINT32_MAX);
        at[i + 1] += (int64_t)(half >> 32);
    }
    at[4] += high * ((int64_t)1 << ONE_BIT); /* of a stripe: less than 2^12 */
}

void psd_exact_carry(psd_exact *sum)
{
    for (int i = 0; i + 1 < PSD_EXACT_LIMBS; i++) {
        const int64_t low = sum->limbs[i] & UINT32_MAX;
        sum->limbs[i + 1] += (sum->limbs[i] - low) / ((int64_t)1 << 32);
        sum->limbs[i] = low;
    }
}

static int is_beyond(const psd_vector_op *op, const psd_extreme *a, const psd_extreme *b)
{
    if (op->dtype == PSD_V_I64)
        return op->code == PSD_V_MAX ? a->value.i > b->value.i : a->value.i < b->value.i;
    if (b->value.f != b->value.f)
        return 0;
    return a->value.f != a->value.f || (op->code == PSD_V_MAX ? a->value.f > b->value.f : a->value.f < b->value.f);
}

void psd_vector_fold(const psd_vector_op *op, const psd_vector_partial *partials, uint64_t stride, uint64_t stripes, psd_vector_sum *sum)
{
    for (uint64_t k = 0; k < stripes; k++) {
        const psd_vector_partial *const p = partials + k * stride;
        if (op->code == PSD_V_MIN || op->code == PSD_V_MAX) {
            if (sum->extreme.index < 0 || is_beyond(op, &p->extreme, &sum->extreme))
                sum->extreme = p->extreme;
        } else if (op->dtype == PSD_V_I64)
            psd_exact_add_words(&sum->exact, p->wide.low, p->wide.middle, p->wide.high);
        else
            psd_exact_add(&sum->exact, p->f);
    }
    if (op->code != PSD_V_MIN && op->code != PSD_V_MAX)
        psd_exact_carry(&sum->exact);
}

/* As reductions.py reads it: kind, flags, first limb, limbs; then the limbs of a number in two's complement. Or value and index. */
uint64_t psd_vector_pack(const psd_vector_op *op, const psd_vector_sum *sum, char *out)
{
    uint8_t *const head = (uint8_t *)out;
    if (op->code == PSD_V_MIN || op->code == PSD_V_MAX) {
        head[0] = 1;
        head[1] = (uint8_t)((op->code == PSD_V_MAX ? 1 : 0) | (op->dtype == PSD_V_I64 ? 2 : 0));
        head[2] = head[3] = 0;
        memcpy(out + 4, &sum->extreme.index, 8);
        memcpy(out + 12, &sum->extreme.value, 8);
        return 20;
    }
    const int64_t *const limbs = sum->exact.limbs; /* carried: all but the last one are from 0 to 2^32 - 1 */
    const int64_t rest = limbs[PSD_EXACT_LIMBS - 1] < 0 ? UINT32_MAX : 0;
    int first = 0, end = PSD_EXACT_LIMBS;
    while (first < end && limbs[first] == 0)
        first++;
    while (end > first + 1 && (limbs[end - 1] & UINT32_MAX) == rest && (limbs[end - 2] >> 31 & 1) == (rest & 1))
        end--;
    head[0] = 0;
    head[1] = (uint8_t)sum->exact.flags;
    head[2] = (uint8_t)first;
    head[3] = (uint8_t)(end - first);
    for (int i = first; i < end; i++) {
        const uint32_t limb = (uint32_t)limbs[i];
        memcpy(out + 4 + 4 * (i - first), &limb, 4);
    }
    return 4 + 4 * (uint64_t)(end - first);
}
