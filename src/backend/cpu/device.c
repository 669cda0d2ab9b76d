/* The CPU as a device: its memory, scratch, streams, jobs and description.
 *
 * Device memory is host memory, so that copies are memcpy and weights are read in place from their mapping. A stream
 * has no queue: an operation has finished when its function returns. Scratch is made by reserve for the
 * largest forward that the limits allow; it is left untouched until used, so that what a small run doesn't need is
 * never resident. */
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cpu.h"
#include "peak.h"

/* ---- floating-point mode ---- */

#if defined(__SSE2__)
enum { MXCSR_DAZ = 0x0040, MXCSR_FTZ = 0x8000 };
uint64_t di_cpu_fp_flush(void) {
    unsigned mode = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(mode | MXCSR_DAZ | MXCSR_FTZ);
    return mode;
}
void di_cpu_fp_restore(uint64_t mode) {
    __builtin_ia32_ldmxcsr((unsigned)mode);
}
#elif defined(__aarch64__)
enum { FPCR_FZ = 1 << 24 };
uint64_t di_cpu_fp_flush(void) {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    __asm__ volatile("msr fpcr, %0" : : "r"(mode | FPCR_FZ));
    return mode;
}
void di_cpu_fp_restore(uint64_t mode) {
    __asm__ volatile("msr fpcr, %0" : : "r"(mode));
}
#else
#error "say here how this processor flushes subnormals: results depend on it"
#endif

static void worker_start(void) {
    (void)di_cpu_fp_flush();
}

/* ---- jobs ---- */

/* Below this many multiply-adds a job takes less time than waking a sleeping worker. */
enum { RUN_WORK_MIN = 24 * 1024 };

void di_cpu_run(di_stream *stream, di_pool_fn fn, void *ctx, int64_t n_parts, int64_t work) {
    if (n_parts > 1 && work >= RUN_WORK_MIN) {
        di_pool_run(stream->dev->pool, fn, ctx, n_parts);
        return;
    }
    for (int64_t part = 0; part < n_parts; part++)
        fn(ctx, part, n_parts, 0);
}

typedef struct host_job {
    di_pool_fn fn;
    void *ctx;
    uint64_t mode;
} host_job;

/* Workers flush subnormals as kernels want it; host code gets the mode of the thread that asked. */
static void host_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    const host_job *job = ctx;
    uint64_t was = di_cpu_fp_flush();
    di_cpu_fp_restore(job->mode);
    job->fn(job->ctx, part, n_parts, worker);
    di_cpu_fp_restore(was);
}

static int cpu_host_threads(di_device *dev) {
    return di_pool_threads(dev->pool);
}

static void cpu_host_run(di_device *dev, di_pool_fn fn, void *ctx, int64_t n_parts) {
    host_job job = {.fn = fn, .ctx = ctx, .mode = di_cpu_fp_flush()};
    di_cpu_fp_restore(job.mode);
    di_pool_run(dev->pool, host_part, &job, n_parts);
}

/* ---- memory ---- */

/* Blocks from this size on come from the system, which is asked for huge pages: the caches and the scratch of a large
 * model would otherwise miss the translation buffers at every row. A page is resident once it is touched, and lies in
 * the memory of the processor that touches it first. */
enum { SMALL_PAGE = 4 << 10, HUGE_PAGE = 2 << 20, HUGE_MIN = 64 << 20, ALIGN = 64 };

/* What lies just before a block's address. */
typedef struct block_head {
    void *base;   /* as the C library or the system returned it */
    size_t bytes; /* of a mapping; 0: the C library's */
} block_head;

static void *block_new(size_t n_bytes, size_t align, bool zeroed) {
    block_head head = {NULL, 0};
    size_t total;
    if (!di_size_add(&total, n_bytes, align + sizeof head))
        return NULL;
    if (align > ALIGN) {
        head.bytes = total;
        head.base = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        head.base = head.base == MAP_FAILED ? NULL : head.base;
    } else {
        head.base = zeroed ? calloc(1, total) : malloc(total);
    }
    if (!head.base)
        return NULL;
    uintptr_t at = ((uintptr_t)head.base + sizeof head + align - 1) & ~(uintptr_t)(align - 1);
    memcpy((void *)(at - sizeof head), &head, sizeof head);
    if (align == HUGE_PAGE)
        (void)madvise((void *)at, n_bytes, MADV_HUGEPAGE); /* advice; without it pages are small */
    return (void *)at;
}

