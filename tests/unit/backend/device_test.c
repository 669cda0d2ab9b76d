/* Backends by name and the check of their tables; the CPU device: memory, scratch, description, floating-point mode. */
#include "ops_mat.h"

/* ---- registry ---- */

static void find_knows_its_names(void **state) {
    (void)state;
    di_backend backend = {0};
    di_error err = {0};
    di_test_ok(di_backend_find("cpu", &backend, &err), &err);
    assert_string_equal(backend.device->name, "cpu");
    backend = (di_backend){0};
    di_test_ok(di_backend_find("auto", &backend, &err), &err);
    assert_string_equal(backend.ops->name, "cpu");
    const char *absent[2] = {"nvidia", "ascend"};
    for (int i = 0; i < 2; i++) { /* asked for by name: an error, never a fall back */
        di_backend untouched = {0};
        assert_int_equal(di_backend_find(absent[i], &untouched, &err), DI_ERR_DEVICE);
        assert_contains(err.message, absent[i]);
        assert_contains(err.message, "'cpu'");
        assert_null(untouched.device);
    }
    assert_int_equal(di_backend_find("abacus", &backend, &err), DI_ERR_ARG);
    assert_contains(err.message, "'abacus'");
    assert_contains(err.message, "nvidia");
    di_strbuf list = {0};
    di_backend_list(&list);
    assert_string_equal(di_strbuf_str(&list), "cpu\n");
    di_strbuf_deinit(&list);
}

static void check_names_what_is_missing(void **state) {
    (void)state;
    di_error err = {0};
    di_device_ops device = di_cpu_device_ops;
    di_ops ops = di_cpu_ops;
    di_test_ok(di_backend_check(&device, &ops, &err), &err);
    ops.attention = NULL;
    ops.moe = NULL;
    device.copy = NULL;
    assert_int_equal(di_backend_check(&device, &ops, &err), DI_ERR_DEVICE);
    assert_contains(err.message, "attention, moe");
    assert_contains(err.message, "device copy");
    device = di_cpu_device_ops, ops = di_cpu_ops;
    ops.abi = DI_BACKEND_ABI + 1;
    assert_int_equal(di_backend_check(&device, &ops, &err), DI_ERR_DEVICE);
    assert_contains(err.message, "ABI");
    ops = di_cpu_ops;
    device.size -= 8;
    assert_int_equal(di_backend_check(&device, &ops, &err), DI_ERR_DEVICE);
    assert_contains(err.message, "bytes");
}

/* ---- levels ---- */

static void every_level_fills_the_table(void **state) {
    (void)state;
    for (int level = 0; level < DI_CPU_LEVEL_COUNT; level++) { /* filling needs no such processor */
        di_cpu_kernels k;
        di_cpu_kernels_init(&k, (di_cpu_level)level);
#define HAS(f) assert_non_null(k.f);
        DI_OPS_LIST(HAS)
#undef HAS
    }
    di_cpu_kernels ref, best;
    di_cpu_kernels_init(&ref, DI_CPU_REF);
    di_cpu_kernels_init(&best, di_cpu_level_best());
    assert_true(ref.gemm != best.gemm);
    assert_true(ref.engram_hash == best.engram_hash); /* no faster one: the reference stays */
}

/* A level by name runs up to that level; one that the machine lacks is an error, never something less. */
static void levels_are_capped_by_name(void **state) {
    (void)state;
    di_error err = {0};
    di_device *dev = NULL;
    char wanted[128] = "";
    for (int level = 0; level < DI_CPU_LEVEL_COUNT; level++) {
        const char *name = di_cpu_level_name((di_cpu_level)level);
        snprintf(wanted + strlen(wanted), sizeof wanted - strlen(wanted), "%s%s", level ? " " : "", name);
        di_status st = di_cpu_device_ops.open(&dev, &(di_device_config){.n_threads = 1, .isa = name}, &err);
        if (level > (int)di_cpu_level_best()) {
            assert_int_equal(st, DI_ERR_DEVICE);
            assert_contains(err.message, name);
            continue;
        }
        di_test_ok(st, &err);
        di_device_info info;
        di_test_ok(di_cpu_device_ops.info(dev, &info, &err), &err);
        assert_string_equal(info.levels, wanted);
        di_cpu_device_ops.close(dev);
    }
    assert_int_equal(di_cpu_device_ops.open(&dev, &(di_device_config){.isa = "sse9"}, &err), DI_ERR_ARG);
    assert_contains(err.message, "'sse9'");
}

