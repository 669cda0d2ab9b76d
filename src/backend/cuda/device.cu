/* An NVIDIA GPU as a device: memory, copies, streams, scratch, host threads and its description.
 *
 * Copies between host and device go through pinned buffers in pieces, so that the processor's reading of a mapped file,
 * the copy into a buffer and the transfer overlap. What operations need beside their arguments is scratch, made once by
 * reserve. Every failure names what was tried, with CUDA's own words; memory that lacks is DI_ERR_MEMORY with the
 * numbers. */
#include "probe.h"
#include "sm90.cuh"

enum : size_t { STAGE_BYTES = 16u << 20 };

di_status di_cuda_check(cudaError_t e, di_error *err, const char *what) {
    if (e == cudaSuccess)
        return DI_OK;
    return di_fail(err, e == cudaErrorMemoryAllocation ? DI_ERR_MEMORY : DI_ERR_DEVICE, "nvidia: %s: %s", what,
                   cudaGetErrorString(e));
}

/* The device must be current on whatever thread calls. */
static di_status enter(const di_device *dev, di_error *err) {
    return di_cuda_check(cudaSetDevice(dev->ordinal), err, "choosing the device");
}

enum { GPUS_MAX = 64 };

/* Whose turn it is on each GPU: the stream that was given something last. */
static struct {
    pthread_mutex_t lock;
    di_stream *stream; /* lock: lock */
} turns[GPUS_MAX];
static pthread_once_t has_turns = PTHREAD_ONCE_INIT;

static void init_turns(void) {
    for (int i = 0; i < GPUS_MAX; i++)
        pthread_mutex_init(&turns[i].lock, NULL);
}

/* ---- finding and opening ---- */

static di_status cuda_probe(di_error *err) {
    int n = 0;
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e == cudaErrorNoDevice || e == cudaErrorInsufficientDriver || (e == cudaSuccess && n == 0))
        return di_fail(err, DI_ERR_DEVICE, "nvidia: no device: %s",
                       e == cudaErrorInsufficientDriver ? "there is no driver, or one that is older than this program"
                                                        : "the driver finds no GPU");
    return di_cuda_check(e, err, "looking for devices");
}

static void cuda_close(di_device *dev) {
    if (!dev)
        return;
    (void)cudaSetDevice(dev->ordinal);
    for (int i = 0; i < DI_CUDA_STAGES; i++) {
        if (dev->stages[i])
            (void)cudaFreeHost(dev->stages[i]);
        if (dev->stage_free[i])
            (void)cudaEventDestroy(dev->stage_free[i]);
    }
    if (dev->copies)
        (void)cudaStreamDestroy(dev->copies);
    (void)cudaFree(dev->scratch);
    di_pool_destroy(dev->pool);
    pthread_mutex_destroy(&dev->copying);
    free(dev);
}

/* The kernels for an architecture that run on this chip, NULL: none. They run on that one alone, sm_100a not on 10.3;
 * the portable ones on all from 9.0 on. */
static const char *special_kernels(const di_device *dev) {
    return dev->prop.major == 9 ? "sm90" : dev->prop.major == 10 && dev->prop.minor == 0 ? "sm100" : NULL;
}

/* Those of Blackwell were never run on a chip, so that they are taken when asked for by name only. */
static di_status find_arch(const di_device *dev, const char *name, di_cuda_arch *out, di_error *err) {
    const char *special = special_kernels(dev);
    bool is_auto = !name || strcmp(name, "auto") == 0;
    if (special && (is_auto ? dev->prop.major == 9 : strcmp(name, special) == 0))
        *out = dev->prop.major == 9 ? DI_CUDA_SM90 : DI_CUDA_SM100;
    else if (is_auto || strcmp(name, "portable") == 0)
        *out = DI_CUDA_PORTABLE;
    else
        return di_fail(err, DI_ERR_DEVICE, "nvidia: kernels '%s' asked for, expected auto, portable%s%s", name,
                       special ? " or " : "", special ? special : "");
    return DI_OK;
}

