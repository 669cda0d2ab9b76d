/* Checkpoints for tests: the list of tensors as the model's description has it, written as safetensors over sparse
 * files.
 *
 * The list is made here from dimensions alone and shares nothing with the program's own, so that each checks the
 * other. A test may change entries between made_place and made_write to make faulty files. Data is all zero and
 * takes no disk. */
#ifndef DI_TEST_CHECKPOINT_MAKER_H
#define DI_TEST_CHECKPOINT_MAKER_H

#include "harness.h"

#include <fcntl.h>
#include <inttypes.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct made_dims {
    int64_t V, H, A, D, Q, G, O, E, I, M, Ai, Di, De, engram_in; /* engram_in: (Ng-1)*He*De */
    int L, Nm, nt;                                               /* layers, draft layers, draft targets */
    int64_t draft_E, rank;
    const char *ratios;    /* a digit a layer */
    const int *kv, *index; /* source layers, ended by -1 */
    const int *engram;     /* Engram layers, ended by -1 */
    const int64_t *engram_rows;
    int64_t Hv, Iv, patch, cells; /* vision; Hv 0 = none; cells: downsample_ratio squared */
    int Lv;
} made_dims;

typedef struct made_tensor {
    char name[96];
    char dtype[12];
    int n_dims;
    int64_t shape[2];
    int shard;           /* where header and data are */
    int index_shard;     /* what the index says; -1 = not in the index */
    bool is_absent;      /* not in any header */
    uint64_t begin, end; /* data_offsets */
} made_tensor;

typedef struct made_checkpoint {
    made_tensor *tensors; /* owned */
    size_t n, cap;
    int n_shards;
    uint64_t n_bytes; /* of all tensors, by made_place */
} made_checkpoint;

static inline int64_t made_itemsize(const char *dtype) {
    return strcmp(dtype, "F32") == 0 ? 4 : strcmp(dtype, "BF16") == 0 ? 2 : 1;
}

__attribute__((format(printf, 5, 6))) static inline made_tensor *
made_add(made_checkpoint *m, const char *dtype, int64_t d0, int64_t d1, const char *name, ...) {
    if (m->n == m->cap) {
        m->cap = m->cap ? 2 * m->cap : 1024;
        m->tensors = realloc(m->tensors, m->cap * sizeof *m->tensors);
        assert_non_null(m->tensors);
    }
    made_tensor *t = &m->tensors[m->n++];
    memset(t, 0, sizeof *t);
    va_list args;
    va_start(args, name);
    vsnprintf(t->name, sizeof t->name, name, args);
    va_end(args);
    snprintf(t->dtype, sizeof t->dtype, "%s", dtype);
    t->n_dims = d1 ? 2 : 1;
    t->shape[0] = d0;
    t->shape[1] = d1;
    return t;
}

/* A weight in E4M3 with its 32x32 scales. */
static inline void made_fp8(made_checkpoint *m, const char *prefix, const char *name, int64_t n_out, int64_t n_in) {
    made_add(m, "F8_E4M3", n_out, n_in, "%s%s.weight", prefix, name);
    made_add(m, "F8_E8M0", (n_out + 31) / 32, (n_in + 31) / 32, "%s%s.scale", prefix, name);
}

