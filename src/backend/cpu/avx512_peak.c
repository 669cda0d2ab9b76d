/* The arithmetic probe of AVX-512: fused steps of sixteen floats. The bf16 dot product of AVX-512 adds in another order
 * than model.md 0.3, so it sets no limit here. */
#include <immintrin.h>
#define PEAK avx512
#define VEC __m512
#define MADD(acc, a, b) _mm512_fmadd_ps(a, b, acc)
#include "peak_body.h"
