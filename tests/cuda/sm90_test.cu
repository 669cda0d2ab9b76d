/* Kernels that use sm90.cuh's functions, one family each, against plain loops on the host.
 *
 * The same file runs on a GPU and in the emulation (cuda_emu.h): there it shows that the functions do what sm90.cuh
 * says, here that the emulation's layouts are the hardware's. Values are small integers, so that every sum is exact in
 * any order and comparisons are of equality. Each family is a function called by sm90_test.c: NULL, or what differed;
 * a text that starts with "skip" where there is no Hopper GPU. */
#include "backend/cuda/sm90.cuh"

#include <vector>

typedef std::vector<uint8_t> bytes;

namespace {

struct result {
    char text[256];
    bool is_set;
    void say(const char *format, ...) __attribute__((format(printf, 2, 3))) {
        if (is_set)
            return;
        va_list args;
        va_start(args, format);
        vsnprintf(text, sizeof text, format, args);
        va_end(args);
        is_set = true;
    }
};

/* Host memory and its image on the device. */
template <class T> struct mirror {
    std::vector<T> host;
    T *dev = NULL;
    explicit mirror(size_t n) : host(n) {
        (void)cudaMalloc(&dev, n * sizeof(T));
    }
    ~mirror() {
        (void)cudaFree(dev);
    }
    void up() {
        (void)cudaMemcpy(dev, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice);
    }
    void down() {
        (void)cudaMemcpy(host.data(), dev, host.size() * sizeof(T), cudaMemcpyDeviceToHost);
    }
    T &operator[](size_t i) {
        return host[i];
    }
};

bool is_done(result *r, const char *what) { /* waits for the kernel */
    cudaError_t e = cudaDeviceSynchronize();
    e = e == cudaSuccess ? cudaGetLastError() : e;
    if (e != cudaSuccess)
        r->say("%s: %s", what, cudaGetErrorString(e));
    return e == cudaSuccess;
}

const char *finish(const result *r) {
    static char text[256];
    memcpy(text, r->text, sizeof text);
    return r->is_set ? text : NULL;
}

const char *absent() {
    cudaDeviceProp p;
    int n = 0;
    if (cudaGetDeviceCount(&n) != cudaSuccess || n < 1 || cudaGetDeviceProperties(&p, 0) != cudaSuccess)
        return "skip: no GPU";
    return p.major == 9 ? NULL : "skip: not a Hopper GPU";
}

uint64_t random_next(uint64_t *rng) {
    uint64_t x = *rng += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}
int random_small(uint64_t *rng) { /* -4 .. 4 */
    return (int)(random_next(rng) % 9) - 4;
}
uint16_t bf16_of(int v) { /* |v| <= 256 */
    float f = (float)v;
    uint32_t u;
    memcpy(&u, &f, 4);
    return (uint16_t)(u >> 16);
}
float bf16_value(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
uint8_t e4m3_of(int v) { /* 0 .. 4 in size */
    static const uint8_t code[5] = {0, 0x38, 0x40, 0x44, 0x48};
    return (uint8_t)(code[v < 0 ? -v : v] | (v < 0 ? 0x80 : 0));
}

/* ---- warpgroup multiplies ---------------------------------------------------------------------------------------- */

/* Where A and B lie: K-major by 128-byte swizzle unless said otherwise. */
enum form { SS, SS_B_MN, SS_A_MN, SS_SW64, SS_SW0, RS, RS_B_MN, N_FORMS };

struct multiply_case {
    const uint8_t *a;                     /* [128][row], or [k][128] elements when A is MN-major */
    const uint8_t *b;                     /* [n][row], or [k][n] */
    float *out;                           /* [128][n], holds the start */
    int n_rows_a, row_a, n_rows_b, row_b; /* rows and bytes of a row as stored */
    int keep;
};

__device__ uint32_t place(int layout, uint32_t r, uint32_t b, uint32_t n_rows) {
    return layout == SS_SW64 ? cu_sw64(r, b, n_rows) : layout == SS_SW0 ? cu_sw0(r, b, n_rows) : cu_sw128(r, b, n_rows);
}

/* 2 warpgroups of 64 rows. k: 128 bf16 or 256 e4m3, that is 8 steps of 32 bytes, two panels. */
template <int H, int FORM, bool E4M3> __global__ void __launch_bounds__(256, 1) multiply_kernel(multiply_case c) {
    DI_DYN_SHARED(uint8_t, smem);
    enum { N = 2 * H, STEPS = 8, A_BYTES = 128 * 256 };
    uint8_t *a = smem, *b = smem + A_BYTES;
    int layout = FORM == SS_SW64 || FORM == SS_SW0 ? FORM : SS;
    for (int i = (int)threadIdx.x; i < c.n_rows_a * c.row_a; i += (int)blockDim.x)
        a[place(layout, (uint32_t)(i / c.row_a), (uint32_t)(i % c.row_a), (uint32_t)c.n_rows_a)] = c.a[i];
    for (int i = (int)threadIdx.x; i < c.n_rows_b * c.row_b; i += (int)blockDim.x)
        b[place(layout, (uint32_t)(i / c.row_b), (uint32_t)(i % c.row_b), (uint32_t)c.n_rows_b)] = c.b[i];
    cu_fence_async();
    __syncthreads();

    int group = (int)threadIdx.x / 128, t = (int)threadIdx.x % 128, row0 = group * 64;
    float d[H];
    for (int i = 0; i < H; i++)
        d[i] = c.out[(row0 + cu_acc_row(t, i)) * N + cu_acc_col(t, i)];
    uint32_t regs[STEPS][4];
    if (FORM == RS || FORM == RS_B_MN) {
        int per = E4M3 ? 4 : 2;
        for (int s = 0; s < STEPS; s++)
            for (int w = 0; w < 4; w++) {
                int row = row0 + t / 32 * 16 + t % 32 / 4 + w % 2 * 8;
                int byte = s * 32 + (w / 2 * 4 * per + t % 4 * per) * (E4M3 ? 1 : 2);
                regs[s][w] = *(const uint32_t *)(c.a + row * c.row_a + byte);
            }
    }
    uint32_t a_at = cu_smem(a), b_at = cu_smem(b);
    cu_wgmma_fence();
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        int keep = s > 0 ? 1 : c.keep;
        uint32_t sa, sb; /* where step s starts */
        uint64_t da, db;
        if (FORM == SS_SW64) {
            sa = (uint32_t)(s / 2 * c.n_rows_a * 64 + s % 2 * 32 + row0 * 64);
            sb = (uint32_t)(s / 2 * c.n_rows_b * 64 + s % 2 * 32);
            da = cu_desc_k64(a_at), db = cu_desc_k64(b_at);
        } else if (FORM == SS_SW0) {
            sa = (uint32_t)(s * c.n_rows_a * 32 + row0 * 16);
            sb = (uint32_t)(s * c.n_rows_b * 32);
            da = cu_desc_k0(a_at, (uint32_t)c.n_rows_a), db = cu_desc_k0(b_at, (uint32_t)c.n_rows_b);
        } else {
            sa = (uint32_t)(s / 4 * c.n_rows_a * 128 + s % 4 * 32 + row0 * 128);
            sb = (uint32_t)(s / 4 * c.n_rows_b * 128 + s % 4 * 32);
            da = cu_desc_k128(a_at), db = cu_desc_k128(b_at);
        }
        if (FORM == SS_A_MN) { /* rows are k; a panel of 64 m for each warpgroup */
            sa = (uint32_t)(group * c.n_rows_a * 128 + s * 2048);
            da = cu_desc_mn128(a_at, (uint32_t)c.n_rows_a);
        }
        if (FORM == SS_B_MN || FORM == RS_B_MN) {
            sb = (uint32_t)(s * 2048);
            db = cu_desc_mn128(b_at, (uint32_t)c.n_rows_b);
        }
        da = cu_desc_add(da, sa), db = cu_desc_add(db, sb);
        if constexpr (E4M3 && FORM == RS)
            cu_wgmma_e4m3_rs(d, regs[s], db, keep);
        else if constexpr (E4M3)
            cu_wgmma_e4m3_ss(d, da, db, keep);
        else if constexpr (FORM == RS)
            cu_wgmma_bf16_rs(d, regs[s], db, keep);
        else if constexpr (FORM == RS_B_MN)
            cu_wgmma_bf16_rs<CU_MN_MAJOR>(d, regs[s], db, keep);
        else if constexpr (FORM == SS_B_MN)
            cu_wgmma_bf16_ss<CU_MN_MAJOR>(d, da, db, keep);
        else if constexpr (FORM == SS_A_MN)
            cu_wgmma_bf16_ss<CU_K_MAJOR, CU_MN_MAJOR>(d, da, db, keep);
        else
            cu_wgmma_bf16_ss(d, da, db, keep);
        if (s == 3)
            cu_wgmma_commit();
    }
    cu_wgmma_commit();
    cu_wgmma_wait<1>();
    cu_wgmma_wait<0>();
    cu_wgmma_pin(d);
    for (int i = 0; i < H; i++)
        c.out[(row0 + cu_acc_row(t, i)) * N + cu_acc_col(t, i)] = d[i];
}

template <int H, int FORM, bool E4M3> void multiply_check(uint64_t *rng, result *r) {
    enum { N = 2 * H, M = 128, K = E4M3 ? 256 : 128, SIZE = E4M3 ? 1 : 2 };
    bool is_a_mn = FORM == SS_A_MN, is_b_mn = FORM == SS_B_MN || FORM == RS_B_MN;
    /* Rows as stored, padded to a whole panel of 128 bytes. */
    int wide_b = is_b_mn && N % 64 ? (N + 63) / 64 * 64 : N;
    std::vector<int> a(M * K), b((size_t)N * K);
    mirror<uint8_t> da((size_t)M * K * SIZE), db((size_t)wide_b * K * SIZE);
    mirror<float> out((size_t)M * N);
    std::vector<float> want((size_t)M * N);
    int keep = (int)(random_next(rng) & 1);
    auto put = [](mirror<uint8_t> &m, size_t i, int v) {
        if (E4M3) {
            m[i] = e4m3_of(v);
        } else {
            uint16_t h = bf16_of(v);
            memcpy(&m[2 * i], &h, 2);
        }
    };
    for (int i = 0; i < M; i++)
        for (int k = 0; k < K; k++) {
            a[(size_t)i * K + k] = random_small(rng);
            put(da, is_a_mn ? (size_t)k * M + i : (size_t)i * K + k, a[(size_t)i * K + k]);
        }
    for (int i = 0; i < N; i++)
        for (int k = 0; k < K; k++) {
            b[(size_t)i * K + k] = random_small(rng);
            put(db, is_b_mn ? (size_t)k * wide_b + i : (size_t)i * K + k, b[(size_t)i * K + k]);
        }
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) {
            int sum = 0;
            out[(size_t)i * N + j] = (float)random_small(rng);
            for (int k = 0; k < K; k++)
                sum += a[(size_t)i * K + k] * b[(size_t)j * K + k];
            want[(size_t)i * N + j] = (float)sum + (keep ? out[(size_t)i * N + j] : 0.0f);
        }
    da.up(), db.up(), out.up();
    multiply_case c = {da.dev,
                       db.dev,
                       out.dev,
                       is_a_mn ? K : M,
                       is_a_mn ? M * SIZE : K * SIZE,
                       is_b_mn ? K : N,
                       is_b_mn ? wide_b * SIZE : K * SIZE,
                       keep};
    DI_LAUNCH((multiply_kernel<H, FORM, E4M3>), 1, 256, 128 * 256 + 256 * 256, (cudaStream_t)NULL, c);
    char name[64];
    snprintf(name, sizeof name, "wgmma %s n %d form %d", E4M3 ? "e4m3" : "bf16", (int)N, FORM);
    if (!is_done(r, name))
        return;
    out.down();
    for (int i = 0; i < M * N; i++)
        if (out[(size_t)i] != want[(size_t)i]) {
            r->say("%s keep %d: (%d, %d) is %g, expected %g", name, keep, i / N, i % N, out[(size_t)i],
                   want[(size_t)i]);
            return;
        }
}