static di_status open_device(di_device *dev, const di_device_config *config, di_error *err) {
    int n = 0;
    di_status st = cuda_probe(err);
    if (st)
        return st;
    if ((st = di_cuda_check(cudaGetDeviceCount(&n), err, "counting devices")))
        return st;
    n = DI_MIN(n, (int)GPUS_MAX);
    if (config->device_index < 0 || config->device_index >= n)
        return di_fail(err, DI_ERR_DEVICE, "nvidia: device %d asked for, expected 0 to %d", config->device_index,
                       n - 1);
    dev->ordinal = config->device_index;
    if ((st = di_cuda_check(cudaGetDeviceProperties(&dev->prop, dev->ordinal), err, "asking for properties")))
        return st;
    if (dev->prop.major < 9)
        return di_fail(err, DI_ERR_DEVICE,
                       "nvidia: device %d is '%s' of compute capability %d.%d, expected 9.0 (H100, H200) or later",
                       dev->ordinal, dev->prop.name, dev->prop.major, dev->prop.minor);
    if ((st = find_arch(dev, config->kernels, &dev->arch, err)))
        return st;
    dev->n_sms = dev->prop.multiProcessorCount;
    dev->is_order_free = config->is_order_free;
    if ((st = enter(dev, err)))
        return st;
    if ((st = di_cuda_check(cudaStreamCreateWithFlags(&dev->copies, cudaStreamNonBlocking), err, "making a stream")))
        return st;
    for (int i = 0; i < DI_CUDA_STAGES && !st; i++) {
        st = di_cuda_check(cudaMallocHost(&dev->stages[i], STAGE_BYTES), err, "pinned buffers for copies");
        if (!st)
            st = di_cuda_check(cudaEventCreateWithFlags(&dev->stage_free[i], cudaEventDisableTiming), err, "an event");
    }
    if (!st)
        st = di_pool_create(&dev->pool, config->n_threads, NULL, err);
    if (!st && config->is_pinned)
        st = di_pool_pin(dev->pool, err);
    return st;
}

static di_status cuda_open(di_device **out, const di_device_config *config, di_error *err) {
    di_device *dev = (di_device *)calloc(1, sizeof *dev);
    if (!dev)
        return di_fail(err, DI_ERR_MEMORY, "nvidia: no memory for a device");
    pthread_once(&has_turns, init_turns);
    pthread_mutex_init(&dev->copying, NULL); /* which can't fail here */
    di_status st = open_device(dev, config, err);
    if (st)
        cuda_close(dev);
    else
        *out = dev;
    return st;
}

static di_status cuda_info(di_device *dev, di_device_info *out, di_error *err) {
    size_t n_free = 0, n_total = 0;
    di_status st = enter(dev, err);
    if (!st)
        st = di_cuda_check(cudaMemGetInfo(&n_free, &n_total), err, "asking for free memory");
    if (st)
        return st;
    memset(out, 0, sizeof *out);
    snprintf(out->name, sizeof out->name, "%.*s", (int)sizeof out->name - 1, dev->prop.name);
    out->memory_total_bytes = n_total;
    out->memory_free_bytes = n_free;
    const char *special = special_kernels(dev);
    snprintf(out->levels_found, sizeof out->levels_found, "portable%s%s", special ? " " : "", special ? special : "");
    snprintf(out->levels, sizeof out->levels, "%s", dev->arch == DI_CUDA_PORTABLE ? "portable" : out->levels_found);
    return DI_OK;
}

/* ---- memory ---- */

static di_status memory_lacks(const char *what, size_t n_bytes, cudaError_t e, di_error *err) {
    size_t n_free = 0, n_total = 0;
    if (e != cudaErrorMemoryAllocation)
        return di_cuda_check(e, err, what);
    (void)cudaGetLastError(); /* it would be reported again */
    (void)cudaMemGetInfo(&n_free, &n_total);
    return di_fail(err, DI_ERR_MEMORY, "nvidia: %s: %zu bytes asked for, %zu of %zu are free", what, n_bytes, n_free,
                   n_total);
}

static di_status cuda_alloc(di_device *dev, size_t n_bytes, void **out, di_error *err) {
    void *p = NULL;
    di_status st = enter(dev, err);
    if (st)
        return st;
    size_t size = n_bytes ? n_bytes : 1;
    cudaError_t e = cudaMalloc(&p, size);
    if (e)
        return memory_lacks("device memory", size, e, err);
    st = di_cuda_check(cudaMemset(p, 0, size), err, "clearing memory");
    if (!st)
        st = di_cuda_check(cudaDeviceSynchronize(), err, "clearing memory");
    if (st)
        (void)cudaFree(p);
    else
        *out = p;
    return st;
}

static void cuda_free(di_device *dev, void *p) {
    (void)cudaSetDevice(dev->ordinal);
    (void)cudaFree(p);
}

