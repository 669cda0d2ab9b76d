/* Stored weights as tiles [input][32 outputs], decoded many bytes at a time. For levels with byte moves alone.
 *
 * Eight vectors hold 16 bytes of 8 rows a lane. Three rounds of interleaving turn them, within each lane, from row
 * after row into input after input, so that 8 outputs of an input lie side by side, and lane beside lane all outputs of
 * a pass:
 *
 *     lane L of vector i: row 8L+i, bytes 0..15    ->    lane L of vector j: rows 8L..8L+7 of byte 2j, of byte 2j+1
 *
 * Codes are transposed before they are decoded, while they are small. E4M3 and E2M1 become fp16, which holds both
 * without rounding, the scale left out: it is a power of two and is applied to a whole group's sum. BF16 becomes fp32.
 * Included by panel_body.h. */
#ifndef DI_CPU_LANES_BYTES_H
#define DI_CPU_LANES_BYTES_H

#define DI_BYTE_OUT (8 * DI_BYTE_LANES) /* outputs of a pass */

DI_INLINE di_b b_and(di_b a, di_b b) {
    return DI_B_BITS(and)(a, b);
}
DI_INLINE di_b b_zero(void) {
    return DI_B_BITS(setzero)();
}

/* 8 rows a lane of bytes to vectors whose lanes hold 8 rows of byte 2j, then of byte 2j+1. */
DI_INLINE void transpose_bytes(di_b z[8]) {
    di_b a[8], b[8];
    for (int i = 0; i < 4; i++) { /* two rows side by side: bytes 0..7, 8..15 */
        a[i] = DI_B(unpacklo_epi8)(z[2 * i], z[2 * i + 1]);
        a[4 + i] = DI_B(unpackhi_epi8)(z[2 * i], z[2 * i + 1]);
    }
    for (int h = 0; h < 2; h++) { /* four rows: bytes 8h + 0..3, 4..7 */
        for (int i = 0; i < 2; i++) {
            b[4 * h + i] = DI_B(unpacklo_epi16)(a[4 * h + 2 * i], a[4 * h + 2 * i + 1]);
            b[4 * h + 2 + i] = DI_B(unpackhi_epi16)(a[4 * h + 2 * i], a[4 * h + 2 * i + 1]);
        }
    }
    for (int q = 0; q < 4; q++) { /* eight rows: bytes 4q + 0..1, 2..3 */
        z[2 * q] = DI_B(unpacklo_epi32)(b[2 * q], b[2 * q + 1]);
        z[2 * q + 1] = DI_B(unpackhi_epi32)(b[2 * q], b[2 * q + 1]);
    }
}

/* Row of the tile's weights that is read for output o: outputs beyond n_out repeat the last one and are not used. */
DI_INLINE int64_t row_of(int64_t o0, int n_out, int o) {
    return o0 + (o < n_out ? o : n_out - 1);
}

/* 16 bytes at `at` of rows i, 8+i, ... of a pass of outputs from `first` on. */
DI_INLINE di_b load_rows(const uint8_t *data, int64_t row_bytes, int64_t at, int64_t o0, int n_out, int first, int i) {
    if (first + DI_BYTE_OUT <= n_out)
        return di_b_load_lanes(data + (o0 + first + i) * row_bytes + at, 8 * row_bytes);
    uint8_t buf[16 * DI_BYTE_LANES];
    for (int lane = 0; lane < DI_BYTE_LANES; lane++)
        memcpy(buf + 16 * lane, data + row_of(o0, n_out, first + 8 * lane + i) * row_bytes + at, 16);
    return di_b_load_lanes(buf, 16);
}

/* Codes of `count` inputs from k0 on, as fp16: count is a multiple of 32. */
static void halves_of_e2m1(const di_mat *w, int64_t o0, int n_out, int64_t k0, int64_t count, uint16_t *tile) {
    /* High bytes of 0 .5 1 1.5 2 3 4 6 in fp16; the low bytes are zero. */
    static const uint8_t high[16] = {0x00, 0x38, 0x3C, 0x3E, 0x40, 0x42, 0x44, 0x46,
                                     0x80, 0xB8, 0xBC, 0xBE, 0xC0, 0xC2, 0xC4, 0xC6};
    const di_b table = di_b_table(high), nibble = DI_B(set1_epi8)(15), zero = b_zero();
    for (int first = 0; first < n_out; first += DI_BYTE_OUT) {
        for (int64_t k = 0; k < count; k += 32) {
            di_b z[8];
            for (int i = 0; i < 8; i++)
                z[i] = load_rows(w->data, w->n_in / 2, (k0 + k) / 2, o0, n_out, first, i);
            transpose_bytes(z);
            uint16_t *out = tile + k * DI_TILE_OUT + first;
            for (int j = 0; j < 8; j++, out += 4 * DI_TILE_OUT) {
                di_b even = DI_B(shuffle_epi8)(table, b_and(z[j], nibble));
                di_b odd = DI_B(shuffle_epi8)(table, b_and(DI_B(srli_epi16)(z[j], 4), nibble));
                di_b_store(out, DI_B(unpacklo_epi8)(zero, even));
                di_b_store(out + DI_TILE_OUT, DI_B(unpacklo_epi8)(zero, odd));
                di_b_store(out + 2 * DI_TILE_OUT, DI_B(unpackhi_epi8)(zero, even));
                di_b_store(out + 3 * DI_TILE_OUT, DI_B(unpackhi_epi8)(zero, odd));
            }
        }
    }
}

