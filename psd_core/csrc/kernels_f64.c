/* The templates for double. Scratch is per tile: 4 KiB, so that five fit in a 32 KiB L1 cache beside the inputs. */
#include "portable.h"
#include "kernels.h"

typedef double real;
typedef uint64_t real_bits;
#define REAL_EXPONENT 0x7ff0000000000000u
#define TILE ((intptr_t)(4096 / sizeof(real)))
#define FN(name) name##_f64

#include "typed.h"
#include "elementwise.h"
#include "step.h"