static di_status cuda_alloc_host(di_device *dev, size_t n_bytes, void **out, di_error *err) {
    void *p = NULL;
    di_status st = enter(dev, err);
    if (st)
        return st;
    cudaError_t e = cudaHostAlloc(&p, n_bytes ? n_bytes : 1, cudaHostAllocPortable | cudaHostAllocMapped);
    if (e == cudaErrorMemoryAllocation)
        (void)cudaGetLastError();
    if (e)
        return di_fail(err, e == cudaErrorMemoryAllocation ? DI_ERR_MEMORY : DI_ERR_DEVICE,
                       "nvidia: pinned memory of the host: %zu bytes: %s", n_bytes, cudaGetErrorString(e));
    memset(p, 0, n_bytes);
    *out = p;
    return DI_OK;
}

static void cuda_free_host(di_device *dev, void *p) {
    (void)cudaSetDevice(dev->ordinal);
    (void)cudaFreeHost(p);
}

/* ---- copies ---- */

typedef struct stage_job {
    uint8_t *dst;
    const uint8_t *src;
    size_t n_bytes;
} stage_job;

enum : size_t { STAGE_PART = 1u << 20 }; /* what one thread copies at a time */

static void stage_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    const stage_job *job = (const stage_job *)ctx;
    (void)n_parts, (void)worker;
    size_t at = (size_t)part * STAGE_PART, n = DI_MIN(job->n_bytes - at, (size_t)STAGE_PART);
    memcpy(job->dst + at, job->src + at, n);
}

static void stage_copy(di_device *dev, void *dst, const void *src, size_t n_bytes) {
    stage_job job = {(uint8_t *)dst, (const uint8_t *)src, n_bytes};
    if (n_bytes <= STAGE_PART)
        memcpy(dst, src, n_bytes);
    else
        di_pool_run(dev->pool, stage_part, &job, (int64_t)((n_bytes + STAGE_PART - 1) / STAGE_PART));
}

static di_status upload(di_device *dev, void *dst, const void *src, size_t n_bytes, di_error *err) {
    di_status st = enter(dev, err);
    int stage = 0;
    for (size_t at = 0; at < n_bytes && !st; stage = (stage + 1) % DI_CUDA_STAGES) {
        size_t n = DI_MIN(n_bytes - at, (size_t)STAGE_BYTES);
        st = di_cuda_check(cudaEventSynchronize(dev->stage_free[stage]), err, "waiting for a buffer");
        if (st)
            break;
        stage_copy(dev, dev->stages[stage], (const uint8_t *)src + at, n);
        st = di_cuda_check(
            cudaMemcpyAsync((uint8_t *)dst + at, dev->stages[stage], n, cudaMemcpyHostToDevice, dev->copies), err,
            "copying to the device");
        if (!st)
            st = di_cuda_check(cudaEventRecord(dev->stage_free[stage], dev->copies), err, "an event");
        at += n;
    }
    return st ? st : di_cuda_check(cudaStreamSynchronize(dev->copies), err, "copying to the device");
}

static di_status cuda_upload(di_device *dev, void *dst, const void *src, size_t n_bytes, di_error *err) {
    pthread_mutex_lock(&dev->copying);
    di_status st = upload(dev, dst, src, n_bytes, err);
    pthread_mutex_unlock(&dev->copying);
    return st;
}

static di_status download(di_device *dev, void *dst, const void *src, size_t n_bytes, di_error *err) {
    di_status st = enter(dev, err);
    /* Two buffers in turn: while one is filled by the device, the host empties the other. */
    size_t n_pieces = (n_bytes + STAGE_BYTES - 1) / STAGE_BYTES;
    for (size_t i = 0; i <= n_pieces && !st; i++) {
        if (i < n_pieces) {
            size_t at = i * STAGE_BYTES, n = DI_MIN(n_bytes - at, (size_t)STAGE_BYTES);
            st = di_cuda_check(
                cudaMemcpyAsync(dev->stages[i % 2], (const uint8_t *)src + at, n, cudaMemcpyDeviceToHost, dev->copies),
                err, "copying from the device");
            if (!st)
                st = di_cuda_check(cudaEventRecord(dev->stage_free[i % 2], dev->copies), err, "an event");
        }
        if (i > 0 && !st) {
            size_t at = (i - 1) * STAGE_BYTES, n = DI_MIN(n_bytes - at, (size_t)STAGE_BYTES);
            st = di_cuda_check(cudaEventSynchronize(dev->stage_free[(i - 1) % 2]), err, "copying from the device");
            if (!st)
                memcpy((uint8_t *)dst + at, dev->stages[(i - 1) % 2], n);
        }
    }
    return st;
}