static void block_free(void *p) {
    if (!p)
        return;
    block_head head;
    memcpy(&head, (uint8_t *)p - sizeof head, sizeof head);
    if (head.bytes)
        munmap(head.base, head.bytes);
    else
        free(head.base);
}

static di_status cpu_alloc(di_device *dev, size_t n_bytes, void **out, di_error *err) {
    (void)dev;
    void *p = block_new(n_bytes, n_bytes >= HUGE_MIN ? HUGE_PAGE : ALIGN, true);
    if (!p)
        return di_fail(err, DI_ERR_MEMORY, "cpu: no memory for %zu bytes", n_bytes);
    *out = p;
    return DI_OK;
}

static void cpu_free(di_device *dev, void *p) {
    (void)dev;
    block_free(p);
}

static di_status cpu_copy(di_device *dev, void *dst, const void *src, size_t n_bytes, di_error *err) {
    (void)dev, (void)err;
    if (n_bytes)
        memmove(dst, src, n_bytes);
    return DI_OK;
}

static di_status cpu_experts_place(di_device *dev, const di_expert *experts, int32_t n, const di_expert *shared,
                                   void **table, di_error *err) {
    (void)dev, (void)experts, (void)n, (void)shared, (void)err;
    *table = NULL;
    return DI_OK;
}

static di_status cpu_probe(di_error *err) {
    (void)err;
    return DI_OK;
}

/* ---- scratch ---- */

static di_limits limits_max(const di_limits *a, const di_limits *b) {
#define BIG(f) .f = DI_MAX(a->f, b->f)
    return (di_limits){
        BIG(rows_max),     BIG(n_in_max),    BIG(n_out_max),        BIG(entries_max),         BIG(keys_max),
        BIG(head_dim),     BIG(n_heads),     BIG(index_heads),      BIG(index_dim),           BIG(experts_max),
        BIG(intermediate), BIG(hidden_size), BIG(candidate_blocks), BIG(experts_per_row_max),
    };
#undef BIG
}

static di_cpu_need needs(const di_limits *limits) {
    di_cpu_need need = {0, 0};
    di_cpu_need_dense(limits, &need);
    di_cpu_need_gemm(limits, &need);
    di_cpu_need_hc(limits, &need);
    di_cpu_need_engram(limits, &need);
    di_cpu_need_moe(limits, &need);
    di_cpu_need_wide(limits, &need);
    di_cpu_need_kv(limits, &need);
    di_cpu_need_index(limits, &need);
    di_cpu_need_attention(limits, &need);
    di_cpu_need_draft(limits, &need);
    /* No page of a worker's scratch is another's, so that each touches its own first. */
    size_t page = need.worker >= HUGE_PAGE ? HUGE_PAGE : SMALL_PAGE;
    return (di_cpu_need){di_cpu_piece(need.shared), DI_ROUND_UP(need.worker, page)};
}

static size_t need_bytes(const di_device *dev, di_cpu_need need) {
    return need.shared + (size_t)di_pool_threads(dev->pool) * need.worker;
}

static size_t cpu_scratch_bytes(di_device *dev, const di_limits *limits) {
    return need_bytes(dev, needs(limits));
}

static di_status cpu_reserve(di_device *dev, const di_limits *limits, di_error *err) {
    pthread_mutex_lock(&dev->lock);
    di_status st = DI_OK;
    di_limits all = limits_max(&dev->limits, limits);
    di_cpu_need need = needs(&all);
    need.shared = DI_MAX(need.shared, dev->have.shared);
    need.worker = DI_MAX(need.worker, dev->have.worker);
    if (need.shared > dev->have.shared || need.worker > dev->have.worker) {
        size_t workers_bytes = (size_t)di_pool_threads(dev->pool) * need.worker;
        uint8_t *shared = block_new(need.shared, need.shared >= HUGE_MIN ? HUGE_PAGE : ALIGN, false);
        uint8_t *workers = block_new(workers_bytes, need.worker >= HUGE_PAGE ? HUGE_PAGE : SMALL_PAGE, false);
        if (shared && workers) {
            block_free(dev->shared);
            block_free(dev->workers);
            dev->shared = shared;
            dev->workers = workers;
            dev->have = need;
        } else {
            block_free(shared);
            block_free(workers);
            st = di_fail(err, DI_ERR_MEMORY, "cpu: no memory for %zu bytes of scratch; fewer rows a step need less",
                         need_bytes(dev, need));
        }
    }
    if (st == DI_OK)
        dev->limits = all;
    pthread_mutex_unlock(&dev->lock);
    return st;
}

