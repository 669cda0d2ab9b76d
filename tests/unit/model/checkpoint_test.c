/* Checkpoints: the released one as it is (names and shapes over sparse files), the one that ships, and one fault at
 * a time: each must be an error of its own that names file, tensor, found and expected. */
#include "harness.h"

#include "checkpoint_maker.h"
#include "golden.h"
#include "model/model_internal.h"

#define COVERAGE "model/coverage.json"
#define SHARDS 3

static di_status open_dir(const char *dir, bool headers_only, di_checkpoint **ckpt, di_error *err) {
    static di_config config; /* the checkpoint borrows nothing of it */
    di_test_ok(di_config_load(&config, dir, err), err);
    return di_checkpoint_open(ckpt, dir, &config, &(di_checkpoint_options){.headers_only = headers_only}, err);
}

/* ---- whole checkpoints ------------------------------------------------------------------------------------------- */

static void released_checkpoint_is_accepted(void **state) {
    (void)state;
    made_dims dims = made_released();
    made_checkpoint m = {0};
    made_list(&m, &dims);
    assert_int_equal(m.n, 96085);
    made_place(&m, 48);
    assert_true(m.n_bytes == 510286023000u);
    const char *dir = di_test_tmp("released");
    made_write(&m, dir, di_test_data("model/released.json"));

    di_error err;
    di_checkpoint *ckpt = NULL;
    di_test_ok(open_dir(dir, true, &ckpt, &err), &err);
    assert_int_equal(di_checkpoint_count(ckpt), 96085);
    assert_int_equal(di_checkpoint_shards(ckpt), 48);
    assert_true(di_checkpoint_bytes(ckpt) == 510286023000u);
    assert_false(di_checkpoint_is_dummy(ckpt));
    size_t kinds[DI_KIND_COUNT] = {0};
    for (size_t i = 0; i < di_checkpoint_count(ckpt); i++)
        kinds[di_checkpoint_at(ckpt, i)->kind]++;
    assert_int_equal(kinds[DI_KIND_DRAFT], 2401);
    assert_int_equal(kinds[DI_KIND_VISION], 263);
    assert_int_equal(kinds[DI_KIND_INDEXER], 32);
    assert_int_equal(kinds[DI_KIND_EXPERT], 40 * 384 * 6);
    assert_int_equal(kinds[DI_KIND_ENGRAM] + kinds[DI_KIND_ENGRAM_TABLE], 12);
    assert_int_equal(kinds[DI_KIND_EMBED] + kinds[DI_KIND_OTHER], 6);
    const di_stored_tensor *t = di_checkpoint_find(ckpt, "layers.14.engram.embed.weight");
    assert_non_null(t);
    assert_true(t->shape[0] == 384016682 && t->shape[1] == 256 && t->n_bytes == (size_t)384016682 * 256);
    assert_null(di_checkpoint_find(ckpt, "layers.24.attn.indexer.wk.weight")); /* reads layer 20's keys */
    di_checkpoint_close(ckpt);
    made_deinit(&m);
}

static void shipped_checkpoint_opens_and_reads(void **state) {
    (void)state;
    di_error err;
    di_checkpoint *ckpt = NULL;
    const char *dir = di_test_source("models/tiny");
    di_test_ok(open_dir(dir, false, &ckpt, &err), &err);
    assert_int_equal(di_checkpoint_count(ckpt), 1980);
    assert_int_equal(di_checkpoint_shards(ckpt), 3);
    /* Bytes of a tensor are those that another reader of the format finds. */
    char path[4096];
    snprintf(path, sizeof path, "%s/model-00001-of-00003.safetensors", dir);
    golden *g = golden_open(path);
    for (int i = 0; i < golden_count(g); i++) {
        const char *name = golden_name(g, i);
        const di_stored_tensor *t = di_checkpoint_find(ckpt, name);
        golden_tensor want = golden_get(g, name);
        assert_non_null(t);
        assert_string_equal(di_dtype_name(t->dtype), want.dtype);
        assert_int_equal(t->n_dims, want.n_dims);
        assert_int_equal(t->n_bytes, want.n_bytes);
        assert_memory_equal(t->data, want.data, want.n_bytes);
    }
    golden_close(g);
    di_checkpoint_close(ckpt);
}

