/* The arithmetic probe of AVX2: fused steps of eight floats. */
#include <immintrin.h>
#define PEAK avx2
#define VEC __m256
#define MADD(acc, a, b) _mm256_fmadd_ps(a, b, acc)
#include "peak_body.h"
