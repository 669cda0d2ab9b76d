/* The indexer's selection on one GPU: scores and top-k at the released sizes, beside the chip's limits measured in the
 * same run, with the results checked against a definition written here.
 *
 *     nvcc -std=c++17 -O3 -fmad=false -ftz=true -prec-div=true -prec-sqrt=true -I src -I include \
 *         -gencode=arch=compute_90a,code=sm_90a bench/cuda/index_bench.cu src/backend/cuda/index.cu \
 *         src/backend/cuda/index_sm90.cu -ldl -o index_bench && ./index_bench
 *
 * Limits: reading a large buffer, copying one, and cuBLASLt's bf16 product of 8192^3. Times are medians of replays of a
 * CUDA graph whose calls take different sequences in turn, so that keys come from memory and not from L2 where there
 * are enough of them. "GB/s" counts 68 bytes a scored key and row (keys that rows of a sequence share are counted once
 * for all of them); "TFLOPS" counts 2 * 32 * 128 a scored key and row. Top-k alone is a call with top-k less one
 * without, beside cub::DeviceSegmentedSort of as many scores. A table, then one JSON object a line.
 *
 * With an argument: cases with it in their names. */
#include <cub/cub.cuh>

#include <cmath>
#include <cstring>
#include <functional>
#include <string>

#include "backend/cuda/cuda.h"
#include "yardstick.cuh"

namespace {

enum { HEADS = 32, DIM = 128, TOPK = 512, PAGE = 128, BLOCKS = 2048, BLOCK = 8, REPLAYS = 15 };
const size_t PAGE_BYTES = PAGE * 68;

struct rng {
    uint64_t s;
    uint64_t next() {
        return mix(s++);
    }
    float unit() {
        return (float)(next() >> 40) * 0x1p-24f;
    }
};

template <class T> T *to_device(const std::vector<T> &v) {
    T *p = device<T>(v.size());
    OK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
    return p;
}
template <class T> std::vector<T> host(const T *p, size_t n) {
    std::vector<T> v(n);
    OK(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
    return v;
}

/* Random keys as a quantiser writes them: any codes, so many scales from 2^-5 on. */
__global__ void fill_pages(uint8_t *pages, size_t n, int n_scales) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        uint8_t byte = (uint8_t)(mix(i) >> 24);
        pages[i] = i % PAGE_BYTES < PAGE * 64 ? byte : (uint8_t)(122 + byte % n_scales);
    }
}

di_device dev;
di_stream stream;
std::vector<std::string> json;

/* Median seconds of one call, of n_calls that a graph makes in turn. */
double time_graph(int n_calls, const std::function<void(int)> &call) {
    return graph_seconds(stream.stream, n_calls, REPLAYS, [&] {
        for (int i = 0; i < n_calls; i++)
            call(i);
    });
}

/* ---- a case ------------------------------------------------------------------------------------------------------ */

struct pool { /* keys of n_seqs sequences of n entries */
    uint8_t *pages;
    int32_t *blocks, *seq;
    int64_t n_seqs, n;
};
pool make_pool(int64_t n_seqs, int64_t n, int64_t rows_of_one, int n_scales) {
    pool p = {};
    int64_t per_seq = (n + PAGE - 1) / PAGE;
    std::vector<int32_t> blocks(n_seqs * per_seq), seq(std::max(2 * n_seqs, rows_of_one));
    rng r = {2};
    for (size_t i = 0; i < blocks.size(); i++)
        blocks[i] = (int32_t)i;
    for (size_t i = blocks.size() - 1; i > 0; i--)
        std::swap(blocks[i], blocks[r.next() % (i + 1)]);
    for (size_t i = 0; i < seq.size(); i++)
        seq[i] = rows_of_one ? 0 : (int32_t)(i % n_seqs);
    p.pages = device<uint8_t>(blocks.size() * PAGE_BYTES);
    fill_pages<<<1024, 256>>>(p.pages, blocks.size() * PAGE_BYTES, n_scales);
    p.blocks = to_device(blocks);
    p.seq = to_device(seq);
    p.n_seqs = n_seqs;
    p.n = n;
    return p;
}
void free_pool(pool *p) {
    OK(cudaFree(p->pages));
    OK(cudaFree(p->blocks));
    OK(cudaFree(p->seq));
}