/* ---- life cycle ---- */

static void cpu_close(di_device *dev) {
    if (!dev)
        return;
    di_pool_destroy(dev->pool);
    pthread_mutex_destroy(&dev->lock);
    block_free(dev->shared);
    block_free(dev->workers);
    free(dev);
}

di_status di_cpu_device_open(di_device **out, int n_threads, di_cpu_level level, di_error *err) {
    di_status st = di_cpu_level_permit(level, err);
    if (st)
        return st;
    di_device *dev = calloc(1, sizeof *dev);
    if (!dev)
        return di_fail(err, DI_ERR_MEMORY, "cpu: no memory for a device");
    st = di_pool_create(&dev->pool, n_threads, worker_start, err);
    if (st) {
        free(dev);
        return di_error_context(err, st, "cpu: starting %d threads", n_threads);
    }
    int e = pthread_mutex_init(&dev->lock, NULL);
    if (e) {
        di_pool_destroy(dev->pool);
        free(dev);
        return di_fail(err, DI_ERR_INTERNAL, "cpu: no lock: %s", strerror(e));
    }
    dev->level = level;
    di_cpu_kernels_init(&dev->kernels, level);
    *out = dev;
    return DI_OK;
}

static di_status cpu_open(di_device **out, const di_device_config *config, di_error *err) {
    bool is_auto = !config->isa || strcmp(config->isa, "auto") == 0;
    di_cpu_level level;
    di_error refused;
    di_status st = di_cpu_level_find(config->isa, &level, err);
    if (st)
        return st;
    if (is_auto && di_cpu_level_permit(level, &refused)) {
        di_info("%s", refused.message);
        level--; /* only the highest level needs permission */
    }
    st = di_cpu_device_open(out, config->n_threads, level, err);
    if (st == DI_OK)
        (*out)->is_order_free = config->is_order_free;
    if (st == DI_OK && config->is_pinned && (st = di_pool_pin((*out)->pool, err))) {
        cpu_close(*out);
        *out = NULL;
    }
    return st;
}

/* Value of the first line "key<space or tab>*: value" of a /proc file, without its line end; false when there is none.
 */
static bool proc_value(const char *path, const char *key, char *out, size_t cap) {
    FILE *f = fopen(path, "re");
    if (!f)
        return false;
    bool is_found = false;
    char line[512];
    while (!is_found && fgets(line, sizeof line, f)) {
        size_t len = strlen(key);
        if (strncmp(line, key, len) != 0)
            continue;
        const char *at = line + len + strspn(line + len, " \t");
        if (*at != ':')
            continue;
        at += 1 + strspn(at + 1, " \t");
        snprintf(out, cap, "%.*s", (int)strcspn(at, "\n"), at);
        is_found = true;
    }
    fclose(f);
    return is_found;
}

/* "ref portable ..." up to `last`. */
static void level_names(di_cpu_level last, char *out, size_t cap) {
    size_t len = 0;
    for (int level = 0; level <= (int)last && len < cap; level++) {
        int n = snprintf(out + len, cap - len, "%s%s", level ? " " : "", di_cpu_level_name((di_cpu_level)level));
        if (n > 0)
            len += (size_t)n;
    }
}

static di_status cpu_info(di_device *dev, di_device_info *out, di_error *err) {
    (void)err;
    *out = (di_device_info){.weights_by_mapping = true};
    if (!proc_value("/proc/cpuinfo", "model name", out->name, sizeof out->name)) {
        snprintf(out->name, sizeof out->name, "cpu");
    }
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    out->memory_total_bytes = page * (uint64_t)sysconf(_SC_PHYS_PAGES);
    out->memory_free_bytes = page * (uint64_t)sysconf(_SC_AVPHYS_PAGES);
    char text[64], number[32];
    uint64_t kib;
    if (proc_value("/proc/meminfo", "MemAvailable", text, sizeof text)) { /* counts what the page cache can give back */
        snprintf(number, sizeof number, "%.*s", (int)strcspn(text, " "), text);
        if (di_parse_u64(number, &kib))
            out->memory_free_bytes = kib * 1024;
    }
    level_names(dev->level, out->levels, sizeof out->levels);
    level_names(di_cpu_level_best(), out->levels_found, sizeof out->levels_found);
    return DI_OK;
}

