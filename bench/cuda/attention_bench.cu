/* Speed of sparse attention at the released shape, beside the machine's limits measured in the same run.
 *
 * 64 heads of 512 values, a window of 128 FP8 records and 512 listed entries of FP4 (288 bytes) or FP8 (528 bytes)
 * pages: decode of 1, 8, 64 and 128 sequences with 32k context, verification of 128 x 6 rows, prefill of 4k and 16k
 * rows. Lists are random. A case runs over several sets of lists, rings, queries and outputs, by turns in one graph, so
 * that what L2 holds is not what is asked for. Rows are checked against a slow kernel in double, in the same run.
 *
 *   nvcc -std=c++17 -O3 -ftz=true -gencode=arch=compute_90a,code=sm_90a -I src -I include -o attention_bench \
 *        bench/cuda/attention_bench.cu src/backend/cuda/attention.cu src/backend/cuda/attention_sm90.cu \
 *        src/backend/cuda/attention_few_sm90.cu -ldl
 *   ./attention_bench [--cublaslt PATH] [--portable] [--quick]
 *
 * TFLOPS: 2*2*64*512 for each key of each row. GB/s: bytes of the records that rows gather, each row for itself.
 * Limits: reading a buffer larger than L2, copying (read and written bytes), cuBLASLt's bf16 product 8192^3. A bound is
 * the larger of gathered bytes at the reading rate and arithmetic at cuBLASLt's rate. */
#include <cmath>
#include <cstring>

#include "yardstick.cuh"

enum { A = 64, D = 512, WINDOW = 128, TOPK = 512, RING = 134, RECORD = 528, PER_BLOCK = 128, N_FREQ = 32 };

/* ---- random data --------------------------------------------------------------------------------------------------
 */

/* Records of n_data code bytes and n_scale scale bytes, `step` bytes apart; E4M3 codes without NaN; scales of [lo, hi).
 */
__global__ void fill_records(uint8_t *p, int64_t n, int64_t step, int n_data, int n_scale, bool is_e4m3, int lo, int hi,
                             uint64_t seed) {
    for (int64_t i = blockIdx.x; i < n; i += gridDim.x) {
        for (int b = threadIdx.x; b < n_data + n_scale; b += blockDim.x) {
            uint64_t r = mix(seed ^ (uint64_t)(i * 1024 + b));
            uint8_t v = (uint8_t)r;
            if (b >= n_data)
                v = (uint8_t)(lo + r % (uint64_t)(hi - lo));
            else if (is_e4m3)
                v = (uint8_t)((v & 0x80) | (r >> 8) % 0x7F);
            p[i * step + b] = v;
        }
    }
}
__global__ void fill_bf16(uint16_t *p, int64_t n, float size, uint64_t seed) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
        p[i] = cu_f32_to_bf16(size * ((float)(mix(seed ^ (uint64_t)i) >> 40) * 0x1p-23f - 1.0f));
}
template <class T> static T *device_copy(const std::vector<T> &v) {
    T *p = device<T>(v.size());
    OK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
    return p;
}

/* ---- the slow kernel ------------------------------------------------------------------------------------------------
 * One block a row and head; double throughout. want and bound [n, A, D]; bound: sum(p |v|) / sum(p). */

