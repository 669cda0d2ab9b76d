/* The router on Hopper: logits by the tensor cores (gemm_bf16_sm90.cu), scores in fp32.
 *
 * Few rows leave the sums of pieces of k apart, and each thread of the choice adds up those of its experts. Source:
 * model.md 3.10. */
#include "gemm.h"
#include "route.cuh"
#include "sm90.cuh"

enum { FEW = 256 /* rows, which get as many threads each as there are experts */, MANY_THREADS = 128 };

__global__ void __launch_bounds__(512) route_select_sm90(route_out o, const float *logits, int64_t step, int n_pieces) {
    DI_DYN_SHARED(float, score);
    cu_grid_begin();
    const float *mine = logits + blockIdx.x * (int64_t)o.n_experts;
    route_choose(o, score, [&](int e) { /* sqrt(softplus(logit)) */
                                        float v[1] = {};
                                        gemm_add_pieces(v, mine + e, step, n_pieces);
                                        return sqrtf(v[0] > 20.0f ? v[0] : log1pf(expf(v[0])));
    });
}

bool di_moe_route_sm90(const di_stream *stream, const di_moe_route_args *a) {
    int64_t n_rows = a->x.n_rows, n_experts = a->gate->n_out;
    gemm_job job = {};
    job.x = a->x, job.w = *a->gate, job.n_groups = 1, job.aligned = n_experts % 2 ? 1 : 2;
    job.out = {DI_F32, n_rows, n_experts, n_experts, NULL, NULL};
    if (job.x.dtype != DI_BF16 || !gemm_sm90_fits(stream->dev, &job))
        return false;
    int n_pieces = gemm_bf16_pieces(stream->dev, &job.w);
    bool is_apart = gemm_bf16_is_apart(stream->dev, n_rows, &job.w, n_pieces);
    int n_left = is_apart ? n_pieces : 1; /* sums that the choice adds up */
    float *logits = (float *)di_cuda_scratch(stream, (size_t)(n_left * n_rows * n_experts) * sizeof(float));
    job.out.data = logits;
    if (!logits || !(is_apart ? gemm_sm90_bf16_apart(stream, &job, n_pieces, logits)
                              : gemm_sm90_bf16_turn(stream, &job, n_pieces)))
        return false;
    unsigned block = n_rows > FEW ? (unsigned)MANY_THREADS : (unsigned)DI_MIN((n_experts + 31) / 32 * 32, (int64_t)512);
    DI_LAUNCH_PDL((route_select_sm90), (unsigned)n_rows, block, 2 * (size_t)n_experts * sizeof(float), stream->stream,
                  route_out_of(a), logits, n_rows * n_experts, n_left);
    return true;
}
