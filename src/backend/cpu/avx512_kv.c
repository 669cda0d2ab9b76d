/* Writers of the caches with AVX-512: record encoding and the pooling of pairs; bit for bit tensor/format.c and
 * ref_kv.c.
 *
 * A group's largest magnitude is found on bit patterns, its scale is made as the scalar code makes it, and sixteen
 * codes come out of the same steps as one. Rows, entries and places are ref_kv.c's. */
#include "cache.h"

#include "avx512_vec.h"

/* ---- codes ------------------------------------------------------------------------------------------------------- */

static inline __m512i magnitude(__m512 x) {
    return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7FFFFFFF));
}

/* Magnitudes where NaN counts as zero: it must not become a group's scale. */
static inline __m512i size_of(__m512 x) {
    __m512i a = magnitude(x);
    return _mm512_maskz_mov_epi32(_mm512_cmple_epi32_mask(a, _mm512_set1_epi32(0x7F800000)), a);
}

static inline float largest(__m512i sizes, float least) {
    int32_t most = _mm512_reduce_max_epi32(sizes), floor = (int32_t)di_f32_bits(least);
    return di_f32_from_bits((uint32_t)DI_MAX(most, floor));
}

/* The smallest power of two >= s, and its E8M0 byte. */
static inline float power_up(float s, uint8_t *byte) {
    uint32_t bits = (di_f32_bits(s) + 0x007FFFFFu) & 0x7F800000u;
    *byte = (uint8_t)(bits >> 23);
    return di_f32_from_bits(bits);
}

/* Sixteen E4M3 codes: the three cases of format.c, which tells why. */
static inline __m128i e4m3_codes(__m512 x) {
    __m512i a = magnitude(x), u = _mm512_min_epi32(a, _mm512_set1_epi32(0x43E00000));
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 20), _mm512_set1_epi32(1));
    __m512i normal = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7FFFF)), odd), 20);
    normal = _mm512_sub_epi32(normal, _mm512_set1_epi32(120 << 3));
    __m512 shifted = _mm512_add_ps(_mm512_castsi512_ps(u), _mm512_set1_ps(16384.0f));
    __m512i small = _mm512_sub_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(0x46800000));
    __m512i code = _mm512_mask_mov_epi32(normal, _mm512_cmplt_epi32_mask(u, _mm512_set1_epi32(0x3C800000)), small);
    code =
        _mm512_mask_mov_epi32(code, _mm512_cmpgt_epi32_mask(a, _mm512_set1_epi32(0x7F800000)), _mm512_set1_epi32(0x7F));
    __m512i sign = _mm512_and_si512(_mm512_srli_epi32(_mm512_castps_si512(x), 24), _mm512_set1_epi32(0x80));
    return _mm512_cvtepi32_epi8(_mm512_or_si512(code, sign));
}

/* Sixteen E2M1 codes in 8 bytes: how many borders between neighbours a magnitude has passed. */
static inline void e2m1_codes(__m512 x, uint8_t *packed) {
    static const int32_t borders[7] = {0x3E800001, 0x3F400000, 0x3FA00001, 0x3FE00000,
                                       0x40200001, 0x40600000, 0x40A00001};
    __m512i a = magnitude(x), code = _mm512_setzero_si512();
    for (int i = 0; i < 7; i++) {
        __mmask16 passed = _mm512_cmpge_epi32_mask(a, _mm512_set1_epi32(borders[i]));
        code = _mm512_mask_add_epi32(code, passed, code, _mm512_set1_epi32(1));
    }
    __m512i sign = _mm512_and_si512(_mm512_srli_epi32(_mm512_castps_si512(x), 28), _mm512_set1_epi32(8));
    __m128i bytes = _mm512_cvtepi32_epi8(_mm512_or_si512(code, sign));
    __m128i pairs = _mm_maddubs_epi16(bytes, _mm_set1_epi16(0x1001)); /* first + 16 * second */
    _mm_storel_epi64((__m128i *)(void *)packed, _mm_packus_epi16(pairs, pairs));
}

