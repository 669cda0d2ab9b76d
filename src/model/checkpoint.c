/* A checkpoint: the index, its shards by mmap, and the check that they hold exactly what the config implies.
 *
 * The config gives the list (tensors.c); index and headers are held against it by name through one hash map, so that
 * opening takes time linear in the number of tensors. Nothing is copied: a tensor is a view into its shard's
 * mapping. Names may carry "model." in front; the list and this file's interface do not. With made-up weights
 * (dummy.c) there are no files. */
#include "model_internal.h"
#include "safetensors.h"

#include <inttypes.h>
#include <sys/mman.h>

#define INDEX_NAME "model.safetensors.index.json"
#define SINGLE_NAME "model.safetensors"
#define SCAN_CHUNK ((size_t)64 << 20)
#define TABLE_SCAN_MAX ((size_t)1 << 30) /* scales of larger Engram tables are not read at start */

typedef struct shard {
    char *name; /* in the arena */
    di_mapping map;
    bool is_open;
} shard;

struct di_checkpoint {
    di_arena arena;            /* names, tensors, shards */
    di_stored_tensor *tensors; /* [n_tensors] in the order of di_tensors_each */
    size_t n_tensors;
    di_map by_name; /* to the index in tensors */
    shard *shards;
    size_t n_shards, shards_cap;
    uint64_t n_bytes;
    bool is_dummy;
    void *made; /* made-up weights: one mapping, owned */
    size_t made_bytes;
};

/* What opening needs beside the result. */
typedef struct opening {
    di_checkpoint *ck;
    const char *dir;
    int32_t *shard_of;  /* [n_tensors] by the index; -1 = not listed */
    uint8_t *has_model; /* [n_tensors] the index spells it with "model." */
    uint8_t *seen;      /* [n_tensors] met in a shard's header */
    di_map shard_ids;   /* file name to index in shards */
    di_arena scratch;
    char *names; /* where the next name goes, while the list is made */
} opening;

/* ---- the list ---------------------------------------------------------------------------------------------------- */

typedef struct tally {
    size_t n_tensors, name_bytes;
} tally;

static di_status count_spec(void *user, const di_tensor_spec *spec) {
    tally *t = user;
    t->n_tensors++;
    t->name_bytes += strlen(spec->name) + 1;
    return DI_OK;
}

static di_status add_spec(void *user, const di_tensor_spec *spec) {
    opening *o = user;
    di_checkpoint *ck = o->ck;
    size_t len = strlen(spec->name), n = 1;
    for (int32_t i = 0; i < spec->n_dims; i++)
        n *= (size_t)spec->shape[i]; /* config.c's ranges keep it in 64 bits */
    memcpy(o->names, spec->name, len + 1);
    di_stored_tensor *t = &ck->tensors[ck->n_tensors];
    *t = (di_stored_tensor){.name = o->names,
                            .dtype = spec->dtype,
                            .n_dims = spec->n_dims,
                            .n_bytes = di_dtype_bytes(spec->dtype, n),
                            .kind = spec->kind};
    memcpy(t->shape, spec->shape, sizeof t->shape);
    o->names += len + 1;
    ck->n_bytes += t->n_bytes;
    return di_map_set(&ck->by_name, t->name, len, (int64_t)ck->n_tensors++, NULL, NULL);
}

static di_status make_list(opening *o, const di_config *config, di_error *err) {
    di_checkpoint *ck = o->ck;
    tally t = {0};
    di_tensors_each(config, count_spec, &t);
    di_status st = di_map_reserve(&ck->by_name, t.n_tensors, err);
    if (st)
        return st;
    ck->tensors = di_arena_calloc(&ck->arena, t.n_tensors, sizeof *ck->tensors);
    o->names = di_arena_alloc(&ck->arena, t.name_bytes);
    o->shard_of = di_arena_calloc(&o->scratch, t.n_tensors, sizeof *o->shard_of);
    o->has_model = di_arena_calloc(&o->scratch, t.n_tensors, 1);
    o->seen = di_arena_calloc(&o->scratch, t.n_tensors, 1);
    if (!ck->tensors || !o->names || !o->shard_of || !o->has_model || !o->seen ||
        di_tensors_each(config, add_spec, o)) {
        return di_fail(err, DI_ERR_MEMORY, "out of memory for a list of %zu tensors", t.n_tensors);
    }
    for (size_t i = 0; i < ck->n_tensors; i++)
        o->shard_of[i] = -1;
    return DI_OK;
}