/* Also called by the pool's own threads, each for a row of logits. */
static di_status cuda_download(di_device *dev, void *dst, const void *src, size_t n_bytes, di_error *err) {
    pthread_mutex_lock(&dev->copying);
    di_status st = download(dev, dst, src, n_bytes, err);
    pthread_mutex_unlock(&dev->copying);
    return st;
}

static di_status cuda_copy(di_device *dev, void *dst, const void *src, size_t n_bytes, di_error *err) {
    di_status st = enter(dev, err);
    if (st || !n_bytes)
        return st;
    st = di_cuda_check(cudaMemcpyAsync(dst, src, n_bytes, cudaMemcpyDeviceToDevice, dev->copies), err,
                       "copying on the device");
    return st ? st : di_cuda_check(cudaStreamSynchronize(dev->copies), err, "copying on the device");
}

/* ---- scratch ---- */

static di_limits limits_max(const di_limits *a, const di_limits *b) {
    di_limits m = {};
#define BIG(f) m.f = DI_MAX(a->f, b->f)
    BIG(rows_max), BIG(n_in_max), BIG(n_out_max), BIG(entries_max), BIG(keys_max), BIG(head_dim), BIG(n_heads);
    BIG(index_heads), BIG(index_dim), BIG(experts_max), BIG(experts_per_row_max), BIG(intermediate), BIG(hidden_size);
    BIG(candidate_blocks), BIG(n_vocab), BIG(logits_max);
#undef BIG
    return m;
}

/* Of operations on a stream, and of those on its side. */
static void scratch_needs(di_device *dev, const di_limits *limits, size_t *main, size_t *side) {
    size_t most = 256;
    di_limits few = *limits;
    few.rows_max = DI_MIN(few.rows_max, (int64_t)DI_SIDE_ROWS);
#define NEED(family, of) most = DI_MAX(most, di_cuda_need_##family(dev, of))
    NEED(dense, &few), NEED(gemm, &few), NEED(hc, &few), NEED(kv, &few);
    *side = di_cuda_piece(most);
    NEED(dense, limits), NEED(gemm, limits), NEED(hc, limits), NEED(engram, limits), NEED(kv, limits);
    NEED(index, limits), NEED(attention, limits), NEED(moe, limits), NEED(draft, limits), NEED(sample, limits);
#undef NEED
    *main = di_cuda_piece(most);
}

static size_t cuda_scratch_bytes(di_device *dev, const di_limits *limits) {
    size_t main, side;
    scratch_needs(dev, limits, &main, &side);
    return main + side;
}

static di_status cuda_reserve(di_device *dev, const di_limits *limits, di_error *err) {
    di_limits all = limits_max(&dev->limits, limits);
    size_t main, side;
    scratch_needs(dev, &all, &main, &side);
    if (main > dev->scratch_bytes || side > dev->side_scratch_bytes) { /* neither shrinks: all has the largest */
        void *p;
        di_status st = cuda_alloc(dev, main + side, &p, err);
        if (st)
            return di_error_context(err, st, "scratch of operations; fewer rows a step need less");
        (void)cudaFree(dev->scratch);
        dev->scratch = (uint8_t *)p;
        dev->scratch_bytes = main;
        dev->side_scratch_bytes = side;
    }
    dev->limits = all;
    return DI_OK;
}

/* ---- streams ---- */

/* stream waits for what other was given until now. */
static cudaError_t follow(di_stream *stream, di_stream *other) {
    cudaError_t e = cudaEventRecord(other->ends, other->stream);
    return e ? e : cudaStreamWaitEvent(stream->stream, other->ends, 0);
}

void di_cuda_turn_begin(di_stream *stream) {
    di_stream *owner = di_cuda_owner(stream);
    if (owner->is_recording) /* the turn is this thread's until the recording ends */
        return;
    auto *turn = &turns[stream->dev->ordinal];
    pthread_mutex_lock(&turn->lock);
    (void)cudaSetDevice(stream->dev->ordinal); /* of the calling thread */
    if (turn->stream == owner)
        return;
    for (di_stream *before = turn->stream; before; before = before->side) {
        for (di_stream *now = owner; now; now = now->side)
            (void)follow(now, before);
    }
    turn->stream = owner;
}