/* Every width; of forms that differ in the descriptor alone, some. */
template <int FORM, bool E4M3> void multiply_some(uint64_t *rng, result *r) {
    multiply_check<8, FORM, E4M3>(rng, r);
    multiply_check<48, FORM, E4M3>(rng, r);
    multiply_check<128, FORM, E4M3>(rng, r);
}
template <int FORM, bool E4M3> void multiply_widths(uint64_t *rng, result *r) {
    multiply_check<4, FORM, E4M3>(rng, r);
    multiply_check<16, FORM, E4M3>(rng, r);
    multiply_check<32, FORM, E4M3>(rng, r);
    multiply_check<64, FORM, E4M3>(rng, r);
    multiply_check<96, FORM, E4M3>(rng, r);
    multiply_some<FORM, E4M3>(rng, r);
}

/* ---- tensor cores by warps --------------------------------------------------------------------------------------- */

struct warp_case {
    const uint16_t *a, *b;   /* [16][16], [8 n][16 k] bf16 */
    const uint8_t *a8, *b8;  /* [16][32], [8][32] e4m3 */
    float *d, *d_trans, *d8; /* [16][8] */
    uint16_t *moved;         /* [8][8]: B's first 8 k transposed: [k][n] */
    uint16_t *stored;        /* [16][16]: A by stmatrix of what ldmatrix read */
    uint16_t *turned;        /* [16][16]: likewise by stmatrix.trans, each 8x8 matrix transposed in place */
};

