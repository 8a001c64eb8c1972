/* Template over `real`: how any rule is driven over a block.
 *
 *   block -> runs of segments that need the same treatment -> tiles that fit in the L1 cache, if there is something to reduce or widen
 *   tile:  widen grad, if it is half; reduce (g = scale * (acc + weight * grad)); then the rule (param, slots, g -> param, slots)
 *
 * A rule is a file rule_<name>.h, which has
 *   FN(<name>)               a struct of constants
 *   PSD_PREPARE(<name>)      sets them, `k`, once per run from the scalars and flags `h` and the step; double until it is assigned
 *   PSD_TILE(<name>)         the arithmetic on one tile; it reads element i of its inputs before it writes element i of its outputs,
 *                            which may be the same arrays
 *   <NAME>_STEPS_ALIKE_FROM  all steps from this one on are alike to the rule: longer runs
 * The split costs nothing: the reduced gradient never leaves L1, and memory sets the pace.
 */

typedef struct {
    int slot_count;
    uint64_t steps_alike_from;
    void (*prepare)(const psd_hyper *, uint64_t step, void *k);
    void (*tile)(const real *p_in, real *p_out, const real *g_in, const real *const *slots_in, real *const *slots_out,
                 intptr_t n, const void *k);
} FN(rule);

#define PSD_ARRAYS const real *p_in, real *p_out, const real *g_in, const real *const *slots_in, real *const *slots_out, intptr_t n
#define PSD_PASSED p_in, p_out, g_in, slots_in, slots_out, n, k