void di_cuda_turn_end(di_stream *stream) {
    if (!di_cuda_owner(stream)->is_recording)
        pthread_mutex_unlock(&turns[stream->dev->ordinal].lock);
}

static di_status cuda_stream_create(di_device *dev, di_stream **out, di_error *err) {
    di_status st = enter(dev, err);
    if (st)
        return st;
    di_stream *stream = (di_stream *)calloc(1, sizeof *stream);
    if (!stream)
        return di_fail(err, DI_ERR_MEMORY, "nvidia: no memory for a stream");
    stream->dev = dev;
    st = di_cuda_check(cudaEventCreateWithFlags(&stream->ends, cudaEventDisableTiming), err, "an event");
    if (!st)
        st = di_cuda_check(cudaStreamCreateWithFlags(&stream->stream, cudaStreamNonBlocking), err, "making a stream");
    if (!st) {
        *out = stream;
        return DI_OK;
    }
    if (stream->ends)
        (void)cudaEventDestroy(stream->ends);
    free(stream);
    return st;
}

static void cuda_stream_destroy(di_stream *stream) {
    if (!stream)
        return;
    auto *turn = &turns[stream->dev->ordinal];
    (void)cudaSetDevice(stream->dev->ordinal);
    (void)cudaStreamSynchronize(stream->stream);
    if (stream->side)
        (void)cudaStreamSynchronize(stream->side->stream);
    pthread_mutex_lock(&turn->lock);
    turn->stream = turn->stream == stream ? NULL : turn->stream;
    pthread_mutex_unlock(&turn->lock);
    cuda_stream_destroy(stream->side); /* whoever has the next turn does not look at it any more */
    (void)cudaEventDestroy(stream->ends);
    (void)cudaStreamDestroy(stream->stream);
    free(stream);
}

static di_status cuda_stream_sync(di_stream *stream, di_error *err) {
    return di_cuda_check(cudaStreamSynchronize(stream->stream), err, "waiting for the device");
}

static di_status cuda_stream_side(di_stream *stream, di_stream **out, di_error *err) {
    di_status st = stream->side ? DI_OK : cuda_stream_create(stream->dev, &stream->side, err);
    if (!st) {
        stream->side->owner = stream;
        *out = stream->side;
    }
    return st;
}

static di_status cuda_stream_follow(di_stream *stream, di_stream *other, di_error *err) {
    di_cuda_turn_begin(stream);
    di_status st = di_cuda_check(follow(stream, other), err, "one stream after the other");
    di_cuda_turn_end(stream);
    return st;
}

static di_status cuda_stream_upload(di_stream *stream, void *dst, const void *src, size_t n_bytes, int64_t n_rows,
                                    size_t row_bytes, di_error *err) {
    if (!n_bytes || n_rows < 1)
        return DI_OK;
    return di_cuda_check(cudaMemcpy2DAsync(dst, row_bytes, src, row_bytes, n_bytes, (size_t)n_rows,
                                           cudaMemcpyHostToDevice, stream->stream),
                         err, "copying to the device");
}

static di_status cuda_stream_copy(di_stream *stream, void *dst, const void *src, size_t n_bytes, di_error *err) {
    return di_cuda_check(cudaMemcpyAsync(dst, src, n_bytes, cudaMemcpyDeviceToDevice, stream->stream), err,
                         "copying on the device");
}

static di_status cuda_stream_download(di_stream *stream, void *dst, const void *src, size_t n_bytes, di_error *err) {
    return di_cuda_check(cudaMemcpyAsync(dst, src, n_bytes, cudaMemcpyDeviceToHost, stream->stream), err,
                         "copying from the device");
}

struct di_event {
    cudaEvent_t event;
};

static di_status cuda_event_create(di_device *dev, di_event **out, di_error *err) {
    di_status st = enter(dev, err);
    if (st)
        return st;
    di_event *event = (di_event *)calloc(1, sizeof *event);
    if (!event)
        return di_fail(err, DI_ERR_MEMORY, "nvidia: no memory for an event");
    st = di_cuda_check(cudaEventCreate(&event->event), err, "an event");
    if (st)
        free(event);
    else
        *out = event;
    return st;
}

