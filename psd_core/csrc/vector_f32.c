/* The kernels of vectors of float. */
#include "portable.h"
#include "vector.h"
#include "vector_math.h"

typedef float real;
#define FN(name) name##_f32
#define ADD(a, b) ((a) + (b))
#define SUB(a, b) ((a) - (b))
#define MUL(a, b) ((a) * (b))
#define NEGATIVE(a) (-(a))
#define NUMBER(x) ((real)(x).f)
#define SQRT sqrtf
#define IS_FLOAT 1
#define SIGNIFICANT 24

#include "vector_elementwise.h"
#include "vector_dots.h"