__device__ void mma_out(float *out, const float (&d)[4]) {
    for (int i = 0; i < 4; i++)
        out[cu_acc_row((int)threadIdx.x, i) * 8 + cu_acc_col((int)threadIdx.x, i)] = d[i];
}

__global__ void warp_kernel(warp_case c) {
    __shared__ __align__(16) uint16_t a[16][16], b[8][16], bt[16][8], s[16][16], u[16][16];
    __shared__ __align__(16) uint8_t a8[16][32], b8[8][32];
    int l = (int)threadIdx.x;
    for (int i = l; i < 256; i += 32)
        a[i / 16][i % 16] = c.a[i];
    for (int i = l; i < 128; i += 32)
        b[i / 16][i % 16] = c.b[i], bt[i % 16][i / 16] = c.b[i];
    for (int i = l; i < 512; i += 32)
        a8[i / 32][i % 32] = c.a8[i];
    for (int i = l; i < 256; i += 32)
        b8[i / 32][i % 32] = c.b8[i];
    __syncwarp();
    /* Matrices in the order of A's words: rows 0-7 and 8-15 of the left half, then of the right. */
    int row = l % 8 + l / 8 % 2 * 8, half = l / 16;
    uint32_t fa[4], fb[2], ft[4];
    cu_ldmatrix(fa, cu_smem(&a[row][half * 8]));
    cu_ldmatrix2(fb, cu_smem(&b[l % 8][l / 8 % 2 * 8]));
    float d[4] = {1, 1, 1, 1};
    cu_mma_bf16(d, fa, fb);
    mma_out(c.d, d);

    cu_ldmatrix_trans(ft, cu_smem(&bt[l % 16][0])); /* the last two repeat the first */
    uint32_t fb2[2] = {ft[0], ft[1]};
    float e[4] = {};
    cu_mma_bf16(e, fa, fb2);
    mma_out(c.d_trans, e);

    uint32_t fa8[4], fb8[2];
    cu_ldmatrix(fa8, cu_smem(&a8[row][half * 16]));
    cu_ldmatrix2(fb8, cu_smem(&b8[l % 8][l / 8 % 2 * 16]));
    float f[4] = {};
    cu_mma_e4m3(f, fa8, fb8);
    mma_out(c.d8, f);

    uint32_t moved = cu_movmatrix(fb[0]);
    ((uint32_t *)c.moved)[l] = moved;
    cu_stmatrix(cu_smem(&s[row][half * 8]), fa);
    cu_stmatrix_trans(cu_smem(&u[row][half * 8]), fa);
    __syncwarp();
    for (int i = l; i < 256; i += 32)
        c.stored[i] = s[i / 16][i % 16], c.turned[i] = u[i / 16][i % 16];
}

void warp_check(uint64_t *rng, result *r) {
    mirror<uint16_t> a(256), b(128), moved(64), stored(256), turned(256);
    mirror<uint8_t> a8(512), b8(256);
    mirror<float> d(128), dt(128), d8(128);
    std::vector<int> va(512), vb(256), va8(512), vb8(256);
    for (int i = 0; i < 512; i++)
        va8[i] = random_small(rng), a8[i] = e4m3_of(va8[i]);
    for (int i = 0; i < 256; i++)
        va[i] = random_small(rng), a[i] = bf16_of(va[i]), vb8[i] = random_small(rng), b8[i] = e4m3_of(vb8[i]);
    for (int i = 0; i < 128; i++)
        vb[i] = random_small(rng), b[i] = bf16_of(vb[i]);
    a.up(), b.up(), a8.up(), b8.up();
    DI_LAUNCH(warp_kernel, 1, 32, 0, (cudaStream_t)NULL,
              warp_case{a.dev, b.dev, a8.dev, b8.dev, d.dev, dt.dev, d8.dev, moved.dev, stored.dev, turned.dev});
    if (!is_done(r, "mma"))
        return;
    d.down(), dt.down(), d8.down(), moved.down(), stored.down(), turned.down();
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 8; j++) {
            int sum = 0, sum8 = 0;
            for (int k = 0; k < 16; k++)
                sum += va[i * 16 + k] * vb[j * 16 + k];
            for (int k = 0; k < 32; k++)
                sum8 += va8[i * 32 + k] * vb8[j * 32 + k];
            if (d[i * 8 + j] != (float)(sum + 1))
                r->say("mma bf16 (%d, %d) is %g, expected %d", i, j, d[i * 8 + j], sum + 1);
            if (dt[i * 8 + j] != (float)sum)
                r->say("mma bf16 after ldmatrix.trans (%d, %d) is %g, expected %d", i, j, dt[i * 8 + j], sum);
            if (d8[i * 8 + j] != (float)sum8)
                r->say("mma e4m3 (%d, %d) is %g, expected %d", i, j, d8[i * 8 + j], sum8);
        }
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 8; j++)
            if (moved[i * 8 + j] != b[j * 16 + i])
                r->say("movmatrix (%d, %d) is %g, expected %g", i, j, bf16_value(moved[i * 8 + j]),
                       bf16_value(b[j * 16 + i]));
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) {
            int ti = i / 8 * 8 + j % 8, tj = j / 8 * 8 + i % 8; /* inside its 8x8 matrix */
            if (stored[i * 16 + j] != a[i * 16 + j])
                r->say("stmatrix (%d, %d)", i, j);
            if (turned[i * 16 + j] != a[ti * 16 + tj])
                r->say("stmatrix.trans (%d, %d)", i, j);
        }
}