#define PSD_PREPARE(name)                                                                     \
    static void FN(name##_set)(const psd_##name *h, uint64_t step, FN(name) *k);              \
    static void FN(name##_prepare)(const psd_hyper *hyper, uint64_t step, void *k)            \
    {                                                                                         \
        FN(name##_set)(&hyper->name, step, k);                                                \
    }                                                                                         \
    static void FN(name##_set)(const psd_##name *h, uint64_t step, FN(name) *k)

#define PSD_TILE(name)                                                                        \
    PSD_INLINE void FN(name##_step)(PSD_ARRAYS, const FN(name) *k);                           \
    PSD_KERNEL void FN(psd_##name##_tile)(PSD_ARRAYS, const void *k)                          \
    {                                                                                         \
        FN(name##_step)(PSD_PASSED);                                                          \
    }                                                                                         \
    PSD_INLINE void FN(name##_step)(PSD_ARRAYS, const FN(name) *k)

/* The loop of a tile with arguments that are constants where it is inlined: each of its forms is a loop without branches. */
#define PSD_LOOP(name, ...) PSD_INLINE void FN(name##_loop)(PSD_ARRAYS, const FN(name) *k, __VA_ARGS__)

/* The tile of a rule whose loop has two forms, without weight decay in the gradient and with it. */
#define PSD_TILE_BY_DECAY(name)                                                               \
    PSD_TILE(name)                                                                            \
    {                                                                                         \
        if (k->decays)                                                                        \
            FN(name##_loop)(PSD_PASSED, 1);                                                   \
        else                                                                                  \
            FN(name##_loop)(PSD_PASSED, 0);                                                   \
    }

/* The gradient that a rule descends along: of the other sign to climb, and with the weight decay in it. */
PSD_INLINE real FN(directed)(real g, real sign, real p, real weight_decay, int decays)
{
    g = sign * g;
    return decays ? g + weight_decay * p : g;
}

/* The way from a to b by the share w, rounded as torch does it: w = 1 ends at b exactly. */
PSD_INLINE real FN(lerp)(real a, real b, real w)
{
    return w < (real)0.5 ? a + w * (b - a) : b - (b - a) * (1 - w);
}

/* A parameter that goes past the caches is made in a tile that does not, a row of its sums: with tiles of 1 KiB a sum of two gradients
 * was a quarter slower. Elements before `whole`, those of whole pieces, go this way, if the parameter begins with a line; the others are
 * written where they lie. */
#define STAGED_TILE ((intptr_t)(PSD_PAGE_ROW / sizeof(real)))
typedef struct {
    _Alignas(64) real tile[PSD_PAGE_ROW / sizeof(real)];
    intptr_t whole;
} FN(stage);

PSD_INLINE void FN(begin_stage)(FN(stage) *stage, const psd_arrays *a, intptr_t n)
{
    const intptr_t piece = PSD_PAGE_PIECE / sizeof(real);
    stage->whole = a->sums && (uintptr_t)a->param_out % 64 == 0 ? n / piece * piece : 0;
    if (a->sums)
        memset(a->sums, 0, sizeof *a->sums);
}

/* Where element `begin` and what follows in its tile are made. */
PSD_INLINE real *FN(made_at)(FN(stage) *stage, const psd_arrays *a, intptr_t begin)
{
    return begin < stage->whole ? stage->tile + begin % STAGED_TILE : (real *)a->param_out + begin;
}

/* The elements up to `end` have been made. */
PSD_INLINE void FN(made)(const FN(stage) *stage, const psd_arrays *a, intptr_t end)
{
    if (end <= stage->whole && end % STAGED_TILE == 0)
        psd_page_stream(a->sums, (real *)a->param_out + end - STAGED_TILE, stage->tile);
}

static void FN(copy_run)(const void *in, void *out, intptr_t begin, intptr_t end)
{
    if (in != out && end > begin)
        memcpy((real *)out + begin, (const real *)in + begin, (size_t)(end - begin) * sizeof(real));
}

static void FN(keep_parameter)(FN(stage) *stage, const psd_arrays *a, intptr_t begin, intptr_t end)
{
    while (begin < end && begin < stage->whole) {
        const intptr_t next = (begin / STAGED_TILE + 1) * STAGED_TILE, n = (next < end ? next : end) - begin;
        memcpy(FN(made_at)(stage, a, begin), (const real *)a->param_in + begin, (size_t)n * sizeof(real));
        begin += n;
        FN(made)(stage, a, begin);
    }
    FN(copy_run)(a->param_in, a->param_out, begin, end);
}

#include "rule_templates.h"

/* Whether there is nothing to compute: a single contribution of weight 1 is exactly the gradient (not 0 + g, which would turn -0
 * into 0). */
PSD_INLINE int FN(is_ready)(const psd_arrays *a)
{
    return (real)a->scale == 1 && (!a->grad || (!a->acc && (real)a->weight == 1));
}

/* Whether the last contribution must be widened, tile by tile. */
PSD_INLINE int FN(is_half)(const psd_arrays *a)
{
#ifdef HALF_GRADIENTS
    return a->grad && a->grad_dtype != PSD_F32;
#else
    (void)a;
    return 0;
#endif
}

/* The last contribution of one tile, if there is one: where it lies, or widened into `scratch`. */
PSD_INLINE const real *FN(contribution)(const psd_arrays *a, intptr_t begin, intptr_t n, real *scratch)
{
#ifdef HALF_GRADIENTS
    if (FN(is_half)(a)) {
        psd_widen_half(a->grad_dtype, scratch, (const uint16_t *)a->grad + begin, n);
        return scratch;
    }
#endif
    (void)n, (void)scratch;
    return a->grad ? (const real *)a->grad + begin : NULL;
}

/* Asks for elements [begin, end) of an array, so that they come while something else is computed. */
PSD_INLINE void FN(prefetch)(const void *array, size_t element_bytes, intptr_t begin, intptr_t end)
{
    const char *const bytes = array;
    if (array)
        for (size_t at = (size_t)begin * element_bytes; at < (size_t)end * element_bytes; at += 64)
            PSD_PREFETCH(bytes + at);
}

/* What waits while a tile is widened: the rest of that tile, [begin, next), which the rule writes, and what the next tile reads,
 * [next, after). Without this, SGD reached 0.70 to 0.84 of the bandwidth of a copy instead of 0.84 to 0.98; where nothing is widened,
 * prefetching was measured to do harm. Inlined, because GCC takes a function that only prefetches for one that does nothing. */
PSD_INLINE void FN(prefetch_around)(const FN(rule) *rule, const psd_arrays *a, intptr_t begin, intptr_t next, intptr_t after,
                                    int is_staged)
{
    FN(prefetch)(a->param_in, sizeof(real), next, after);
    FN(prefetch)(a->acc, sizeof(real), next, after);
    FN(prefetch)(a->grad, sizeof(uint16_t), next, after);
    if (!is_staged)
        FN(prefetch)(a->param_out, sizeof(real), begin, next);
    for (int s = 0; s < rule->slot_count; s++) {
        FN(prefetch)(a->slots_in[s], sizeof(real), next, after);
        FN(prefetch)(a->slots_out[s], sizeof(real), begin, next);
    }
}

/* Computes the gradient of one tile; `out` may be `grad`. */
PSD_KERNEL void FN(psd_reduce_tile)(const real *acc, const real *grad, real weight, real scale, real *out, intptr_t n)
{
    if (!grad) {
        PSD_ELEMENTWISE
        for (intptr_t i = 0; i < n; i++)
            out[i] = scale * acc[i];
    } else if (!acc) {
        PSD_ELEMENTWISE
        for (intptr_t i = 0; i < n; i++)
            out[i] = scale * (weight * grad[i]);
    } else {
        PSD_ELEMENTWISE
        for (intptr_t i = 0; i < n; i++)
            out[i] = scale * (acc[i] + weight * grad[i]);
    }
}

/* Outputs are stored plainly, unless the caller has the parameter's sums made. Streaming stores were measured (100 MB in blocks of 1 MiB, 32 MiB
 * of L3; medians of runs that vary by a fifth). Where the output is cold they save 10 to 30 %: 11 against 13 ms, with momentum 18 against 24.
 * Where it is the spare that was an input a moment ago they save nothing, and a reader who comes next then finds nothing in the cache: update
 * plus read 18 against 14 ms, with momentum 24 against 20. So whoever keeps spare blocks should reuse the last one freed. */
static void FN(step_run)(const FN(rule) *rule, const psd_arrays *a, FN(stage) *stage, const void *k, intptr_t begin, intptr_t end)
{
    _Alignas(64) real scratch[TILE];
    const real *slots_in[PSD_SLOTS_MAX] = {NULL};
    real *slots_out[PSD_SLOTS_MAX] = {NULL};
    const int ready = FN(is_ready)(a), half = FN(is_half)(a);
    while (begin < end) {
        /* Tiles lie on a grid that does not depend on where runs begin, so that whole tiles stay aligned. With nothing to reduce
         * or widen the rule is the only phase, and runs through: for SGD that saves a tenth. */
        const int staged = begin < stage->whole;
        const intptr_t tile = staged ? STAGED_TILE : TILE;
        const intptr_t next = ready && !half && !staged ? end : (begin / tile + 1) * tile, n = (next < end ? next : end) - begin;
        for (int s = 0; s < rule->slot_count; s++)
            if (a->slots_in[s]) {
                slots_in[s] = (const real *)a->slots_in[s] + begin;
                slots_out[s] = (real *)a->slots_out[s] + begin;
            }
        if (half)
            FN(prefetch_around)(rule, a, begin, begin + n, end - begin - n < tile ? end : begin + n + tile, staged);
        const real *const acc = a->acc ? (const real *)a->acc + begin : NULL;
        const real *const grad = FN(contribution)(a, begin, n, scratch);
        const real *g = grad ? grad : acc;
        if (!ready) {
            FN(psd_reduce_tile)(acc, grad, (real)a->weight, (real)a->scale, scratch, n);
            g = scratch;
        }
        rule->tile((const real *)a->param_in + begin, FN(made_at)(stage, a, begin), g, slots_in, slots_out, n, k);
        begin += n;
        FN(made)(stage, a, begin);
    }
}

/* Segments with equal keys are treated alike: 0 for an untouched one, else its step, capped where the rule stops caring. */
PSD_INLINE uint64_t FN(run_key)(const FN(rule) *rule, const psd_segments *s, intptr_t i)
{
    const uint64_t step = s->steps_in[i] + 1;
    return !s->touched[i] ? 0 : step < rule->steps_alike_from ? step : rule->steps_alike_from;
}

void FN(psd_step_block)(int id, const psd_arrays *a, const psd_hyper *hyper, const psd_segments *s)
{
    const FN(rule) *rule = &FN(rules)[id];
    FN(constants) k;
    FN(stage) stage;
    intptr_t begin = 0;
    FN(begin_stage)(&stage, a, s->count ? s->ends[s->count - 1] : 0);
    for (intptr_t i = 0; i < s->count;) {
        const uint64_t key = FN(run_key)(rule, s, i);
        do {
            s->steps_out[i] = s->steps_in[i] + (s->touched[i] != 0);
            i++;
        } while (i < s->count && FN(run_key)(rule, s, i) == key);
        const intptr_t end = s->ends[i - 1];
        if (key) {
            rule->prepare(hyper, key, &k);
            FN(step_run)(rule, a, &stage, &k, begin, end);
        } else {
            FN(keep_parameter)(&stage, a, begin, end);
            for (int slot = 0; slot < rule->slot_count; slot++) /* one that is not kept is NULL in both */
                FN(copy_run)(a->slots_in[slot], a->slots_out[slot], begin, end);
        }
        begin = end;
    }
    if (stage.whole)
        PSD_STREAMED();
}
