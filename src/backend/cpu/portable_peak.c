/* The arithmetic probe of plain C: product, then sum, in vectors of the baseline. */
typedef float peak_vec __attribute__((vector_size(16)));
#define PEAK portable
#define VEC peak_vec
#define MADD(acc, a, b) ((acc) + (a) * (b))
#include "peak_body.h"