/* ---- faults ------------------------------------------------------------------------------------------------------ */

typedef struct faulty {
    made_checkpoint m;
    const char *dir;
} faulty;

static faulty faulty_begin(const char *name) {
    faulty f = {.dir = di_test_tmp(name)};
    made_dims dims = made_coverage();
    made_list(&f.m, &dims);
    made_place(&f.m, SHARDS);
    return f;
}

static const char *faulty_shard(const faulty *f, int shard) {
    static char path[4096];
    char name[64];
    made_shard_name(name, shard, SHARDS);
    snprintf(path, sizeof path, "%s/%s", f->dir, name);
    return path;
}

/* Opens and expects the status and every part in the message, parts separated by '|'. Frees f. */
static void faulty_expect(faulty *f, di_status want, const char *parts) {
    di_error err = {0};
    di_checkpoint *ckpt = NULL;
    di_status st = open_dir(f->dir, false, &ckpt, &err);
    if (st != want)
        fail_msg("status %d (%s), expected %d", st, st ? err.message : "opened", want);
    assert_null(ckpt);
    char text[512];
    snprintf(text, sizeof text, "%s", parts);
    for (char *part = text; part;) {
        char *bar = strchr(part, '|');
        if (bar)
            *bar = 0;
        assert_contains(err.message, part);
        part = bar ? bar + 1 : NULL;
    }
    made_deinit(&f->m);
}

/* Writes, then opens and expects. */
static void faulty_check(faulty *f, di_status want, const char *parts) {
    made_write(&f->m, f->dir, di_test_data(COVERAGE));
    faulty_expect(f, want, parts);
}

static void faultless_opens(void **state) {
    (void)state;
    faulty f = faulty_begin("faultless");
    made_write(&f.m, f.dir, di_test_data(COVERAGE));
    di_error err;
    di_checkpoint *ckpt = NULL;
    di_test_ok(open_dir(f.dir, false, &ckpt, &err), &err);
    assert_int_equal(di_checkpoint_count(ckpt), f.m.n);
    assert_true(di_checkpoint_bytes(ckpt) == f.m.n_bytes);
    for (size_t i = 0; i < f.m.n; i++) {
        const di_stored_tensor *t = di_checkpoint_find(ckpt, f.m.tensors[i].name);
        assert_non_null(t);
        assert_int_equal(t->n_bytes, f.m.tensors[i].end - f.m.tensors[i].begin);
        assert_int_equal((uintptr_t)t->data % (uintptr_t)made_itemsize(f.m.tensors[i].dtype), 0);
    }
    di_checkpoint_close(ckpt);
    made_deinit(&f.m);
}

/* All names may carry "model." in front. */
static void prefixed_names_open(void **state) {
    (void)state;
    faulty f = faulty_begin("prefixed");
    for (size_t i = 0; i < f.m.n; i++) {
        char name[96];
        snprintf(name, sizeof name, "model.%.80s", f.m.tensors[i].name);
        memcpy(f.m.tensors[i].name, name, sizeof name);
    }
    made_write(&f.m, f.dir, di_test_data(COVERAGE));
    di_error err;
    di_checkpoint *ckpt = NULL;
    di_test_ok(open_dir(f.dir, false, &ckpt, &err), &err);
    assert_non_null(di_checkpoint_find(ckpt, "layers.0.attn.wkv.weight"));
    di_checkpoint_close(ckpt);
    made_deinit(&f.m);
}

/* One file without an index. */
static void single_file_opens(void **state) {
    (void)state;
    faulty f = faulty_begin("single");
    made_deinit(&f.m);
    made_dims dims = made_coverage();
    made_list(&f.m, &dims);
    made_place(&f.m, 1);
    made_write(&f.m, f.dir, di_test_data(COVERAGE));
    char from[4096], to[4096];
    snprintf(from, sizeof from, "%s/model-00001-of-00001.safetensors", f.dir);
    snprintf(to, sizeof to, "%s/model.safetensors", f.dir);
    assert_int_equal(rename(from, to), 0);
    snprintf(from, sizeof from, "%s/model.safetensors.index.json", f.dir);
    assert_int_equal(unlink(from), 0);
    di_error err;
    di_checkpoint *ckpt = NULL;
    di_test_ok(open_dir(f.dir, false, &ckpt, &err), &err);
    assert_int_equal(di_checkpoint_count(ckpt), f.m.n);
    di_checkpoint_close(ckpt);
    assert_int_equal(unlink(to), 0);
    faulty_expect(&f, DI_ERR_NOT_FOUND, "model.safetensors.index.json");
}