static void cuda_event_destroy(di_event *event) {
    if (!event)
        return;
    (void)cudaEventDestroy(event->event);
    free(event);
}

static di_status cuda_event_record(di_event *event, di_stream *stream, di_error *err) {
    return di_cuda_check(cudaEventRecord(event->event, stream->stream), err, "an event");
}

static di_status cuda_event_wait(di_event *event, di_error *err) {
    return di_cuda_check(cudaEventSynchronize(event->event), err, "waiting for the device");
}

static bool cuda_event_elapsed(const di_event *from, const di_event *to, int64_t *ns) {
    float ms = 0;
    /* Asked first: that an event has not come is no failure, but elapsed time would report it as one. */
    if (cudaEventQuery(to->event) || cudaEventElapsedTime(&ms, from->event, to->event)) {
        (void)cudaGetLastError();
        return false;
    }
    *ns = (int64_t)((double)ms * 1e6);
    return true;
}

struct di_graph {
    cudaGraphExec_t exec;
};

/* While a stream records no other one gets a turn: an event that it recorded for one would be part of the graph. */
static di_status cuda_graph_begin(di_stream *stream, di_error *err) {
    pthread_mutex_t *lock = &turns[stream->dev->ordinal].lock;
    pthread_mutex_lock(lock);
    (void)cudaSetDevice(stream->dev->ordinal);
    di_status st = di_cuda_check(cudaStreamBeginCapture(stream->stream, cudaStreamCaptureModeThreadLocal), err,
                                 "recording operations");
    stream->is_recording = st == DI_OK;
    if (st)
        pthread_mutex_unlock(lock);
    return st;
}

static di_status cuda_graph_end(di_stream *stream, di_graph **out, di_error *err) {
    cudaGraph_t recorded = NULL;
    di_status st = di_cuda_check(cudaStreamEndCapture(stream->stream, &recorded), err, "recording operations");
    stream->is_recording = false;
    pthread_mutex_unlock(&turns[stream->dev->ordinal].lock);
    if (st)
        return st;
    di_graph *graph = (di_graph *)calloc(1, sizeof *graph);
    if (!graph)
        st = di_fail(err, DI_ERR_MEMORY, "nvidia: no memory for a graph");
    else
        st = di_cuda_check(cudaGraphInstantiate(&graph->exec, recorded, 0), err, "making a graph of operations");
    (void)cudaGraphDestroy(recorded);
    if (st)
        free(graph);
    else
        *out = graph;
    return st;
}

static di_status cuda_graph_launch(di_stream *stream, di_graph *graph, di_error *err) {
    di_cuda_turn_begin(stream);
    di_status st = di_cuda_check(cudaGraphLaunch(graph->exec, stream->stream), err, "starting a graph of operations");
    di_cuda_turn_end(stream);
    return st;
}

static void cuda_graph_destroy(di_graph *graph) {
    if (!graph)
        return;
    (void)cudaGraphExecDestroy(graph->exec);
    free(graph);
}

static const char *cuda_stream_refused(const di_stream *stream) {
    return stream->refused;
}

/* ---- measuring ---- */

/* Independent bf16 products on registers, as many warps as the chip holds. */
__global__ void __launch_bounds__(512) peak_kernel(int n, float *out) {
    float d[8][4] = {};
    uint32_t one = threadIdx.x | 0x3F803F80u; /* values near 1 */
    const uint32_t a[4] = {one, one, one, one}, b[2] = {0x3F803F80u, 0x3F803F80u};
    for (int i = 0; i < n; i++) {
#pragma unroll
        for (int j = 0; j < 8; j++)
            cu_mma_bf16(d[j], a, b);
    }
    float sum = 0.0f;
    for (int j = 0; j < 8; j++)
        sum += d[j][0] + d[j][3];
    if (sum == -1.0f)
        *out = sum; /* never; keeps the loop */
}