/* ---- asynchronous copies ----------------------------------------------------------------------------------------- */

enum { COPY_STAGES = 3, COPY_ROUNDS = 8, COPY_PIECE = 2048 };

struct copy_case {
    const uint8_t *in; /* COPY_ROUNDS pieces */
    uint8_t *bulk, *bulk_hint, *by_threads, *by_arrival, *stored, *zeroed, *small, *once;
};

/* Warp 0 is the producer of a ring of bulk loads, warps 1-3 take pieces out. */
__global__ void __launch_bounds__(128) ring_kernel(copy_case c, int use_hint) {
    DI_DYN_SHARED(uint8_t, ring);
    __shared__ uint64_t full[COPY_STAGES], empty[COPY_STAGES];
    int t = (int)threadIdx.x;
    if (t == 0) {
        for (int i = 0; i < COPY_STAGES; i++) {
            cu_mbar_init(&full[i], 1);
            cu_mbar_init(&empty[i], 96);
        }
        cu_fence_mbar_init();
        cu_fence_async();
    }
    __syncthreads();
    if (t < 32) {
        if (cu_elect()) {
            for (int i = 0; i < COPY_ROUNDS; i++) {
                int stage = i % COPY_STAGES, turn = i / COPY_STAGES;
                cu_mbar_wait(&empty[stage], (uint32_t)((turn & 1) ^ 1)); /* passes at once in the first turn */
                uint32_t to = cu_smem(ring + stage * COPY_PIECE);
                if (use_hint) {
                    cu_mbar_expect(&full[stage], COPY_PIECE);
                    cu_bulk_load_hint(to, c.in + i * COPY_PIECE, COPY_PIECE, &full[stage], cu_policy_first());
                    cu_mbar_arrive(&full[stage]);
                } else { /* two loads for one phase */
                    cu_mbar_arrive_expect(&full[stage], COPY_PIECE);
                    cu_bulk_load(to, c.in + i * COPY_PIECE, COPY_PIECE / 2, &full[stage]);
                    cu_bulk_load(to + COPY_PIECE / 2, c.in + i * COPY_PIECE + COPY_PIECE / 2, COPY_PIECE / 2,
                                 &full[stage]);
                }
            }
        }
    } else {
        for (int i = 0; i < COPY_ROUNDS; i++) {
            int stage = i % COPY_STAGES;
            cu_mbar_wait(&full[stage], (uint32_t)(i / COPY_STAGES & 1));
            uint8_t *out = use_hint ? c.bulk_hint : c.bulk;
            for (int j = t - 32; j < COPY_PIECE; j += 96)
                out[i * COPY_PIECE + j] = ring[stage * COPY_PIECE + j];
            cu_mbar_arrive(&empty[stage]);
        }
    }
}

__global__ void __launch_bounds__(128) copy_kernel(copy_case c) {
    DI_DYN_SHARED(uint8_t, smem); /* 4 pieces */
    __shared__ uint64_t bar;
    int t = (int)threadIdx.x;
    uint8_t *stage[2] = {smem, smem + COPY_PIECE}, *third = smem + 2 * COPY_PIECE, *fourth = smem + 3 * COPY_PIECE;
    if (t == 0) {
        cu_mbar_init(&bar, 128);
        cu_fence_mbar_init();
    }
    __syncthreads();
    /* Two stages of cp.async, one group in flight. */
    for (int i = 0; i <= COPY_ROUNDS; i++) {
        if (i < COPY_ROUNDS)
            cu_cp16(cu_smem(stage[i % 2] + t * 16), c.in + i * COPY_PIECE + t * 16);
        cu_cp_commit();
        cu_cp_wait<1>();
        __syncthreads();
        if (i > 0)
            for (int j = t; j < COPY_PIECE; j += 128)
                c.by_threads[(i - 1) * COPY_PIECE + j] = stage[(i - 1) % 2][127 * 16 - j / 16 * 16 + j % 16];
        __syncthreads();
    }
    /* An arrival that follows the copies. */
    cu_cp16(cu_smem(third + t * 16), c.in + t * 16);
    cu_mbar_arrive_cp(&bar);
    cu_mbar_wait(&bar, 0);
    for (int j = t; j < COPY_PIECE; j += 128)
        c.by_arrival[j] = third[COPY_PIECE - 1 - j];
    __syncthreads();
    /* t % 17 of 16 bytes; 4 and 8 bytes. */
    cu_cp16_zfill(cu_smem(third + t * 16), c.in + t * 16, (uint32_t)t % 17);
    cu_cp<4>(cu_smem(fourth + t * 16), c.in + t * 4);
    cu_cp<8>(cu_smem(fourth + t * 16 + 8), c.in + t * 8);
    cu_cp_commit();
    cu_cp_wait<0>();
    __syncthreads();
    for (int j = t; j < COPY_PIECE; j += 128) {
        c.zeroed[j] = third[j];
        if (j % 16 < 4 || j % 16 >= 8)
            c.small[j] = fourth[j];
    }
    __syncthreads();
    /* Shared to global by the copy engine. */
    for (int j = t; j < COPY_PIECE; j += 128)
        third[j] = (uint8_t)(c.in[j] ^ 0x5A);
    cu_fence_async();
    __syncthreads();
    if (t == 0) {
        cu_bulk_store(c.stored, cu_smem(third), COPY_PIECE / 2);
        cu_bulk_commit();
        cu_bulk_store(c.stored + COPY_PIECE / 2, cu_smem(third + COPY_PIECE / 2), COPY_PIECE / 2);
        cu_bulk_commit();
        cu_bulk_wait_read<1>();
        cu_bulk_wait<0>();
        cu_mbar_inval(&bar);
    }
    /* Loads that pass once. */
    cu_prefetch_l2(c.in + COPY_PIECE);
    cu_bulk_prefetch_l2(c.in + COPY_PIECE, COPY_PIECE);
    uint4 *once = (uint4 *)(c.once + t * 64);
    const uint8_t *from = c.in + COPY_PIECE + t * 64;
    once[0] = cu_load16_once(from);
    once[1] = cu_load16_hint(from + 16, cu_policy_last());
    uint2 *pair = (uint2 *)(once + 2);
    pair[0] = cu_load8_once(from + 32);
    pair[1] = cu_load8_hint(from + 40, cu_policy_first());
    uint32_t *word = (uint32_t *)(once + 3);
    for (int i = 0; i < 4; i++)
        word[i] = cu_load4_once(from + 48 + 4 * i);
}

