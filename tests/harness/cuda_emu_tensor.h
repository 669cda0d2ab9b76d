/* What Blackwell's tensor cores do, for cuda_emu.cpp: descriptors decoded bit by bit, scales and multiplies over a
 * block's tensor memory. Reserved bits must be what the description says; a kernel whose descriptor, swizzle, column or
 * byte of a scale is wrong fails or gives wrong numbers.
 *
 * Written from the description, not from sm100.cuh, whose constants it doesn't use. Products and sums of 32 are float
 * in rising k, a sum times both scales is added to D in float: the hardware keeps fewer bits and has its own order.
 * Source: PTX ISA, chapter tcgen05: "shared memory descriptor", "instruction descriptor" (kind::mxf8f6f4), "canonical
 * layouts", "packing formats", "data path layout organization", "block scaling". */
#ifndef DI_TEST_CUDA_EMU_TENSOR_H
#define DI_TEST_CUDA_EMU_TENSOR_H

enum : uint32_t { TMEM_LANES = 128, TMEM_COLUMNS = 512, TMEM_QUARTER = 32 };

struct tensor_memory {           /* of a block */
    std::vector<uint32_t> cells; /* [column][lane] */
    uint32_t first = 0, n = 0;   /* columns that are the block's */
    uint32_t warp = 0;           /* that took them */
    bool is_done = false;        /* takes no more */

    uint32_t &at(uint32_t lane, uint32_t column) {
        return cells[column * TMEM_LANES + lane];
    }
    void check(const char *what, uint32_t address, uint32_t n_columns) const {
        uint32_t column = address & 0xFFFF, lane = address >> 16;
        DI_EMU_CHECK(lane == 0 && column >= first && column + n_columns <= first + n,
                     "%s: tensor memory 0x%x, %u columns: the block has columns %u to %u", what, address, n_columns,
                     first, first + n);
    }
};

/* Bits [from, to) of a word. */
static inline uint32_t tensor_bits(uint64_t word, unsigned from, unsigned to) {
    return (uint32_t)(word >> from & (((uint64_t)1 << (to - from)) - 1));
}

/* An operand in shared memory, its rows along k. */
struct tensor_operand {
    uint32_t start, along, across, swizzle;

    tensor_operand() = default;
    explicit tensor_operand(uint64_t d) {
        start = tensor_bits(d, 0, 14) << 4;
        along = tensor_bits(d, 16, 30) << 4;
        across = tensor_bits(d, 32, 46) << 4;
        swizzle = tensor_bits(d, 61, 64);
        DI_EMU_CHECK(!tensor_bits(d, 14, 16) && !tensor_bits(d, 30, 32) && tensor_bits(d, 46, 49) == 1 &&
                         !tensor_bits(d, 53, 61),
                     "matrix descriptor %016llx: fixed bits are wrong", (unsigned long long)d);
        DI_EMU_CHECK(!tensor_bits(d, 49, 53) && (swizzle == 0 || swizzle == 2),
                     "matrix descriptor %016llx: base offset, absolute distance or swizzle %u is not modelled",
                     (unsigned long long)d, swizzle);
        DI_EMU_CHECK(swizzle == 0 || (start & 0x380) == 0,
                     "matrix descriptor %016llx: a tile in the 128-byte swizzle starts at 0x%x, inside an atom",
                     (unsigned long long)d, start);
    }
    /* Of 16 bytes: chunk c of row r. */
    uint32_t address(uint32_t r, uint32_t c) const {
        if (swizzle == 0)
            return start + r / 8 * across + r % 8 * 16 + c * along;
        uint32_t a = start + r / 8 * across + r % 8 * 128 + c * 16;
        return a ^ (a >> 3 & 0x70);
    }
};

enum tensor_step { TENSOR_SCALES, TENSOR_MULTIPLY, TENSOR_COMMIT };

struct tensor_operation {
    tensor_step step;
    uint32_t bar;        /* commit */
    uint32_t to;         /* column of scales or of D */
    tensor_operand a, b; /* scales: a */
    uint32_t n, a_format, b_format;
    uint32_t a_scale, b_scale, a_byte, b_byte;
    bool keep;