static void truncated_shard(void **state) {
    (void)state;
    faulty f = faulty_begin("truncated");
    made_write(&f.m, f.dir, di_test_data(COVERAGE));
    struct stat info;
    assert_int_equal(stat(faulty_shard(&f, 1), &info), 0);
    assert_int_equal(truncate(faulty_shard(&f, 1), info.st_size - 1), 0);
    faulty_expect(&f, DI_ERR_FORMAT, "model-00002-of-00003|truncated");
    f = faulty_begin("truncated_header");
    made_write(&f.m, f.dir, di_test_data(COVERAGE));
    assert_int_equal(truncate(faulty_shard(&f, 2), 1000), 0);
    faulty_expect(&f, DI_ERR_FORMAT, "model-00003-of-00003|truncated|header");
    f = faulty_begin("truncated_empty");
    made_write(&f.m, f.dir, di_test_data(COVERAGE));
    assert_int_equal(truncate(faulty_shard(&f, 0), 0), 0);
    faulty_expect(&f, DI_ERR_FORMAT, "model-00001-of-00003|truncated: 0 bytes");
}

static void overwrite(const char *path, long at, const char *bytes, size_t n) {
    FILE *file = fopen(path, "r+b");
    assert_non_null(file);
    assert_int_equal(fseek(file, at, SEEK_SET), 0);
    assert_int_equal(fwrite(bytes, 1, n, file), n);
    assert_int_equal(fclose(file), 0);
}

static void bad_header(void **state) {
    (void)state;
    faulty f = faulty_begin("bad_header");
    made_write(&f.m, f.dir, di_test_data(COVERAGE));
    overwrite(faulty_shard(&f, 0), 8, "[", 1);
    faulty_expect(&f, DI_ERR_FORMAT, "model-00001-of-00003|header|byte 0|expected an object");
    f = faulty_begin("huge_header");
    made_write(&f.m, f.dir, di_test_data(COVERAGE));
    overwrite(faulty_shard(&f, 0), 0, "\377\377\377\377\377\377\377\177", 8);
    faulty_expect(&f, DI_ERR_FORMAT, "model-00001-of-00003|header of 9223372036854775807 bytes");
}

static void offset_past_the_end(void **state) {
    (void)state;
    faulty f = faulty_begin("past_end");
    made_write(&f.m, f.dir, di_test_data(COVERAGE)); /* file sizes as they should be */
    struct stat info;
    made_tensor *t = made_get(&f.m, "layers.0.attn.wkv.weight");
    assert_int_equal(stat(faulty_shard(&f, t->shard), &info), 0);
    t->begin += (uint64_t)1 << 32;
    t->end += (uint64_t)1 << 32;
    made_write(&f.m, f.dir, di_test_data(COVERAGE));
    assert_int_equal(truncate(faulty_shard(&f, t->shard), info.st_size + 64), 0);
    faulty_expect(&f, DI_ERR_FORMAT, "layers.0.attn.wkv.weight|past the end");
}

static void size_differs_from_shape(void **state) {
    (void)state;
    faulty f = faulty_begin("size");
    made_get(&f.m, "layers.0.attn.wkv.weight")->end -= 1;
    faulty_check(&f, DI_ERR_FORMAT, "layers.0.attn.wkv.weight|span 32767 bytes|expected 32768");
    f = faulty_begin("falling");
    made_tensor *t = made_get(&f.m, "layers.0.attn.wkv.weight");
    uint64_t swap = t->begin;
    t->begin = t->end;
    t->end = swap;
    faulty_check(&f, DI_ERR_FORMAT, "layers.0.attn.wkv.weight|falling");
}