__device__ static double value_of(di_kv_format f, const uint8_t *record, int i) {
    if (f == DI_KV_FP8)
        return (double)cu_e4m3_to_f32(record[i]) * cu_e8m0_to_f32(record[D + i / 32]);
    return (double)cu_e2m1_to_f32(record[i / 2] >> i % 2 * 4 & 15) * cu_e4m3_to_f32(record[D / 2 + i / 16]);
}
__device__ static const uint8_t *key_at(const di_attention_args &a, const di_rows &rows, int row, int k, int n_window) {
    int seq = rows.seq[row];
    if (k < n_window) {
        int pos = rows.win_lo[row] + k, ahead = pos - rows.pos0[seq];
        return ahead >= 0 ? a.records + (size_t)(rows.row0[seq] + ahead) * RECORD
                          : a.ring.slots + rows.slot[seq] * a.ring.slot_bytes + a.ring.offset + pos % RING * RECORD;
    }
    int e = a.idx[(int64_t)row * a.topk + k - n_window];
    if (e < 0)
        return NULL;
    return a.main.pages + (size_t)rows.blocks[seq * rows.blocks_stride + e / PER_BLOCK] * a.main.page_bytes +
           a.main.offset + e % PER_BLOCK * (a.main.format == DI_KV_FP8 ? 528 : 288);
}
__global__ void slow_attention(di_attention_args a, di_rows rows, const int *checked, double *want, double *bound) {
    __shared__ double p[WINDOW + TOPK];
    __shared__ double total;
    int row = checked[blockIdx.x], head = blockIdx.y, n_window = rows.win_hi[row] - rows.win_lo[row];
    int n = n_window + (a.idx ? a.topk : 0);
    const uint16_t *q = (const uint16_t *)a.q.data + row * a.q.stride + head * D;
    for (int k = threadIdx.x; k < n; k += blockDim.x) {
        const uint8_t *record = key_at(a, rows, row, k, n_window);
        double s = 0;
        for (int i = 0; i < D && record; i++)
            s += (double)cu_bf16_to_f32(q[i]) * value_of(k < n_window ? a.win_format : a.main.format, record, i);
        p[k] = record ? s * a.scale : -INFINITY;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        double most = a.sink[head];
        for (int k = 0; k < n; k++)
            most = fmax(most, p[k]);
        total = exp(a.sink[head] - most);
        for (int k = 0; k < n; k++) {
            p[k] = exp(p[k] - most);
            total += p[k];
        }
    }
    __syncthreads();
    double *o = want + ((int64_t)blockIdx.x * A + head) * D, *b = bound + ((int64_t)blockIdx.x * A + head) * D;
    for (int i = threadIdx.x; i < D; i += blockDim.x) {
        double sum = 0, size = 0;
        for (int k = 0; k < n; k++) {
            const uint8_t *record = key_at(a, rows, row, k, n_window);
            double v = record ? value_of(k < n_window ? a.win_format : a.main.format, record, i) : 0;
            sum += p[k] * v;
            size += p[k] * fabs(v);
        }
        o[i] = sum / total;
        b[i] = size / total;
    }
    __syncthreads();
    for (int f = threadIdx.x; f < a.n_freq; f += blockDim.x) {
        double c = a.cos[row * a.n_freq + f], s = a.sin[row * a.n_freq + f];
        int i = D - 2 * a.n_freq + 2 * f;
        double x = o[i], y = o[i + 1], bx = b[i], by = b[i + 1];
        o[i] = x * c + y * s;
        o[i + 1] = y * c - x * s;
        b[i] = bx * fabs(c) + by * fabs(s);
        b[i + 1] = by * fabs(c) + bx * fabs(s);
    }
}

/* ---- cases --------------------------------------------------------------------------------------------------------
 */

struct setup {
    int n_seqs_max; /* sequences that have pages */
    int blocks_each;
    uint8_t *pages;
    size_t page_bytes, offset;
    di_kv_format format;
    int32_t *blocks;
};
struct result {
    double us, tflops, gbs, worst;
    bool is_right;
};

static di_device dev;
static di_stream stream;

