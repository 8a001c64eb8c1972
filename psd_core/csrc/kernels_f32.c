/* The templates for float. Scratch is per tile: 4 KiB, so that five fit in a 32 KiB L1 cache beside the inputs. */
#include "portable.h"
#include "kernels.h"

typedef float real;
typedef uint32_t real_bits;
#define REAL_EXPONENT 0x7f800000u
#define TILE ((intptr_t)(4096 / sizeof(real)))
#define FN(name) name##_f32

#include "typed.h"
#include "elementwise.h"
#include "step.h"
