/* Made-up weights (dummy.md): every stored tensor as a pure function of seed, name and element.
 *
 * A tensor's bytes are a stream of 64-bit words, each edited lane by lane: one AND and one ADD for E4M3 and bf16,
 * two bits summed for scales, nothing for packed E2M1. No lane carries into the next, so that words are made whole,
 * several gigabytes a second on one core. Only the few fp32 tensors are made element by element. No piece depends on
 * another, so any slice can be made alone and threads share nothing. */
#include "model_internal.h"

#include <inttypes.h>
#include <sys/mman.h>

#define GOLDEN 0x9E3779B97F4A7C15u
#define BYTES_01 0x0101010101010101u
#define LANES_0001 0x0001000100010001u
#define PIECE_BYTES ((size_t)4 << 20) /* made by one part of a job */
#define PIECES_PER_RUN 64             /* between two reports of progress */

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are laid out little-endian");

/* ---- recipes ----------------------------------------------------------------------------------------------------- */

typedef enum edit {
    EDIT_NONE,    /* word as it is */
    EDIT_AND_ADD, /* (w & mask) + add */
    EDIT_BITS,    /* (w & 01..) + (w>>1 & 01..) + add */
    EDIT_F32      /* by element, from 16-bit lanes: add_f + s * scale */
} edit;

typedef struct recipe {
    edit how;
    uint64_t key, mask, add;
    float scale, base;
    int32_t hc_mult, hot; /* hc base: M, and the stream that starts hot; M = 0 for all other tensors */
} recipe;

static bool starts(const char *s, const char *with) {
    return strncmp(s, with, strlen(with)) == 0;
}

static bool ends(const char *s, const char *with) {
    size_t n = strlen(s), k = strlen(with);
    return n >= k && memcmp(s + n - k, with, k) == 0;
}

/* q(n): 2^q is the power of two nearest to sqrt(n); 4^q <= 2n < 4^(q+1). */
static int nearest_root(int64_t n) {
    return (64 - __builtin_clzll((uint64_t)n)) / 2;
}

/* The gain exponent: the longest row that the name without .weight or .scale ends with, after a dot or whole. */
static int gain(const char *name) {
    static const struct {
        const char *end;
        int g;
    } rows[] = {{"attn.wo_b", -1},
                {"engram.wkv", 1},
                {"shared_experts.w1", 2},
                {"shared_experts.w3", 2},
                {"shared_experts.w2", -7},
                {"w1", 2},
                {"w3", 2},
                {"w2", -5},
                {"head", 2},
                {"markov_head.head", 0},
                {"gate", 1},
                {"confidence_head.proj", -1}};
    if (starts(name, "vision.") || starts(name, "aligner."))
        return 0;
    const char *dot = strrchr(name, '.');
    size_t len = dot ? (size_t)(dot - name) : strlen(name), best = 0;
    int g = 0;
    for (size_t i = 0; i < DI_COUNT(rows); i++) {
        size_t k = strlen(rows[i].end);
        bool hit = k <= len && memcmp(name + len - k, rows[i].end, k) == 0 && (k == len || name[len - k - 1] == '.');
        if (hit && k > best) {
            best = k;
            g = rows[i].g;
        }
    }
    return g;
}

static uint64_t stream_key(uint64_t seed, const char *name) {
    return di_mix64(di_hash_fnv1a(name, strlen(name)) + seed * GOLDEN);
}

/* Number of inputs of the weight that a tensor is, or is the scale of. */
static int64_t fan_in(const di_tensor_spec *s) {
    if (s->n_dims < 2 || ends(s->name, "embed.weight"))
        return 1;
    if (s->dtype == DI_F8_E8M0)
        return 32 * s->shape[1]; /* inputs come in whole groups of 32 */
    int64_t n = 1;
    for (int32_t i = 1; i < s->n_dims; i++)
        n *= s->shape[i];
    return n;
}