static inline void made_block(made_checkpoint *m, const made_dims *d, const char *p, int64_t n_experts) {
    made_add(m, "BF16", d->H, 0, "%sattn_norm.weight", p);
    made_add(m, "BF16", d->H, 0, "%sffn_norm.weight", p);
    made_fp8(m, p, "attn.wq_a", d->Q, d->H);
    made_add(m, "BF16", d->Q, 0, "%sattn.q_norm.weight", p);
    made_fp8(m, p, "attn.wq_b", d->A * d->D, d->Q);
    made_fp8(m, p, "attn.wkv", d->D, d->H);
    made_add(m, "BF16", d->D, 0, "%sattn.kv_norm.weight", p);
    made_add(m, "F32", d->A, 0, "%sattn.attn_sink", p);
    made_fp8(m, p, "attn.wo_a", d->G * d->O, d->A * d->D / d->G);
    made_fp8(m, p, "attn.wo_b", d->H, d->G * d->O);
    const char *const sub[2] = {"attn", "ffn"};
    for (int i = 0; i < 2; i++) {
        made_add(m, "F32", (2 + d->M) * d->M, d->M * d->H, "%shc_%s_fn", p, sub[i]);
        made_add(m, "F32", (2 + d->M) * d->M, 0, "%shc_%s_base", p, sub[i]);
        made_add(m, "F32", 3, 0, "%shc_%s_scale", p, sub[i]);
    }
    made_add(m, "BF16", n_experts, d->H, "%sffn.gate.weight", p);
    made_add(m, "F32", n_experts, 0, "%sffn.gate.bias", p);
    made_add(m, "F32", n_experts, 0, "%sffn.gate.bias_vl", p);
    made_fp8(m, p, "ffn.shared_experts.w1", d->I, d->H);
    made_fp8(m, p, "ffn.shared_experts.w3", d->I, d->H);
    made_fp8(m, p, "ffn.shared_experts.w2", d->H, d->I);
    for (int64_t e = 0; e < n_experts; e++) {
        for (int w = 1; w <= 3; w++) {
            int64_t n_out = w == 2 ? d->H : d->I, n_in = w == 2 ? d->I : d->H;
            made_add(m, "I8", n_out, n_in / 2, "%sffn.experts.%" PRId64 ".w%d.weight", p, e, w);
            made_add(m, "F8_E8M0", n_out, n_in / 32, "%sffn.experts.%" PRId64 ".w%d.scale", p, e, w);
        }
    }
}

static inline int made_find(const int *list, int l) {
    for (int i = 0; list[i] >= 0; i++) {
        if (list[i] == l)
            return i;
    }
    return -1;
}

static inline void made_list(made_checkpoint *m, const made_dims *d) {
    char p[32];
    made_add(m, "BF16", d->V, d->H, "embed.weight");
    made_add(m, "BF16", d->V, d->H, "head.weight");
    made_add(m, "BF16", d->H, 0, "norm.weight");
    for (int l = 0; l < d->L; l++) {
        snprintf(p, sizeof p, "layers.%d.", l);
        made_block(m, d, p, d->E);
        if (made_find(d->kv, l) >= 0) {
            made_add(m, "BF16", d->D, d->H, "%sattn.compressor.wkv.weight", p);
            if (d->ratios[l] == '2')
                made_add(m, "BF16", d->D, d->H, "%sattn.compressor.wgate.weight", p);
            made_add(m, "BF16", d->D, 0, "%sattn.compressor.norm.weight", p);
            made_add(m, "BF16", d->Di, d->D, "%sattn.indexer.wk.weight", p);
            made_add(m, "BF16", d->Di, 0, "%sattn.indexer.k_norm.weight", p);
        }
        if (made_find(d->index, l) >= 0) {
            made_fp8(m, p, "attn.indexer.wq_b", d->Ai * d->Di, d->Q);
            made_add(m, "BF16", d->Ai, d->H, "%sattn.indexer.weights_proj.weight", p);
        }
        int e = made_find(d->engram, l);
        if (e >= 0) {
            made_add(m, "F8_E4M3", d->engram_rows[e], d->De, "%sengram.embed.weight", p);
            made_add(m, "F8_E8M0", d->engram_rows[e], d->De / 32, "%sengram.embed.scale", p);
            made_fp8(m, p, "engram.wkv", (d->M + 1) * d->H, d->engram_in);
            made_add(m, "BF16", d->M, d->H, "%sengram.q_weight", p);
            made_add(m, "BF16", d->M, d->H, "%sengram.k_weight", p);
        }
    }
    for (int i = 0; i < d->Nm; i++) {
        snprintf(p, sizeof p, "mtp.%d.", i);
        made_block(m, d, p, d->draft_E);
    }
    if (d->Nm) {
        snprintf(p, sizeof p, "mtp.%d.", d->Nm - 1);
        made_fp8(m, "mtp.0.", "main_proj", d->H, d->nt * d->H);
        made_add(m, "BF16", d->H, 0, "mtp.0.main_norm.weight");
        made_add(m, "BF16", d->H, 0, "%snorm.weight", p);
        made_add(m, "BF16", d->V, d->rank, "%smarkov_head.embed.weight", p);
        made_add(m, "BF16", d->V, d->rank, "%smarkov_head.head.weight", p);
        made_add(m, "BF16", 1, d->H + d->rank, "%sconfidence_head.proj.weight", p);
    }
    if (!d->Hv)
        return;
    made_add(m, "BF16", d->H, 0, "image_start");
    made_add(m, "BF16", d->H, 0, "image_end");
    made_add(m, "BF16", d->H, 0, "image_newline");
    made_add(m, "BF16", d->Hv, 3 * d->patch * d->patch, "vision.patch_embed.proj.weight");
    made_add(m, "BF16", d->Hv, 0, "vision.patch_embed.proj.bias");
    for (int i = 0; i < d->Lv; i++) {
        made_add(m, "BF16", d->Hv, 0, "vision.blocks.%d.norm1.weight", i);
        made_add(m, "BF16", d->Hv, 0, "vision.blocks.%d.norm2.weight", i);
        made_add(m, "BF16", 3 * d->Hv, d->Hv, "vision.blocks.%d.attn.wqkv.weight", i);
        made_add(m, "BF16", 3 * d->Hv, 0, "vision.blocks.%d.attn.wqkv.bias", i);
        made_add(m, "BF16", d->Hv, d->Hv, "vision.blocks.%d.attn.wo.weight", i);
        made_add(m, "BF16", d->Hv, 0, "vision.blocks.%d.attn.wo.bias", i);
        made_add(m, "BF16", 2 * d->Iv, d->Hv, "vision.blocks.%d.mlp.w1.weight", i);
        made_add(m, "BF16", d->Hv, d->Iv, "vision.blocks.%d.mlp.w2.weight", i);
    }
    made_add(m, "BF16", d->Hv, 0, "vision.norm.weight");
    made_add(m, "BF16", d->H, d->cells * d->Hv, "aligner.w1.weight");
    made_add(m, "BF16", d->H, 0, "aligner.w1.bias");
    made_add(m, "BF16", d->H, d->H, "aligner.w2.weight");
    made_add(m, "BF16", d->H, 0, "aligner.w2.bias");
}