static void overlapping_tensors(void **state) {
    (void)state;
    faulty f = faulty_begin("overlap");
    made_tensor *a = made_get(&f.m, "layers.0.attn.wq_a.weight"), *b = made_get(&f.m, "layers.0.attn.wkv.weight");
    assert_int_equal(a->shard, b->shard);
    uint64_t n = b->end - b->begin;
    b->begin = a->begin + 1;
    b->end = b->begin + n;
    faulty_check(&f, DI_ERR_FORMAT, "overlap|layers.0.attn.wq_a.weight|layers.0.attn.wkv.weight");
}

static void duplicate_tensor(void **state) {
    (void)state;
    faulty f = faulty_begin("twice_in_index");
    made_tensor copy = *made_get(&f.m, "layers.2.attn.wkv.scale");
    made_tensor *t = made_add(&f.m, "I8", 1, 0, "x");
    *t = copy;
    t->is_absent = true;
    faulty_check(&f, DI_ERR_FORMAT, "index.json|layers.2.attn.wkv.scale|twice");

    f = faulty_begin("twice_in_header");
    t = made_add(&f.m, "I8", 1, 0, "x");
    *t = copy;
    t->index_shard = -1;
    faulty_check(&f, DI_ERR_FORMAT, "model-0000|layers.2.attn.wkv.scale|twice");

    f = faulty_begin("in_two_shards");
    t = made_add(&f.m, "I8", 1, 0, "x");
    *t = copy;
    t->index_shard = -1;
    t->shard = copy.shard == 0 ? 1 : 0;
    t->begin = (uint64_t)1 << 30;
    t->end = t->begin + (copy.end - copy.begin);
    faulty_check(&f, DI_ERR_FORMAT, "layers.2.attn.wkv.scale|the index has it in");

    f = faulty_begin("both_spellings");
    t = made_add(&f.m, "I8", 1, 0, "x");
    *t = copy;
    snprintf(t->name, sizeof t->name, "model.layers.2.attn.wkv.scale");
    t->is_absent = true;
    faulty_check(&f, DI_ERR_FORMAT, "index.json|layers.2.attn.wkv.scale|both spellings");
}

static void missing_tensor(void **state) {
    (void)state;
    faulty f = faulty_begin("not_in_index");
    made_tensor *t = made_get(&f.m, "layers.7.ffn.experts.15.w2.scale");
    t->index_shard = -1;
    t->is_absent = true;
    faulty_check(&f, DI_ERR_FORMAT, "index.json|layers.7.ffn.experts.15.w2.scale|missing|1 of 1238");
    f = faulty_begin("not_in_shard");
    made_get(&f.m, "layers.7.ffn.experts.15.w2.scale")->is_absent = true;
    faulty_check(&f, DI_ERR_FORMAT, "model-0000|layers.7.ffn.experts.15.w2.scale|missing");
}

static void unknown_tensor(void **state) {
    (void)state;
    faulty f = faulty_begin("unknown_in_index");
    made_add(&f.m, "BF16", 1, 0, "layers.8.attn_norm.weight")->is_absent = true;
    faulty_check(&f, DI_ERR_FORMAT, "index.json|layers.8.attn_norm.weight|unknown");
    f = faulty_begin("unknown_in_shard");
    made_tensor *t = made_add(&f.m, "BF16", 0, 0, "layers.3.attn.compressor.wkv.weight");
    t->index_shard = -1;
    faulty_check(&f, DI_ERR_FORMAT, "model-00001-of-00003|layers.3.attn.compressor.wkv.weight|unknown");
}

/* Ties of the draft module to the global embedding and head are not read. */
static void draft_ties_are_ignored(void **state) {
    (void)state;
    faulty f = faulty_begin("ties");
    made_add(&f.m, "BF16", 0, 0, "mtp.0.embed.weight");
    made_add(&f.m, "BF16", 0, 0, "model.mtp.1.head.weight");
    made_write(&f.m, f.dir, di_test_data(COVERAGE));
    di_error err;
    di_checkpoint *ckpt = NULL;
    di_test_ok(open_dir(f.dir, false, &ckpt, &err), &err);
    assert_null(di_checkpoint_find(ckpt, "mtp.0.embed.weight"));
    di_checkpoint_close(ckpt);
    made_deinit(&f.m);
}