/* Index of a stored name in the list, -1 when it is not there; *has_model: it was spelled with "model.". */
static int64_t find_name(const di_checkpoint *ck, const char *name, size_t len, bool *has_model) {
    int64_t i = -1;
    *has_model = len > 6 && memcmp(name, "model.", 6) == 0;
    if (*has_model)
        name += 6, len -= 6;
    di_map_get(&ck->by_name, name, len, &i);
    return i;
}

static bool ends_with(const char *s, size_t len, const char *end) {
    size_t n = strlen(end);
    return len >= n && memcmp(s + len - n, end, n) == 0;
}

/* A name outside the list: DI_OK for what is to be ignored, else why it can't be there. */
static di_status judge_unlisted(const char *name, size_t len, di_error *err) {
    const char *s = name;
    size_t n = len;
    if (n > 6 && memcmp(s, "model.", 6) == 0)
        s += 6, n -= 6;
    if (n > 4 && memcmp(s, "mtp.", 4) == 0) { /* ties of the draft module to the global embedding and head */
        size_t i = 4;
        while (i < n && s[i] >= '0' && s[i] <= '9')
            i++;
        size_t rest = n - i;
        if (i > 4 &&
            ((rest == 13 && ends_with(s, n, ".embed.weight")) || (rest == 12 && ends_with(s, n, ".head.weight")))) {
            return DI_OK;
        }
    }
    const char *leaf = s; /* of "layers.3.hc_attn_norm.weight": "hc_attn_norm.weight" */
    for (size_t i = 0; i + 4 < n; i++) {
        if ((i == 0 || s[i - 1] == '.') && memcmp(s + i, "hc_", 3) == 0)
            leaf = s + i;
    }
    size_t leaf_len = n - (size_t)(leaf - s);
    if (leaf_len > 3 && memcmp(leaf, "hc_", 3) == 0) {
        if (ends_with(leaf, leaf_len, "_norm.weight")) {
            return di_fail(
                err, DI_ERR_UNSUPPORTED,
                "tensor '%.*s': found a hyper-connection norm, expected it folded into the columns of hc_*_fn",
                (int)len, name);
        }
        if (leaf_len > 8 && memcmp(leaf, "hc_head_", 8) == 0) {
            return di_fail(err, DI_ERR_UNSUPPORTED,
                           "tensor '%.*s': found a hyper-connection head, expected the shifted variant", (int)len,
                           name);
        }
    }
    return di_fail(err, DI_ERR_FORMAT, "tensor '%.*s' is unknown: config.json implies none of this name", (int)len,
                   name);
}

/* ---- index ------------------------------------------------------------------------------------------------------- */

static di_status find_shard(opening *o, const char *file, size_t len, int32_t *out, di_error *err) {
    di_checkpoint *ck = o->ck;
    int64_t id;
    if (di_map_get(&o->shard_ids, file, len, &id)) {
        *out = (int32_t)id;
        return DI_OK;
    }
    /* A plain file name: an index must not lead outside its folder. */
    bool plain = len > 0 && len < 256 && file[0] != '.' && !memchr(file, '/', len) && !memchr(file, '\\', len) &&
                 !memchr(file, 0, len);
    if (!plain) {
        return di_fail(err, DI_ERR_FORMAT, "shard '%.*s': expected a plain file name", (int)DI_MIN(len, 256), file);
    }
    if (ck->n_shards == ck->shards_cap) {
        size_t cap = ck->shards_cap ? 2 * ck->shards_cap : 64;
        shard *more = di_arena_calloc(&ck->arena, cap, sizeof *more);
        if (!more)
            return di_fail(err, DI_ERR_MEMORY, "out of memory for %zu shards", cap);
        if (ck->n_shards)
            memcpy(more, ck->shards, ck->n_shards * sizeof *more);
        ck->shards = more;
        ck->shards_cap = cap;
    }
    char *name = di_arena_strndup(&ck->arena, file, len);
    if (!name)
        return di_fail(err, DI_ERR_MEMORY, "out of memory for a shard's name");
    di_status st = di_map_set(&o->shard_ids, name, len, (int64_t)ck->n_shards, NULL, err);
    if (st)
        return st;
    *out = (int32_t)ck->n_shards;
    ck->shards[ck->n_shards++] = (shard){.name = name};
    return DI_OK;
}

