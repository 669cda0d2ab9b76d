/* The ring of stages that the copy engine fills for a product: which units of work a block of threads has, and who asks
 * for their boxes. A stage is 128 bytes of k of a tile's rows and outputs. Private to gemm_bf16_sm90.cu and
 * gemm_fp8_sm90.cu.
 *
 * A kernel's form F has ROWS and OUTS of a tile, IS_APART (pieces of k are units of their own), STAGES of a block of
 * 128 k, and of shared memory X and W in a stage, BYTES of it, COUNT of them, and BARRIERS: where those of full stages
 * begin, with those of empty ones behind. */
#ifndef DI_GEMM_RING_CUH
#define DI_GEMM_RING_CUH

#include "gemm.h"
#include "sm90.cuh"

/* The tiles of a product. Bands of 8 row tiles, inside a band output by output, so that what runs together shares rows
 * of both operands. */
struct gemm_tiles {
    int n_row_tiles, n_out_tiles;

    __device__ int count() const {
        return n_row_tiles * n_out_tiles;
    }
    /* Tile t of `rows` rows and `outs` outputs. */
    __device__ void at(int t, int rows, int outs, int64_t &row0, int64_t &out0) const {
        enum { BAND = 8 };
        int per_band = BAND * n_out_tiles, first = t / per_band * BAND, in_band = t % per_band;
        int n = n_row_tiles - first < BAND ? n_row_tiles - first : BAND;
        row0 = (int64_t)(first + in_band % n) * rows;
        out0 = (int64_t)(in_band / n) * outs;
    }
};

/* The units of a block of threads: tiles, or their pieces. */
struct gemm_units {
    gemm_tiles tiles;
    int n_blocks, n_pieces; /* n_blocks: of 128 k */
    int n_apart;            /* pieces of a tile that are units, or 1 */
    int group_out;          /* outputs of a group of columns; a multiple of a tile's, or all */
    int box_rows;           /* of x that come: a smaller box leaves the others as they were; nobody reads their sums */

    __device__ int count() const {
        return tiles.count() * n_apart;
    }
    __device__ int begin(int piece) const { /* its first block of k; likewise gemm_piece */
        return n_blocks * piece / n_pieces;
    }
};

/* The number of units goes to *n_units. Host. */
template <class F> static inline gemm_units gemm_units_of(const gemm_job &job, int n_pieces, int64_t *n_units) {
    gemm_units units = {};
    units.tiles = {(int)gemm_ceil_div(job.x.n_rows, F::ROWS), (int)gemm_ceil_div(job.w.n_out, F::OUTS)};
    units.n_blocks = (int)(job.w.n_in / 128);
    units.n_pieces = n_pieces;
    units.n_apart = F::IS_APART ? n_pieces : 1;
    units.group_out = (int)(job.w.n_out / job.n_groups);
    units.box_rows = (int)DI_MIN((int64_t)F::ROWS, gemm_ceil_div(job.x.n_rows, 8) * 8);
    *n_units = (int64_t)units.tiles.n_row_tiles * units.tiles.n_out_tiles * units.n_apart;
    return units;
}

/* Where a unit lies. */
template <class F> struct gemm_unit {
    int64_t row0, out0;
    int piece, begin, end; /* blocks of k */
    int group;             /* of columns of x */

    __device__ gemm_unit(const gemm_units &units, int unit) {
        units.tiles.at(unit / units.n_apart, F::ROWS, F::OUTS, row0, out0);
        piece = F::IS_APART ? unit % units.n_apart : 0;
        begin = F::IS_APART ? units.begin(piece) : 0;
        end = F::IS_APART ? units.begin(piece + 1) : units.n_blocks;
        group = (int)out0 / units.group_out;
    }
};

/* A place in the ring and the parity of its round. `shared`: where the block's memory begins. */
template <class F> struct gemm_at {
    uint32_t shared, stage = 0, parity = 0;

    __device__ explicit gemm_at(uint32_t shared_) : shared(shared_) {
    }
    __device__ void next() {
        if (++stage == F::COUNT) {
            stage = 0;
            parity ^= 1;
        }
    }
    __device__ uint32_t full() const {
        return shared + F::BARRIERS + stage * 8;
    }
    __device__ uint32_t empty() const {
        return full() + F::COUNT * 8;
    }
};

/* n_full: arrivals that fill a stage; n_empty: that release it. One thread, before a barrier of the block. */
template <class F> __device__ static inline void gemm_ring_init(uint8_t *shared, uint32_t n_full, uint32_t n_empty) {
    uint64_t *full = (uint64_t *)(shared + F::BARRIERS), *empty = full + F::COUNT;
    for (int s = 0; s < F::COUNT; s++) {
        cu_mbar_init(&full[s], n_full);
        cu_mbar_init(&empty[s], n_empty);
    }
    cu_fence_mbar_init();
}

/* The boxes that are asked for next. */
template <class F> struct gemm_cursor {
    const gemm_units &units;
    int unit, stage = 0, end = 0;      /* stages of k */
    int row0 = 0, out0 = 0, first = 0; /* first: byte of the group's columns in a row of x */

    __device__ explicit gemm_cursor(const gemm_units &u) : units(u), unit(blockIdx.x) {
        set();
    }
    __device__ bool is_over() const {
        return unit >= units.count();
    }
    __device__ void set() {
        if (is_over())
            return;
        gemm_unit<F> u(units, unit);
        row0 = (int)u.row0, out0 = (int)u.out0;
        stage = u.begin * F::STAGES, end = u.end * F::STAGES;
        first = u.group * units.n_blocks * F::STAGES * 128;
    }
    __device__ void next() {
        if (++stage < end)
            return;
        unit += gridDim.x;
        set();
    }
    __device__ void ask_x(const cu_map &x, uint32_t to, uint64_t *full) const {
        cu_map_load(to + F::X, x, first + stage * 128, row0, full);
    }
};

/* Asks for all stages; one thread. ask_w(to, byte of k, first output, barrier) asks for the weights of one. */
template <class F, class W>
__device__ static inline void gemm_fill(uint8_t *shared, const gemm_units &units, const cu_map &x_map, W ask_w) {
    uint64_t *full = (uint64_t *)(shared + F::BARRIERS);
    uint32_t n_bytes = (uint32_t)(units.box_rows + F::OUTS) * 128;
    gemm_cursor<F> w(units), x(units);
    gemm_at<F> at(cu_smem(shared));
    int n = 0; /* stages whose weights are on their way: these don't depend on the kernels before */
    for (; n < F::COUNT && !w.is_over(); n++, w.next()) {
        cu_mbar_arrive_expect(&full[n], n_bytes);
        ask_w(at.shared + (uint32_t)n * F::BYTES + F::W, w.stage * 128, w.out0, &full[n]);
    }
    cu_grid_begin();
    for (int s = 0; s < n; s++, x.next())
        x.ask_x(x_map, at.shared + (uint32_t)s * F::BYTES, &full[s]);
    for (; !w.is_over(); w.next(), at.next()) {
        uint32_t to = at.shared + at.stage * F::BYTES;
        cu_mbar_wait(at.empty(), at.parity);
        cu_mbar_arrive_expect(&full[at.stage], n_bytes);
        ask_w(to + F::W, w.stage * 128, w.out0, &full[at.stage]);
        w.ask_x(x_map, to, &full[at.stage]);
    }
}

#endif