/* Shards in the list's order, the two parts of an Engram table together, in a shard, wide elements first, as the common
 * writer does, so that all lie aligned. */
static inline void made_place(made_checkpoint *m, int n_shards) {
    m->n_shards = n_shards;
    for (size_t i = 0; i < m->n; i++) {
        made_tensor *t = &m->tensors[i];
        t->shard = (int)(i * (size_t)n_shards / m->n);
        if (strstr(t->name, "engram.embed.scale"))
            t->shard = m->tensors[i - 1].shard;
        t->index_shard = t->shard;
    }
    uint64_t *at = calloc((size_t)n_shards, sizeof *at);
    assert_non_null(at);
    for (int64_t width = 4; width; width /= 2) {
        for (size_t i = 0; i < m->n; i++) {
            made_tensor *t = &m->tensors[i];
            if (made_itemsize(t->dtype) != width)
                continue;
            uint64_t bytes = (uint64_t)width * (uint64_t)t->shape[0] * (uint64_t)(t->n_dims == 2 ? t->shape[1] : 1);
            t->begin = at[t->shard];
            t->end = at[t->shard] += bytes;
            m->n_bytes += bytes;
        }
    }
    free(at);
}

static inline void made_shard_name(char out[64], int shard, int n_shards) {
    snprintf(out, 64, "model-%05d-of-%05d.safetensors", shard + 1, n_shards);
}

static inline made_tensor *made_get(made_checkpoint *m, const char *name) {
    for (size_t i = 0; i < m->n; i++) {
        if (strcmp(m->tensors[i].name, name) == 0)
            return &m->tensors[i];
    }
    fail_msg("no tensor '%s'", name);
    return NULL;
}

static inline void made_copy_file(const char *from, const char *to) {
    FILE *in = fopen(from, "rb"), *out = fopen(to, "wb");
    assert_true(in && out);
    char buf[65536];
    size_t n;
    while ((n = fread(buf, 1, sizeof buf, in)) > 0)
        assert_int_equal(fwrite(buf, 1, n, out), n);
    fclose(in);
    assert_int_equal(fclose(out), 0);
}