static di_status index_entry(void *user, const char *name, size_t len, const char *file, size_t file_len,
                             di_error *err) {
    opening *o = user;
    bool has_model;
    int64_t i = find_name(o->ck, name, len, &has_model);
    if (i < 0)
        return judge_unlisted(name, len, err);
    if (o->shard_of[i] >= 0) {
        if (has_model != (o->has_model[i] != 0)) {
            return di_fail(err, DI_ERR_FORMAT, "tensor '%s' is there in both spellings, with and without 'model.'",
                           o->ck->tensors[i].name);
        }
        return di_fail(err, DI_ERR_FORMAT, "tensor '%.*s' twice", (int)len, name);
    }
    o->has_model[i] = has_model;
    return find_shard(o, file, file_len, &o->shard_of[i], err);
}

static di_status check_covered(const opening *o, di_error *err) {
    size_t first = 0, n = 0;
    for (size_t i = o->ck->n_tensors; i-- > 0;) {
        if (o->shard_of[i] < 0)
            first = i, n++;
    }
    if (!n)
        return DI_OK;
    return di_fail(err, DI_ERR_FORMAT, "tensor '%s' is missing (%zu of %zu are)", o->ck->tensors[first].name, n,
                   o->ck->n_tensors);
}

static di_status read_index(opening *o, di_error *err) {
    di_strbuf path = {0};
    di_mapping map = {0};
    di_path_join(&path, o->dir, INDEX_NAME);
    di_status st = di_strbuf_status(&path, err);
    if (st)
        goto out;
    if (!di_path_exists(di_strbuf_str(&path))) {
        /* Small checkpoints may be one file without an index. */
        di_path_join(&path, o->dir, SINGLE_NAME);
        if ((st = di_strbuf_status(&path, err)))
            goto out;
        if (!di_path_exists(di_strbuf_str(&path))) {
            st = di_fail(err, DI_ERR_NOT_FOUND, "'%s' has no %s (and no %s): no weights to load", o->dir, INDEX_NAME,
                         SINGLE_NAME);
            goto out;
        }
        int32_t id = 0;
        if ((st = find_shard(o, SINGLE_NAME, strlen(SINGLE_NAME), &id, err)))
            goto out;
        for (size_t i = 0; i < o->ck->n_tensors; i++)
            o->shard_of[i] = id;
        goto out;
    }
    if ((st = di_mapping_open(&map, di_strbuf_str(&path), err)))
        goto out;
    st = di_weight_map_parse((const char *)map.data, map.n_bytes, index_entry, o, &o->scratch, err);
    if (!st)
        st = check_covered(o, err);
    di_error_context(err, st, "'%s'", di_strbuf_str(&path));
out:
    di_mapping_close(&map);
    di_strbuf_deinit(&path);
    return st;
}

/* ---- shards ------------------------------------------------------------------------------------------------------ */

static void shape_text(char *out, size_t cap, const int64_t *shape, int32_t n) {
    size_t len = 0;
    for (int32_t i = 0; i < n && len < cap; i++) {
        int k = snprintf(out + len, cap - len, "%s%" PRId64, i ? "," : "", shape[i]);
        len += k > 0 ? (size_t)k : 0;
    }
    if (n == 0 && cap)
        out[0] = 0;
}