/* QI and the scores by their definitions. Source: model.md 0.2, 3.7. */
float e2m1(uint32_t code) {
    const float v[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    return code & 8 ? -v[code & 7] : v[code & 7];
}
uint32_t nearest_e2m1(float x) {
    float m = fabsf(x);
    float v = m < 2 ? rintf(2 * m) / 2 : m < 4 ? rintf(m) : fminf(2 * rintf(m / 2), 6);
    for (uint32_t c = 0; c < 8; c++)
        if (e2m1(c) == v)
            return c | (x < 0 ? 8u : 0u);
    return 0;
}
float from_bf16(uint16_t h) {
    return di_bf16_to_f32(h);
}
float true_score(const uint16_t *q, const uint16_t *w, const uint8_t *codes, const uint8_t *scales) {
    float score = 0;
    for (int h = 0; h < HEADS; h++) {
        float dot = 0;
        for (int g = 0; g < DIM / 32; g++) {
            float most = 6 * 0x1p-126f, part[2] = {0, 0};
            int e;
            for (int i = 0; i < 32; i++)
                most = fmaxf(most, fabsf(from_bf16(q[h * DIM + g * 32 + i])));
            float step = frexpf(most / 6.0f, &e) == 0.5f ? ldexpf(1, e - 1) : ldexpf(1, e);
            for (int i = 0; i < 32; i++) {
                uint8_t byte = codes[g * 16 + i / 2];
                float k = e2m1(i % 2 ? byte >> 4 : byte & 15) * ldexpf(1, scales[g] - 127);
                part[i % 2] += e2m1(nearest_e2m1(from_bf16(q[h * DIM + g * 32 + i]) / step)) * step * k;
            }
            dot += part[0] + part[1];
        }
        float product = from_bf16(w[h]) * fmaxf(dot, 0);
        score += product;
    }
    return di_round_bf16(score);
}

std::vector<int32_t> best_of(const std::vector<float> &s, size_t k) {
    std::vector<int32_t> order;
    for (size_t i = 0; i < s.size(); i++)
        if (s[i] > -INFINITY)
            order.push_back((int32_t)i);
    std::stable_sort(order.begin(), order.end(), [&](int32_t x, int32_t y) { return s[x] > s[y]; });
    order.resize(std::min(order.size(), k));
    std::sort(order.begin(), order.end());
    order.resize(k, -1);
    return order;
}

struct bench_case {
    const char *name;
    int64_t rows, n;
    bool is_prefill, with_list, with_blocks;
    int n_scales = 5; /* up to four: the scales of a key are at most 2^3 apart */
    int ratio = 1;
};

const char *only = ""; /* cases with this in their names */

void run_case(const bench_case &c, double bandwidth, double peak) {
    if (!strstr(c.name, only))
        return;
    int64_t key_bytes = c.n * 68,
            n_seqs = c.is_prefill ? 1 : std::max(c.rows, std::min<int64_t>(128, 400000000 / key_bytes));
    n_seqs = c.is_prefill ? 1 : n_seqs / c.rows * c.rows;
    pool p = make_pool(n_seqs, c.n, c.is_prefill ? c.rows : 0, c.n_scales);
    int n_calls = c.is_prefill ? 1 : (int)std::max<int64_t>(1, std::min<int64_t>(32, n_seqs / c.rows));
    rng r = {3};
    std::vector<uint16_t> q(c.rows * HEADS * DIM), w(c.rows * HEADS);
    std::vector<int32_t> pos(c.rows), list(c.rows * BLOCKS);
    for (auto &v : q)
        v = di_f32_to_bf16(4 * r.unit() - 2);
    for (auto &v : w)
        v = di_f32_to_bf16(2 * r.unit() - 0.5f);
    for (int64_t i = 0; i < c.rows; i++) {
        pos[i] = (int32_t)(c.is_prefill ? c.n * c.ratio - c.rows + i : c.n * c.ratio - 1);
        int64_t n_blocks = ((pos[i] + 1) / c.ratio + BLOCK - 1) / BLOCK, at = 0;
        for (int64_t b = 0; b < n_blocks && at < BLOCKS; b++) /* as many as there is room for, at random */
            if ((int64_t)(r.next() % (uint64_t)(n_blocks - b)) < BLOCKS - at)
                list[i * BLOCKS + at++] = (int32_t)b;
        while (at < BLOCKS)
            list[i * BLOCKS + at++] = -1;
    }
    uint16_t *dq = to_device(q), *dw = to_device(w);
    int32_t *dpos = to_device(pos), *dlist = to_device(list), *idx = device<int32_t>(c.rows * TOPK),
            *cand = device<int32_t>(c.rows * BLOCKS);
    di_rows rows = {};
    rows.n_rows = (int32_t)c.rows;
    rows.n_seqs = c.is_prefill ? 1 : (int32_t)c.rows;
    rows.pos = dpos;
    rows.blocks = p.blocks;
    rows.blocks_stride = (c.n + PAGE - 1) / PAGE;
    di_index_select_args a = {};
    a.rows = &rows;
    a.q = {DI_BF16, c.rows, HEADS * DIM, HEADS * DIM, dq, NULL};
    a.w = {DI_BF16, c.rows, HEADS, HEADS, dw, NULL};
    a.n_heads = HEADS;
    a.dim = DIM;
    a.ratio = c.ratio;
    a.keys = {p.pages, PAGE_BYTES, 0, PAGE, DI_KV_MX4, DIM};
    a.round_bf16 = true;
    a.topk = TOPK;
    a.idx = idx;
    a.cand_block = BLOCK;
    a.n_cand = BLOCKS;
    a.cand_in = c.with_list ? dlist : NULL;
    a.cand_out = c.with_blocks ? cand : NULL;
    auto call = [&](int i) {
        rows.seq = p.seq + (c.is_prefill ? 0 : i * c.rows % n_seqs);
        if (di_cuda_index_select(&stream, &a)) {
            fprintf(stderr, "%s: refused\n", c.name);
            exit(1);
        }
        OK(cudaGetLastError());
    };
    double all = time_graph(n_calls, call);
    a.topk = 0;
    a.cand_out = NULL;
    double scores = time_graph(n_calls, call);
    a.topk = TOPK;
    a.cand_out = c.with_blocks ? cand : NULL;

    /* Correctness: some scores by definition, and what is chosen from the scores of some rows. */
    int64_t n_scores = std::min<int64_t>(c.rows, 8);
    bool is_right = true;
    OK(cudaMemset(idx, 0xA5, c.rows * TOPK * 4));
    OK(cudaMemset(cand, 0xA5, c.rows * BLOCKS * 4));
    call(0);
    OK(cudaStreamSynchronize(stream.stream));
    auto got = host(idx, c.rows * TOPK), got_cand = host(cand, c.rows * BLOCKS);
    std::vector<int32_t> seqs = host(p.seq, c.rows), blocks = host(p.blocks, n_seqs * rows.blocks_stride);
    float *dscores = device<float>(n_scores * c.n);
    for (int64_t part = 0; part < 2; part++) { /* the first rows, then the last */
        int64_t row0 = part ? c.rows - n_scores : 0;
        di_rows some = rows;
        di_index_select_args b = a;
        some.n_rows = (int32_t)n_scores;
        some.n_seqs = c.is_prefill ? 1 : (int32_t)n_scores;
        some.pos += row0;
        some.seq = p.seq + row0;
        b.rows = &some;
        b.q.data = dq + row0 * HEADS * DIM;
        b.w.data = dw + row0 * HEADS;
        b.q.n_rows = b.w.n_rows = n_scores;
        b.cand_in = a.cand_in ? dlist + row0 * BLOCKS : NULL;
        b.idx = device<int32_t>(n_scores * TOPK);
        b.cand_out = a.cand_out ? device<int32_t>(n_scores * BLOCKS) : NULL;
        b.scores = dscores;
        b.scores_stride = c.n;
        if (di_cuda_index_select(&stream, &b))
            is_right = false;
        OK(cudaStreamSynchronize(stream.stream));
        auto s = host(dscores, n_scores * c.n);
        OK(cudaFree(b.idx));
        if (b.cand_out)
            OK(cudaFree(b.cand_out));
        for (int64_t i = 0; i < n_scores; i++) {
            int64_t row = row0 + i, n = (pos[row] + 1) / c.ratio;
            std::vector<float> sr(s.begin() + i * c.n, s.begin() + i * c.n + n);
            auto want = best_of(sr, TOPK);
            is_right = is_right && std::equal(want.begin(), want.end(), got.begin() + row * TOPK);
            if (a.cand_out) {
                std::vector<float> most((n + BLOCK - 1) / BLOCK, -INFINITY);
                for (int64_t e = 0; e < n; e++)
                    most[e / BLOCK] = std::max(most[e / BLOCK], sr[e]);
                if (n > 0)
                    most.back() = INFINITY;
                want = best_of(most, BLOCKS);
                is_right = is_right && std::equal(want.begin(), want.end(), got_cand.begin() + row * BLOCKS);
            }
            for (int t = 0; t < 200 && n > 0; t++) {
                int64_t e = (int64_t)(r.next() % (uint64_t)n);
                if (a.cand_in && n > BLOCKS * BLOCK)
                    e = list[row * BLOCKS + r.next() % (BLOCKS / 2)] * BLOCK;
                uint8_t record[2][64];
                const uint8_t *page = p.pages + blocks[seqs[row] * rows.blocks_stride + e / PAGE] * PAGE_BYTES;
                OK(cudaMemcpy(record[0], page + e % PAGE * 64, 64, cudaMemcpyDeviceToHost));
                OK(cudaMemcpy(record[1], page + PAGE * 64 + e % PAGE * 4, 4, cudaMemcpyDeviceToHost));
                float by_hand = true_score(&q[row * HEADS * DIM], &w[row * HEADS], record[0], record[1]);
                if (by_hand != sr[e] && is_right)
                    fprintf(stderr, "%s: row %lld entry %lld: %.9g, expected %.9g\n", c.name, (long long)row,
                            (long long)e, sr[e], by_hand);
                is_right = is_right && by_hand == sr[e];
            }
        }
    }

    /* Work: keys once for rows that share them. */
    double scored = 0;
    for (int64_t i = 0; i < c.rows; i++)
        scored += (double)std::min<int64_t>((pos[i] + 1) / c.ratio, c.with_list ? BLOCKS * BLOCK : c.n);
    double bytes = 68 * (c.is_prefill && !c.with_list ? (double)c.n : scored), flops = 2.0 * HEADS * DIM * scored;
    printf("%-26s %5lld x %-7lld %10.1f %10.1f %9.1f %8.0f %5.0f%% %8.0f %5.0f%%  %s\n", c.name, (long long)c.rows,
           (long long)c.n, all * 1e6, scores * 1e6, (all - scores) * 1e6, bytes / scores * 1e-9,
           100 * bytes / scores / bandwidth, flops / scores * 1e-12, 100 * flops / scores / peak,
           is_right ? "right" : "WRONG");
    fflush(stdout);
    char line[512];
    snprintf(line, sizeof line,
             "{\"bench\":\"index\",\"case\":\"%s\",\"rows\":%lld,\"entries\":%lld,\"us\":%.2f,\"scores_us\":%.2f,"
             "\"gb_per_s\":%.1f,\"of_read\":%.3f,\"tflops\":%.1f,\"of_bf16\":%.3f,\"right\":%s}",
             c.name, (long long)c.rows, (long long)c.n, all * 1e6, scores * 1e6, bytes / scores * 1e-9,
             bytes / scores / bandwidth, flops / scores * 1e-12, flops / scores / peak, is_right ? "true" : "false");
    json.push_back(line);
    OK(cudaFree(dq));
    OK(cudaFree(dw));
    OK(cudaFree(dpos));
    OK(cudaFree(dlist));
    OK(cudaFree(idx));
    OK(cudaFree(cand));
    OK(cudaFree(dscores));
    free_pool(&p);
}

/* Top-k of scores alone, of one row by di_cuda_topk (with its wait), against sorting by cub. */
void run_topk(int64_t rows, int64_t n) {
    std::vector<float> s(rows * n);
    std::vector<int32_t> offsets(rows + 1), at(rows * n);
    rng r = {4};
    for (auto &v : s)
        v = di_round_bf16(2 * r.unit() - 1);
    for (int64_t i = 0; i < rows * n; i++)
        at[i] = (int32_t)(i % n);
    for (int64_t i = 0; i <= rows; i++)
        offsets[i] = (int32_t)(i * n);
    float *ds = to_device(s), *sorted = device<float>(rows * n);
    int32_t *dat = to_device(at), *dout = device<int32_t>(rows * n), *doff = to_device(offsets),
            *idx = device<int32_t>(TOPK);
    size_t room = 0;
    OK(cub::DeviceSegmentedSort::SortPairsDescending(NULL, room, ds, sorted, dat, dout, (int)(rows * n), (int)rows,
                                                     doff, doff + 1, stream.stream));
    void *space = device<uint8_t>(room);
    double cub_s = time_graph(4, [&](int) {
        OK(cub::DeviceSegmentedSort::SortPairsDescending(space, room, ds, sorted, dat, dout, (int)(rows * n), (int)rows,
                                                         doff, doff + 1, stream.stream));
    });
    std::vector<double> times(REPLAYS);
    bool is_right = true;
    cudaEvent_t start, end;
    OK(cudaEventCreate(&start));
    OK(cudaEventCreate(&end));
    for (auto &t : times) {
        float ms;
        OK(cudaEventRecord(start, dev.copies));
        di_cuda_topk(&dev, ds, n, TOPK, idx);
        OK(cudaEventRecord(end, dev.copies));
        OK(cudaEventSynchronize(end));
        OK(cudaEventElapsedTime(&ms, start, end));
        t = ms * 1e-3;
    }
    std::sort(times.begin(), times.end());
    auto got = host(idx, TOPK);
    is_right = got == best_of(std::vector<float>(s.begin(), s.begin() + n), TOPK);
    printf("%-26s %5lld x %-7lld one row %.1f us; cub sorts all rows in %.1f us  %s\n", "topk alone", (long long)rows,
           (long long)n, times[REPLAYS / 2] * 1e6, cub_s * 1e6, is_right ? "right" : "WRONG");
    fflush(stdout);
    char line[256];
    snprintf(
        line, sizeof line,
        "{\"bench\":\"index_topk\",\"rows\":%lld,\"entries\":%lld,\"one_row_us\":%.2f,\"cub_us\":%.2f,\"right\":%s}",
        (long long)rows, (long long)n, times[REPLAYS / 2] * 1e6, cub_s * 1e6, is_right ? "true" : "false");
    json.push_back(line);
    OK(cudaFree(ds));
    OK(cudaFree(sorted));
    OK(cudaFree(dat));
    OK(cudaFree(dout));
    OK(cudaFree(doff));
    OK(cudaFree(idx));
    OK(cudaFree(space));
}

} // namespace

