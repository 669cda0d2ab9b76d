/* Tokens that stay on the device: what one step drew becomes the input of the next (ops.h, feed). */
#include "cu.cuh"
#include "sm90.cuh"

__global__ void feed_kernel(di_feed_args a) {
    int32_t i = (int32_t)(blockIdx.x * blockDim.x + threadIdx.x);
    cu_grid_begin();
    if (i >= a.n || a.from[i] < 0)
        return;
    int32_t token = a.tokens[a.from[i]];
    a.ids[i] = token;
    if (!a.n_gram)
        return;
    int32_t cls = token < 0 || token >= a.n_map ? -1 : a.token_map ? a.token_map[token] : token;
    int32_t *grams = a.grams + (int64_t)i * a.n_gram;
    grams[0] = cls < 0 ? a.pad : cls;
    for (int32_t k = 1; cls < 0 && k < a.n_gram; k++)
        grams[k] = a.pad;
}

di_status di_cuda_feed(di_stream *stream, const di_feed_args *a) {
    if (a->n < 0 || !a->from || !a->tokens || !a->ids || a->n_gram < 0 || (a->n_gram && !a->grams))
        return DI_ERR_SHAPE;
    if (a->n)
        DI_LAUNCH_PDL(feed_kernel, (unsigned)((a->n + 127) / 128), 128, 0, stream->stream, *a);
    return DI_OK;
}