static di_status check_tensor(const di_stored_tensor *t, const di_safetensor *s, di_error *err) {
    if (!s->has_dtype || s->dtype != t->dtype) {
        return di_fail(err, DI_ERR_FORMAT, "tensor '%s': dtype %s, expected %s", t->name, s->dtype_name,
                       di_dtype_name(t->dtype));
    }
    bool same = s->n_dims == t->n_dims;
    for (int32_t i = 0; same && i < t->n_dims; i++)
        same = s->shape[i] == t->shape[i];
    if (!same) {
        char found[200], want[100];
        shape_text(found, sizeof found, s->shape, s->n_dims);
        shape_text(want, sizeof want, t->shape, t->n_dims);
        return di_fail(err, DI_ERR_FORMAT, "tensor '%s': shape [%s], expected [%s]", t->name, found, want);
    }
    return DI_OK;
}

/* Data that doesn't lie on its element's alignment can't be read in place; writers of the format align it, so this
 * is rare and such a tensor gets a copy. */
static di_status place_tensor(di_checkpoint *ck, di_stored_tensor *t, const uint8_t *data, bool headers_only,
                              di_error *err) {
    size_t align = t->dtype == DI_F32 ? 4 : t->dtype == DI_BF16 ? 2 : 1;
    t->data = data;
    if ((uintptr_t)data % align == 0 || headers_only)
        return DI_OK;
    uint8_t *copy = di_arena_alloc(&ck->arena, t->n_bytes);
    if (!copy)
        return di_fail(err, DI_ERR_MEMORY, "tensor '%s' is not aligned: out of memory for a copy of %zu bytes", t->name,
                       t->n_bytes);
    memcpy(copy, data, t->n_bytes);
    t->data = copy;
    return DI_OK;
}

static di_status read_shard(opening *o, int32_t id, bool headers_only, di_error *err) {
    di_checkpoint *ck = o->ck;
    shard *sh = &ck->shards[id];
    di_safetensors file;
    di_status st = di_safetensors_parse(&file, sh->map.data, sh->map.n_bytes, &o->scratch, err);
    for (size_t k = 0; !st && k < file.n_tensors; k++) {
        const di_safetensor *s = &file.tensors[k];
        bool has_model;
        int64_t i = find_name(ck, s->name, s->name_len, &has_model);
        if (i < 0) {
            st = judge_unlisted(s->name, s->name_len, err);
            continue;
        }
        di_stored_tensor *t = &ck->tensors[i];
        if (o->shard_of[i] != id) {
            st = di_fail(err, DI_ERR_FORMAT, "tensor '%s' is here, but the index has it in '%s'", t->name,
                         ck->shards[o->shard_of[i]].name);
        } else if (o->seen[i]) {
            st = di_fail(err, DI_ERR_FORMAT, "tensor '%s' twice", t->name);
        } else if (!(st = check_tensor(t, s, err))) {
            o->seen[i] = 1;
            st = place_tensor(ck, t, file.data + s->begin, headers_only, err);
        }
    }
    return st;
}

static di_status open_shards(opening *o, bool headers_only, di_error *err) {
    di_checkpoint *ck = o->ck;
    di_strbuf path = {0};
    di_status st = DI_OK;
    for (size_t i = 0; !st && i < ck->n_shards; i++) {
        shard *sh = &ck->shards[i];
        di_path_join(&path, o->dir, sh->name);
        if ((st = di_strbuf_status(&path, err)))
            break;
        if (!di_path_exists(di_strbuf_str(&path))) {
            st = di_fail(err, DI_ERR_NOT_FOUND, "shard '%s' is missing: the index names it (shard %zu of %zu)",
                         di_strbuf_str(&path), i + 1, ck->n_shards);
            break;
        }
        if ((st = di_mapping_open(&sh->map, di_strbuf_str(&path), err)))
            break;
        sh->is_open = true;
        st = read_shard(o, (int32_t)i, headers_only, err);
        di_error_context(err, st, "'%s'", di_strbuf_str(&path));
    }
    for (size_t i = 0; !st && i < ck->n_tensors; i++) {
        if (o->seen[i])
            continue;
        st = di_fail(err, DI_ERR_FORMAT, "'%s/%s': tensor '%s' is missing: the index has it here", o->dir,
                     ck->shards[o->shard_of[i]].name, ck->tensors[i].name);
    }
    di_strbuf_deinit(&path);
    return st;
}

/* ---- contents ---------------------------------------------------------------------------------------------------- */