int main(int argc, char **argv) {
    only = argc > 1 ? argv[1] : only;
    OK(cudaSetDevice(0));
    OK(cudaGetDeviceProperties(&dev.prop, 0));
    dev.arch = DI_CUDA_SM90;
    dev.n_sms = dev.prop.multiProcessorCount;
    dev.limits.rows_max = 8192;
    dev.limits.entries_max = 1 << 20;
    dev.limits.keys_max = 1024;
    dev.limits.candidate_blocks = BLOCKS;
    dev.limits.index_heads = HEADS;
    dev.limits.index_dim = DIM;
    dev.scratch_bytes = di_cuda_need_index(&dev, &dev.limits);
    dev.scratch = device<uint8_t>(dev.scratch_bytes);
    OK(cudaStreamCreateWithFlags(&dev.copies, cudaStreamNonBlocking));
    stream.dev = &dev;
    OK(cudaStreamCreateWithFlags(&stream.stream, cudaStreamNonBlocking));

    size_t n = (size_t)4 << 30;
    uint8_t *x = device<uint8_t>(n), *y = device<uint8_t>(n);
    fill_pages<<<1024, 256>>>(x, n, 5);
    OK(cudaDeviceSynchronize());
    double read = (double)n / time_graph(4, [&](int) {
                      read_all<<<8 * dev.n_sms, 512, 0, stream.stream>>>((const uint4 *)(const void *)x,
                                                                         (int64_t)(n / 16), (uint32_t *)(void *)y);
                  });
    double copy =
        2.0 * n / time_graph(4, [&](int) { OK(cudaMemcpyAsync(y, x, n, cudaMemcpyDeviceToDevice, stream.stream)); });
    OK(cudaFree(x));
    OK(cudaFree(y));
    double peak = cublaslt_tflops(NULL, stream.stream) * 1e12;
    printf("%s: read %.0f GB/s, copy %.0f GB/s (both ways), cuBLASLt bf16 %.0f TFLOPS; scratch %.0f MB\n\n",
           dev.prop.name, read * 1e-9, copy * 1e-9, peak * 1e-12, dev.scratch_bytes * 1e-6);
    char line[256];
    snprintf(line, sizeof line, "{\"bench\":\"limits\",\"device\":\"%s\",\"read\":%.4g,\"copy\":%.4g,\"bf16\":%.4g}",
             dev.prop.name, read, copy, peak);
    json.push_back(line);

    printf("%-26s %15s %10s %10s %9s %8s %6s %8s %6s\n", "", "rows x entries", "all us", "scores us", "best us", "GB/s",
           "read", "TFLOPS", "bf16");
    for (int64_t entries : {32768, 131072})
        for (int64_t rows : {1, 8, 64, 128})
            run_case({"decode", rows, entries, false, false, false}, read, peak);
    run_case({"decode", 1, 1 << 20, false, false, false}, read, peak);
    run_case({"decode, blocks out", 64, 131072, false, false, true}, read, peak);
    for (int64_t rows : {1, 8, 64, 128})
        run_case({"decode, 2048 blocks in", rows, 131072, false, true, false}, read, peak);
    run_case({"decode, short", 128, 2048, false, false, false}, read, peak);
    run_case({"prefill", 4096, 32768, true, false, false}, read, peak);
    run_case({"prefill, blocks out", 4096, 32768, true, false, true}, read, peak);
    run_case({"prefill, 2048 blocks in", 4096, 32768, true, true, false}, read, peak);
    run_case({"prefill, several chunks", 4096, 65536, true, false, false}, read, peak);
    run_case({"prefill, near scales", 4096, 32768, true, false, false, 4}, read, peak);
    /* Prompts from their start; keys of two tokens. */
    run_case({"prompt", 1024, 512, true, false, false, 4, 2}, read, peak);
    run_case({"prompt", 8192, 4096, true, false, false, 4, 2}, read, peak);
    run_case({"prompt, far scales", 8192, 4096, true, false, false, 5, 2}, read, peak);
    run_case({"prompt, blocks out", 8192, 4096, true, false, true, 4, 2}, read, peak);
    run_case({"prompt, blocks in", 8192, 4096, true, true, false, 4, 2}, read, peak);
    printf("\n");
    if (!*only) {
        run_topk(1, 65536);
        run_topk(128, 32768);
        run_topk(128, 131072);
        run_topk(1, 1 << 20);
    }
    printf("\n");
    for (auto &l : json)
        printf("%s\n", l.c_str());
    return 0;
}