/* Reads all of a buffer, each thread several vectors at a time. */
__global__ void __launch_bounds__(512) read_kernel(const uint4 *from, size_t n, uint32_t *out) {
    size_t step = (size_t)gridDim.x * blockDim.x, i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    uint32_t sum = 0;
    for (; i + 3 * step < n; i += 4 * step) {
        uint4 v[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
            v[k] = __ldcs(from + i + k * step);
#pragma unroll
        for (int k = 0; k < 4; k++)
            sum ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    if (sum == 0x9E3779B9u)
        *out = sum; /* hardly ever; keeps the loads */
}

/* Milliseconds of the best of a few runs of a probe. */
template <class Launch> static di_status time_probe(di_device *dev, Launch launch, float *best, di_error *err) {
    enum { RUNS = 5 };
    cudaEvent_t start = NULL, end = NULL;
    di_status st = di_cuda_check(cudaEventCreate(&start), err, "an event");
    if (!st)
        st = di_cuda_check(cudaEventCreate(&end), err, "an event");
    *best = 0.0f;
    for (int i = 0; i < RUNS && !st; i++) {
        float ms = 0.0f;
        (void)cudaEventRecord(start, dev->copies);
        launch();
        (void)cudaEventRecord(end, dev->copies);
        st = di_cuda_check(cudaEventSynchronize(end), err, "a probe");
        if (!st)
            st = di_cuda_check(cudaEventElapsedTime(&ms, start, end), err, "a probe");
        *best = *best == 0.0f || ms < *best ? ms : *best;
    }
    if (start)
        (void)cudaEventDestroy(start);
    if (end)
        (void)cudaEventDestroy(end);
    return st;
}

static di_status cuda_measure(di_device *dev, double *peak, double *read_bandwidth, di_error *err) {
    const int rounds = 4096;
    const size_t n_bytes = (size_t)2 << 30;
    float ms;
    void *buffer = NULL;
    di_status st = cuda_alloc(dev, n_bytes, &buffer, err);
    if (st)
        return st;
    uint32_t *out = (uint32_t *)buffer;
    double operations = 4.0 * dev->n_sms * 16 * rounds * 8 * (2.0 * 16 * 8 * 16);
    st = time_probe(
        dev,
        [&] {
            if (dev->arch == DI_CUDA_SM90)
                operations = di_cuda_probe_sm90(dev, dev->copies, rounds, (float *)out);
            else
                DI_LAUNCH(peak_kernel, 4 * dev->n_sms, 512, 0, dev->copies, rounds, (float *)out);
        },
        &ms, err);
    if (!st)
        *peak = operations / (ms * 1e-3);
    if (!st)
        st = time_probe(
            dev,
            [&] {
                DI_LAUNCH(read_kernel, 8 * dev->n_sms, 512, 0, dev->copies, (const uint4 *)buffer,
                          n_bytes / sizeof(uint4), out);
            },
            &ms, err);
    if (!st)
        *read_bandwidth = (double)n_bytes / (ms * 1e-3);
    cuda_free(dev, buffer);
    return st;
}

/* ---- host threads ---- */

static int cuda_host_threads(di_device *dev) {
    return di_pool_threads(dev->pool);
}

static void cuda_host_run(di_device *dev, di_pool_fn fn, void *ctx, int64_t n_parts) {
    di_pool_run(dev->pool, fn, ctx, n_parts);
}

extern const di_device_ops di_cuda_device_ops;
const di_device_ops di_cuda_device_ops = {
    .abi = DI_BACKEND_ABI,
    .size = sizeof(di_device_ops),
    .name = "nvidia",
    .probe = cuda_probe,
    .open = cuda_open,
    .close = cuda_close,
    .info = cuda_info,
    .reserve = cuda_reserve,
    .scratch_bytes = cuda_scratch_bytes,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .alloc_host = cuda_alloc_host,
    .free_host = cuda_free_host,
    .experts_place = di_cuda_experts_place,
    .upload = cuda_upload,
    .download = cuda_download,
    .copy = cuda_copy,
    .stream_create = cuda_stream_create,
    .stream_destroy = cuda_stream_destroy,
    .stream_sync = cuda_stream_sync,
    .stream_side = cuda_stream_side,
    .stream_follow = cuda_stream_follow,
    .stream_upload = cuda_stream_upload,
    .stream_copy = cuda_stream_copy,
    .stream_download = cuda_stream_download,
    .event_create = cuda_event_create,
    .event_destroy = cuda_event_destroy,
    .event_record = cuda_event_record,
    .event_wait = cuda_event_wait,
    .event_elapsed = cuda_event_elapsed,
    .graph_begin = cuda_graph_begin,
    .graph_end = cuda_graph_end,
    .graph_launch = cuda_graph_launch,
    .graph_destroy = cuda_graph_destroy,
    .measure = cuda_measure,
    .topk = di_cuda_topk,
    .host_threads = cuda_host_threads,
    .host_run = cuda_host_run,
    .stream_refused = cuda_stream_refused,
};
