/* Number formats: tables, single conversions and the quantisers of model.md 0.2.
 *
 * A quantiser takes the largest magnitude of a group, makes its scale from it, and codes value/scale. Powers of two
 * are found on the bit pattern, so scales are exact and their reciprocals too; the E4M3 scale of compressed entries
 * is not a power of two and multiplies by its rounded reciprocal. The conversions are written without branches, so
 * that the compiler makes vectors of the loops over a group. Matrices and cache records are mat.c's. */
#include "tensor.h"

#include <math.h>

#include "format_inline.h"

/* ---- tables ------------------------------------------------------------------------------------------------------ */

/* E4M3 with exponent field e and mantissa m: m * 2^-9 for e = 0, (8 + m) * 2^(e-10) above. */
#define E4M3_SUB(s, m) ((s) * (m) / 512.0f)
#define E4M3_NORM(s, e, m) ((s) * (8 + (m)) * (1 << (e)) / 1024.0f)
#define E4M3_ROW(s, e)                                                                                                 \
    E4M3_NORM(s, e, 0), E4M3_NORM(s, e, 1), E4M3_NORM(s, e, 2), E4M3_NORM(s, e, 3), E4M3_NORM(s, e, 4),                \
        E4M3_NORM(s, e, 5), E4M3_NORM(s, e, 6), E4M3_NORM(s, e, 7)
#define E4M3_HALF(s)                                                                                                   \
    E4M3_SUB(s, 0.0f), E4M3_SUB(s, 1), E4M3_SUB(s, 2), E4M3_SUB(s, 3), E4M3_SUB(s, 4), E4M3_SUB(s, 5), E4M3_SUB(s, 6), \
        E4M3_SUB(s, 7), E4M3_ROW(s, 1), E4M3_ROW(s, 2), E4M3_ROW(s, 3), E4M3_ROW(s, 4), E4M3_ROW(s, 5),                \
        E4M3_ROW(s, 6), E4M3_ROW(s, 7), E4M3_ROW(s, 8), E4M3_ROW(s, 9), E4M3_ROW(s, 10), E4M3_ROW(s, 11),              \
        E4M3_ROW(s, 12), E4M3_ROW(s, 13), E4M3_ROW(s, 14), E4M3_NORM(s, 15, 0), E4M3_NORM(s, 15, 1),                   \
        E4M3_NORM(s, 15, 2), E4M3_NORM(s, 15, 3), E4M3_NORM(s, 15, 4), E4M3_NORM(s, 15, 5), E4M3_NORM(s, 15, 6)

const float di_e4m3_table[256] = {E4M3_HALF(1.0f), NAN, E4M3_HALF(-1.0f), -NAN};
const float di_e2m1_table[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                 -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

/* ---- single values ----------------------------------------------------------------------------------------------- */

uint8_t di_f32_to_e4m3(float f) {
    return (uint8_t)di_e4m3_code(f);
}

uint8_t di_f32_to_e2m1(float f) {
    return (uint8_t)di_e2m1_code(f);
}

/* ---- quantisers -------------------------------------------------------------------------------------------------- */

void di_quant_qa(const float *x, int64_t n, uint8_t *codes, uint8_t *scales) {
    for (int64_t g = 0; g < n / 32; g++, x += 32, codes += 32)
        scales[g] = di_quant_qa_group(x, codes);
}

static inline void pack_group(const float *x, int n, float inv, uint8_t *packed) {
    uint8_t code[32];
    for (int i = 0; i < n; i++)
        code[i] = (uint8_t)di_e2m1_code(x[i] * inv);
    for (int i = 0; i < n / 2; i++)
        packed[i] = (uint8_t)(code[2 * i] | code[2 * i + 1] << 4);
}

void di_quant_qi(const float *x, int64_t n, uint8_t *packed, uint8_t *scales) {
    for (int64_t g = 0; g < n / 32; g++, x += 32, packed += 16) {
        float s = di_pow2_ceil(di_abs_max(x, 32, 0x1.8p-124f) / 6.0f); /* least 6 * 2^-126 */
        scales[g] = di_e8m0_byte(s);
        pack_group(x, 32, 1.0f / s, packed);
    }
}

void di_quant_qk(const float *x, int64_t n, uint8_t *packed, uint8_t *scales) {
    for (int64_t g = 0; g < n / 16; g++, x += 16, packed += 8) {
        float s = di_abs_max(x, 16, 0.01171875f) * (1.0f / 6.0f); /* least 6 * 2^-9 */
        scales[g] = di_f32_to_e4m3(s);                            /* clamps to 448 */
        pack_group(x, 16, 1.0f / di_e4m3_to_f32(scales[g]), packed);
    }
}

void di_quant_block(const float *w, int64_t n_out, int64_t n_in, uint8_t *codes, uint8_t *scales) {
    int64_t n_blocks = DI_CEIL_DIV(n_in, 32);
    for (int64_t ob = 0; ob * 32 < n_out; ob++) {
        int64_t o1 = DI_MIN(ob * 32 + 32, n_out);
        for (int64_t ib = 0; ib < n_blocks; ib++) {
            int64_t i0 = ib * 32;
            int n = (int)DI_MIN(32, n_in - i0);
            float most = 1e-4f;
            for (int64_t o = ob * 32; o < o1; o++)
                most = di_abs_max(w + o * n_in + i0, n, most);
            float s = di_pow2_ceil(most / 448.0f), inv = 1.0f / s;
            scales[ob * n_blocks + ib] = di_e8m0_byte(s);
            for (int64_t o = ob * 32; o < o1; o++) {
                const float *row = w + o * n_in + i0;
                uint8_t *out = codes + o * n_in + i0;
                for (int i = 0; i < n; i++)
                    out[i] = (uint8_t)di_e4m3_code(row[i] * inv);
            }
        }
    }
}

/* ---- back to floats ---------------------------------------------------------------------------------------------- */

void di_dequant_qa(const uint8_t *codes, const uint8_t *scales, int64_t n, float *x) {
    for (int64_t g = 0; g < n / 32; g++) {
        float s = di_e8m0_to_f32(scales[g]);
        for (int64_t i = 32 * g; i < 32 * g + 32; i++)
            x[i] = di_e4m3_to_f32(codes[i]) * s;
    }
}

static inline void unpack_group(const uint8_t *packed, int n, float s, float *x) {
    for (int i = 0; i < n / 2; i++) {
        x[2 * i] = di_e2m1_table[packed[i] & 15] * s;
        x[2 * i + 1] = di_e2m1_table[packed[i] >> 4] * s;
    }
}

void di_dequant_qi(const uint8_t *packed, const uint8_t *scales, int64_t n, float *x) {
    for (int64_t g = 0; g < n / 32; g++)
        unpack_group(packed + 16 * g, 32, di_e8m0_to_f32(scales[g]), x + 32 * g);
}

void di_dequant_qk(const uint8_t *packed, const uint8_t *scales, int64_t n, float *x) {
    for (int64_t g = 0; g < n / 16; g++)
        unpack_group(packed + 8 * g, 16, di_e4m3_to_f32(scales[g]), x + 16 * g);
}
