/* The templates for double. A tile is 1 KiB: larger ones (2, 4, 8 KiB) were measured to be up to a quarter slower,
 * since the phases of a tile then outrun the memory prefetchers. */
#include "portable.h"
#include "kernels.h"
#include "scalars.h"

typedef double real;
typedef uint64_t real_bits;
#define REAL_EXPONENT 0x7ff0000000000000u
#define REAL_SQRT sqrt
#define REAL_ABS fabs
#define TILE ((intptr_t)(1024 / sizeof(real)))
#define FN(name) name##_f64

#include "typed.h"
#include "elementwise.h"
#include "squares.h"
#include "step.h"