void same_bytes(result *r, const char *what, const uint8_t *got, const uint8_t *want, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (got[i] != want[i]) {
            r->say("%s: byte %zu is %02x, expected %02x", what, i, got[i], want[i]);
            return;
        }
}

void copy_check(uint64_t *rng, result *r) {
    size_t n = (size_t)COPY_ROUNDS * COPY_PIECE;
    mirror<uint8_t> in(n), bulk(n), hint(n), threads(n), arrival(COPY_PIECE), stored(COPY_PIECE), zeroed(COPY_PIECE);
    mirror<uint8_t> small(COPY_PIECE), once(128 * 64);
    for (size_t i = 0; i < n; i++)
        in[i] = (uint8_t)random_next(rng);
    in.up(), small.up();
    copy_case c = {in.dev, bulk.dev, hint.dev, threads.dev, arrival.dev, stored.dev, zeroed.dev, small.dev, once.dev};
    DI_LAUNCH(ring_kernel, 1, 128, COPY_STAGES * COPY_PIECE, (cudaStream_t)NULL, c, 0);
    DI_LAUNCH(ring_kernel, 1, 128, COPY_STAGES * COPY_PIECE, (cudaStream_t)NULL, c, 1);
    DI_LAUNCH(copy_kernel, 1, 128, 4 * COPY_PIECE, (cudaStream_t)NULL, c);
    if (!is_done(r, "copies"))
        return;
    bulk.down(), hint.down(), threads.down(), arrival.down(), stored.down(), zeroed.down(), small.down(), once.down();
    bytes want(n);
    same_bytes(r, "ring of bulk loads", bulk.host.data(), in.host.data(), n);
    same_bytes(r, "ring of bulk loads with a hint", hint.host.data(), in.host.data(), n);
    for (size_t i = 0; i < n; i++) {
        size_t j = i % COPY_PIECE;
        want[i] = in[i - j + 127 * 16 - j / 16 * 16 + j % 16];
    }
    same_bytes(r, "cp.async in groups", threads.host.data(), want.data(), n);
    for (size_t j = 0; j < COPY_PIECE; j++)
        want[j] = in[COPY_PIECE - 1 - j];
    same_bytes(r, "cp.async with an arrival", arrival.host.data(), want.data(), COPY_PIECE);
    for (size_t j = 0; j < COPY_PIECE; j++)
        want[j] = j % 16 < j / 16 % 17 ? in[j] : 0;
    same_bytes(r, "cp.async with zeroes", zeroed.host.data(), want.data(), COPY_PIECE);
    for (size_t j = 0; j < COPY_PIECE; j++)
        want[j] = j % 16 < 4 ? in[j / 16 * 4 + j % 16] : j % 16 < 8 ? 0 : in[j / 16 * 8 + j % 16 - 8];
    same_bytes(r, "cp.async of 4 and 8 bytes", small.host.data(), want.data(), COPY_PIECE);
    for (size_t j = 0; j < COPY_PIECE; j++)
        want[j] = in[j] ^ 0x5A;
    same_bytes(r, "bulk store", stored.host.data(), want.data(), COPY_PIECE);
    same_bytes(r, "loads that pass once", once.host.data(), in.host.data() + COPY_PIECE, 128 * 64);
}

/* ---- clusters ---------------------------------------------------------------------------------------------------- */

enum { CLUSTER = 4, CLUSTER_PIECE = 1024 };

struct cluster_case {
    const uint8_t *in;             /* [blocks] pieces */
    uint8_t *multicast;            /* [blocks][CLUSTER pieces] */
    float *read, *written, *fixed; /* [blocks][CLUSTER] */
    uint32_t *ranks;               /* [blocks] */
};

__global__ void __launch_bounds__(64) cluster_kernel(cluster_case c) {
    DI_DYN_SHARED(uint8_t, smem); /* CLUSTER pieces, then CLUSTER + 4 floats */
    __shared__ uint64_t full, heard;
    __shared__ float fixed;
    float *mine = (float *)(smem + CLUSTER * CLUSTER_PIECE), *inbox = mine + 4;
    int t = (int)threadIdx.x;
    uint32_t rank = cu_cluster_rank(), n = cu_cluster_size(), block = blockIdx.x;
    if (t == 0) {
        c.ranks[block] = rank * 100 + n;
        cu_mbar_init(&full, 1);
        cu_mbar_init(&heard, CLUSTER);
        cu_fence_mbar_init();
        cu_mbar_arrive_expect(&full, CLUSTER * CLUSTER_PIECE);
        fixed = (float)(block * 7);
    }
    if (t < 4)
        mine[t] = (float)(block * 10 + (uint32_t)t);
    cu_cluster_sync();
    if (t == 0) /* every block sends its piece to all */
        cu_bulk_load_multicast(cu_smem(smem + rank * CLUSTER_PIECE), c.in + block * CLUSTER_PIECE, CLUSTER_PIECE, &full,
                               (1 << CLUSTER) - 1);
    if (t < CLUSTER) {
        float4 v = cu_dsmem_load4(cu_mapa(cu_smem(mine), (uint32_t)t));
        float w = cu_dsmem_load(cu_mapa(cu_smem(mine + 1), (uint32_t)t));
        c.read[block * CLUSTER + (uint32_t)t] = v.x + v.y * 1000.0f + v.z * 0.25f + v.w * 0.5f + w;
        c.fixed[block * CLUSTER + (uint32_t)t] = cu_dsmem_load(cu_mapa(cu_smem(&fixed), (uint32_t)t));
        cu_dsmem_store(cu_mapa(cu_smem(inbox + rank), (uint32_t)t), (float)(block * 3 + 1));
        cu_mbar_arrive_remote(&heard, (uint32_t)t);
    }
    cu_mbar_wait(&full, 0);
    cu_mbar_wait_cluster(&heard, 0);
    for (int j = t; j < CLUSTER * CLUSTER_PIECE; j += 64)
        c.multicast[block * CLUSTER * CLUSTER_PIECE + (uint32_t)j] = smem[j];
    if (t < CLUSTER)
        c.written[block * CLUSTER + (uint32_t)t] = inbox[t];
    cu_cluster_sync(); /* nobody's memory goes while others use it */
}