static void bf16_recipe(recipe *r, const char *name, int q, int g) {
    uint64_t mask = 0x003F, add;
    if (ends(name, "q_norm.weight")) {
        add = 0x3FA0;
    } else if (ends(name, "norm.weight") || ends(name, "norm1.weight") || ends(name, "norm2.weight") ||
               ends(name, ".q_weight") || ends(name, ".k_weight")) {
        add = 0x3F60;
    } else {
        mask = 0x81FF; /* sign, two exponent bits, mantissa */
        add = (uint64_t)(ends(name, ".bias") ? 118 : 124 - q + g) << 7;
    }
    r->how = EDIT_AND_ADD;
    r->mask = mask * LANES_0001;
    r->add = add * LANES_0001;
}

static float pow2(int e) {
    return di_f32_from_bits((uint32_t)(127 + e) << 23);
}

static void f32_recipe(recipe *r, const di_tensor_spec *s, int q, int32_t hc_mult) {
    r->how = EDIT_F32;
    if (ends(s->name, ".attn_sink")) {
        r->scale = pow2(-15);
    } else if (ends(s->name, ".bias") || ends(s->name, ".bias_vl")) {
        r->scale = pow2(-19);
    } else if (ends(s->name, "_fn")) {
        r->scale = pow2(-(14 + q));
    } else if (ends(s->name, "_scale")) {
        r->scale = pow2(-19);
        r->base = 0.5f;
    } else { /* hc_*_base: the number in the name says which stream starts hot */
        r->scale = pow2(-17);
        r->hc_mult = hc_mult;
        int32_t k = 0;
        const char *p = strchr(s->name, '.');
        for (p = p ? p + 1 : ""; *p >= '0' && *p <= '9'; p++)
            k = k * 10 + (*p - '0');
        r->hot = (k + ends(s->name, "hc_ffn_base")) % hc_mult;
    }
}

static recipe recipe_of(const di_config *config, const di_tensor_spec *s) {
    recipe r = {.key = stream_key(config->dummy_seed, s->name)};
    int q = nearest_root(fan_in(s)), g = gain(s->name);
    switch (s->dtype) {
    case DI_F8_E4M3: /* sign and mantissa free, exponent field 8..11 */
        r.how = EDIT_AND_ADD;
        r.mask = 0x9F * BYTES_01;
        r.add = 0x40 * BYTES_01;
        break;
    case DI_F8_E8M0: {
        int b = ends(s->name, "engram.embed.scale") ? 121 : strstr(s->name, ".experts.") ? 125 - q + g : 123 - q + g;
        r.how = EDIT_BITS;
        r.add = (uint64_t)(b - 1) * BYTES_01;
        break;
    }
    case DI_BF16:
        bf16_recipe(&r, s->name, q, g);
        break;
    case DI_F32:
        f32_recipe(&r, s, q, config->hc_mult);
        break;
    default: /* packed E2M1: all codes are values */
        r.how = EDIT_NONE;
    }
    return r;
}

/* ---- filling ----------------------------------------------------------------------------------------------------- */

static inline uint64_t stream_word(uint64_t key, uint64_t j) {
    return di_mix64(key + (j + 1) * GOLDEN);
}

static inline uint64_t edited_word(const recipe *r, uint64_t j) {
    uint64_t w = stream_word(r->key, j);
    if (r->how == EDIT_AND_ADD)
        return (w & r->mask) + r->add;
    if (r->how == EDIT_BITS)
        return (w & BYTES_01) + (w >> 1 & BYTES_01) + r->add;
    return w;
}

/* Whole words j .. j + n. The finaliser is written out, so that the loop stays one block of independent operations. */
static void fill_words(const recipe *r, uint64_t j, size_t n, uint8_t *out) {
    const edit how = r->how;
    const uint64_t mask = how == EDIT_AND_ADD ? r->mask : UINT64_MAX, add = how == EDIT_NONE ? 0 : r->add;
    uint64_t x = r->key + (j + 1) * GOLDEN;
    if (how == EDIT_BITS) {
        for (size_t i = 0; i < n; i++, x += GOLDEN) {
            uint64_t z = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
            z = (z ^ z >> 27) * 0x94D049BB133111EBu;
            z ^= z >> 31;
            z = (z & BYTES_01) + (z >> 1 & BYTES_01) + add;
            memcpy(out + 8 * i, &z, 8);
        }
        return;
    }
    for (size_t i = 0; i < n; i++, x += GOLDEN) {
        uint64_t z = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
        z = (z ^ z >> 27) * 0x94D049BB133111EBu;
        z ^= z >> 31;
        z = (z & mask) + add;
        memcpy(out + 8 * i, &z, 8);
    }
}