    /* Of a multiply. */
    void decode(uint32_t kind) {
        a_format = tensor_bits(kind, 7, 10);
        b_format = tensor_bits(kind, 10, 13);
        n = tensor_bits(kind, 17, 23) * 8;
        b_byte = tensor_bits(kind, 4, 6);
        a_byte = tensor_bits(kind, 29, 31);
        uint32_t m = tensor_bits(kind, 24, 29) * 16;
        DI_EMU_CHECK(!tensor_bits(kind, 0, 4) && !tensor_bits(kind, 6, 7) && !tensor_bits(kind, 31, 32),
                     "instruction descriptor %08x: fixed bits are set, or it is sparse", kind);
        DI_EMU_CHECK(!tensor_bits(kind, 13, 17),
                     "instruction descriptor %08x: signs and rows across k are not modelled", kind);
        DI_EMU_CHECK((a_format == 0 || a_format == 5) && (b_format == 0 || b_format == 5),
                     "instruction descriptor %08x: formats %u and %u are not modelled", kind, a_format, b_format);
        DI_EMU_CHECK(tensor_bits(kind, 23, 24) == 1, "instruction descriptor %08x: scales are not UE8M0", kind);
        DI_EMU_CHECK(m == 128 && n >= 16 && n <= 256 && n % 16 == 0, "instruction descriptor %08x: M %u, N %u", kind, m,
                     n);
    }
};

/* The machine's: 16 bytes of a block's shared memory. */
typedef const uint8_t *(*tensor_shared)(void *ctx, uint32_t address);

/* 32 values of a row; 4-bit ones lie in the first 8 of 16 bytes, low half first. */
static inline void tensor_row(const tensor_operand &o, uint32_t format, uint32_t row, tensor_shared at, void *ctx,
                              float *out) {
    static const float e2m1[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    static const std::vector<float> e4m3 = [] {
        std::vector<float> v(256);
        for (int i = 0; i < 256; i++)
            v[(size_t)i] = di_emu_e4m3_to_f32((uint8_t)i);
        return v;
    }();
    for (uint32_t c = 0; c < 2; c++) {
        const uint8_t *p = at(ctx, o.address(row, c));
        for (uint32_t i = 0; i < 16; i++) {
            uint32_t code = format == 0 ? p[i] : p[i / 2] >> i % 2 * 4 & 15;
            out[c * 16 + i] = format == 0 ? e4m3[code] : code & 8 ? -e2m1[code & 7] : e2m1[code];
        }
    }
}

/* A row's scale as factor: all quarters of the lanes must have it. */
static inline bool tensor_scale(tensor_memory *m, uint32_t column, uint32_t byte, uint32_t row, double *out) {
    uint32_t word = m->at(row % TMEM_QUARTER, column + row / TMEM_QUARTER), code = word >> 8 * byte & 255;
    for (uint32_t q = 1; q < 4; q++)
        if (m->at(q * TMEM_QUARTER + row % TMEM_QUARTER, column + row / TMEM_QUARTER) != word)
            return false;
    *out = code == 255 ? (double)NAN : ldexp(1.0, (int)code - 127);
    return true;
}

/* NULL, or what is wrong. */
static inline const char *tensor_run(tensor_memory *m, const tensor_operation &op, tensor_shared at, void *ctx) {
    static thread_local float a[32], b[32][256], sum[256];
    static thread_local double b_scale[256];
    if (op.step == TENSOR_SCALES) { /* 32 lines of 16 bytes, to every quarter */
        for (uint32_t l = 0; l < TMEM_LANES; l++) {
            uint32_t words[4];
            memcpy(words, at(ctx, op.a.address(l % TMEM_QUARTER, 0)), 16);
            for (uint32_t c = 0; c < 4; c++)
                m->at(l, op.to + c) = words[c];
        }
        return NULL;
    }
    for (uint32_t c = 0; c < op.n; c++) {
        float row[32];
        tensor_row(op.b, op.b_format, c, at, ctx, row);
        for (int k = 0; k < 32; k++)
            b[k][c] = row[k];
        if (!tensor_scale(m, op.b_scale, op.b_byte, c, &b_scale[c]))
            return "quarters of tensor memory have different scales of B";
    }
    for (uint32_t r = 0; r < TMEM_LANES; r++) {
        double a_scale;
        tensor_row(op.a, op.a_format, r, at, ctx, a);
        if (!tensor_scale(m, op.a_scale, op.a_byte, r, &a_scale))
            return "quarters of tensor memory have different scales of A";
        for (uint32_t c = 0; c < op.n; c++)
            sum[c] = 0.0f;
        for (int k = 0; k < 32; k++)
            for (uint32_t c = 0; c < op.n; c++)
                sum[c] += a[k] * b[k][c];
        for (uint32_t c = 0; c < op.n; c++) {
            uint32_t *d = &m->at(r, op.to + c);
            double had = op.keep ? (double)__uint_as_float(*d) : 0.0;
            *d = __float_as_uint((float)(had + (double)sum[c] * (a_scale * b_scale[c])));
        }
    }
    return NULL;
}

#endif