/* Writes dir (made if needed) with config.json (copied from config), index and shards. */
static inline void made_write(const made_checkpoint *m, const char *dir, const char *config) {
    char path[8192], name[64];
    mkdir(dir, 0777);
    snprintf(path, sizeof path, "%s/config.json", dir);
    made_copy_file(config, path);
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", dir);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    fprintf(f, "{\"metadata\": {\"total_size\": %" PRIu64 "}, \"weight_map\": {", m->n_bytes);
    const char *comma = "";
    for (size_t i = 0; i < m->n; i++) {
        const made_tensor *t = &m->tensors[i];
        if (t->index_shard < 0)
            continue;
        made_shard_name(name, t->index_shard, m->n_shards);
        fprintf(f, "%s\n\"%s\": \"%s\"", comma, t->name, name);
        comma = ",";
    }
    fprintf(f, "}}\n");
    assert_int_equal(fclose(f), 0);

    for (int s = 0; s < m->n_shards; s++) {
        made_shard_name(name, s, m->n_shards);
        snprintf(path, sizeof path, "%s/%s", dir, name);
        f = fopen(path, "wb");
        assert_non_null(f);
        uint64_t header = 0, data = 0;
        fwrite(&header, 8, 1, f);
        fprintf(f, "{\"__metadata__\":{\"format\":\"pt\"}");
        for (size_t i = 0; i < m->n; i++) {
            const made_tensor *t = &m->tensors[i];
            if (t->shard != s || t->is_absent)
                continue;
            fprintf(f, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[%" PRId64, t->name, t->dtype, t->shape[0]);
            if (t->n_dims == 2)
                fprintf(f, ",%" PRId64, t->shape[1]);
            fprintf(f, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", t->begin, t->end);
            data = t->end > data ? t->end : data;
        }
        fputc('}', f);
        while (ftell(f) % 8)
            fputc(' ', f);
        header = (uint64_t)ftell(f) - 8;
        rewind(f);
        fwrite(&header, 8, 1, f);
        assert_int_equal(fclose(f), 0);
        assert_int_equal(truncate(path, (off_t)(8 + header + data)), 0);
    }
}

static inline void made_deinit(made_checkpoint *m) {
    free(m->tensors);
    memset(m, 0, sizeof *m);
}

/* Dimensions of tests/data/model/released.json and coverage.json. */
static inline made_dims made_released(void) {
    static const int kv[] = {2, 8, 14, 20, -1}, index[] = {2, 8, 14, 20, 24, 28, 32, 36, -1}, engram[] = {1, 14, -1};
    static const int64_t rows[] = {384006168, 384016682};
    return (made_dims){.V = 129280,
                       .H = 5120,
                       .A = 64,
                       .D = 512,
                       .Q = 1280,
                       .G = 8,
                       .O = 1024,
                       .E = 384,
                       .I = 2304,
                       .M = 4,
                       .Ai = 32,
                       .Di = 128,
                       .De = 256,
                       .engram_in = 3 * 8 * 256,
                       .L = 40,
                       .Nm = 3,
                       .nt = 3,
                       .draft_E = 128,
                       .rank = 256,
                       .ratios = "0022222222222222222211111111111111111111",
                       .kv = kv,
                       .index = index,
                       .engram = engram,
                       .engram_rows = rows,
                       .Hv = 1024,
                       .Iv = 2816,
                       .patch = 14,
                       .cells = 9,
                       .Lv = 32};
}

static inline made_dims made_coverage(void) {
    static const int kv[] = {2, 4, 5, -1}, index[] = {2, 4, 5, 7, -1}, engram[] = {1, 3, -1};
    static const int64_t rows[] = {6126, 6332};
    return (made_dims){.V = 1024,
                       .H = 256,
                       .A = 4,
                       .D = 128,
                       .Q = 128,
                       .G = 2,
                       .O = 128,
                       .E = 16,
                       .I = 128,
                       .M = 4,
                       .Ai = 4,
                       .Di = 128,
                       .De = 128,
                       .engram_in = 3 * 2 * 128,
                       .L = 8,
                       .Nm = 2,
                       .nt = 2,
                       .draft_E = 8,
                       .rank = 32,
                       .ratios = "00222111",
                       .kv = kv,
                       .index = index,
                       .engram = engram,
                       .engram_rows = rows,
                       .Hv = 64,
                       .Iv = 128,
                       .patch = 14,
                       .cells = 9,
                       .Lv = 2};
}

#endif