/* ---- records ----------------------------------------------------------------------------------------------------- */

void di_cpu_avx512_encode(di_kv_format format, const float *x, int64_t n, uint8_t *data, uint8_t *scale) {
    if (format == DI_KV_F32) {
        memcpy(data, x, (size_t)n * sizeof(float));
        return;
    }
    if (format == DI_KV_FP4) {
        for (int64_t i = 0; i < n; i += 16, scale++) {
            __m512 v = _mm512_loadu_ps(x + i);
            float s = largest(size_of(v), 0.01171875f) * (1.0f / 6.0f); /* least 6 * 2^-9 */
            *scale = di_f32_to_e4m3(s);
            e2m1_codes(_mm512_mul_ps(v, _mm512_set1_ps(1.0f / di_e4m3_to_f32(*scale))), data + i / 2);
        }
        return;
    }
    for (int64_t i = 0; i < n; i += 32, scale++) {
        __m512 v0 = _mm512_loadu_ps(x + i), v1 = _mm512_loadu_ps(x + i + 16);
        __m512i sizes = _mm512_max_epi32(size_of(v0), size_of(v1));
        bool is_fp8 = format == DI_KV_FP8;
        float s = is_fp8 ? largest(sizes, 1e-4f) / 448.0f : largest(sizes, 0x1.8p-124f) / 6.0f;
        __m512 by = _mm512_set1_ps(1.0f / power_up(s, scale));
        v0 = _mm512_mul_ps(v0, by);
        v1 = _mm512_mul_ps(v1, by);
        if (is_fp8) {
            _mm_storeu_si128((__m128i *)(void *)(data + i), e4m3_codes(v0));
            _mm_storeu_si128((__m128i *)(void *)(data + i + 16), e4m3_codes(v1));
        } else {
            e2m1_codes(v0, data + i / 2);
            e2m1_codes(v1, data + i / 2 + 8);
        }
    }
}

static void pool_pair(const float *first, const float *second, int64_t d, float *out) {
    for (int64_t c = 0; c < d; c += DI_LANES) {
        __mmask16 here = d - c >= DI_LANES ? 0xFFFF : (__mmask16)((1u << (d - c)) - 1);
        __m512 a = _mm512_maskz_loadu_ps(here, first + c), b = _mm512_maskz_loadu_ps(here, second + c);
        __m512 most = _mm512_max_ps(a, b);
        __m512 e0 = di_v16_exp(_mm512_sub_ps(a, most)), e1 = di_v16_exp(_mm512_sub_ps(b, most));
        __m512 sum = _mm512_add_ps(e0, e1);
        __m512 x = _mm512_mul_ps(_mm512_div_ps(e0, sum), _mm512_maskz_loadu_ps(here, first + d + c));
        __m512 y = _mm512_mul_ps(_mm512_div_ps(e1, sum), _mm512_maskz_loadu_ps(here, second + d + c));
        _mm512_mask_storeu_ps(out + c, here, _mm512_add_ps(x, y));
    }
}

/* ---- the operations ---------------------------------------------------------------------------------------------- */

static di_status avx512_kv_encode(di_stream *stream, const di_kv_encode_args *a) {
    return di_cpu_kv_encode_by(stream, a, di_cpu_avx512_encode);
}

static di_status avx512_page_store(di_stream *stream, const di_page_store_args *a) {
    return di_cpu_page_store_by(stream, a, di_cpu_avx512_encode);
}

static di_status avx512_compress_pool(di_stream *stream, const di_compress_pool_args *a) {
    return di_cpu_compress_pool_by(stream, a, pool_pair);
}

void di_cpu_install_avx512_kv(di_cpu_kernels *k) {
    k->kv_encode = avx512_kv_encode;
    k->page_store = avx512_page_store;
    k->compress_pool = avx512_compress_pool;
}