static di_status cpu_stream_create(di_device *dev, di_stream **out, di_error *err) {
    di_stream *stream = calloc(1, sizeof *stream);
    if (!stream)
        return di_fail(err, DI_ERR_MEMORY, "cpu: no memory for a stream");
    stream->dev = dev;
    *out = stream;
    return DI_OK;
}

static void cpu_stream_destroy(di_stream *stream) {
    free(stream);
}

static di_status cpu_stream_sync(di_stream *stream, di_error *err) {
    (void)stream, (void)err;
    return DI_OK;
}

static di_status cpu_stream_upload(di_stream *stream, void *dst, const void *src, size_t n_bytes, int64_t n_rows,
                                   size_t row_bytes, di_error *err) {
    (void)stream, (void)err;
    for (int64_t i = 0; i < n_rows; i++)
        memcpy((uint8_t *)dst + (size_t)i * row_bytes, (const uint8_t *)src + (size_t)i * row_bytes, n_bytes);
    return DI_OK;
}

static di_status cpu_stream_copy(di_stream *stream, void *dst, const void *src, size_t n_bytes, di_error *err) {
    (void)stream;
    return cpu_copy(NULL, dst, src, n_bytes, err);
}

/* Everything that was put on a stream is done: an event has always come. */
static di_status cpu_event_create(di_device *dev, di_event **out, di_error *err) {
    (void)dev, (void)err;
    *out = NULL;
    return DI_OK;
}

static void cpu_event_destroy(di_event *event) {
    (void)event;
}

static di_status cpu_event_record(di_event *event, di_stream *stream, di_error *err) {
    (void)event, (void)stream, (void)err;
    return DI_OK;
}

static di_status cpu_event_wait(di_event *event, di_error *err) {
    (void)event, (void)err;
    return DI_OK;
}

static bool cpu_event_elapsed(const di_event *from, const di_event *to, int64_t *ns) {
    (void)from, (void)to, (void)ns;
    return false;
}

static const char *cpu_stream_refused(const di_stream *stream) {
    return stream->refused;
}

static void cpu_topk(di_device *dev, const float *scores, int64_t n, int32_t k, int32_t *idx) {
    pthread_mutex_lock(&dev->lock);
    uint64_t mode = di_cpu_fp_flush();
    dev->kernels.topk(scores, n, k, idx);
    di_cpu_fp_restore(mode);
    pthread_mutex_unlock(&dev->lock);
}

const di_device_ops di_cpu_device_ops = {
    .abi = DI_BACKEND_ABI,
    .size = sizeof(di_device_ops),
    .name = "cpu",
    .probe = cpu_probe,
    .open = cpu_open,
    .close = cpu_close,
    .info = cpu_info,
    .reserve = cpu_reserve,
    .scratch_bytes = cpu_scratch_bytes,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .alloc_host = cpu_alloc,
    .free_host = cpu_free,
    .experts_place = cpu_experts_place,
    .upload = cpu_copy,
    .download = cpu_copy,
    .copy = cpu_copy,
    .stream_create = cpu_stream_create,
    .stream_destroy = cpu_stream_destroy,
    .stream_sync = cpu_stream_sync,
    .stream_refused = cpu_stream_refused,
    .stream_upload = cpu_stream_upload,
    .stream_copy = cpu_stream_copy,
    .stream_download = cpu_stream_copy,
    .event_create = cpu_event_create,
    .event_destroy = cpu_event_destroy,
    .event_record = cpu_event_record,
    .event_wait = cpu_event_wait,
    .event_elapsed = cpu_event_elapsed,
    .measure = di_cpu_measure,
    .host_threads = cpu_host_threads,
    .host_run = cpu_host_run,
    .topk = cpu_topk,
};