static void unfolded_norms_are_refused(void **state) {
    (void)state;
    faulty f = faulty_begin("hc_norm");
    made_add(&f.m, "BF16", 256, 0, "layers.0.hc_attn_norm.weight");
    faulty_check(&f, DI_ERR_UNSUPPORTED, "layers.0.hc_attn_norm.weight|folded");
    f = faulty_begin("hc_head");
    made_add(&f.m, "F32", 4, 0, "hc_head_fn");
    faulty_check(&f, DI_ERR_UNSUPPORTED, "hc_head_fn|shifted");
}

static void wrong_dtype_or_shape(void **state) {
    (void)state;
    faulty f = faulty_begin("dtype");
    snprintf(made_get(&f.m, "layers.0.attn.wkv.weight")->dtype, 12, "U8");
    faulty_check(&f, DI_ERR_FORMAT, "layers.0.attn.wkv.weight|dtype U8, expected F8_E4M3");
    f = faulty_begin("foreign_dtype");
    snprintf(made_get(&f.m, "norm.weight")->dtype, 12, "F16");
    faulty_check(&f, DI_ERR_FORMAT, "norm.weight|dtype F16, expected BF16");
    f = faulty_begin("shape");
    made_tensor *t = made_get(&f.m, "layers.0.attn.wkv.weight");
    t->shape[0] = 256;
    t->shape[1] = 128;
    faulty_check(&f, DI_ERR_FORMAT, "layers.0.attn.wkv.weight|shape [256,128], expected [128,256]");
    f = faulty_begin("dims");
    t = made_get(&f.m, "layers.0.attn.wkv.weight");
    t->n_dims = 1;
    t->shape[0] = 128 * 256;
    faulty_check(&f, DI_ERR_FORMAT, "layers.0.attn.wkv.weight|shape [32768], expected [128,256]");
}

static void nan_scale(void **state) {
    (void)state;
    faulty f = faulty_begin("nan");
    made_tensor *t = made_get(&f.m, "layers.3.ffn.experts.2.w1.scale"); /* [128, 8] */
    made_write(&f.m, f.dir, di_test_data(COVERAGE));
    uint64_t header = 0;
    FILE *file = fopen(faulty_shard(&f, t->shard), "rb");
    assert_non_null(file);
    assert_int_equal(fread(&header, 8, 1, file), 1);
    fclose(file);
    overwrite(faulty_shard(&f, t->shard), (long)(8 + header + t->begin + 5 * 8 + 3), "\377", 1);
    di_error err;
    di_checkpoint *ckpt = NULL;
    di_test_ok(open_dir(f.dir, true, &ckpt, &err), &err); /* headers alone don't show it */
    di_checkpoint_close(ckpt);
    faulty_expect(&f, DI_ERR_FORMAT, "layers.3.ffn.experts.2.w1.scale|scale [5,3] is NaN");
}

/* Both parts of an Engram table are mapped whatever shards they are in; the checkpoint that ships has such a table. */
static void table_parts_may_be_in_different_shards(void **state) {
    (void)state;
    faulty f = faulty_begin("table");
    made_tensor *t = made_get(&f.m, "layers.1.engram.embed.scale");
    t->shard = t->index_shard = 2;
    t->begin = (uint64_t)1 << 30;
    t->end = t->begin + 6126 * 4;
    made_write(&f.m, f.dir, di_test_data(COVERAGE));
    di_error err;
    di_checkpoint *ckpt = NULL;
    di_test_ok(open_dir(f.dir, false, &ckpt, &err), &err);
    di_checkpoint_close(ckpt);
    made_deinit(&f.m);
}

static void index_names_a_missing_file(void **state) {
    (void)state;
    faulty f = faulty_begin("no_file");
    made_write(&f.m, f.dir, di_test_data(COVERAGE));
    assert_int_equal(unlink(faulty_shard(&f, 1)), 0);
    faulty_expect(&f, DI_ERR_NOT_FOUND, "model-00002-of-00003.safetensors|missing|2 of 3");
}

static void write_index(const faulty *f, const char *text) {
    char path[4096];
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", f->dir);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
}