/* n_sets inputs of n_seqs sequences x n_each rows; pos0: of every sequence's first row. */
static result run_case(const setup &s, int n_seqs, int n_each, int pos0, int n_sets, int n_rounds) {
    int n_rows = n_seqs * n_each;
    size_t slot_bytes = (size_t)n_sets * RING * RECORD;
    int n_slots = n_seqs;
    uint8_t *slots = device<uint8_t>(slot_bytes * n_slots),
            *records = device<uint8_t>((size_t)n_sets * n_rows * RECORD);
    fill_records<<<2048, 128>>>(slots, (int64_t)n_sets * RING * n_slots, RECORD, 512, 16, true, 116, 120, 1);
    fill_records<<<2048, 128>>>(records, (int64_t)n_sets * n_rows, RECORD, 512, 16, true, 116, 120, 2);
    size_t q_n = (size_t)n_rows * A * D;
    uint16_t *q = device<uint16_t>(q_n * n_sets), *out = device<uint16_t>(q_n * n_sets);
    fill_bf16<<<2048, 256>>>(q, q_n * n_sets, 1, 3);
    OK(cudaMemset(out, 0xA5, q_n * n_sets * 2));
    std::vector<float> sink(A), cs((size_t)n_rows * N_FREQ), sn(cs.size());
    for (int h = 0; h < A; h++)
        sink[h] = (float)(mix(h) >> 40) * 0x1p-22f - 2.0f;
    for (size_t i = 0; i < cs.size(); i++) {
        double angle = (double)(mix(i) >> 40) * 0x1p-21;
        cs[i] = (float)cos(angle);
        sn[i] = (float)sin(angle);
    }
    float *d_sink = device_copy(sink), *d_cos = device_copy(cs), *d_sin = device_copy(sn);
    std::vector<int32_t> row0(n_seqs), n(n_seqs, n_each), pos0s(n_seqs, pos0), slot(n_seqs);
    std::vector<int32_t> pos(n_rows), seq(n_rows), lo(n_rows), hi(n_rows);
    double n_keys = 0, n_bytes = 0;
    int entry_bytes = s.format == DI_KV_FP4 ? 288 : 528;
    for (int i = 0; i < n_rows; i++) {
        seq[i] = i / n_each;
        pos[i] = pos0 + i % n_each;
        hi[i] = pos[i] + 1;
        lo[i] = std::max(0, hi[i] - WINDOW);
        int listed = std::min((int)TOPK, pos[i] + 1);
        n_keys += hi[i] - lo[i] + listed;
        n_bytes += (hi[i] - lo[i]) * (double)RECORD + listed * (double)entry_bytes;
    }
    for (int i = 0; i < n_seqs; i++) {
        row0[i] = i * n_each;
        slot[i] = n_seqs - 1 - i;
    }
    int32_t *d_pos = device_copy(pos), *d_seq = device_copy(seq), *d_lo = device_copy(lo), *d_hi = device_copy(hi);
    int32_t *d_row0 = device_copy(row0), *d_n = device_copy(n), *d_pos0 = device_copy(pos0s),
            *d_slot = device_copy(slot);
    std::vector<di_attention_args> args(n_sets);
    std::vector<di_rows> rows(n_sets);
    std::vector<int32_t> idx((size_t)n_rows * TOPK);
    uint64_t rng = 7;
    for (int set = 0; set < n_sets; set++) {
        for (int i = 0; i < n_rows; i++) { /* a random ascending choice: each step skips a random stretch */
            int visible = pos[i] + 1, want = std::min((int)TOPK, visible);
            int32_t *list = &idx[(size_t)i * TOPK];
            for (int t = 0; t < TOPK; t++)
                list[t] = -1;
            for (int t = 0; t < want; t++) { /* one of every stratum: distinct and ascending */
                int64_t from = (int64_t)t * visible / want, to = (int64_t)(t + 1) * visible / want;
                rng = mix(rng);
                list[t] = (int32_t)(from + (int64_t)(rng >> 20) % (to - from));
            }
        }
        /* The sets' sequences lie one after another among those that have pages. */
        rows[set] = di_rows{n_rows,
                            n_seqs,
                            d_pos,
                            d_seq,
                            d_lo,
                            d_hi,
                            d_row0,
                            d_n,
                            d_pos0,
                            d_slot,
                            s.blocks + (size_t)(set * n_seqs % s.n_seqs_max) * s.blocks_each,
                            s.blocks_each};
        di_attention_args a = {};
        a.q = di_act{DI_BF16, n_rows, A * D, A * D, q + set * q_n, NULL};
        a.n_heads = A;
        a.head_dim = D;
        a.win_format = DI_KV_FP8;
        a.records = records + (size_t)set * n_rows * RECORD;
        a.ring = di_ring{slots, slot_bytes, (size_t)set * RING * RECORD, RECORD, RING};
        a.idx = device_copy(idx);
        a.topk = TOPK;
        a.main = di_paged{s.pages, s.page_bytes, s.offset, PER_BLOCK, s.format, D};
        a.sink = d_sink;
        a.scale = (float)(1 / sqrt(512.0));
        a.cos = d_cos;
        a.sin = d_sin;
        a.n_freq = N_FREQ;
        a.out = di_act{DI_BF16, n_rows, A * D, A * D, out + set * q_n, NULL};
        args[set] = a;
    }
    for (int set = 0; set < n_sets; set++)
        args[set].rows = &rows[set];
    OK(cudaDeviceSynchronize());

    cudaGraph_t graph;
    cudaGraphExec_t exec;
    OK(cudaStreamBeginCapture(stream.stream, cudaStreamCaptureModeThreadLocal));
    for (int set = 0; set < n_sets; set++) {
        if (di_cuda_attention(&stream, &args[set])) {
            fprintf(stderr, "refused\n");
            exit(1);
        }
    }
    OK(cudaStreamEndCapture(stream.stream, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    result r;
    r.us = median_ms(stream.stream, n_rounds, [&] { OK(cudaGraphLaunch(exec, stream.stream)); }) * 1e3 / n_sets;
    OK(cudaDeviceSynchronize());
    r.tflops = 4.0 * A * D * n_keys / r.us * 1e-6;
    r.gbs = n_bytes / r.us * 1e-3;

    std::vector<int> checked;
    for (int i = 0; i < 24; i++)
        checked.push_back((int)((int64_t)i * (n_rows - 1) / 23));
    int set = n_sets - 1, *d_checked = device_copy(checked);
    size_t m = checked.size() * A * D;
    double *want = device<double>(m), *bound = device<double>(m);
    di_attention_args a = args[set];
    a.rows = NULL;
    slow_attention<<<dim3((unsigned)checked.size(), A), 256>>>(a, rows[set], d_checked, want, bound);
    OK(cudaDeviceSynchronize());
    std::vector<double> h_want(m), h_bound(m);
    std::vector<uint16_t> h_out(q_n);
    OK(cudaMemcpy(h_want.data(), want, m * sizeof(double), cudaMemcpyDeviceToHost));
    OK(cudaMemcpy(h_bound.data(), bound, m * sizeof(double), cudaMemcpyDeviceToHost));
    OK(cudaMemcpy(h_out.data(), out + set * q_n, q_n * 2, cudaMemcpyDeviceToHost));
    r.worst = 0; /* error over the bound 2^-8 * (sum(p |v|)/sum(p) + |value|) */
    for (size_t i = 0; i < m; i++) {
        uint32_t bits = (uint32_t)h_out[(size_t)checked[i / (A * D)] * A * D + i % (A * D)] << 16;
        float got;
        memcpy(&got, &bits, 4);
        double e = fabs(got - h_want[i]) / (0x1p-8 * (h_bound[i] + fabs(h_want[i])) + 1e-30);
        r.worst = e > r.worst || e != e ? e : r.worst;
        if (e != e)
            break;
    }
    r.is_right = r.worst <= 1;
    OK(cudaGraphExecDestroy(exec));
    OK(cudaGraphDestroy(graph));
    for (int i = 0; i < n_sets; i++)
        OK(cudaFree((void *)args[i].idx));
    void *all[] = {slots, records, q,      out, d_sink, d_cos,  d_sin,     d_pos, d_seq,
                   d_lo,  d_hi,    d_row0, d_n, d_pos0, d_slot, d_checked, want,  bound};
    for (void *p : all)
        OK(cudaFree(p));
    return r;
}

static setup make_pages(di_kv_format format, int n_seqs, int n_positions) {
    setup s;
    s.format = format;
    s.n_seqs_max = n_seqs;
    s.blocks_each = (n_positions + PER_BLOCK - 1) / PER_BLOCK;
    int entry = format == DI_KV_FP4 ? 288 : 528;
    s.offset = 77056; /* the sections in front of a released layer's */
    s.page_bytes = s.offset + (size_t)entry * PER_BLOCK + 128;
    int64_t n_pages = (int64_t)n_seqs * s.blocks_each;
    s.pages = device<uint8_t>(n_pages * s.page_bytes);
    std::vector<int32_t> blocks(n_pages);
    for (int64_t i = 0; i < n_pages; i++)
        blocks[i] = (int32_t)i;
    for (int64_t i = n_pages - 1; i > 0; i--)
        std::swap(blocks[i], blocks[mix(i) % (uint64_t)(i + 1)]);
    s.blocks = device_copy(blocks);
    for (int e = 0; e < PER_BLOCK; e++) { /* an entry of every page at a time */
        if (format == DI_KV_FP4)
            fill_records<<<2048, 128>>>(s.pages + s.offset + e * entry, n_pages, s.page_bytes, 256, 32, false, 0x10,
                                        0x30, 100 + e);
        else
            fill_records<<<2048, 128>>>(s.pages + s.offset + e * entry, n_pages, s.page_bytes, 512, 16, true, 116, 120,
                                        100 + e);
    }
    OK(cudaDeviceSynchronize());
    return s;
}

int main(int argc, char **argv) {
    const char *cublaslt = NULL;
    bool is_portable = false, is_quick = false;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--cublaslt") && i + 1 < argc)
            cublaslt = argv[++i];
        is_portable |= !strcmp(argv[i], "--portable");
        is_quick |= !strcmp(argv[i], "--quick");
    }
    OK(cudaSetDevice(0));
    OK(cudaGetDeviceProperties(&dev.prop, 0));
    OK(cudaStreamCreate(&stream.stream));
    dev.arch = is_portable ? DI_CUDA_PORTABLE : DI_CUDA_SM90;
    dev.n_sms = dev.prop.multiProcessorCount;
    dev.limits.keys_max = WINDOW + TOPK;
    dev.limits.head_dim = D;
    dev.limits.n_heads = A;
    dev.scratch_bytes = di_cuda_need_attention(&dev, &dev.limits);
    if (dev.scratch_bytes)
        dev.scratch = device<uint8_t>(dev.scratch_bytes);
    stream.dev = &dev;
    int driver = 0;
    OK(cudaDriverGetVersion(&driver));

    int64_t n_read = (int64_t)4 << 30;
    uint8_t *from = device<uint8_t>(n_read), *to = device<uint8_t>(n_read);
    fill_bf16<<<2048, 256>>>((uint16_t *)from, n_read / 2, 1, 5);
    double read_ms = median_ms(stream.stream, 9, [&] {
        read_all<<<dev.n_sms * 8, 512, 0, stream.stream>>>((const uint4 *)from, n_read / 16, (uint32_t *)to);
    });
    double copy_ms = median_ms(stream.stream, 9,
                               [&] { OK(cudaMemcpyAsync(to, from, n_read, cudaMemcpyDeviceToDevice, stream.stream)); });
    double read_gbs = n_read / read_ms * 1e-6, copy_gbs = 2.0 * n_read / copy_ms * 1e-6;
    OK(cudaFree(from));
    OK(cudaFree(to));
    double peak = cublaslt_tflops(cublaslt, stream.stream);
    printf("%s, %d multiprocessors, driver %d.%d: reads %.0f GB/s, copies %.0f GB/s, cuBLASLt bf16 %.0f TFLOPS%s\n",
           dev.prop.name, dev.n_sms, driver / 1000, driver % 1000 / 10, read_gbs, copy_gbs, peak,
           peak > 0 ? "" : " (library not found; bounds take 790)");
    printf("{\"bench\":\"attention_limits\",\"device\":\"%s\",\"read_gbs\":%.1f,\"copy_gbs\":%.1f,\"cublaslt_bf16_"
           "tflops\":"
           "%.1f}\n",
           dev.prop.name, read_gbs, copy_gbs, peak);
    double rate = peak > 0 ? peak : 790;
    printf("%-28s %6s %10s %9s %9s %9s %8s\n", "case", "rows", "us", "TFLOPS", "GB/s", "of bound", "error");

    struct {
        const char *name;
        di_kv_format format;
        int n_seqs, n_each, pos0, n_sets, n_rounds;
    } cases[] = {
        {"decode 1", DI_KV_FP4, 1, 1, 32767, 128, 15},    {"decode 8", DI_KV_FP4, 8, 1, 32767, 32, 15},
        {"decode 16", DI_KV_FP4, 16, 1, 32767, 32, 15},   {"decode 17", DI_KV_FP4, 17, 1, 32767, 32, 15},
        {"decode 64", DI_KV_FP4, 64, 1, 32767, 16, 15},   {"decode 128", DI_KV_FP4, 128, 1, 32767, 8, 21},
        {"decode 132", DI_KV_FP4, 132, 1, 32767, 8, 15},  {"verify 128x6", DI_KV_FP4, 128, 6, 32762, 3, 11},
        {"prefill 4k", DI_KV_FP4, 1, 4096, 0, 2, 9},      {"prefill 16k", DI_KV_FP4, 1, 16384, 0, 1, 7},
        {"decode 1 fp8", DI_KV_FP8, 1, 1, 32767, 128, 9}, {"decode 128 fp8", DI_KV_FP8, 128, 1, 32767, 8, 15},
        {"prefill 4k fp8", DI_KV_FP8, 1, 4096, 0, 2, 7},
    };
    bool is_right = true;
    setup s = {};
    for (auto &c : cases) {
        if (is_quick && c.n_seqs * c.n_each > 128)
            continue;
        if (!s.pages || s.format != c.format) {
            if (s.pages) {
                OK(cudaFree(s.pages));
                OK(cudaFree(s.blocks));
            }
            s = make_pages(c.format, 132, 32768);
        }
        /* A set's sequences must not run over the end of those that have pages. */
        int n_rounds = is_portable ? 3 : c.n_rounds, n_sets = is_portable ? 1 : c.n_sets;
        if (s.n_seqs_max % c.n_seqs && c.n_seqs > 1 && c.n_seqs != 132)
            s.n_seqs_max = 132 / c.n_seqs * c.n_seqs;
        result r = run_case(s, c.n_seqs, c.n_each, c.pos0, n_sets, n_rounds);
        s.n_seqs_max = 132;
        double bound = std::max(r.tflops / rate, r.gbs / read_gbs);
        printf("%-28s %6d %10.2f %9.1f %9.0f %8.1f%% %8.3f%s\n", c.name, c.n_seqs * c.n_each, r.us, r.tflops, r.gbs,
               100 * bound, r.worst, r.is_right ? "" : "  WRONG");
        printf("{\"bench\":\"attention\",\"case\":\"%s\",\"format\":\"%s\",\"rows\":%d,\"us\":%.3f,\"tflops\":%.2f,"
               "\"gathered_gbs\":%.1f,\"of_bound\":%.4f,\"error_of_tolerance\":%.4f,\"right\":%s}\n",
               c.name, c.format == DI_KV_FP4 ? "fp4" : "fp8", c.n_seqs * c.n_each, r.us, r.tflops, r.gbs, bound,
               r.worst, r.is_right ? "true" : "false");
        fflush(stdout);
        is_right &= r.is_right;
    }
    return is_right ? 0 : 1;
}