void cluster_check(uint64_t *rng, result *r) {
    enum { BLOCKS = 12 };
    mirror<uint8_t> in(BLOCKS * CLUSTER_PIECE), multicast(BLOCKS * CLUSTER * CLUSTER_PIECE);
    mirror<float> read(BLOCKS * CLUSTER), written(BLOCKS * CLUSTER), fixed(BLOCKS * CLUSTER);
    mirror<uint32_t> ranks(BLOCKS);
    for (uint8_t &v : in.host)
        v = (uint8_t)random_next(rng);
    in.up();
    DI_LAUNCH_CLUSTER(cluster_kernel, CLUSTER, BLOCKS, 64, CLUSTER * CLUSTER_PIECE + (4 + CLUSTER) * 4,
                      (cudaStream_t)NULL,
                      cluster_case{in.dev, multicast.dev, read.dev, written.dev, fixed.dev, ranks.dev});
    if (!is_done(r, "clusters"))
        return;
    multicast.down(), read.down(), written.down(), fixed.down(), ranks.down();
    for (unsigned b = 0; b < BLOCKS; b++) {
        unsigned first = b / CLUSTER * CLUSTER;
        if (ranks[b] != b % CLUSTER * 100 + CLUSTER)
            r->say("block %u: rank*100 + size is %u", b, ranks[b]);
        same_bytes(r, "multicast", &multicast.host[b * CLUSTER * CLUSTER_PIECE], &in.host[first * CLUSTER_PIECE],
                   CLUSTER * CLUSTER_PIECE);
        for (unsigned t = 0; t < CLUSTER; t++) {
            float x = (float)((first + t) * 10);
            float want = x + (x + 1) * 1000.0f + (x + 2) * 0.25f + (x + 3) * 0.5f + (x + 1);
            if (read[b * CLUSTER + t] != want)
                r->say("block %u reads %g of rank %u, expected %g", b, read[b * CLUSTER + t], t, want);
            if (fixed[b * CLUSTER + t] != (float)((first + t) * 7))
                r->say("block %u reads static %g of rank %u", b, fixed[b * CLUSTER + t], t);
            if (written[b * CLUSTER + t] != (float)((first + t) * 3 + 1))
                r->say("block %u was sent %g by rank %u", b, written[b * CLUSTER + t], t);
        }
    }
}

/* ---- conversions ------------------------------------------------------------------------------------------------- */

__global__ void convert_kernel(const float *in, int n, uint32_t *bf16, uint16_t *e4m3, uint32_t *f16, float *exp2) {
    for (int i = (int)(blockIdx.x * blockDim.x + threadIdx.x); i < n; i += (int)(gridDim.x * blockDim.x)) {
        bf16[i] = cu_pack_bf16(in[i], in[n - 1 - i]);
        e4m3[i] = cu_pack_e4m3(in[i], in[n - 1 - i]);
        f16[i] = cu_e4m3x2_to_f16x2((uint16_t)(i * 257 + 128)); /* all codes in both halves over 65536 inputs */
        exp2[i] = cu_exp2_fast(in[i] * 0.01f);
    }
}

/* Nearest of all codes, ties to even; the definition. */
uint8_t nearest_e4m3(double v) {
    double best = 1e300;
    int code = 0;
    if (v != v)
        return 0x7F;
    double a = fmin(fabs(v), 448.0);
    for (int i = 0; i < 127; i++) {
        double value = i >> 3 ? ldexp(8 + (i & 7), (i >> 3) - 10) : ldexp(i & 7, -9);
        double distance = fabs(a - value);
        if (distance < best || (distance == best && i % 2 == 0))
            best = distance, code = i;
    }
    return (uint8_t)(code | (std::signbit(v) ? 128 : 0));
}
uint16_t nearest_bf16(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return f != f ? 0x7FFF : (uint16_t)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}
double half_value(uint16_t h) {
    int e = h >> 10 & 31, m = h & 1023;
    double v = e == 31 ? (m ? NAN : INFINITY) : e ? ldexp(1024 + m, e - 25) : ldexp(m, -24);
    return h >> 15 ? -v : v;
}
double e4m3_value(int i) {
    double v = (i & 127) == 127 ? NAN : i >> 3 & 15 ? ldexp(8 + (i & 7), (i >> 3 & 15) - 10) : ldexp(i & 7, -9);
    return i & 128 ? -v : v;
}

void convert_check(uint64_t *rng, result *r) {
    enum { N = 65536 };
    mirror<float> in(N), exp2(N);
    mirror<uint32_t> bf16(N), f16(N);
    mirror<uint16_t> e4m3(N);
    for (int i = 0; i < N; i++) {
        int code = i % 127;
        double step = e4m3_value(code + 1 > 126 ? 126 : code + 1) - e4m3_value(code);
        double v = i % 3 == 0 ? e4m3_value(code) + step * 0.5 /* ties */
                   : i % 3 == 1
                       ? e4m3_value(code) + step * (double)(random_next(rng) % 1000) / 1000.0
                       : ldexp((double)(random_next(rng) % 1000000) / 1000000.0, (int)(random_next(rng) % 40) - 25);
        in[i] = (float)(random_next(rng) & 1 ? -v : v);
    }
    in[0] = NAN, in[1] = INFINITY, in[2] = -INFINITY, in[3] = 0.0f, in[4] = -0.0f, in[5] = 448.0f, in[6] = 464.0f;
    in[7] = 1e30f;
    in.up();
    DI_LAUNCH(convert_kernel, 16, 128, 0, (cudaStream_t)NULL, in.dev, (int)N, bf16.dev, e4m3.dev, f16.dev, exp2.dev);
    if (!is_done(r, "conversions"))
        return;
    bf16.down(), e4m3.down(), f16.down(), exp2.down();
    for (int i = 0; i < N; i++) {
        float lo = in[i], hi = in[N - 1 - i];
        uint32_t want = (uint32_t)nearest_bf16(hi) << 16 | nearest_bf16(lo);
        if (bf16[i] != want)
            r->say("bf16 of %g, %g is %08x, expected %08x", lo, hi, bf16[i], want);
        /* The sign of NaN's code is the hardware's own. */
        uint16_t got8 = e4m3[i], want8 = (uint16_t)(nearest_e4m3(hi) << 8 | nearest_e4m3(lo));
        if (lo == lo && hi == hi && got8 != want8)
            r->say("e4m3 of %g, %g is %04x, expected %04x", lo, hi, got8, want8);
        if (lo != lo && (got8 & 127) != 127)
            r->say("e4m3 of NaN is %02x", got8 & 255);
        uint16_t codes = (uint16_t)(i * 257 + 128);
        double a = half_value((uint16_t)f16[i]), b = half_value((uint16_t)(f16[i] >> 16));
        double wa = e4m3_value(codes & 255), wb = e4m3_value(codes >> 8);
        if ((a != wa && (a == a || wa == wa)) || (b != wb && (b == b || wb == wb)))
            r->say("f16 of codes %04x is %g, %g, expected %g, %g", codes, a, b, wa, wb);
        float x = in[i] * 0.01f;
        double e = exp2f(x);
        if (x == x && fabs(x) < 120.0f && fabs(exp2[i] - e) > 4e-7 * e)
            r->say("2^%g is %.9g, expected %.9g", x, exp2[i], e);
    }
}