static float f32_element(const recipe *r, uint64_t i) {
    int16_t s = (int16_t)(stream_word(r->key, i / 4) >> (16 * (i % 4)));
    float base = r->base;
    if (r->hc_mult) {
        uint64_t m = (uint64_t)r->hc_mult;
        if (i < m) {
            base = i == (uint64_t)r->hot ? 2.0f : -2.0f;
        } else if (i >= 2 * m) {
            base = (i - 2 * m) / m == (i - 2 * m) % m ? 2.0f : -2.0f;
        }
    }
    return base + (float)s * r->scale; /* exact */
}

/* Bytes [first, first + n), n <= 8, of the group of 8 bytes that first lies in. */
static void fill_part(const recipe *r, size_t first, size_t n, uint8_t *out) {
    uint8_t word[8];
    if (r->how == EDIT_F32) {
        float pair[2] = {f32_element(r, first / 8 * 2), f32_element(r, first / 8 * 2 + 1)};
        memcpy(word, pair, 8);
    } else {
        uint64_t w = edited_word(r, first / 8);
        memcpy(word, &w, 8);
    }
    memcpy(out, word + first % 8, n);
}

void di_dummy_fill(const di_config *config, const di_tensor_spec *spec, size_t first, size_t n, uint8_t *out) {
    recipe r = recipe_of(config, spec);
    size_t end = first + n;
    if (first % 8 && first < end) {
        size_t k = DI_MIN(8 - first % 8, end - first);
        fill_part(&r, first, k, out);
        first += k, out += k;
    }
    size_t words = (end - first) / 8;
    if (r.how == EDIT_F32) {
        for (size_t i = 0; i < words; i++)
            fill_part(&r, first + 8 * i, 8, out + 8 * i);
    } else {
        fill_words(&r, first / 8, words, out);
    }
    if ((end - first) % 8)
        fill_part(&r, first + 8 * words, (end - first) % 8, out + 8 * words);
}

/* ---- a whole checkpoint ------------------------------------------------------------------------------------------ */

/* The number behind `key` in a text of lines "key value", 0 when absent. */
static uint64_t field(const char *text, const char *key) {
    const char *p = strstr(text, key);
    uint64_t v = 0;
    if (!p)
        return 0;
    for (p += strlen(key); *p == ' ' || *p == '\t' || *p == ':'; p++) {
    }
    for (; *p >= '0' && *p <= '9'; p++)
        v = v * 10 + (uint64_t)(*p - '0');
    return v;
}

static uint64_t number_in(const char *path, const char *key) {
    di_strbuf text = {0};
    uint64_t v = 0;
    if (!di_file_read(path, (size_t)1 << 20, &text, NULL))
        v = field(di_strbuf_str(&text), key);
    di_strbuf_deinit(&text);
    return v;
}

/* Memory that can be had without swapping: the system's own figure, or what a control group leaves, if less. */
static uint64_t memory_available(void) {
    uint64_t avail = number_in("/proc/meminfo", "MemAvailable") * 1024;
    uint64_t limit = number_in("/sys/fs/cgroup/memory.max", ""); /* 0 for "max" and where there is none */
    if (limit) {
        uint64_t used = number_in("/sys/fs/cgroup/memory.current", "");
        uint64_t cache = number_in("/sys/fs/cgroup/memory.stat", "inactive_file"); /* given back when needed */
        used -= DI_MIN(cache, used);
        avail = DI_MIN(avail, limit - DI_MIN(used, limit));
    }
    return avail;
}