/* ---- memory ---- */

static void memory_is_zeroed_and_aligned(void **state) {
    (void)state;
    di_error err = {0};
    di_device *dev;
    di_test_ok(di_cpu_device_ops.open(&dev, &(di_device_config){.n_threads = 1}, &err), &err);
    const size_t sizes[4] = {1, 63, 4096, 1 << 20};
    for (int i = 0; i < 4; i++) {
        uint8_t *p;
        void *at;
        di_test_ok(di_cpu_device_ops.alloc(dev, sizes[i], &at, &err), &err);
        p = at;
        assert_int_equal((uintptr_t)p % 64, 0);
        for (size_t j = 0; j < sizes[i]; j++)
            assert_int_equal(p[j], 0);
        p[sizes[i] - 1] = 7;
        uint8_t back = 0;
        di_test_ok(di_cpu_device_ops.download(dev, &back, p + sizes[i] - 1, 1, &err), &err);
        assert_int_equal(back, 7);
        di_cpu_device_ops.free(dev, p);
    }
    di_cpu_device_ops.free(dev, NULL);
    void *none = NULL;
    assert_int_equal(di_cpu_device_ops.alloc(dev, SIZE_MAX - 10, &none, &err), DI_ERR_MEMORY);
    assert_null(none);
    uint8_t a[8] = "abcdefg", b[8] = "";
    di_test_ok(di_cpu_device_ops.upload(dev, b, a, 8, &err), &err);
    assert_memory_equal(a, b, 8);
    di_test_ok(di_cpu_device_ops.copy(dev, a + 1, a, 6, &err), &err); /* overlap is fine */
    assert_memory_equal(a, "aabcdef", 7);
    di_cpu_device_ops.close(dev);
}

static void reserve_grows_and_never_shrinks(void **state) {
    (void)state;
    di_error err = {0};
    di_device *dev;
    di_test_ok(di_cpu_device_ops.open(&dev, &(di_device_config){.n_threads = 2}, &err), &err);
    di_limits small = ops_mat_limits(), big = small;
    small.rows_max = 8;
    big.rows_max = 500;
    assert_true(di_cpu_device_ops.scratch_bytes(dev, &small) < di_cpu_device_ops.scratch_bytes(dev, &big));
    di_stream *stream;
    di_test_ok(di_cpu_device_ops.stream_create(dev, &stream, &err), &err);
    float x[32] = {0}, y[32];
    uint16_t weight[32] = {0};
    di_rms_norm_args args = {.x = {DI_F32, 1, 32, 32, x, NULL}, .out = {DI_F32, 1, 32, 32, y, NULL}, .weight = weight};
    assert_null(di_cpu_device_ops.stream_refused(stream));
    assert_int_equal(di_cpu_ops.rms_norm(stream, &args), DI_ERR_SHAPE); /* nothing is reserved yet */
    assert_string_equal(di_cpu_device_ops.stream_refused(stream), "rms_norm");
    di_test_ok(di_cpu_device_ops.reserve(dev, &big, &err), &err);
    assert_int_equal(di_cpu_ops.rms_norm(stream, &args), DI_OK);
    di_cpu_need before = dev->have;
    di_test_ok(di_cpu_device_ops.reserve(dev, &small, &err), &err);
    assert_int_equal(dev->have.shared, before.shared);
    assert_int_equal(dev->have.worker, before.worker);
    assert_int_equal(dev->limits.rows_max, 500);
    assert_int_equal(dev->have.shared + 2 * dev->have.worker, di_cpu_device_ops.scratch_bytes(dev, &big));
    di_test_ok(di_cpu_device_ops.stream_sync(stream, &err), &err);
    di_cpu_device_ops.stream_destroy(stream);
    di_cpu_device_ops.close(dev);
    di_cpu_device_ops.close(NULL);
}