static bool is_scanned(const di_stored_tensor *t) {
    return t->dtype == DI_F8_E8M0 && !(t->kind == DI_KIND_ENGRAM_TABLE && t->n_bytes > TABLE_SCAN_MAX);
}

/* No scale may be NaN (255): one would silently poison every product of its block. */
static di_status check_scales(const opening *o, const di_checkpoint_options *opt, di_error *err) {
    const di_checkpoint *ck = o->ck;
    uint64_t done = 0, total = 0;
    for (size_t i = 0; i < ck->n_tensors; i++)
        total += is_scanned(&ck->tensors[i]) ? ck->tensors[i].n_bytes : 0;
    for (size_t i = 0; i < ck->n_tensors; i++) {
        const di_stored_tensor *t = &ck->tensors[i];
        if (!is_scanned(t))
            continue;
        for (size_t at = 0; at < t->n_bytes; at += SCAN_CHUNK) {
            size_t n = DI_MIN(SCAN_CHUNK, t->n_bytes - at);
            const uint8_t *nan = memchr(t->data + at, 255, n);
            if (nan) {
                int64_t k = nan - t->data;
                return di_fail(err, DI_ERR_FORMAT,
                               "'%s/%s': tensor '%s': scale [%" PRId64 ",%" PRId64 "] is NaN (byte 255)", o->dir,
                               ck->shards[o->shard_of[i]].name, t->name, k / t->shape[1], k % t->shape[1]);
            }
            done += n;
            if (opt->progress)
                opt->progress(opt->user, done, total);
        }
    }
    return DI_OK;
}

/* ---- interface --------------------------------------------------------------------------------------------------- */

di_status di_checkpoint_open(di_checkpoint **out, const char *dir, const di_config *config,
                             const di_checkpoint_options *opt, di_error *err) {
    static const di_checkpoint_options defaults = {0};
    if (!opt)
        opt = &defaults;
    di_checkpoint *ck = calloc(1, sizeof *ck);
    if (!ck)
        return di_fail(err, DI_ERR_MEMORY, "out of memory for a checkpoint");
    di_arena_init(&ck->arena, (size_t)1 << 18);
    opening o = {.ck = ck, .dir = dir};
    di_arena_init(&o.scratch, (size_t)1 << 18);
    di_status st = make_list(&o, config, err);
    if (!st && opt->dummy) {
        ck->is_dummy = true;
        if (!opt->headers_only)
            st = di_dummy_make(config, ck->tensors, ck->n_tensors, opt, &ck->made, &ck->made_bytes, err);
    } else if (!st) {
        st = read_index(&o, err);
        if (!st)
            st = open_shards(&o, opt->headers_only, err);
        if (!st && !opt->headers_only)
            st = check_scales(&o, opt, err);
    }
    di_map_deinit(&o.shard_ids);
    di_arena_deinit(&o.scratch);
    if (st) {
        di_checkpoint_close(ck);
        return st;
    }
    *out = ck;
    return DI_OK;
}

void di_checkpoint_close(di_checkpoint *ck) {
    if (!ck)
        return;
    for (size_t i = 0; i < ck->n_shards; i++) {
        if (ck->shards[i].is_open)
            di_mapping_close(&ck->shards[i].map);
    }
    if (ck->made)
        munmap(ck->made, ck->made_bytes);
    di_map_deinit(&ck->by_name);
    di_arena_deinit(&ck->arena);
    free(ck);
}

size_t di_checkpoint_count(const di_checkpoint *ck) {
    return ck->n_tensors;
}

const di_stored_tensor *di_checkpoint_at(const di_checkpoint *ck, size_t i) {
    return &ck->tensors[i];
}

const di_stored_tensor *di_checkpoint_find(const di_checkpoint *ck, const char *name) {
    int64_t i;
    return di_map_get(&ck->by_name, name, strlen(name), &i) ? &ck->tensors[i] : NULL;
}

size_t di_checkpoint_shards(const di_checkpoint *ck) {
    return ck->n_shards;
}

uint64_t di_checkpoint_bytes(const di_checkpoint *ck) {
    return ck->n_bytes;
}

bool di_checkpoint_is_dummy(const di_checkpoint *ck) {
    return ck->is_dummy;
}