/* ---- functions of a warp, barriers, atomics ------------------------------------------------------------------------
 */

enum { WARP_RESULTS = 28 };

__global__ void vote_kernel(const uint32_t *in, uint32_t *out, uint32_t *counters) {
    int t = (int)threadIdx.x, l = t % 32;
    uint32_t v = in[t], *o = out + t * WARP_RESULTS;
    const uint32_t all = 0xFFFFFFFFu;
    o[0] = __shfl_sync(all, v, (l * 7 + 3) % 32);
    o[1] = __shfl_sync(all, v, l + 5, 8);
    o[2] = __shfl_up_sync(all, v, 3);
    o[3] = __shfl_up_sync(all, v, 3, 8);
    o[4] = __shfl_down_sync(all, v, 5);
    o[5] = __shfl_down_sync(all, v, 5, 16);
    o[6] = __shfl_xor_sync(all, v, 9);
    o[7] = __shfl_xor_sync(all, v, 6, 8);
    o[8] = __ballot_sync(all, v & 1);
    o[9] = (uint32_t)__any_sync(all, v == in[5]);
    o[10] = (uint32_t)__all_sync(all, v < 1000);
    o[11] = __match_any_sync(all, v % 5);
    o[12] = __reduce_add_sync(all, v);
    o[13] = __reduce_min_sync(all, v);
    o[14] = __reduce_max_sync(all, v);
    o[15] = (uint32_t)__reduce_min_sync(all, (int)v - 500);
    o[16] = __reduce_or_sync(all, v) ^ __reduce_and_sync(all, v | 0xF0u) ^ (__reduce_xor_sync(all, v) << 16);
    o[17] = 0;
    if (l < 12) /* some lanes */
        o[17] = __shfl_sync(0xFFFu, v, 11 - l) + __ballot_sync(0xFFFu, v & 2);
    else
        o[17] = __reduce_add_sync(~0xFFFu, v);
    unsigned long long wide = (unsigned long long)v << 32 | (uint32_t)t;
    wide = __shfl_xor_sync(all, wide, 1);
    o[18] = (uint32_t)(wide >> 32), o[19] = (uint32_t)wide;
    float f = __shfl_down_sync(all, (float)v * 0.5f, 1);
    o[20] = __float_as_uint(f);
    o[21] = (uint32_t)__syncthreads_count((int)(v & 1));
    o[22] = (uint32_t)(__syncthreads_or(t == 77) != 0);
    o[23] = (uint32_t)(__syncthreads_and(v < 1000) != 0);
    o[24] = __byte_perm(v, ~v, 0x8142u) ^ (uint32_t)__popc(v) ^ (uint32_t)__clz((int)v) << 8 ^
            (uint32_t)__ffs((int)v) << 16;
    o[25] = __brev(v) ^ __umulhi(v * 77777u, 0x12345678u) ^ __funnelshift_r(v, ~v, 9) ^ __funnelshift_l(v, ~v, 5);
    atomicAdd(&counters[0], v);
    atomicMax(&counters[1], v);
    atomicMin(&counters[2], v);
    atomicOr(&counters[3], 1u << v % 32);
    o[26] = atomicAdd(&counters[4], 1u);
    __shared__ uint32_t picked;
    if (t == 0)
        picked = 0;
    __syncthreads();
    if (v % 3 == 0)
        atomicCAS(&picked, 0u, 1u);
    __syncthreads();
    o[27] = picked;
}

/* Two warpgroups hand a buffer to and fro through named barriers; registers move from one to the other. */
__global__ void __launch_bounds__(256, 1) hand_kernel(uint32_t *out) {
    __shared__ uint32_t box[128];
    int t = (int)threadIdx.x % 128;
    if (threadIdx.x < 128) {
        cu_regs_give<40>();
        for (uint32_t i = 0; i < 20; i++) {
            box[t] = i * 1000 + (uint32_t)t;
            cu_bar_arrive(1, 256);
            cu_bar_sync(2, 256);
        }
    } else {
        cu_regs_take<232>();
        uint32_t sum = 0;
        for (uint32_t i = 0; i < 20; i++) {
            cu_bar_sync(1, 256);
            sum += box[127 - t] * (i + 1);
            cu_bar_arrive(2, 256);
        }
        out[t] = sum;
    }
}

