/* The templates for float. A tile is 1 KiB: larger ones (2, 4, 8 KiB) were measured to be up to a quarter slower,
 * since the phases of a tile then outrun the memory prefetchers. */
#include "portable.h"
#include "kernels.h"
#include "scalars.h"
#include "half.h"

typedef float real;
typedef uint32_t real_bits;
#define REAL_EXPONENT 0x7f800000u
#define REAL_SQRT sqrtf
#define REAL_ABS fabsf
#define HALF_GRADIENTS /* a gradient may have half the bits; beside doubles none may */
#define TILE ((intptr_t)(1024 / sizeof(real)))
#define FN(name) name##_f32

#include "typed.h"
#include "elementwise.h"
#include "squares.h"
#include "step.h"
#include "rows.h"