static void info_describes_the_machine(void **state) {
    (void)state;
    di_error err = {0};
    di_device *dev;
    di_device_info info;
    di_test_ok(di_cpu_device_ops.open(&dev, &(di_device_config){.n_threads = 1}, &err), &err);
    di_test_ok(di_cpu_device_ops.info(dev, &info, &err), &err);
    assert_true(info.name[0] != 0);
    assert_true(info.memory_total_bytes > 1 << 24);
    assert_true(info.memory_free_bytes <= info.memory_total_bytes);
    assert_true(info.weights_by_mapping);
    assert_int_equal(strncmp(info.levels, "ref portable", 12), 0);
    assert_string_equal(info.levels, info.levels_found);
    di_cpu_device_ops.close(dev);
    assert_int_equal(di_cpu_device_ops.open(&dev, &(di_device_config){.n_threads = -1}, &err), DI_ERR_RANGE);
}

/* ---- floating-point mode ---- */

/* Kernels flush subnormals; the caller's own arithmetic is as before once an operation has returned. */
static void caller_keeps_its_subnormals(void **state) {
    (void)state;
    di_limits limits = ops_mat_limits();
    ops_rig rig;
    ops_rig_open(&rig, di_cpu_level_best(), 2, &limits);
    volatile float tiny = 0x1p-130f;
    float x[32], y[32];
    for (int i = 0; i < 32; i++)
        x[i] = tiny;
    const int32_t pos[1] = {1};
    const float freq[1] = {0.5f}; /* any operation will do */
    di_rope_table_args args = {.pos = pos, .n_rows = 1, .n_freq = 1, .inv_freq = freq, .cos = x, .sin = y};
    assert_int_equal(di_cpu_ops.rope_table(rig.stream, &args), DI_OK);
    assert_true(tiny * 0.5f == 0x1p-131f);
    uint64_t mode = di_cpu_fp_flush();
    volatile float half = tiny * 0.5f;
    di_cpu_fp_restore(mode);
    assert_true(half == 0.0f);
    assert_true(tiny * 0.5f == 0x1p-131f);
    ops_rig_close(&rig);
}

/* ---- jobs ---- */

typedef struct count_job {
    int hits[100];
    bool is_wrong[100]; /* told here: a worker thread can't end the test */
    const di_stream *stream;
} count_job;

static void count_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    count_job *job = ctx;
    uint8_t *scratch = di_cpu_worker(job->stream, worker);
    size_t n_bytes = job->stream->dev->have.worker;
    job->hits[part]++;
    job->is_wrong[part] = n_parts != 100;
    memset(scratch, (int)part, n_bytes); /* a worker's scratch is its own */
    for (size_t i = 0; i < n_bytes; i++) {
        if (scratch[i] != part)
            job->is_wrong[part] = true;
    }
}

static void small_and_large_jobs_run_every_part_once(void **state) {
    (void)state;
    di_limits limits = ops_mat_limits();
    for (int threads = 1; threads <= 3; threads++) {
        ops_rig rig;
        ops_rig_open(&rig, DI_CPU_REF, threads, &limits);
        for (int is_large = 0; is_large < 2; is_large++) {
            count_job job = {.stream = rig.stream};
            di_cpu_run(rig.stream, count_part, &job, 100, is_large ? INT64_MAX : 1);
            for (int i = 0; i < 100; i++)
                assert_true(job.hits[i] == 1 && !job.is_wrong[i]);
        }
        ops_rig_close(&rig);
    }
}

DI_TEST_GROUP(backend_device, cmocka_unit_test(find_knows_its_names), cmocka_unit_test(check_names_what_is_missing),
              cmocka_unit_test(every_level_fills_the_table), cmocka_unit_test(memory_is_zeroed_and_aligned),
              cmocka_unit_test(levels_are_capped_by_name), cmocka_unit_test(reserve_grows_and_never_shrinks),
              cmocka_unit_test(info_describes_the_machine), cmocka_unit_test(caller_keeps_its_subnormals),
              cmocka_unit_test(small_and_large_jobs_run_every_part_once));