void vote_check(uint64_t *rng, result *r) {
    enum { T = 96 };
    mirror<uint32_t> in(T), out(T * WARP_RESULTS), counters(5), hand(128);
    for (uint32_t &v : in.host)
        v = (uint32_t)(random_next(rng) % 1000);
    counters[2] = 0xFFFFFFFFu;
    in.up(), counters.up();
    DI_LAUNCH(vote_kernel, 1, T, 0, (cudaStream_t)NULL, in.dev, out.dev, counters.dev);
    DI_LAUNCH(hand_kernel, 1, 256, 0, (cudaStream_t)NULL, hand.dev);
    if (!is_done(r, "warp functions"))
        return;
    out.down(), counters.down(), hand.down();
    uint32_t total = 0, most = 0, least = 0xFFFFFFFFu, bits = 0, odd = 0, thirds = 0;
    std::vector<bool> tickets(T);
    for (int t = 0; t < T; t++) {
        uint32_t v = in[t];
        total += v, most = std::max(most, v), least = std::min(least, v), bits |= 1u << v % 32, odd += v & 1;
        thirds |= v % 3 == 0;
    }
    for (int t = 0; t < T; t++) {
        int l = t % 32, w = t - l;
        auto lane = [&](int i) { return in[w + i]; };
        uint32_t ballot = 0, match = 0, sum = 0, lo = 0xFFFFFFFFu, hi = 0, any = 0, o_or = 0, o_and = ~0u, o_xor = 0;
        uint32_t ballot2 = 0, rest = 0;
        for (int i = 0; i < 32; i++) {
            uint32_t v = lane(i);
            ballot |= (v & 1) << i, match |= (uint32_t)(v % 5 == lane(l) % 5) << i, sum += v;
            lo = std::min(lo, v), hi = std::max(hi, v), any |= v == in[5];
            o_or |= v, o_and &= v | 0xF0u, o_xor ^= v;
            ballot2 |= i < 12 ? (v >> 1 & 1) << i : 0, rest += i >= 12 ? v : 0;
        }
        uint32_t v = lane(l), nv = ~v, want[WARP_RESULTS] = {};
        uint64_t both = (uint64_t)nv << 32 | v;
        want[0] = lane((l * 7 + 3) % 32);
        want[1] = lane(l / 8 * 8 + (l + 5) % 8);
        want[2] = lane(l < 3 ? l : l - 3);
        want[3] = lane(l % 8 < 3 ? l : l - 3);
        want[4] = lane(l + 5 > 31 ? l : l + 5);
        want[5] = lane(l % 16 + 5 > 15 ? l : l + 5);
        want[6] = lane(l ^ 9);
        want[7] = lane(l ^ 6);
        want[8] = ballot, want[9] = any, want[10] = 1, want[11] = match;
        want[12] = sum, want[13] = lo, want[14] = hi, want[15] = lo - 500;
        want[16] = o_or ^ o_and ^ o_xor << 16;
        want[17] = l < 12 ? lane(11 - l) + ballot2 : rest;
        want[18] = lane(l ^ 1), want[19] = (uint32_t)(t ^ 1);
        float f = (float)lane(l == 31 ? 31 : l + 1) * 0.5f;
        memcpy(&want[20], &f, 4);
        want[21] = odd, want[22] = 1, want[23] = 1;
        uint32_t perm = 0;
        for (int i = 0; i < 4; i++) {
            uint32_t pick = 0x8142u >> 4 * i & 7; /* the fourth bit is ignored */
            perm |= ((uint32_t)(both >> 8 * pick) & 255) << 8 * i;
        }
        uint32_t pop = 0, lead = 32, first = 0, turned = 0;
        for (int i = 0; i < 32; i++) {
            pop += v >> i & 1;
            turned |= (v >> i & 1) << (31 - i);
            if (v >> i & 1)
                lead = 31 - (uint32_t)i, first = first ? first : (uint32_t)i + 1;
        }
        want[24] = perm ^ pop ^ lead << 8 ^ first << 16;
        want[25] = turned ^ (uint32_t)((uint64_t)(v * 77777u) * 0x12345678u >> 32) ^ (uint32_t)(both >> 9) ^
                   (uint32_t)(both << 5 >> 32);
        want[26] = out[(size_t)t * WARP_RESULTS + 26];
        want[27] = thirds;
        if (want[26] < T)
            tickets[want[26]] = true;
        for (int i = 0; i < WARP_RESULTS; i++)
            if (out[(size_t)t * WARP_RESULTS + i] != want[i])
                r->say("warp function %d of thread %d is %08x, expected %08x", i, t, out[(size_t)t * WARP_RESULTS + i],
                       want[i]);
    }
    for (int t = 0; t < T; t++)
        if (!tickets[t])
            r->say("atomicAdd gave no thread the number %d", t);
    if (counters[0] != total || counters[1] != most || counters[2] != least || counters[3] != bits || counters[4] != T)
        r->say("atomics are %u %u %u %08x %u, expected %u %u %u %08x %d", counters[0], counters[1], counters[2],
               counters[3], counters[4], total, most, least, bits, (int)T);
    for (uint32_t t = 0; t < 128; t++) {
        uint32_t sum = 0;
        for (uint32_t i = 0; i < 20; i++)
            sum += (i * 1000 + 127 - t) * (i + 1);
        if (hand[t] != sum)
            r->say("named barriers: thread %u has %u, expected %u", t, hand[t], sum);
    }
}

} // namespace

#define FAMILY(name, ...)                                                                                              \
    extern "C" const char *di_test_sm90_##name(uint64_t seed) {                                                        \
        result r = {};                                                                                                 \
        uint64_t rng = seed;                                                                                           \
        if (const char *reason = absent())                                                                             \
            return reason;                                                                                             \
        __VA_ARGS__;                                                                                                   \
        return finish(&r);                                                                                             \
    }
FAMILY(wgmma_bf16_shared, multiply_widths<SS, false>(&rng, &r), multiply_check<36, SS, false>(&rng, &r),
       multiply_some<SS_B_MN, false>(&rng, &r), multiply_some<SS_A_MN, false>(&rng, &r),
       multiply_some<SS_SW64, false>(&rng, &r), multiply_some<SS_SW0, false>(&rng, &r))
FAMILY(wgmma_bf16_registers, multiply_widths<RS, false>(&rng, &r), multiply_some<RS_B_MN, false>(&rng, &r))
FAMILY(wgmma_e4m3, multiply_widths<SS, true>(&rng, &r), multiply_some<SS_SW64, true>(&rng, &r),
       multiply_some<SS_SW0, true>(&rng, &r), multiply_widths<RS, true>(&rng, &r))
FAMILY(mma, warp_check(&rng, &r))
FAMILY(copies, copy_check(&rng, &r))
FAMILY(clusters, cluster_check(&rng, &r))
FAMILY(conversions, convert_check(&rng, &r))
FAMILY(warps, vote_check(&rng, &r))