static void shard_names_stay_in_the_folder(void **state) {
    (void)state;
    static const char *const names[] = {"../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", "",
                                        "a\\\\b",           "a\\u0000b"};
    for (size_t i = 0; i < DI_COUNT(names); i++) {
        faulty f = faulty_begin("traversal");
        made_write(&f.m, f.dir, di_test_data(COVERAGE));
        char text[256];
        snprintf(text, sizeof text, "{\"weight_map\":{\"norm.weight\":\"%s\"}}", names[i]);
        write_index(&f, text);
        faulty_expect(&f, DI_ERR_FORMAT, "index.json|shard '|plain file name");
    }
}

static void bad_index(void **state) {
    (void)state;
    static const struct {
        const char *text, *parts;
    } rows[] = {{"", "bad JSON"},
                {"[]", "expected an object"},
                {"{}", "weight_map|missing"},
                {"{\"weight_map\": 3}", "byte 15|found '3'|weight_map"},
                {"{\"weight_map\": {\"norm.weight\": 3}}", "found '3'|file name"},
                {"{\"weight_map\": {\"norm.weight\": \"a\"}", "bad JSON"},
                {"{\"weight_map\": {}}, 3", "expected the end"},
                {"{\"weight_map\": {\"norm.weight\": \"a\",}}", "tensor name"},
                {"{\"weight_map\": {}, \"weight_map\": {}}", "'weight_map' twice"}};
    for (size_t i = 0; i < DI_COUNT(rows); i++) {
        faulty f = faulty_begin("bad_index");
        made_write(&f.m, f.dir, di_test_data(COVERAGE));
        write_index(&f, rows[i].text);
        faulty_expect(&f, DI_ERR_FORMAT, rows[i].parts);
    }
}

/* A tensor of wide elements at an odd address is copied to where it can be read. */
static void unaligned_tensors_are_copied(void **state) {
    (void)state;
    faulty f = faulty_begin("unaligned");
    made_tensor *t = made_get(&f.m, "layers.0.attn.attn_sink");
    t->begin = ((uint64_t)1 << 30) + 1;
    t->end = t->begin + 16;
    made_write(&f.m, f.dir, di_test_data(COVERAGE));
    uint64_t header = 0;
    FILE *file = fopen(faulty_shard(&f, t->shard), "rb");
    assert_non_null(file);
    assert_int_equal(fread(&header, 8, 1, file), 1);
    fclose(file);
    const float sink[4] = {1.0f, -2.0f, 3.5f, 0.25f};
    overwrite(faulty_shard(&f, t->shard), (long)(8 + header + t->begin), (const char *)sink, sizeof sink);
    di_error err;
    di_checkpoint *ckpt = NULL;
    di_test_ok(open_dir(f.dir, false, &ckpt, &err), &err);
    const di_stored_tensor *got = di_checkpoint_find(ckpt, "layers.0.attn.attn_sink");
    assert_int_equal((uintptr_t)got->data % 4, 0);
    assert_memory_equal(got->data, sink, sizeof sink);
    di_checkpoint_close(ckpt);
    made_deinit(&f.m);
}

DI_TEST_GROUP(checkpoint, cmocka_unit_test(released_checkpoint_is_accepted),
              cmocka_unit_test(shipped_checkpoint_opens_and_reads), cmocka_unit_test(faultless_opens),
              cmocka_unit_test(prefixed_names_open), cmocka_unit_test(single_file_opens),
              cmocka_unit_test(truncated_shard), cmocka_unit_test(bad_header), cmocka_unit_test(offset_past_the_end),
              cmocka_unit_test(size_differs_from_shape), cmocka_unit_test(overlapping_tensors),
              cmocka_unit_test(duplicate_tensor), cmocka_unit_test(missing_tensor), cmocka_unit_test(unknown_tensor),
              cmocka_unit_test(draft_ties_are_ignored), cmocka_unit_test(unfolded_norms_are_refused),
              cmocka_unit_test(wrong_dtype_or_shape), cmocka_unit_test(nan_scale),
              cmocka_unit_test(table_parts_may_be_in_different_shards), cmocka_unit_test(index_names_a_missing_file),
              cmocka_unit_test(shard_names_stay_in_the_folder), cmocka_unit_test(bad_index),
              cmocka_unit_test(unaligned_tensors_are_copied));