typedef struct make_job {
    const di_config *config;
    const di_stored_tensor *tensors;
    const size_t *offset; /* [n_tensors + 1] of each tensor in the mapping; the last is the end */
    size_t n_tensors;
    uint8_t *base;
    size_t first; /* byte where the run starts */
} make_job;

/* One piece of the mapping: parts of large tensors, or many small ones. */
static void make_piece(void *ctx, int64_t part, int64_t n_parts, int worker) {
    const make_job *job = ctx;
    (void)n_parts, (void)worker;
    size_t begin = job->first + (size_t)part * PIECE_BYTES,
           end = DI_MIN(begin + PIECE_BYTES, job->offset[job->n_tensors]);
    size_t lo = 0, hi = job->n_tensors; /* the tensor that `begin` lies in */
    while (hi - lo > 1) {
        size_t mid = lo + (hi - lo) / 2;
        if (job->offset[mid] <= begin) {
            lo = mid;
        } else {
            hi = mid;
        }
    }
    for (size_t i = lo; i < job->n_tensors && job->offset[i] < end; i++) {
        const di_stored_tensor *t = &job->tensors[i];
        size_t from = job->offset[i] < begin ? begin - job->offset[i] : 0;
        size_t to = DI_MIN(t->n_bytes, end - job->offset[i]);
        if (from >= to)
            continue; /* only the gap behind it */
        di_tensor_spec spec = {.dtype = t->dtype, .n_dims = t->n_dims, .kind = t->kind};
        snprintf(spec.name, sizeof spec.name, "%s", t->name);
        memcpy(spec.shape, t->shape, sizeof spec.shape);
        di_dummy_fill(job->config, &spec, from, to - from, job->base + job->offset[i] + from);
    }
}

di_status di_dummy_make(const di_config *config, di_stored_tensor *tensors, size_t n_tensors,
                        const di_checkpoint_options *opt, void **map, size_t *map_bytes, di_error *err) {
    size_t *offset = calloc(n_tensors + 1, sizeof *offset);
    if (!offset)
        return di_fail(err, DI_ERR_MEMORY, "out of memory for %zu tensors", n_tensors);
    for (size_t i = 0; i < n_tensors; i++)
        offset[i + 1] = offset[i] + DI_ROUND_UP(tensors[i].n_bytes, (size_t)64);
    size_t total = offset[n_tensors];
    const double gib = 1073741824.0;
    uint64_t avail = memory_available();
    di_pool *pool = NULL;
    void *base = MAP_FAILED;
    di_status st = DI_OK;
    if (avail && total > avail) {
        st = di_fail(err, DI_ERR_MEMORY,
                     "made-up weights need %zu bytes (%.1f GiB), available are %" PRIu64 " (%.1f GiB)", total,
                     (double)total / gib, avail, (double)avail / gib);
        goto out;
    }
    base = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        st = di_fail(err, DI_ERR_MEMORY, "made-up weights need %zu bytes (%.1f GiB), the system has no such mapping",
                     total, (double)total / gib);
        goto out;
    }
    madvise(base, total, MADV_HUGEPAGE); /* fewer faults while it is filled; no harm where refused */
    if ((st = di_pool_create(&pool, opt->n_threads, NULL, err)))
        goto out;
    make_job job = {.config = config, .tensors = tensors, .offset = offset, .n_tensors = n_tensors, .base = base};
    for (; job.first < total; job.first += PIECES_PER_RUN * PIECE_BYTES) {
        size_t n = DI_MIN(total - job.first, PIECES_PER_RUN * PIECE_BYTES);
        di_pool_run(pool, make_piece, &job, (int64_t)DI_CEIL_DIV(n, PIECE_BYTES));
        if (opt->progress)
            opt->progress(opt->user, job.first + n, total);
    }
    for (size_t i = 0; i < n_tensors; i++)
        tensors[i].data = (const uint8_t *)base + offset[i];
    *map = base;
    *map_bytes = total;
out:
    di_pool_destroy(pool);
    free(offset);
    if (st && base != MAP_FAILED)
        munmap(base, total);
    return st;
}
