/* The kernels of vectors of double. */
#include "portable.h"
#include "vector.h"
#include "vector_math.h"

typedef double real;
#define FN(name) name##_f64
#define ADD(a, b) ((a) + (b))
#define SUB(a, b) ((a) - (b))
#define MUL(a, b) ((a) * (b))
#define NEGATIVE(a) (-(a))
#define NUMBER(x) ((real)(x).f)
#define SQRT sqrt
#define IS_FLOAT 1
#define SIGNIFICANT 53

#include "vector_elementwise.h"
#include "vector_dots.h"