/* E4M3 words (the code in the high byte) as fp16 of value * 2^-8, subnormals too; NaN codes would read as 480. */
DI_INLINE di_b half_of_e4m3(di_b word) {
    const di_b sign = DI_B(set1_epi16)((int16_t)0x8000), rest = DI_B(set1_epi16)(0x3F80);
    return DI_B_BITS(or)(b_and(word, sign), b_and(DI_B(srli_epi16)(word, 1), rest));
}

/* The same for E4M3, times 2^-8. Returns false when there is a NaN among the codes. */
static bool halves_of_e4m3(const di_mat *w, int64_t o0, int n_out, int64_t k0, int64_t count, uint16_t *tile) {
    const di_b low7 = DI_B(set1_epi8)(0x7F), zero = b_zero();
    di_b most = zero;
    for (int first = 0; first < n_out; first += DI_BYTE_OUT) {
        for (int64_t k = 0; k < count; k += 16) {
            di_b z[8];
            for (int i = 0; i < 8; i++)
                z[i] = load_rows(w->data, w->n_in, k0 + k, o0, n_out, first, i);
            transpose_bytes(z);
            uint16_t *out = tile + k * DI_TILE_OUT + first;
            for (int j = 0; j < 8; j++, out += 2 * DI_TILE_OUT) {
                most = DI_B(max_epu8)(most, b_and(z[j], low7));
                di_b_store(out, half_of_e4m3(DI_B(unpacklo_epi8)(zero, z[j])));
                di_b_store(out + DI_TILE_OUT, half_of_e4m3(DI_B(unpackhi_epi8)(zero, z[j])));
            }
        }
    }
    return !di_b_any_equal(most, low7);
}

/* BF16 weights as floats: count is a multiple of 8. Lane L takes rows 4L..4L+3 of the pass's first half and of its
 * second, so that widening leaves the outputs in order. */
static void floats_of_bf16(const di_mat *w, int64_t o0, int n_out, int64_t k0, int64_t count, float *tile) {
    enum { HALF_OUT = DI_BYTE_OUT / 2 };
    const di_b zero = b_zero();
    int64_t row_bytes = 2 * w->n_in;
    for (int first = 0; first < n_out; first += DI_BYTE_OUT) {
        bool is_full = first + DI_BYTE_OUT <= n_out;
        for (int64_t k = 0; k < count; k += 8) {
            const uint8_t *data = (const uint8_t *)w->data + 2 * (k0 + k);
            di_b z[8], a[8], b[8];
            for (int i = 0; i < 8; i++) {
                int o = first + (i < 4 ? i : HALF_OUT + i - 4);
                if (is_full) {
                    z[i] = di_b_load_lanes(data + (o0 + o) * row_bytes, 4 * row_bytes);
                    continue;
                }
                uint8_t buf[16 * DI_BYTE_LANES];
                for (int lane = 0; lane < DI_BYTE_LANES; lane++)
                    memcpy(buf + 16 * lane, data + row_of(o0, n_out, o + 4 * lane) * row_bytes, 16);
                z[i] = di_b_load_lanes(buf, 16);
            }
            for (int i = 0; i < 4; i++) { /* two rows: inputs 0..3, 4..7 */
                a[i] = DI_B(unpacklo_epi16)(z[2 * i], z[2 * i + 1]);
                a[4 + i] = DI_B(unpackhi_epi16)(z[2 * i], z[2 * i + 1]);
            }
            for (int h = 0; h < 2; h++) { /* four rows: inputs 4h + 0..1, 2..3 */
                for (int i = 0; i < 2; i++) {
                    b[4 * h + i] = DI_B(unpacklo_epi32)(a[4 * h + 2 * i], a[4 * h + 2 * i + 1]);
                    b[4 * h + 2 + i] = DI_B(unpackhi_epi32)(a[4 * h + 2 * i], a[4 * h + 2 * i + 1]);
                }
            }
            float *out = tile + k * DI_TILE_OUT + first;
            for (int q = 0; q < 4; q++, out += 2 * DI_TILE_OUT) { /* eight rows: inputs 2q, 2q + 1 */
                di_b even = DI_B(unpacklo_epi64)(b[2 * q], b[2 * q + 1]);
                di_b odd = DI_B(unpackhi_epi64)(b[2 * q], b[2 * q + 1]);
                di_b_store(out, DI_B(unpacklo_epi16)(zero, even));
                di_b_store(out + HALF_OUT, DI_B(unpackhi_epi16)(zero, even));
                di_b_store(out + DI_TILE_OUT, DI_B(unpacklo_epi16)(zero, odd));
                di_b_store(out + DI_TILE_OUT + HALF_OUT, DI_B(unpackhi_epi16)(zero, odd));
            }
        }
    }
}

#endif
